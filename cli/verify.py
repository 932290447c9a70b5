"""``tseeds verify RUN``: re-check every committed artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tseeds_cli.options import JsonOption


def verify(
    path: Annotated[Path, typer.Argument(help="Run directory or one artifact.")],
    logprobs: Annotated[
        int,
        typer.Option(
            min=0,
            help="Also recompute the log-probs of this many trajectories of every iteration with their own policies.",
        ),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Re-check every committed file, and that a run's artifacts belong together; exit 1 when anything is damaged."""
    import json
    from dataclasses import asdict

    from tseeds.verify import check, check_logprobs, remakable

    artifacts, damages = check(path)
    rescored = None
    if logprobs and not damages:
        from tseeds_cli.console import quiet

        quiet()
        rescored = check_logprobs(path, logprobs)
        damages = rescored.damages
    if as_json:
        found = {} if rescored is None else {"logprobs": {k: v for k, v in asdict(rescored).items() if k != "damages"}}
        typer.echo(json.dumps({"artifacts": artifacts, "damages": damages, **found}))
    else:
        for line in damages:
            typer.echo(line)
        typer.echo(f"{artifacts} artifacts checked, {len(damages)} damages")
        if rescored is not None:
            left = f"; {rescored.skipped} rows by policies that are not kept" if rescored.skipped else ""
            typer.echo(
                f"{rescored.tokens} log-probs recomputed: off by {rescored.mean:.1e} nats on average, {rescored.most:.1e} at "
                f"most{left}"
            )
        elif logprobs:
            typer.echo("log-probs were not recomputed: mend the damages first")
        if damages:
            typer.echo("Mend: restore the files from a backup.")
            can, cannot = remakable(path, damages)
            for place in can:
                typer.echo(f"  or delete {place} and run again, which remakes it")
            for place in cannot:
                typer.echo(f"  {place} cannot be remade: retention removed what it was made from; leave it where it is")
    if damages:
        raise typer.Exit(1)
