"""Every figure as PNG and SVG for papers: matplotlib, one column wide, print colours, no title inside."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tseeds.artifacts.disk import refusals
from tseeds.errors import UserError
from tseeds.report.figures import Figure, all_figures
from tseeds.report.read import Group

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b0487f", "#7a5c00", "#3d8fc4", "#333333", "#6a4fb3")
"""Okabe and Ito's order, darkened until each reads on white."""
STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "D", "^", "P", "X", "*", "p")
WIDTH, HEIGHT = 4.2, 2.9  # inches


def write(groups: Sequence[Group], folder: Path) -> list[Path]:
    """One PNG (200 dpi) and one SVG (text kept as text) per figure; returns the files.

    Raises:
        UserError: matplotlib is not installed, or nothing can be written there.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError("figures for papers need matplotlib: pip install matplotlib (or tseeds[report])") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with refusals(folder):
        folder.mkdir(parents=True, exist_ok=True)
    look: Any = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "legend.frameon": False,
        "legend.fontsize": 7.5,
        "svg.fonttype": "none",
        "svg.hashsalt": "tseeds",
    }
    files = []
    with plt.rc_context(look):
        for figure in all_figures(groups):
            canvas, axes = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
            _draw(axes, figure)
            for kind in ("png", "svg"):
                file = folder / f"{figure.id}.{kind}"
                with refusals(file):
                    canvas.savefig(file, dpi=200, metadata={"Date": None} if kind == "svg" else None)
                files.append(file)
            plt.close(canvas)
    return files


def _draw(axes: Any, figure: Figure) -> None:
    axes.set_xlabel(figure.x)
    named = figure.kind == "heat" or figure.y.lower() in figure.title.lower()
    label = figure.y if named else f"{figure.title} ({figure.y})"
    axes.set_ylabel(textwrap.fill(label, 36))
    if figure.kind == "heat":
        _heat(axes, figure)
        return
    if figure.kind == "bars":
        _bars(axes, figure)
    else:
        for series in figure.series:
            colour = COLOURS[series.group % len(COLOURS)]
            marker = MARKERS[series.group % len(MARKERS)] if figure.kind == "points" or len(series.x) == 1 else None
            held = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None]
            axes.plot(
                [x for x, _ in held],
                [y for _, y in held],
                color=colour,
                linestyle=STYLES[series.variant % len(STYLES)],
                marker=marker,
                markersize=3.5,
                linewidth=1.4,
                label=series.name,
            )
            band = [
                (x, lo, hi)
                for x, lo, hi in zip(series.x, series.lo, series.hi, strict=False)
                if lo is not None is not hi
            ]
            if band:
                axes.fill_between(*zip(*band, strict=True), color=colour, alpha=0.15, linewidth=0)
        if figure.x_log2:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if len(figure.series) > 1:
        axes.legend(loc="best", ncols=1 if len(figure.series) < 5 else 2)


def _bars(axes: Any, figure: Figure) -> None:
    names = list(dict.fromkeys(x for s in figure.series for x in s.x))
    stacked = figure.id == "time"
    width = 0.6 if stacked else 0.8 / len(figure.series)
    below = [0.0] * len(names)
    for i, series in enumerate(figure.series):
        value = dict(zip(series.x, series.y, strict=True))
        heights = [value.get(n) or 0.0 for n in names]
        at = [j if stacked else j - 0.4 + (i + 0.5) * width for j in range(len(names))]
        axes.bar(
            at,
            heights,
            width,
            bottom=below if stacked else None,
            color=COLOURS[series.group % len(COLOURS)],
            alpha=0.45 if series.variant else 1.0,
            hatch="//" if series.variant else None,
            edgecolor="white",
            linewidth=0.5,
            label=series.name,
        )
        if stacked:
            below = [b + h for b, h in zip(below, heights, strict=True)]
    axes.set_xticks(range(len(names)), [str(n) for n in names])
    axes.grid(False, axis="x")


def _heat(axes: Any, figure: Figure) -> None:
    cells = [[float("nan") if v is None else v for v in row] for row in figure.cells]
    image = axes.imshow(cells, cmap="cividis", aspect="auto")
    axes.grid(False)
    axes.set_xticks(range(len(figure.series[0].x)), figure.series[0].x, rotation=30, ha="right")
    axes.set_yticks(range(len(figure.rows)), figure.rows)
    middle = (image.norm.vmin + image.norm.vmax) / 2
    for i, row in enumerate(cells):
        for j, value in enumerate(row):
            colour = "white" if value < middle else "black"
            axes.text(j, i, f"{value:.3f}", ha="center", va="center", fontsize=7, color=colour)
    axes.figure.colorbar(image, ax=axes, label=figure.series[0].name)
