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
    """Re-check the digest of every committed file; exit 1 when anything is damaged, with the mend."""
    import json

    from tseeds.artifacts import store
    from tseeds.errors import UserError

    damages: list[str] = []
    artifacts = 0
    if not path.exists():
        raise UserError(f"{path}: no such run or artifact")
    for file in sorted(path.rglob(store.MANIFEST)):
        if any(part.endswith(".partial") or part.startswith(".") for part in file.relative_to(path).parts):
            continue
        artifacts += 1
        try:
            manifest = store.read_manifest(file.parent)
        except UserError as error:
            damages.append(str(error))
            continue
        if manifest is not None:
            damages += store.damages(manifest)
    if not artifacts:
        raise UserError(f"{path}: holds no committed artifact")
    if as_json:
        typer.echo(json.dumps({"artifacts": artifacts, "damages": damages}))
    else:
        for line in damages:
            typer.echo(line)
        typer.echo(f"{artifacts} artifacts checked, {len(damages)} damaged files")
        if damages:
            typer.echo(
                "Mend: restore the file from a backup, or delete its artifact directory and run again to remake it."
            )
    if damages:
        raise typer.Exit(1)
