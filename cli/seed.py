"""``tseeds seed``: past policies write the beginnings."""

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
    ProblemsOption,
    RunArgument,
    SetOption,
)


def seed(
    run: RunArgument = None,
    iteration: Iteration = None,
    config: ConfigOption = None,
    problems: ProblemsOption = None,
    snapshot: Annotated[list[Path] | None, typer.Option(help="Snapshot artifact; repeat for a pool.")] = None,
    curriculum: CurriculumOption = None,
    out: OutOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let snapshots write seed prefixes with their behaviour log-probs."""
    from tseeds import seed as stage
    from tseeds.artifacts.store import require
    from tseeds.errors import UserError
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
            problems=problems,
            snapshot=snapshot,
            curriculum=curriculum,
            out=out,
        )
        run_stage(pipeline, step, as_json=as_json, run=where.root)
        return
    pipeline = explicit(config, sets, problems=problems, out=out)
    if not snapshot:
        raise UserError("name a run directory, or give --snapshot (one or more) too")
    assert problems is not None
    assert out is not None
    pool = {int(require(p, "a snapshot", "snapshot").facts["step"]): p for p in snapshot}
    inputs = stage.Inputs(problems, pool, iteration or max(pool) + 1, curriculum=curriculum)
    run_stage(pipeline, Step(stage, inputs, out, inputs.iteration), as_json=as_json)
