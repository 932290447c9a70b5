"""``tseeds import FILE``: trajectories of other trainers as artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tseeds_cli.options import JsonOption


def import_(
    file: Annotated[Path, typer.Argument(help="TRL- or verl-style .jsonl or .parquet with token ids and log-probs.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory for rollout/ and score/.")],
    as_json: JsonOption = False,
) -> None:
    """Import trajectories that another trainer wrote: to read them, or to train on them with the file's rewards.

    Rows whose problem_id names problems of a problems artifact can also be graded again.
    """
    import json

    from tseeds.exchange import import_rows

    rollouts, scores = import_rows(file, out)
    places = {"rollout": str(rollouts.path), **({"score": str(scores.path)} if scores is not None else {})}
    if as_json:
        typer.echo(json.dumps({**places, "rows": rollouts.rows}))
    else:
        for name, place in places.items():
            typer.echo(f"{name:8} {place}  {rollouts.rows} rows")
