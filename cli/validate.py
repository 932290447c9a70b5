"""``tseeds validate PIPELINE``: the resolved pipeline, or one line per mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tseeds_cli.options import JsonOption, SetOption


def validate(
    pipeline: Annotated[Path, typer.Argument(help="Pipeline file (.toml).")],
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the resolved pipeline with every default and what each value means, or one clear line per mistake."""
    import json

    from tseeds import config as configuration

    config = configuration.load(pipeline, sets or ())
    typer.echo(json.dumps(config.model_dump(mode="json"), indent=1) if as_json else configuration.dumps(config))
