"""``tseeds curriculum``: the base policy's pass rate on every problem."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tseeds_cli.options import ConfigOption, JsonOption, OutOption, PolicyOption, ProblemsOption, RunArgument, SetOption

if TYPE_CHECKING:
    from tseeds.config import CurriculumConfig


def curriculum(
    run: RunArgument = None,
    config: ConfigOption = None,
    policy: PolicyOption = None,
    problems: ProblemsOption = None,
    out: OutOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the base policy's pass rate on every problem, by which the curriculum section filters or weights them."""
    from tseeds import curriculum as stage
    from tseeds.pipeline import Step
    from tseeds_cli.console import run_stage
    from tseeds_cli.options import explicit, from_run

    if run is not None:
        pipeline, where, step = from_run(
            run, stage.STAGE, 0, sets, config=config, policy=policy, problems=problems, out=out
        )
        run_stage(pipeline, step, as_json=as_json, run=where.root)
        target: Path = step.out
    else:
        pipeline = explicit(config, sets, policy=policy, problems=problems, out=out)
        assert policy is not None
        assert problems is not None
        assert out is not None
        run_stage(pipeline, Step(stage, stage.Inputs(policy, problems), out, 0), as_json=as_json)
        target = out
    if not as_json:
        typer.echo(summary(target, pipeline.curriculum))


def summary(artifact: Path, config: CurriculumConfig) -> str:
    """How many problems have which pass rate, and how many the pipeline's filter keeps."""
    from tseeds.artifacts.store import read_table, require
    from tseeds.selection import total

    table = read_table(require(artifact, "pass rates"))
    rates = table["pass_rate"].to_pylist()
    shares = {
        "0": sum(r <= 0 for r in rates),
        "up to 1/4": sum(0 < r <= 0.25 for r in rates),
        "up to 3/4": sum(0.25 < r <= 0.75 for r in rates),
        "below 1": sum(0.75 < r < 1 for r in rates),
        "1": sum(r >= 1 for r in rates),
    }
    measured = table["rewards"].to_pylist()
    kept = sum(config.lo <= total(r) / len(r) <= config.hi for r in measured)
    return (
        f"mean pass rate {sum(rates) / max(1, len(rates)):.3f}; problems by pass rate: "
        + ", ".join(f"{count} {name}" for name, count in shares.items())
        + f"; [{config.lo:g}, {config.hi:g}] keeps {kept} of {len(rates)}"
    )
