"""``tseeds status RUN``: what is fresh, stale, incomplete, missing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tseeds_cli.options import JsonOption

if TYPE_CHECKING:
    from tseeds.artifacts.rundir import RunDir
    from tseeds.config import Pipeline


def status(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    as_json: JsonOption = False,
) -> None:
    """Show, per stage, what is fresh, stale (which value changed), incomplete or missing, and the disk use."""
    from tseeds import config as configuration
    from tseeds.artifacts.rundir import open_run

    where = open_run(run)
    print_survey(configuration.load(where.pipeline), where, as_json=as_json)


def print_survey(config: Pipeline, run: RunDir, *, accept: bool = False, as_json: bool) -> None:
    """The survey of a run under a configuration, for status and run --dry-run; accept: as if its changes were accepted."""
    import json
    from collections import defaultdict

    from tseeds import pipeline as chain
    from tseeds.artifacts.lock import owner
    from tseeds.history import History
    from tseeds_cli.console import duration, size

    record = chain.read_record(run)
    plan = chain.plan(config, run, record) if run.pipeline.is_file() else None
    refused = plan is not None and bool(plan.fixed or (plan.stale and not accept))
    history = plan.history if plan else History(config, record["changes"])
    reports = plan.reports if plan and (refused or not plan.changes) else list(chain.survey(history, run))
    done, total = run.finished(), history.config.run.iterations
    writer = owner(run.lock)
    if as_json:
        rows = [
            {
                "stage": r.step.module.STAGE,
                "iteration": r.step.iteration,
                "path": str(r.step.out),
                "state": r.state,
                "reasons": r.reasons,
                "seconds": r.seconds,
                "parts": r.parts,
                "follows": r.follows,
            }
            for r in reports
        ]
        typer.echo(
            json.dumps(
                {
                    "run": str(run.root),
                    "finished": done,
                    "iterations": total,
                    "writer": writer,
                    "refused": refused,
                    "stages": rows,
                }
            )
        )
        return
    typer.echo(f"{run.root}: {done} of {total} iterations finished")
    if writer:
        typer.echo(f"being written by process {writer['pid']} on {writer['host']} since {writer['since']}")
    by_stage: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for r in reports:
        by_stage[r.step.module.STAGE][r.state] += 1
    for stage, states in by_stage.items():
        typer.echo(
            f"  {stage:10} "
            + ", ".join(f"{states[s]} {s}" for s in ("fresh", "stale", "incomplete", "missing") if states[s])
        )
    for r in reports:
        if r.state == "incomplete":
            parts = f": {r.parts} parts committed" if r.parts else ""
            typer.echo(f"  {r.step.out} is incomplete{parts}; tseeds run goes on with it")
    stale = [r for r in reports if r.state == "stale"]
    if stale:
        for reason in dict.fromkeys(reason for r in stale for reason in r.reasons):
            mine = [r for r in stale if reason in r.reasons]
            stages = ", ".join(dict.fromkeys(r.step.module.STAGE for r in mine))
            typer.echo(f"  stale because {reason}: {len(mine)} stages ({stages}), the first is {mine[0].step.name}")
        follow = [r for r in reports if r.follows]
        cost = duration(sum(r.seconds for r in [*stale, *follow]))
        typer.echo(
            f"  a redo would cost about {cost}: {len(stale)} stale stages and {len(follow)} that follow from them"
        )
    if plan is not None and refused:
        typer.echo(f"  tseeds run refuses. {chain.outlook(plan, run)}")
    elif plan is not None:
        for change in plan.changes:
            typer.echo(f"  would change from iteration {change['iteration']} on: {chain.show(change)}")
    for r in reports:
        if r.state == "fresh" and r.reasons:
            typer.echo(f"  {r.step.out}: {r.reasons[0]}")
    for change in record["changes"]:
        typer.echo(f"  changed from iteration {change['iteration']} on: {chain.show(change)}")
    if "parent" in record:
        typer.echo(f"  forked from {record['parent']['run']} at iteration {record['parent']['at']}")
    if done < total:
        last = [r for r in reports if r.step.iteration == done and r.state == "fresh"]
        each = sum(r.seconds for r in last)
        left = f", about {duration(each * (total - done))} at the last one's pace" if each else ""
        typer.echo(f"  to do: {total - done} iterations{left}")
    folders = [run.stage(i, "x").parent for i in run.iterations()]
    if folders:
        used = [disk(folder) for folder in folders]
        typer.echo(
            f"  disk: {size(disk(run.root))}, of which {len(used)} iterations take {size(sum(used))} (the newest "
            f"{size(used[-1])}, {size(sum(used) / len(used))} each); tseeds gc RUN --dry-run lists what can go"
        )


def disk(folder: Path) -> int:
    """Bytes below a folder; a file with several names counts once."""
    import os

    seen: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                stat = os.stat(os.path.join(parent, name))
            except FileNotFoundError:
                continue  # a writer renamed it meanwhile
            seen[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(seen.values())
