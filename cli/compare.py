"""``tseeds compare PIPELINE...``: arms × seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tseeds_cli.options import JsonOption, SetOption

_SHOWN = ("pass@1", "pass@4", "pass@16", "pass@64", "distinct", "entropy", "effective_entropy", "clipped_mass_all")


def compare(
    pipelines: Annotated[list[Path], typer.Argument(help="Pipeline files (.toml), one per arm.")],
    seeds: Annotated[int, typer.Option(min=1, help="Run seeds per arm.")] = 5,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Runs at once, a process each; 0: one per core.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory of the runs.")] = Path("runs/compare"),
    records: Annotated[
        Path | None, typer.Option(help="Results, one JSON line per finished run; default OUT/records.jsonl.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Stop resumable after this many minutes; 0: never.")] = 0,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train every arm from several seeds, seed by seed; recorded runs are skipped, interrupted ones go on."""
    import json
    import os
    import signal
    import sys
    import time

    from tseeds import compare as comparison

    wish: list[str] = []

    def ask(number: int, _frame: object) -> None:
        wish.append(signal.Signals(number).name)
        sys.stderr.write(f"\ntseeds: {wish[-1]}: running parts are finished first\n")

    if (workers or os.cpu_count() or 1) > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    todo = comparison.jobs(pipelines, range(first_seed, first_seed + seeds), sets or ())
    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        found = comparison.run(
            todo,
            out,
            records=records or out / "records.jsonl",
            workers=workers or os.cpu_count() or 1,
            listener=_listener(),
            stop=lambda: bool(wish) or time.monotonic() > end,
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    arms = list(dict.fromkeys(job.arm for job in todo))
    rows = {arm: {m: comparison.by_arm(found, m).get(arm, {}) for m in _SHOWN} for arm in arms}
    if as_json:
        typer.echo(json.dumps({"arms": rows, "records": str(records or out / "records.jsonl")}))
    else:
        _print(rows, records or out / "records.jsonl")


def _listener() -> Any:
    import sys

    from tseeds import compare as comparison

    class Lines(comparison.Listener):
        """One line per event on standard error."""

        def plan(self, done: Any, waiting: Any) -> None:
            sys.stderr.write(f"{len(done) + len(waiting)} runs: {len(done)} recorded, {len(waiting)} to do\n")
            self.done, self.total = 0, len(waiting)

        def started(self, job: Any, root: Path) -> None:
            sys.stderr.write(f"{job.name}: running, log in {root / 'logs'}\n")

        def finished(self, job: Any, record: Any) -> None:
            self.done += 1
            shown = "  ".join(f"{m} {v:.3f}" for m in _SHOWN[:6] if (v := comparison.final(record, m)) is not None)
            cost = f"  {record['wall_s']:.0f} s" if record["wall_s"] else ""
            sys.stderr.write(f"{job.name}: done ({self.done} of {self.total})  {shown}{cost}\n")

        def failed(self, job: Any, reason: str) -> None:
            sys.stderr.write(f"{job.name}: failed: {reason}\n")

    return Lines()


def _print(rows: dict[str, dict[str, dict[int, float]]], records: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from tseeds.compare import mean_sd

    table = Table(title="mean ± standard deviation over seeds", title_justify="left")
    table.add_column("arm")
    table.add_column("seeds", justify="right")
    for metric in _SHOWN:
        table.add_column(metric.replace("_", " "), justify="right")
    for arm, metrics in rows.items():
        cells = []
        for metric in _SHOWN:
            values = list(metrics[metric].values())
            mean, sd = mean_sd(values) if values else (None, None)
            cells.append("–" if mean is None else f"{mean:.3f}" + ("" if sd is None else f" ± {sd:.3f}"))
        table.add_row(arm, str(max(len(v) for v in metrics.values())), *cells)
    console = Console(width=None if Console().is_terminal else 200)
    console.print(table)
    console.print(f"  results  {records}", highlight=False, soft_wrap=True)
