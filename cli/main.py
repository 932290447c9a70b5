"""The ``tseeds`` command: wires the sub-commands and turns mistakes into one clear line and an exit code."""

from __future__ import annotations

import os
import sys

import typer

from tseeds.errors import UserError
from tseeds_cli import (
    env,
    evaluate,
    gc,
    rollout,
    run,
    score,
    seed,
    show,
    snapshot,
    status,
    toy,
    update,
    validate,
    verify,
)

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

_TRAIN, _STAGES, _LOOK, _KEEP = "Train", "Stages, one at a time", "Look", "Keep"
app.command(rich_help_panel=_TRAIN)(run.run)
app.command(rich_help_panel=_TRAIN)(validate.validate)
app.command(rich_help_panel=_TRAIN)(toy.toy)
app.command(rich_help_panel=_STAGES)(snapshot.snapshot)
app.command(rich_help_panel=_STAGES)(seed.seed)
app.command(rich_help_panel=_STAGES)(rollout.rollout)
app.command(rich_help_panel=_STAGES)(score.score)
app.command(rich_help_panel=_STAGES)(update.update)
app.command(rich_help_panel=_STAGES)(evaluate.evaluate)
app.command(rich_help_panel=_LOOK)(status.status)
app.command(rich_help_panel=_LOOK)(show.show)
app.command(rich_help_panel=_KEEP)(verify.verify)
app.command(rich_help_panel=_KEEP)(gc.gc)
app.command(rich_help_panel=_KEEP)(env.env)


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
