"""The report as one HTML file: Plotly and data inside, nothing fetched."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tseeds.artifacts.disk import make_parent
from tseeds.artifacts.store import write_file
from tseeds.errors import UserError
from tseeds.report.figures import all_figures, overview
from tseeds.report.page import as_json, asset, build
from tseeds.report.read import Group

_BODY = """<header><h1>{title}</h1><nav></nav>
<div class="controls"><label>Smoothing <select id="smooth">
<option value="1">none</option><option value="5">5 iterations</option><option value="15">15 iterations</option>
</select></label><button id="theme" type="button" title="light or dark">◐</button></div></header>
<main></main>
<footer>{footer}</footer>"""


def _plain(value: Any) -> Any:
    """JSON-ready: NaN and infinities become null."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def render(groups: Sequence[Group], *, title: str = "tseeds report") -> str:
    """The page's text.

    Raises:
        UserError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("tseeds report draws with plotly: pip install plotly (or tseeds[report])") from None
    runs = sum(len(g.runs) for g in groups)
    data = {
        "figures": [asdict(f) for f in all_figures(groups)],
        "overview": asdict(overview(groups)),
        "overview_note": "Reward, entropy and clipped mass: mean of the last fifth of the iterations. Evaluation: without "
        "seeds, before → after. ± and bands: one standard deviation over the runs of a group.",
    }
    names = ", ".join(f"{g.name}: {', '.join(str(r.root) for r in g.runs)}" for g in groups)
    return build(
        title=title,
        style=asset("theme.css") + asset("report.css"),
        body=_BODY.format(title=html.escape(title), footer=html.escape(f"{runs} runs ({names})")),
        scripts=[get_plotlyjs(), asset("theme.js"), asset("report.js")],
        data=as_json(_plain(data)),
    )


def write(groups: Sequence[Group], out: Path, *, title: str = "tseeds report") -> Path:
    """Write the page; its folder is made where it is missing.

    Raises:
        UserError: plotly is not installed, a run's file is damaged, or nothing can be written there.
    """
    make_parent(out)
    write_file(out, render(groups, title=title))
    return out
