"""``tseeds watch RUN``: follow a run from another terminal, without touching it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tseeds_cli.options import JsonOption

if TYPE_CHECKING:
    from tseeds.artifacts.rundir import RunDir

CURVES = (
    ("reward", "reward"),
    ("entropy", "entropy (nats)"),
    ("effective_entropy", "effective entropy"),
    ("clipped_mass_all", "clipped mass"),
    ("response_length", "length (tokens)"),
)


def watch(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    once: Annotated[bool, typer.Option("--once", help="Say how it stands and return.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between looks.")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Follow a run: iteration, stage, rows, tokens/s, reward, entropy, clipped mass, time left. Ends with the run."""
    import json
    import sys
    import time

    from rich.console import Console
    from rich.live import Live

    from tseeds.artifacts.rundir import open_run

    where = open_run(run)
    console = Console(file=sys.stdout)
    if once or as_json:
        now = state(where)
        if as_json:
            typer.echo(json.dumps(now))
        else:
            console.print(render(now))
        return
    shown, idle = 0, 0
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    try:
        if live is not None:
            live.start()
        while True:
            now = state(where)
            if live is not None:
                live.update(render(now), refresh=True)
            else:
                for line in now["metrics"][shown:]:
                    values = "  ".join(f"{title} {number(line.get(key))}" for key, title in CURVES)
                    typer.echo(f"iteration {line['iteration']:4d}/{now['iterations']}  {values}")
                shown = len(now["metrics"])
            idle = 0 if now["writer"] else idle + 1
            if now["finished"] >= now["iterations"] or idle > 2:
                break
            time.sleep(interval)
    except KeyboardInterrupt:
        pass
    finally:
        if live is not None:
            live.stop()
    if now["finished"] < now["iterations"] and not now["writer"]:
        typer.echo(
            f"no process trains here: {now['finished']} of {now['iterations']} iterations; tseeds run {run} goes on"
        )


def state(run: RunDir) -> dict[str, Any]:
    """What a run does now, from its files alone: finished, stage and rows in progress, rate, metrics, writer."""
    from tseeds import config as configuration
    from tseeds.artifacts import store
    from tseeds.artifacts.lock import owner

    config = configuration.load(run.pipeline)
    metrics = store.read_lines(run.metrics)
    rows = config.rollout.problems_per_iteration * config.rollout.group_size
    stage, done = None, 0
    current = run.finished() + 1
    for name in ("seed", "rollout", "score", "update"):
        partial = run.stage(current, name).with_name(f"{name}.partial")
        if partial.is_dir():
            stage, done = name, sum(line.get("rows") or 0 for line in store.read_lines(partial / "parts.jsonl"))
    seconds = [sum(m["seconds"].values()) for m in metrics[-20:]]
    left = sum(seconds) / len(seconds) * max(0, config.run.iterations - len(metrics)) if seconds else None
    newest = metrics[-1] if metrics else {}
    sampled = newest.get("seconds", {}).get("rollout")
    rate = newest.get("tokens", 0) / sampled if sampled else None
    return {
        "run": str(run.root),
        "iteration": min(current, config.run.iterations),
        "iterations": config.run.iterations,
        "finished": run.finished(),
        "stage": stage,
        "rows": done,
        "total": rows,
        "tokens_per_second": rate,
        "seconds_left": left,
        "writer": owner(run.lock),
        "metrics": metrics,
    }


def render(now: dict[str, Any]) -> Any:
    """The panel of one state."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from tseeds_cli.console import duration
    from tseeds_cli.panel import sparkline

    grid = Table.grid(padding=(0, 2))
    left = "" if now["seconds_left"] is None else f"left {duration(now['seconds_left'])}"
    grid.add_row(
        "iteration",
        f"{now['finished']}/{now['iterations']}",
        ProgressBar(max(1, now["iterations"]), now["finished"], width=32),
        left,
    )
    if now["stage"]:
        rate = f"{now['tokens_per_second']:,.0f} tok/s" if now["tokens_per_second"] else ""
        bar = ProgressBar(max(1, now["total"]), now["rows"], width=32)
        grid.add_row(now["stage"], f"{now['rows']}/{now['total']}", bar, rate)
    for key, title in CURVES:
        values = [m[key] for m in now["metrics"] if m.get(key) is not None]
        grid.add_row(title, number(values[-1] if values else None), Text(sparkline(values), style="cyan"), "")
    who = now["writer"]
    head = f"process {who['pid']} on {who['host']} since {who['since']}" if who else "no process trains here now"
    return Group(Text(f"{now['run']}: {head}"), grid)


def number(value: float | None) -> str:
    """Three decimals below 100, one above."""
    return "–" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
