"""``tseeds snapshot``: an immutable copy of a policy."""

from __future__ import annotations

from typing import Annotated

import typer

from tseeds_cli.options import ConfigOption, JsonOption, OutOption, PolicyOption, RunArgument, SetOption


def snapshot(
    run: RunArgument = None,
    step: Annotated[int | None, typer.Option(help="Training step of the policy; default: the newest finished.")] = None,
    config: ConfigOption = None,
    policy: PolicyOption = None,
    out: OutOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a policy into an immutable, content-addressed snapshot that later iterations draw seeds from."""
    from tseeds import config as configuration
    from tseeds import snapshot as stage
    from tseeds.artifacts.rundir import open_run
    from tseeds.pipeline import Step
    from tseeds_cli.console import run_stage
    from tseeds_cli.options import explicit, without_run

    if run is not None:
        without_run(run, config=config)
        where = open_run(run)
        pipeline = configuration.load(where.pipeline, sets or ())
        number = where.finished() if step is None else step
        inputs = stage.Inputs(policy or where.policy(number), number, link=policy is None)
        run_stage(pipeline, Step(stage, inputs, out or where.snapshot(number), 0), as_json=as_json)
        return
    pipeline = explicit(config, sets, policy=policy, out=out)
    assert policy is not None
    assert out is not None
    run_stage(pipeline, Step(stage, stage.Inputs(policy, step or 0), out, 0), as_json=as_json)
