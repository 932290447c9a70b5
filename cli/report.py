"""``tseeds report RUN...``: figures that compare runs, in one file that opens offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tseeds_cli.options import JsonOption


def report(
    runs: Annotated[
        list[str],
        typer.Argument(help="Run directories; NAME=RUN puts runs of one NAME (seeds of an arm) into one group."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "tseeds report",
    figures: Annotated[
        Path | None, typer.Option(help="Also write every figure as PNG and SVG into this directory.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runs: reward, entropy, clipping, ratios, pass@k, lengths, speed. Runs of one group become mean and band.

    The page is one self-contained file; it opens without a network, in light and dark.
    """
    import json

    from tseeds.report import html, read

    groups = read.groups(runs)
    written = [str(html.write(groups, out, title=title))]
    if figures is not None:
        from tseeds.report import paper

        written += [str(p) for p in paper.write(groups, figures)]
    if as_json:
        typer.echo(json.dumps({"files": written, "groups": {g.name: [str(r.root) for r in g.runs] for g in groups}}))
    else:
        typer.echo("\n".join(written))
