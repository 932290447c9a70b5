"""Chains the stages of a pipeline file, decides what is fresh, resumes what was interrupted.

problems -> snapshot 0 -> for each iteration: seed -> rollout -> score -> update (-> snapshot, evaluate). Whether a stage
has to run is decided by keys alone: a manifest's key against that of the configuration and inputs as they are now.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from tseeds import config as configuration
from tseeds import evaluate, problems, retention, rollout, schedule, score, seed, snapshot, update
from tseeds.artifacts import store
from tseeds.artifacts.lock import locked
from tseeds.artifacts.rundir import RunDir
from tseeds.config import Pipeline
from tseeds.context import Context
from tseeds.errors import Stale, UserError

log = logging.getLogger(__name__)

State = Literal["fresh", "stale", "incomplete", "missing"]


@dataclass(frozen=True)
class Step:
    """One stage to run: its module (identity and run), inputs, output, and the iteration it belongs to (0: set-up)."""

    module: ModuleType
    inputs: Any
    out: Path
    iteration: int

    @property
    def name(self) -> str:
        """Stage name, with its iteration or policy step."""
        return f"{self.module.STAGE} {self.out.parent.name if self.iteration else self.out.name}"


@dataclass(frozen=True)
class Report:
    """State of one step: why it is stale, what a redo would cost (seconds, from the committed manifest), parts done."""

    step: Step
    state: State
    reasons: tuple[str, ...] = ()
    seconds: float = 0.0
    parts: int = 0


def setup_steps(config: Pipeline, run: RunDir) -> Iterator[Step]:
    """problems and the snapshot of step 0."""
    source = Path(config.policy.path)
    if not source.exists() and store.read_manifest(run.snapshot(0)) is not None:
        source = run.snapshot(0)  # the policy moved away; the run has its own copy
    yield Step(snapshot, snapshot.Inputs(source, 0), run.snapshot(0), 0)
    yield Step(problems, problems.Inputs(run.snapshot(0)), run.problems, 0)
    if config.evaluate.every:
        yield from evaluation_steps(config, run, 0)


def evaluation_steps(config: Pipeline, run: RunDir, step: int) -> Iterator[Step]:
    """One evaluation per benchmark of the policy of ``step``."""
    for benchmark in config.evaluate.benchmarks:
        yield Step(
            evaluate,
            evaluate.Inputs(run.policy(step), step, benchmark.name),
            run.evaluation(step, benchmark.name),
            step,
        )


def iteration_steps(config: Pipeline, run: RunDir, iteration: int) -> Iterator[Step]:
    """The stages of one iteration in order."""
    i = iteration
    policy, state = run.policy(i - 1), run.state(i - 1)
    pool = schedule.pool_steps(config.snapshot, i - 1, snapshot_bytes=retention.snapshot_bytes(run))
    snapshots = {s: run.snapshot(s) for s in pool}
    seeded = len(schedule.seeded_samples(config, i)) > 0
    if seeded:
        history = (
            [(run.stage(k, "rollout"), run.stage(k, "score")) for k in range(1, i)]
            if seed.needs_history(config)
            else []
        )
        writers = {i - 1: policy} if config.seed.sampler == "current" else snapshots
        if config.seed.source == "live" or history:
            yield Step(seed, seed.Inputs(run.problems, writers, i, history), run.stage(i, "seed"), i)
        else:
            seeded = False  # nothing to replay in the first iteration
    seeds = run.stage(i, "seed") if seeded else None
    yield Step(rollout, rollout.Inputs(policy, i - 1, run.problems, seeds, i, snapshots), run.stage(i, "rollout"), i)
    yield Step(score, score.Inputs(run.stage(i, "rollout"), run.problems), run.stage(i, "score"), i)
    yield Step(
        update,
        update.Inputs(
            policy, state, run.stage(i, "rollout"), run.stage(i, "score"), i, _reference(config, run, i, pool)
        ),
        run.stage(i, "update"),
        i,
    )
    if i % config.snapshot.every == 0:
        yield Step(snapshot, snapshot.Inputs(run.policy(i), i, link=True), run.snapshot(i), i)
    if config.evaluate.every and (i % config.evaluate.every == 0 or i == config.run.iterations):
        yield from evaluation_steps(config, run, i)


def _reference(config: Pipeline, run: RunDir, iteration: int, pool: list[int]) -> Path | None:
    """Policy of the KL term: step 0, or one snapshot of the pool drawn for the iteration."""
    if not config.update.kl_coef:
        return None
    if config.update.kl_reference == "base":
        return run.snapshot(0)
    draw = schedule.rng_seed(config.run.seed, "kl-reference", iteration)
    return run.snapshot(pool[draw % len(pool)])


def inspect(config: Pipeline, step: Step) -> Report:
    """Fresh, stale (why), incomplete (parts done) or missing. Reads manifests only; never blocks."""
    manifest = store.read_manifest(step.out)
    if manifest is None:
        partial = step.out.with_name(step.out.name + ".partial")
        parts = len(store.read_lines(partial / "parts.jsonl"))
        return Report(step, "incomplete" if partial.is_dir() else "missing", parts=parts)
    identity = step.module.identity(config, step.inputs)
    if identity.key == manifest.identity.key:
        return Report(step, "fresh", seconds=manifest.wall_s)
    return Report(step, "stale", tuple(identity.differences(manifest.identity)), manifest.wall_s)


def execute(config: Pipeline, step: Step, context: Context) -> tuple[store.Manifest, bool]:
    """Run a step unless it is fresh; returns its manifest and whether it ran.

    Raises:
        Stale: something else is committed at its place.
    """
    report = inspect(config, step)
    if report.state == "fresh":
        manifest = store.read_manifest(step.out)
        assert manifest is not None
        return manifest, False
    if report.state == "stale":
        raise Stale(
            f"{step.out}: made with other values ({'; '.join(report.reasons)}); move it away or choose another --out"
        )
    log.info("%s: running", step.name)
    return step.module.run(config, step.inputs, step.out, context), True


def read_record(run: RunDir) -> dict[str, Any]:
    """run.json: created, lineage (parent, at), changes accepted in mid-run."""
    try:
        return json.loads(run.record.read_text())
    except FileNotFoundError:
        return {"changes": []}
    except ValueError:
        raise UserError(f"{run.record}: damaged; it is JSON written by tseeds run") from None


def config_at(config: Pipeline, record: dict[str, Any], iteration: int) -> Pipeline:
    """The configuration that was in force in an iteration: later accepted changes undone."""
    undo = [c for c in record["changes"] if c["iteration"] > iteration]
    if not undo:
        return config
    data = config.model_dump(mode="json", exclude_none=True)
    for change in reversed(undo):
        section, key = change["key"].split(".", 1)
        if change["old"] is None:
            data[section].pop(key, None)
        else:
            data[section][key] = change["old"]
    return configuration.parse(data, "run.json")


def survey(config: Pipeline, run: RunDir, *, upto: int | None = None) -> Iterator[Report]:
    """State of every step up to iteration ``upto`` (default: the pipeline's), each under the configuration of its time."""
    record = read_record(run)
    last = config.run.iterations if upto is None else upto
    first = config_at(config, record, 0)
    for step in setup_steps(first, run):
        yield _inspect_or_missing(first, step)
    for i in range(1, last + 1):
        now = config_at(config, record, i)
        reports = [_inspect_or_missing(now, step) for step in iteration_steps(now, run, i)]
        yield from reports
        if all(r.state == "missing" for r in reports):
            return  # nothing after the first untouched iteration exists


def _inspect_or_missing(config: Pipeline, step: Step) -> Report:
    """inspect, where an input that does not exist yet only means that the step has not run."""
    if store.read_manifest(step.out) is None:
        return inspect(config, step)
    try:
        return inspect(config, step)
    except UserError as error:
        return Report(step, "stale", (f"an input is gone: {error}",))


def begun(run: RunDir) -> int:
    """The newest iteration in which any stage was committed or begun."""
    started = [
        i
        for i in run.iterations()
        if any(p.is_dir() and not p.name.startswith(".") for p in run.stage(i, "x").parent.iterdir())
    ]
    return max(started, default=0)


def adopt(config: Pipeline, run: RunDir, *, accept: bool) -> Pipeline:
    """Make ``config`` the run's configuration, or refuse it where it contradicts what is committed.

    With ``accept`` the changed values apply from the next iteration that has not begun; they are recorded in run.json.

    Raises:
        Stale: committed stages were made with other values and accept is False; every value is named.
    """
    run.root.mkdir(parents=True, exist_ok=True)
    record = read_record(run)
    if not run.pipeline.is_file():
        record |= {"created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "changes": record["changes"]}
        store.write_file(run.record, json.dumps(record, indent=1))
        store.write_file(run.pipeline, configuration.dumps(config))
        return config
    old = configuration.load(run.pipeline)
    stale = [r for r in survey(config, run) if r.state == "stale"]
    if stale:
        named = sorted({reason for r in stale for reason in r.reasons if not reason.startswith("input ")})
        inputs = sorted({reason for r in stale for reason in r.reasons if reason.startswith("input ")})
        cost = sum(r.seconds for r in stale)
        what = "; ".join(named or inputs)
        setup = [r for r in stale if r.step.iteration == 0]
        if setup:
            raise Stale(
                f"{run.root}: {what}: changes {setup[0].step.module.STAGE}, which every iteration builds on; "
                "start another run (--run NEW)"
            )
        if not accept:
            raise Stale(
                f"{run.root}: {what}: {len(stale)} committed stages from iteration {stale[0].step.iteration} on were made "
                f"with the old value (redoing them would take about {cost:.0f} s). --accept applies the change from "
                f"iteration {begun(run) + 1} on; tseeds fork redoes from an earlier one; or set the value back"
            )
        before, after = configuration.flatten(old), configuration.flatten(config)
        start = begun(run) + 1
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key):
                record["changes"].append(
                    {"iteration": start, "key": key, "old": before.get(key), "new": after.get(key), "at": time.time()}
                )
        store.write_file(run.record, json.dumps(record, indent=1))
        left = [r for r in survey(config, run) if r.state == "stale"]
        assert not left, f"still stale after acceptance: {left[0].step.name}: {left[0].reasons}"
    if configuration.flatten(old) != configuration.flatten(config):
        store.write_file(run.pipeline, configuration.dumps(config))
    return config


def metrics_line(run: RunDir, iteration: int) -> dict[str, Any]:
    """One line of metrics.jsonl, from the committed manifests of an iteration."""
    manifest = store.require(run.stage(iteration, "update"), "update")
    seconds = {
        stage: m.wall_s
        for stage in ("seed", "rollout", "score", "update")
        if (m := store.read_manifest(run.stage(iteration, stage))) is not None
    }
    line = {"iteration": iteration, **manifest.facts["summary"], "seconds": seconds, "policy": manifest.facts["policy"]}
    for folder in sorted((run.root / "evaluations" / f"{iteration:06d}").glob("*")):
        found = store.read_manifest(folder)
        if found is not None:
            line.setdefault("evaluation", {})[folder.name] = found.facts.get("summary")
    return line


def sync_metrics(run: RunDir) -> list[dict[str, Any]]:
    """Append the finished iterations that metrics.jsonl lacks; returns the new lines."""
    have = {line["iteration"] for line in store.read_lines(run.metrics)}
    new = [metrics_line(run, i) for i in range(1, run.finished() + 1) if i not in have]
    for line in new:
        store.append_line(run.metrics, line)
    return new


class Listener:
    """Hears what the loop does; this one does nothing. The command line shows it, loggers record it."""

    def started(self, run: RunDir, config: Pipeline, finished: int) -> None:
        """The run is locked and its configuration adopted; ``finished`` iterations exist already."""

    def stage(self, step: Step, ran: bool, manifest: store.Manifest) -> None:
        """A stage is committed (ran) or was fresh."""

    def iteration(self, number: int, metrics: dict[str, Any]) -> None:
        """An iteration is finished."""


class Listeners(Listener):
    """Several listeners as one."""

    def __init__(self, listeners: list[Listener]) -> None:
        self._listeners = listeners

    def started(self, run: RunDir, config: Pipeline, finished: int) -> None:
        for listener in self._listeners:
            listener.started(run, config, finished)

    def stage(self, step: Step, ran: bool, manifest: store.Manifest) -> None:
        for listener in self._listeners:
            listener.stage(step, ran, manifest)

    def iteration(self, number: int, metrics: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener.iteration(number, metrics)


def run_pipeline(
    config: Pipeline,
    root: Path,
    context: Context,
    *,
    accept: bool = False,
    listener: Listener | None = None,
) -> RunDir:
    """Train until the pipeline's number of iterations is finished; whatever is committed already is kept.

    Raises:
        Locked: another process trains in ``root``. Stale: see adopt. Interrupted: asked to stop; run again to go on.
    """
    run, listener = RunDir(Path(root)), listener or Listener()
    with locked(run.lock, f"run {root}"):
        config = adopt(config, run, accept=accept)
        context.run = run.root
        sync_metrics(run)
        listener.started(run, config, run.finished())
        record = read_record(run)
        first = config_at(config, record, 0)
        for step in setup_steps(first, run):
            context.check_stop()
            manifest, ran = execute(first, step, context)
            listener.stage(step, ran, manifest)
        for i in range(1, config.run.iterations + 1):
            now = config_at(config, record, i)
            for step in iteration_steps(now, run, i):
                context.check_stop()
                manifest, ran = execute(now, step, context)
                listener.stage(step, ran, manifest)
            retention.collect(now, run)
            for line in sync_metrics(run):
                listener.iteration(line["iteration"], line)
    return run


def attempt_log(run: RunDir) -> Path:
    """Path of the next log file of a run: logs/attempt-0001.log and so on."""
    folder = run.root / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1_000_000):
        path = folder / f"attempt-{number:04d}.log"
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            return path
        except FileExistsError:
            continue
    raise AssertionError("a million attempts")
