"""The ``tseeds`` command: wires the sub-commands and turns mistakes into one clear line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys

import typer

from tseeds.errors import UserError

app = typer.Typer(
    name="tseeds",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Thinking Seeds: reinforcement learning in which past policies write the beginning of the reasoning. "
    "Every stage reads and writes Parquet; everything resumes.",
)

PANELS = {
    "Train": ("run", "fork", "compare", "validate", "toy"),
    "Stages, one at a time": (
        "problems",
        "curriculum",
        "snapshot",
        "seed",
        "rollout",
        "score",
        "update",
        "evaluate",
        "engine",
    ),
    "Look": ("status", "show", "watch", "report", "view", "export", "import"),
    "Keep": ("verify", "gc", "env"),
}
"""Commands by panel of the help screen; each is a module of this package (with _ where the name is a Python keyword)."""

for _panel, _names in PANELS.items():
    for _name in _names:
        _module = importlib.import_module(f"tseeds_cli.{_name}{'_' if _name == 'import' else ''}")
        if hasattr(_module, "app"):
            app.add_typer(_module.app, name=_name, rich_help_panel=_panel)
        else:
            app.command(_name, rich_help_panel=_panel)(getattr(_module, _module.__name__.rpartition(".")[2]))


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
