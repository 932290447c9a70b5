"""``tseeds toy DIR``: the toy problems and their small policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def toy(
    directory: Annotated[Path, typer.Argument(help="Where policy/, train.jsonl and test.jsonl go.")] = Path("toy"),
    seed: Annotated[int, typer.Option(help="Draws other problems; the held-out ones stay held out.")] = 0,
    train: Annotated[bool, typer.Option("--train", help="Make the policy again from nothing (minutes).")] = False,
) -> None:
    """Make the toy task: Countdown problems and a small warm-started policy, a normal Hugging Face model directory."""
    from tseeds.toy import make

    paths = make(directory, seed=seed, train=train)
    for name, path in paths.items():
        typer.echo(f"{name:6} {path}")
