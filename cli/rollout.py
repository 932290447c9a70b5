"""``tseeds rollout``: the current policy completes the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tseeds_cli.options import (
    ConfigOption,
    CurriculumOption,
    Iteration,
    JsonOption,
    OutOption,
    PolicyOption,
    ProblemsOption,
    RunArgument,
    SetOption,
)


def rollout(
    run: RunArgument = None,
    iteration: Iteration = None,
    config: ConfigOption = None,
    policy: PolicyOption = None,
    problems: ProblemsOption = None,
    seeds: Annotated[Path | None, typer.Option(help="Seed artifact; leave out for on-policy rows only.")] = None,
    snapshot: Annotated[
        list[Path] | None, typer.Option(help="Snapshot artifact that finishes rows (position suffix).")
    ] = None,
    curriculum: CurriculumOption = None,
    out: OutOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Complete seeded and unseeded rows on-policy; token ids, log-probs and spans go into Parquet."""
    from tseeds import rollout as stage
    from tseeds.artifacts.store import require
    from tseeds.pipeline import Step
    from tseeds_cli.console import run_stage
    from tseeds_cli.options import explicit, from_run

    if run is not None:
        pipeline, where, step = from_run(
            run,
            stage.STAGE,
            iteration,
            sets,
            config=config,
            policy=policy,
            problems=problems,
            seeds=seeds,
            snapshot=snapshot,
            curriculum=curriculum,
            out=out,
        )
        run_stage(pipeline, step, as_json=as_json, run=where.root)
        return
    pipeline = explicit(config, sets, policy=policy, problems=problems, out=out)
    assert policy is not None
    assert problems is not None
    assert out is not None
    number = iteration or 1
    pool = {int(require(p, "a snapshot", "snapshot").facts["step"]): p for p in snapshot or ()}
    inputs = stage.Inputs(policy, number - 1, problems, seeds, number, pool, curriculum)
    run_stage(pipeline, Step(stage, inputs, out, number), as_json=as_json)
