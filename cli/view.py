"""``tseeds view PATH``: read trajectories token by token in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def view(
    path: Annotated[Path, typer.Argument(help="Run directory, or a rollout or evaluation artifact.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write a static page here instead of serving: DIR, or FILE.html.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port on this machine; 0 picks a free one.")] = 8642,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser window.")] = True,
    limit: Annotated[int, typer.Option(min=0, help="With -o: at most this many rows; 0 takes all.")] = 0,
) -> None:
    """Read trajectories: problem, seed and continuation, log-probs, ratios, entropy, clipping, advantage per token.

    Without -o a page is served on this machine only (127.0.0.1) until Ctrl-C; nothing is loaded before it is looked at.
    """
    from tseeds.report import viewer

    if out is not None:
        typer.echo(str(viewer.write(path, out, limit=limit)))
        return
    viewer.serve(path, port=port, open_browser=open_browser, ready=lambda url: typer.echo(url))
