"""``tseeds evaluate``: pass@k, maj@k and the rest on benchmarks; mixed inference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tseeds_cli.options import ConfigOption, JsonOption, OutOption, PolicyOption, RunArgument, SetOption

if TYPE_CHECKING:
    from rich.console import Console

    from tseeds.artifacts.rundir import RunDir
    from tseeds.artifacts.store import Manifest
    from tseeds.config import Pipeline
    from tseeds.pipeline import Step


def evaluate(
    run: RunArgument = None,
    iteration: Annotated[
        int | None, typer.Option(help="Policy of this step of the run (0: the start); default: the newest.")
    ] = None,
    benchmark: Annotated[
        list[str] | None, typer.Option(help="Only this entry of evaluate.benchmarks; may be repeated.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Decode greedily, once per problem.")] = False,
    mixed: Annotated[
        bool,
        typer.Option("--mixed", help="Mixed inference: snapshots write the first tokens, the policy finishes."),
    ] = False,
    lengths: Annotated[str | None, typer.Option(help="With --mixed: seed lengths in tokens, such as 2,4,8.")] = None,
    snapshots: Annotated[
        str | None, typer.Option(help="With --mixed: snapshot steps, such as 0,10,20; default: all of the run.")
    ] = None,
    config: ConfigOption = None,
    policy: PolicyOption = None,
    out: OutOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a policy on the pipeline's benchmarks, without seeds: pass@k, maj@k, distinct solutions, intervals.

    Results are Parquet: one row per sample, and tables/metrics.parquet with every k and difficulty. They go to
    RUN/evaluations/STEP/BENCHMARK, or to OUT/BENCHMARK on explicit files (--config --policy --out).
    """
    import json

    from tseeds import evaluate as stage
    from tseeds.artifacts.rundir import RunDir
    from tseeds.errors import UserError
    from tseeds.pipeline import Step

    if (lengths or snapshots) and not mixed:
        raise UserError("--lengths and --snapshots belong to --mixed")
    pipeline, where, model, step = _source(run, iteration, config, policy, out, sets)
    if greedy:
        pipeline = pipeline.model_copy(
            update={"evaluate": pipeline.evaluate.model_copy(update={"temperature": 0.0, "top_p": 1.0})}
        )
    names = benchmark or [b.name for b in pipeline.evaluate.benchmarks]
    if not names:
        raise UserError("the pipeline names no evaluate.benchmarks; add [[evaluate.benchmarks]] with name and path")
    steps = []
    for name in names:
        stage.benchmark_config(pipeline, name)
        folder = f"{name}-greedy" if greedy else name
        if mixed:
            inputs: Any = stage.MixedInputs(
                model, step, name, _snapshots(where, snapshots, step), _lengths(lengths, pipeline)
            )
            place = where.root / "mixed" / f"{step:06d}" / folder if isinstance(where, RunDir) else where / folder
            steps.append(Step(_Mixed, inputs, place, step))  # type: ignore[arg-type]
        else:
            place = where.evaluation(step, folder) if isinstance(where, RunDir) else where / folder
            steps.append(Step(stage, stage.Inputs(model, step, name), place, step))
    for made, manifest in _execute(pipeline, steps, where.root if isinstance(where, RunDir) else None):
        if as_json:
            typer.echo(
                json.dumps(
                    {
                        "path": str(made.out),
                        "benchmark": made.inputs.benchmark,
                        "step": step,
                        **({"cells": manifest.facts["cells"]} if mixed else {"summary": manifest.facts["summary"]}),
                    }
                )
            )
        else:
            (_print_cells if mixed else _print_summary)(made, manifest)


class _Mixed:
    """Mixed inference in the shape of a stage module."""

    STAGE = "mixed"

    @staticmethod
    def identity(config: Pipeline, inputs: Any) -> Any:
        from tseeds.evaluate import mixed_identity

        return mixed_identity(config, inputs)

    @staticmethod
    def run(config: Pipeline, inputs: Any, out: Path, context: Any) -> Manifest:
        from tseeds.evaluate import run_mixed

        return run_mixed(config, inputs, out, context)


def _source(
    run: Path | None,
    iteration: int | None,
    config: Path | None,
    policy: Path | None,
    out: Path | None,
    sets: list[str] | None,
) -> tuple[Pipeline, RunDir | Path, Path, int]:
    """(configuration, run or output directory, policy, its step)."""
    from tseeds import config as configuration
    from tseeds import pipeline as chain
    from tseeds.artifacts.rundir import open_run
    from tseeds.errors import UserError
    from tseeds_cli.options import explicit, kept_policy, without_run

    if run is None:
        pipeline = explicit(config, sets, policy=policy, out=out)
        assert policy is not None
        assert out is not None
        return pipeline, out, policy, iteration or 0
    without_run(run, config=config, policy=policy, out=out)
    where = open_run(run)
    step = where.finished() if iteration is None else iteration
    if not 0 <= step <= where.finished():
        raise UserError(f"--iteration {step}: the run has policies of steps 0 to {where.finished()}")
    model = kept_policy(where, step)
    if model is None:
        raise UserError(
            f"{where.policy(step)}: retention removed the policy of step {step}; choose a snapshot's step or the newest"
        )
    pipeline = chain.config_at(configuration.load(where.pipeline, sets or ()), chain.read_record(where), step)
    return pipeline, where, model, step


def _lengths(text: str | None, config: Pipeline) -> tuple[int, ...]:
    from tseeds.evaluate import default_lengths

    return default_lengths(config) if text is None else tuple(sorted(set(_numbers(text, "--lengths"))))


def _snapshots(where: RunDir | Path, text: str | None, step: int) -> dict[int, Path]:
    """Snapshots of the run that are on disk and older than the policy."""
    from tseeds.artifacts.policy import is_policy
    from tseeds.artifacts.rundir import RunDir
    from tseeds.errors import UserError

    if not isinstance(where, RunDir):
        raise UserError("--mixed takes its snapshots from a run; name a run directory")
    there = sorted(int(p.name[5:]) for p in (where.root / "snapshots").glob("step-*") if p.name[5:].isdigit())
    usable = [s for s in there if s < step and is_policy(where.snapshot(s))]
    wanted = usable if text is None else _numbers(text, "--snapshots")
    missing = [s for s in wanted if s not in usable]
    if missing:
        raise UserError(f"--snapshots {missing[0]}: not there; the run has {', '.join(map(str, usable)) or 'none'}")
    if not wanted:
        raise UserError(f"mixed inference needs snapshots older than step {step}; the run has none")
    return {s: where.snapshot(s) for s in wanted}


def _numbers(text: str, option: str) -> list[int]:
    from tseeds.errors import UserError

    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"{option} {text}: write whole numbers separated by commas, such as 2,4,8") from None


def _execute(config: Pipeline, steps: list[Step], run: Path | None) -> Any:
    """Run the steps in one context (one engine) and yield each with its manifest."""
    from tseeds.context import Context
    from tseeds.pipeline import execute
    from tseeds_cli.console import plain_progress, quiet, stoppable

    quiet()
    with Context(config, progress=plain_progress(), run=run) as context, stoppable(context):
        for step in steps:
            yield step, execute(config, step, context)[0]


def _print_summary(step: Step, manifest: Manifest) -> None:
    """A table: metric, value, interval, and a column per difficulty."""
    import sys

    from rich.console import Console
    from rich.table import Table

    summary = manifest.facts["summary"]
    levels = summary.get("difficulty", {})
    table = Table(
        title=f"{step.inputs.benchmark}, policy of step {step.inputs.step}: {summary['problems']} problems × "
        f"{summary['samples']} samples",
        title_justify="left",
    )
    table.add_column("metric")
    for column in ("value", "95 % interval", *(f"{level} ({levels[level]['problems']})" for level in levels)):
        table.add_column(column, justify="right")
    for name, (lo, hi) in summary["ci"].items():
        table.add_row(
            _title(name),
            _number(summary[name]),
            f"{_number(lo)} – {_number(hi)}",
            *(_number(level[name]) for level in levels.values()),
        )
    console = Console(file=sys.stdout)
    console.print(table)
    _print_left_out(console, step, manifest)
    console.print(f"rows and tables: {step.out}", highlight=False, soft_wrap=True)


def _print_cells(step: Step, manifest: Manifest) -> None:
    """One row per snapshot, one column per seed length, pass@k for the largest k."""
    import sys

    from rich.console import Console
    from rich.table import Table

    cells = manifest.facts["cells"]
    k = cells[0]["samples"]
    console = Console(file=sys.stdout)
    lengths = sorted({c["seed_length"] for c in cells if c["seed_length"] > 0})
    alone = next(c for c in cells if c["seed_length"] == 0)
    for key in dict.fromkeys((f"pass@{k}", "pass@1")):
        table = Table(
            title=f"{key} on {step.inputs.benchmark}: snapshot writes L tokens, policy of step {step.inputs.step} finishes "
            f"(alone: {alone[key]:.3f})",
            title_justify="left",
        )
        table.add_column("snapshot")
        for length in lengths:
            table.add_column(f"L = {length}", justify="right")
        table.add_column("alone", justify="right")
        for snapshot in sorted({c["snapshot_step"] for c in cells if c["seed_length"]}, key=lambda s: (s is None, s)):
            mine = {c["seed_length"]: c for c in cells if c["snapshot_step"] == snapshot and c["seed_length"]}
            table.add_row(
                "all, equal parts" if snapshot is None else f"step {snapshot}",
                *(f"{mine[n][key]:.3f}" for n in [*lengths, -1]),
            )
        console.print(table)
    _print_left_out(console, step, manifest)
    console.print(f"rows: {step.out}", highlight=False, soft_wrap=True)


def _print_left_out(console: Console, step: Step, manifest: Manifest) -> None:
    """Which rows of the benchmark were not asked, for the score is not that of the whole set then."""
    found = manifest.facts.get("benchmark", {})
    if found.get("quarantined"):
        reasons = ", ".join(f"{count} {reason}" for reason, count in found["quarantined"].items())
        line = f"left out of {found['rows']} rows: {reasons} ({step.out / 'tables' / 'quarantine.parquet'})"
        console.print(line, highlight=False, soft_wrap=True)


def _title(name: str) -> str:
    units = {
        "length": "length (tokens)",
        "surprisal": "surprisal (nats per token)",
        "distinct": "distinct correct solutions",
        "extraction_failures": "extraction failures (share)",
        "truncated": "truncated (share)",
    }
    return units.get(name, name)


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
