"""``tseeds fork RUN --at N --run NEW``: a new run from an iteration of another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tseeds_cli.options import JsonOption, SetOption


def fork(
    run: Annotated[Path, typer.Argument(help="Run directory of the parent.")],
    at: Annotated[int, typer.Option("--at", help="Last iteration that the fork shares; 0 is the start.")],
    new: Annotated[Path, typer.Option("--run", help="Directory of the new run.")],
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a new run from iteration N of another, sharing its artifacts; changed values apply from N + 1 on."""
    import json

    from tseeds.artifacts.rundir import open_run
    from tseeds.fork import fork as make
    from tseeds.fork import span

    made = make(open_run(run), at, new, sets or ())
    if as_json:
        typer.echo(json.dumps({"run": str(made.root), "parent": str(run), "at": at}))
    else:
        typer.echo(f"{made.root}: {span(at)} shared with {run}; tseeds run {made.root} goes on from there")
