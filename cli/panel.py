"""What ``tseeds run`` shows: a live panel on a terminal, one line per iteration elsewhere, a table at the end."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tseeds import pipeline as chain
from tseeds.artifacts import store
from tseeds.artifacts.rundir import RunDir
from tseeds.artifacts.store import Manifest
from tseeds.config import Pipeline
from tseeds.context import Progress
from tseeds.history import Change
from tseeds_cli.console import duration, size
from tseeds_cli.status import disk

_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVES = (
    ("reward", "reward"),
    ("entropy", "entropy"),
    ("effective_entropy", "eff. entropy"),
    ("clipped_mass_all", "clipped mass"),
)


def sparkline(values: list[float], width: int = 24) -> str:
    """A curve as at most ``width`` block characters: means of equal stretches, scaled to their own range.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    >>> sparkline([0.0, 0.0, 1.0, 1.0], width=2)
    '▁█'
    """
    count = min(width, len(values))
    cuts = [k * len(values) // count for k in range(count + 1)] if count else []
    means = [_mean(values[a:b]) for a, b in pairwise(cuts)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, int((v - low) / span * 7 + 0.5))] for v in means)


class _Stage(Progress):
    """The running stage's numbers, for the panel."""

    def __init__(self) -> None:
        self.stage, self.total, self.rows, self.tokens, self.start = "starting", 0, 0, 0, time.monotonic()

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        self.stage, self.total, self.rows, self.tokens, self.start = stage, total, done, 0, time.monotonic()

    def advance(self, rows: int, tokens: int = 0) -> None:
        self.rows += rows
        self.tokens += tokens

    def rate(self) -> float:
        return self.tokens / max(1e-6, time.monotonic() - self.start)


class Panel(chain.Listener):
    """Listens to the loop and shows it."""

    def __init__(self, config: Pipeline, run: RunDir) -> None:
        self.config, self.run = config, run
        self.progress = _Stage()
        self.console = Console(stderr=True)
        self._history: list[dict[str, Any]] = []
        self._first = 0
        self._idle = True
        self._started = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Panel:
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, run: RunDir, config: Pipeline, finished: int) -> None:
        self.config, self._first = config, finished
        self._history = store.read_lines(run.metrics)
        if finished < config.run.iterations:
            going_on = f", going on after iteration {finished}" if finished else ""
            self.say(f"run {run.root}: {config.run.iterations} iterations{going_on}; log in {run.root / 'logs'}")

    def changed(self, change: Change) -> None:
        self.say(f"changed from iteration {change['iteration']} on: {chain.show(change)}")

    def stage(self, step: chain.Step, ran: bool, manifest: Manifest) -> None:
        self._idle = self._idle and not ran
        if ran and step.iteration == 0:
            rows = f", {manifest.rows} rows" if manifest.rows else ""
            self.say(f"{step.out}: made in {duration(manifest.wall_s)}{rows}")
            for note in manifest.facts.get("notes", []):
                self.say(f"  {note}")

    def iteration(self, number: int, metrics: dict[str, Any]) -> None:
        self._history.append(metrics)
        if self._live is None:
            shown = "  ".join(f"{title} {_number(metrics.get(key))}" for key, title in _CURVES)
            spent = sum(metrics["seconds"].values())
            self.say(f"iteration {number:4d}/{self.config.run.iterations}  {shown}  {spent:.1f} s  left {self._left()}")

    def say(self, text: str) -> None:
        """Print one line above the live panel."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _left(self) -> str:
        done = len(self._history)
        here = done - self._first
        if here <= 0:
            return "–"
        return duration((time.monotonic() - self._started) / here * max(0, self.config.run.iterations - done))

    def _render(self) -> Group:
        done, total, now = len(self._history), self.config.run.iterations, self.progress
        head = Table.grid(padding=(0, 2))
        head.add_row(
            "iteration", f"{min(done + 1, total)}/{total}", ProgressBar(total, done, width=32), f"left {self._left()}"
        )
        rate = f"{now.rate():,.0f} tok/s" if now.tokens else ""
        head.add_row(now.stage, f"{now.rows}/{now.total}", ProgressBar(max(1, now.total), now.rows, width=32), rate)
        for key, title in _CURVES:
            values = [h[key] for h in self._history if h.get(key) is not None]
            head.add_row(title, _number(values[-1] if values else None), Text(sparkline(values), style="cyan"))
        return Group(head)

    def finish(self) -> None:
        """Say so where the run was finished before."""
        if self._idle:
            done = self.run.finished()
            self.say(
                f"{self.run.root}: all {done} iterations are finished, nothing left to do (--iterations N goes on)"
            )

    def summary(self) -> None:
        """What happened and where to look: first and last values, evaluation before and after, artifacts."""
        self._history = store.read_lines(self.run.metrics)
        out = Console(file=sys.stdout)
        if self._history:
            out.print(self._curves())
        before_after = evaluations(self.run)
        if before_after:
            out.print(before_after)
        last = self.run.finished()
        for name, place in (
            ("trajectories", f'pl.read_parquet("{self.run.root}/iterations/*/rollout/*.parquet")'),
            ("metrics", str(self.run.metrics)),
            ("policy", str(self.run.policy(last))),
            ("read them", f"tseeds show {self.run.stage(max(1, last), 'rollout')}"),
            ("figures", f"tseeds report {self.run.root} -o report.html"),
            ("disk", size(disk(self.run.root))),
        ):
            out.print(f"  {name:14}{place}", highlight=False, markup=False, soft_wrap=True)

    def _curves(self) -> Table:
        n = max(1, len(self._history) // 5)
        table = Table(title=f"{len(self._history)} iterations, mean of the first and last {n}", title_justify="left")
        for column in ("metric", "first", "last", "over training"):
            table.add_column(column, justify="left" if column in ("metric", "over training") else "right")
        rows = (
            ("reward", "reward"),
            ("reward_seeded", "  seeded rows"),
            ("reward_unseeded", "  unseeded rows"),
            ("entropy", "entropy, unseeded (nats)"),
            ("effective_entropy", "effective entropy (nats)"),
            ("clip_fraction_seed", "clip fraction, seed"),
            ("clip_fraction_continuation", "clip fraction, continuation"),
            ("clipped_mass_all", "clipped mass"),
            ("zero_variance_share", "groups without signal"),
            ("response_length", "response length (tokens)"),
        )
        for key, title in rows:
            values = [h[key] for h in self._history if h.get(key) is not None]
            if values:
                table.add_row(title, _number(_mean(values[:n])), _number(_mean(values[-n:])), sparkline(values))
        return table


def evaluations(run: RunDir) -> Table | None:
    """pass@k of the first and the newest evaluated step of each benchmark."""
    root = run.root / "evaluations"
    steps = sorted(int(p.name) for p in root.iterdir() if p.name.isdigit()) if root.is_dir() else []
    table = Table(title="evaluation without seeds", title_justify="left")
    for column in ("benchmark", "metric", "before", "after"):
        table.add_column(column, justify="right" if column in ("before", "after") else "left")
    for benchmark in sorted(
        {p.name for s in steps for p in (root / f"{s:06d}").iterdir() if not p.name.startswith(".")}
    ):
        found = [
            m.facts["summary"] for s in steps if (m := store.read_manifest(run.evaluation(s, benchmark))) is not None
        ]
        if len(found) < 2:
            continue
        keys = [k for k in found[0] if k.startswith("pass@")] + ["distinct"]
        for key in keys:
            if key in found[0] and key in found[-1]:
                table.add_row(benchmark, key, _number(found[0][key]), _number(found[-1][key]))
    return table if table.row_count else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
