"""``tseeds gc RUN``: what retention may delete."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tseeds_cli.options import JsonOption


def gc(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would go and why; delete nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete what the snapshot retention rules no longer keep; trajectories and metrics always stay."""
    import json

    from tseeds import pipeline, retention
    from tseeds.artifacts.lock import locked
    from tseeds.artifacts.rundir import open_run
    from tseeds_cli.console import size

    where = open_run(run)
    history, done = pipeline.open_history(where), where.finished()
    found = list(retention.removals(history, where, done))
    if not dry_run:
        with locked(where.lock, f"run {run}"):
            done = where.finished()
            found = list(retention.removals(history, where, done))
            retention.collect(history, where, done)
    if as_json:
        rows = [{"path": str(r.path), "names": r.names, "bytes": r.bytes, "reason": r.reason} for r in found]
        typer.echo(json.dumps({"removed": not dry_run, "items": rows}))
        return
    for r in found:
        typer.echo(
            f"{r.path} ({', '.join(r.names[:2])}{', …' if len(r.names) > 2 else ''}): {size(r.bytes)}: {r.reason}"
        )
    total = size(sum(r.bytes for r in found))
    typer.echo(f"{'would free' if dry_run else 'freed'} {total} in {len(found)} artifacts")
