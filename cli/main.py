"""The ``tseeds`` command: finds the sub-commands and turns mistakes into one clear line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from tseeds.errors import UserError

PANELS = {
    "Train": {
        "run": "Train: chain the stages for N iterations; fresh stages are skipped, interrupted ones resumed.",
        "fork": "Start a new run from iteration N of another, sharing its artifacts.",
        "compare": "Train every arm from several seeds, seed by seed, resumable.",
        "validate": "Print the resolved pipeline and what each value means, or one clear line per mistake.",
        "toy": "Make a toy task: problems and a small warm-started policy.",
    },
    "Stages, one at a time": {
        "problems": "Read data sets into problems with prompt token ids; quarantine and count bad rows.",
        "curriculum": "Measure the base policy's pass rate on every problem.",
        "snapshot": "Copy a policy into an immutable, content-addressed snapshot.",
        "seed": "Let snapshots write seed prefixes with their behaviour log-probs.",
        "rollout": "Complete seeded and unseeded rows on-policy.",
        "score": "Grade rollouts: a verdict and a reward for every row.",
        "update": "Train on one iteration's rows and commit the new policy.",
        "evaluate": "Evaluate a policy without seeds: pass@k, maj@k, distinct solutions, intervals.",
        "grade": "Grade answers: a pair, or JSONL in and JSONL out.",
        "engine": "Keep one engine warm for stage commands run by hand.",
    },
    "Look": {
        "status": "What is fresh, stale (which value changed), incomplete or missing; disk use.",
        "show": "Rows of any artifact; trajectories with seed and continuation told apart.",
        "watch": "Follow a run from another terminal.",
        "report": "Figures comparing runs, as one offline page or as PNG and SVG.",
        "view": "Read trajectories token by token in a browser.",
        "export": "Rollouts for TRL or verl; policies for transformers and vllm serve.",
        "import": "Trajectories that another trainer wrote.",
    },
    "Keep": {
        "verify": "Re-check every committed file.",
        "gc": "Delete what retention no longer keeps; trajectories and metrics always stay.",
        "env": "Versions and hardware, for a bug report.",
    },
}
"""Commands by panel of the help screen, with what the screen says of each; a command is a module of this package."""


class Commands(TyperGroup):
    """Imports a command's module when the command is called; the help screen is made from the table alone."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, in the help screen's order."""
        return [name for commands in PANELS.values() for name in commands]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command called ``cmd_name``, or None."""
        panel = next((p for p, commands in PANELS.items() if cmd_name in commands), None)
        if panel is None:
            return None
        if self._listing:
            return TyperCommand(cmd_name, help=PANELS[panel][cmd_name], rich_help_panel=panel)
        module = importlib.import_module(f"tseeds_cli.{cmd_name}{'_' if cmd_name == 'import' else ''}")
        if hasattr(module, "app"):
            command = typer.main.get_command(module.app)
        else:
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            single.command(cmd_name)(getattr(module, module.__name__.rpartition(".")[2]))
            command = typer.main.get_command(single)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """(name, command, its arguments).

        Raises:
            UserError: no command has this name; the nearest one is named.
        """
        name, names = args[0], self.list_commands(ctx)
        if name not in names and not name.startswith("-"):
            near = get_close_matches(name, names, n=1)
            raise UserError(f"no command {name}; {f'did you mean {near[0]}?' if near else 'tseeds --help lists them'}")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help screen."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


app = typer.Typer(
    name="tseeds",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def tseeds() -> None:
    """Thinking Seeds: reinforcement learning in which past policies write the beginning of the reasoning.

    Every stage reads and writes Parquet; everything resumes.
    """


def main() -> None:
    """Entry point: a UserError is printed as it is and decides the exit code; anything else is a bug and shows itself."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        sys.stderr.write(f"tseeds: {error}\n")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
