"""``tseeds verify RUN``: re-check every committed artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tseeds_cli.options import JsonOption


def verify(
    path: Annotated[Path, typer.Argument(help="Run directory or one artifact.")],
    as_json: JsonOption = False,
) -> None:
    """Re-check every committed file, and that a run's artifacts belong together; exit 1 when anything is damaged."""
    import json

    from tseeds.verify import check

    artifacts, damages = check(path)
    if as_json:
        typer.echo(json.dumps({"artifacts": artifacts, "damages": damages}))
    else:
        for line in damages:
            typer.echo(line)
        typer.echo(f"{artifacts} artifacts checked, {len(damages)} damages")
        if damages:
            typer.echo(
                "Mend: restore the file from a backup, or delete its artifact directory and run again to remake it."
            )
    if damages:
        raise typer.Exit(1)
