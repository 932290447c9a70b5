"""``tseeds score``: verdicts and rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tseeds_cli.options import ConfigOption, Iteration, JsonOption, OutOption, ProblemsOption, RunArgument, SetOption


def score(
    run: RunArgument = None,
    iteration: Iteration = None,
    config: ConfigOption = None,
    rollouts: Annotated[Path | None, typer.Option(help="Rollout artifact.")] = None,
    problems: ProblemsOption = None,
    out: OutOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Grade rollouts: a verdict and a reward for every row."""
    from tseeds import score as stage
    from tseeds.pipeline import Step
    from tseeds_cli.console import run_stage
    from tseeds_cli.options import explicit, from_run

    if run is not None:
        pipeline, where, step = from_run(
            run, stage.STAGE, iteration, sets, config=config, rollouts=rollouts, problems=problems, out=out
        )
        run_stage(pipeline, step, as_json=as_json, run=where.root)
        return
    pipeline = explicit(config, sets, rollouts=rollouts, problems=problems, out=out)
    assert rollouts is not None
    assert problems is not None
    assert out is not None
    run_stage(pipeline, Step(stage, stage.Inputs(rollouts, problems), out, iteration or 1), as_json=as_json)
