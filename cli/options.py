"""Command-line options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tseeds.artifacts.rundir import RunDir
    from tseeds.config import Pipeline
    from tseeds.pipeline import Step

RunArgument = Annotated[Path | None, typer.Argument(help="Run directory. Leave out to work on explicit files.")]
Iteration = Annotated[int | None, typer.Option(help="Iteration of the run; default: the first unfinished.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Pipeline file, when no run is named.")]
PolicyOption = Annotated[Path | None, typer.Option(help="Model directory.")]
ProblemsOption = Annotated[Path | None, typer.Option(help="Problems artifact.")]
CurriculumOption = Annotated[Path | None, typer.Option(help="Pass rates, where the pipeline has a curriculum.")]
OutOption = Annotated[Path | None, typer.Option(help="Where the artifact is committed.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="section.key=value, over the pipeline file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]


def from_run(
    run: Path, stage: str, iteration: int | None, sets: list[str] | None, **files: object
) -> tuple[Pipeline, RunDir, Step]:
    """Configuration, run and the step of ``stage`` in an iteration of a run directory; see ``without_run`` for ``files``."""
    from tseeds import config as configuration
    from tseeds import pipeline
    from tseeds.artifacts.rundir import open_run
    from tseeds.errors import UserError
    from tseeds.history import History

    without_run(run, **files)
    where = open_run(run)
    number = iteration if iteration is not None else where.finished() + 1
    if not 0 <= number <= where.finished() + 1:
        raise UserError(
            f"--iteration {number}: the run has finished {where.finished()}, so 1 to {where.finished() + 1} can be made"
        )
    record = pipeline.read_record(where)
    history = History(configuration.load(where.pipeline, sets or ()), record["changes"])
    config = history.at(number)
    steps = [*pipeline.setup_steps(config, where)] if number == 0 or stage in ("problems", "curriculum") else []
    if number > 0:
        steps += pipeline.iteration_steps(history, where, number)
    for step in steps:
        if stage == step.module.STAGE:
            return config, where, step
    raise UserError(f"{run}: iteration {number} has no stage {stage} under its pipeline")


def without_run(run: Path, **files: object) -> None:
    """Check that no option for explicit files was given beside a run.

    Raises:
        UserError: naming the first that was.
    """
    from tseeds.errors import UserError

    for name, value in files.items():
        if value is not None:
            raise UserError(f"--{name} goes without a run directory: leave out either it or {run}")


def kept_policy(run: RunDir, step: int) -> Path | None:
    """The policy of ``step``, or its snapshot where retention removed the one in its iteration; None where both are gone."""
    from tseeds.artifacts.policy import is_policy

    return next((place for place in (run.policy(step), run.snapshot(step)) if is_policy(place)), None)


def explicit(config: Path | None, sets: list[str] | None, **paths: Path | None) -> Pipeline:
    """Configuration for a stage on explicit files; every path named must be given.

    Raises:
        UserError: naming the first missing option.
    """
    from tseeds import config as configuration
    from tseeds.errors import UserError

    missing = [f"--{name}" for name, path in {"config": config, **paths}.items() if path is None]
    if missing:
        raise UserError(f"name a run directory, or give {', '.join(missing)} too")
    assert config is not None
    return configuration.load(config, sets or ())
