"""``tseeds update``: the mixed-loss policy update."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tseeds_cli.options import ConfigOption, Iteration, JsonOption, OutOption, PolicyOption, RunArgument, SetOption


def update(
    run: RunArgument = None,
    iteration: Iteration = None,
    config: ConfigOption = None,
    policy: PolicyOption = None,
    state: Annotated[
        Path | None, typer.Option(help="Trainer state of an earlier update; leave out to begin anew.")
    ] = None,
    rollouts: Annotated[Path | None, typer.Option(help="Rollout artifact.")] = None,
    scores: Annotated[Path | None, typer.Option(help="Score artifact.")] = None,
    reference: Annotated[Path | None, typer.Option(help="Model directory of the KL term.")] = None,
    out: OutOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train on one iteration's rows and commit the new policy with its optimizer state and metrics."""
    from tseeds import update as stage
    from tseeds.pipeline import Step
    from tseeds_cli.console import run_stage
    from tseeds_cli.options import explicit, from_run

    if run is not None:
        pipeline, where, step = from_run(run, stage.STAGE, iteration, sets)
        run_stage(pipeline, step, as_json=as_json, run=where.root)
        return
    pipeline = explicit(config, sets, policy=policy, rollouts=rollouts, scores=scores, out=out)
    assert policy is not None
    assert rollouts is not None
    assert scores is not None
    assert out is not None
    inputs = stage.Inputs(policy, state, rollouts, scores, iteration or 1, reference)
    run_stage(pipeline, Step(stage, inputs, out, inputs.iteration), as_json=as_json)
