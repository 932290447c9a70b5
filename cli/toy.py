"""``tseeds toy DIR``: the toy problems and their small policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def toy(
    directory: Annotated[Path, typer.Argument(help="Where policy/, train.jsonl and test.jsonl go.")] = Path("toy"),
    task: Annotated[
        str, typer.Option(help="countdown (reach a target) or arithmetic (evaluate an expression).")
    ] = "countdown",
    seed: Annotated[int, typer.Option(help="Draws other problems; the held-out ones stay held out.")] = 0,
    train: Annotated[bool, typer.Option("--train", help="Make the policy again from nothing (minutes).")] = False,
) -> None:
    """Make a toy task: problems and a small warm-started policy, a normal Hugging Face model directory.

    pipelines/toy.toml trains on `tseeds toy toy`, pipelines/arithmetic.toml on `tseeds toy toy-arithmetic --task arithmetic`.
    """
    from tseeds.toy import make

    paths = make(directory, task, seed=seed, train=train)
    for name, path in paths.items():
        typer.echo(f"{name:6} {path}")
