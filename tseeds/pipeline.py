"""Chains the stages of a pipeline file, decides what is fresh, resumes what was interrupted.

problems -> snapshot 0 -> for each iteration: seed -> rollout -> score -> update (-> snapshot, evaluate). Whether a stage
has to run is decided by keys alone: a manifest's key against that of the configuration and inputs as they are now.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from tseeds import config as configuration
from tseeds import curriculum, evaluate, problems, retention, rollout, schedule, score, seed, snapshot, update
from tseeds.artifacts import disk, store
from tseeds.artifacts.lock import locked
from tseeds.artifacts.rundir import RunDir
from tseeds.config import Pipeline
from tseeds.context import Context
from tseeds.errors import Stale, UserError
from tseeds.history import VERSION, Change, History

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
        """Stage name, with its iteration beyond set-up."""
        return f"{self.module.STAGE} of iteration {self.iteration}" if self.iteration else str(self.module.STAGE)


class Snapshots(Mapping[int, Path]):
    """step -> directory of the snapshots in a pool; a path is made when it is asked for (pools grow to hundreds)."""

    def __init__(self, run: RunDir, steps: Sequence[int]) -> None:
        self._run, self._steps = run, {step: None for step in steps}

    def __getitem__(self, step: int) -> Path:
        if step not in self._steps:
            raise KeyError(step)
        return self._run.snapshot(step)

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


@dataclass(frozen=True)
class Report:
    """State of one step.

    reasons: why it is stale (or fresh but unchecked). seconds: what it took, so what a redo would cost. parts: those of an
    incomplete stage that are committed. follows: it is fresh itself, but redoing an earlier stale stage would redo it too.
    """

    step: Step
    state: State
    reasons: tuple[str, ...] = ()
    seconds: float = 0.0
    parts: int = 0
    follows: bool = False


def setup_steps(config: Pipeline, run: RunDir) -> Iterator[Step]:
    """problems, the snapshot of step 0, and its pass rates where a curriculum asks for them."""
    source = Path(config.policy.path)
    if not source.exists() and store.read_manifest(run.snapshot(0)) is not None:
        source = run.snapshot(0)  # the policy moved away; the run has its own copy
    yield Step(snapshot, snapshot.Inputs(source, 0), run.snapshot(0), 0)
    yield Step(problems, problems.Inputs(run.snapshot(0)), run.problems, 0)
    if config.curriculum.samples:
        yield Step(curriculum, curriculum.Inputs(run.snapshot(0), run.problems), run.curriculum, 0)
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


def iteration_steps(history: History, run: RunDir, iteration: int) -> Iterator[Step]:
    """The stages of one iteration in order, under the configuration of its time."""
    i, config = iteration, history.at(iteration)
    policy, state = run.policy(i - 1), run.state(i - 1)
    pool = history.pool(i, snapshot_bytes=retention.snapshot_bytes(run))
    snapshots = Snapshots(run, pool)
    rates = run.curriculum if config.curriculum.samples else None
    if rates is not None and not history.at(0).curriculum.samples:
        raise UserError(
            f"{run.root}: curriculum.samples was 0 when this run began, and pass rates are measured at its start; start "
            "another run"
        )
    seeded = len(schedule.seeded_samples(config, i)) > 0
    if seeded:
        past = (
            [(run.stage(k, "rollout"), run.stage(k, "score")) for k in range(1, i)]
            if seed.needs_history(config)
            else []
        )
        writers = {i - 1: policy} if config.seed.sampler == "current" else snapshots
        if config.seed.source == "live" or past:
            yield Step(seed, seed.Inputs(run.problems, writers, i, past, rates), run.stage(i, "seed"), i)
        else:
            seeded = False  # nothing to replay in the first iteration
    seeds = run.stage(i, "seed") if seeded else None
    yield Step(
        rollout, rollout.Inputs(policy, i - 1, run.problems, seeds, i, snapshots, rates), run.stage(i, "rollout"), i
    )
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
    if config.update.kl_sampler != "uniform":
        sampler = config.seed.model_copy(update={"sampler": config.update.kl_sampler, "snapshots_per_iteration": 1})
        (step,) = schedule.draw_snapshots(sampler, pool, run_seed=config.run.seed, iteration=iteration)
        return run.snapshot(step)
    draw = schedule.rng_seed(config.run.seed, "kl-reference", iteration)  # not the draw of the seeds
    return run.snapshot(pool[draw % len(pool)])


def inspect(history: History, step: Step) -> Report:
    """Fresh, stale (why), incomplete (parts done) or missing. Reads manifests only; never blocks."""
    manifest = store.read_manifest(step.out)
    if manifest is None:
        partial = step.out.with_name(step.out.name + ".partial")
        if not partial.is_dir():
            return Report(step, "missing")
        try:
            return Report(step, "incomplete", parts=len(store.read_lines(partial / store.PARTS)))
        except UserError:
            return Report(step, "incomplete")  # a damaged log: its parts are made again
    identity = step.module.identity(history.at(step.iteration), step.inputs)
    version = history.version(step.module.STAGE, step.iteration, identity.version)
    identity = replace(identity, version=version)
    if identity.key == manifest.identity.key:
        return Report(step, "fresh", seconds=manifest.wall_s)
    reasons = tuple(dict.fromkeys(_in_words(step, d) for d in identity.differences(manifest.identity)))
    return Report(step, "stale", reasons, manifest.wall_s)


_FILES = {
    "input data ": "problems.path",
    "input benchmark ": "evaluate.benchmarks",
    "problems.benchmark ": "evaluate.benchmarks",
    "input verifier ": "the verifier",
}
"""Beginning of a difference: what the pipeline calls the files that make it."""


def _in_words(step: Step, difference: str) -> str:
    """A difference of identities in the words of the pipeline, where the artifact has others for its inputs."""
    names = {**_FILES, "input policy ": "policy.path"} if step.name == "snapshot" else _FILES
    return next(
        (f"files of {name} changed" for begin, name in names.items() if difference.startswith(begin)), difference
    )


def execute(history: History | Pipeline, step: Step, context: Context) -> tuple[store.Manifest, bool]:
    """Run a step unless it is fresh; returns its manifest and whether it ran.

    Raises:
        Stale: something else is committed at its place.
    """
    history = history if isinstance(history, History) else History(history)
    report = inspect_committed(history, step)
    if report.state == "fresh":
        manifest = store.read_manifest(step.out)
        assert manifest is not None
        return manifest, False
    if report.state == "stale":
        raise Stale(
            f"{step.out}: made with other values ({'; '.join(report.reasons)}); move it away or choose another --out"
        )
    log.info("%s: running", step.name)
    config = history.at(step.iteration)
    context.use(config)
    return step.module.run(config, step.inputs, step.out, context), True


def read_record(run: RunDir) -> dict[str, Any]:
    """run.json: created, pipeline (the configuration in force), changes made in mid-run, parent (of a fork)."""
    mend = "restore it from a backup; it is what tseeds run wrote"
    try:
        record = disk.read_object(run.record, mend)
    except (FileNotFoundError, NotADirectoryError):
        return {"changes": []}
    if not isinstance(record.setdefault("changes", []), list) or not isinstance(record.get("pipeline", {}), dict):
        raise UserError(f"{run.record}: damaged; {mend}")
    return record


def write_record(run: RunDir, record: dict[str, Any], config: Pipeline) -> None:
    """Make ``config`` and the changes of ``record`` the run's. run.json decides; pipeline.toml, for reading, comes first."""
    store.write_file(run.pipeline, configuration.dumps(config))
    store.fault("run", "record")
    record["pipeline"] = config.model_dump(mode="json", exclude_none=True)
    store.write_file(run.record, json.dumps(record, indent=1))


def committed_config(run: RunDir, record: dict[str, Any]) -> Pipeline:
    """The configuration that the run has followed so far, whatever was written into pipeline.toml since."""
    if "pipeline" in record:
        return configuration.parse(record["pipeline"], str(run.record))
    return configuration.load(run.pipeline)


def open_history(run: RunDir) -> History:
    """The configurations that the iterations of an existing run had."""
    record = read_record(run)
    return History(committed_config(run, record), record["changes"])


def config_at(config: Pipeline, record: dict[str, Any], iteration: int) -> Pipeline:
    """The configuration that was in force in an iteration: later changes undone."""
    return History(config, record["changes"]).at(iteration)


def survey(history: History, run: RunDir, *, upto: int | None = None) -> Iterator[Report]:
    """State of every step up to iteration ``upto`` (default: the pipeline's), each under the configuration of its time."""
    last = history.config.run.iterations if upto is None else upto
    redo = False  # whether a stage that the following ones build on is stale
    for report in _reports(history, run, last):
        leaf = report.step.module is evaluate
        yield replace(report, follows=True) if redo and report.state == "fresh" else report
        redo = redo or (report.state == "stale" and not leaf)


def _reports(history: History, run: RunDir, last: int) -> Iterator[Report]:
    for step in setup_steps(history.at(0), run):
        yield inspect_committed(history, step)
    for i in range(1, last + 1):
        reports = [inspect_committed(history, step) for step in iteration_steps(history, run, i)]
        yield from reports
        if all(r.state == "missing" for r in reports):
            return  # nothing after the first untouched iteration exists


def inspect_committed(history: History, step: Step) -> Report:
    """inspect, where an input that is gone leaves a committed artifact as it is: what was made from it is here."""
    manifest = store.read_manifest(step.out)
    if manifest is None:
        return inspect(history, step)
    try:
        return inspect(history, step)
    except UserError as error:
        return Report(step, "fresh", (f"not compared with its input: {error}",), manifest.wall_s)


def unsettled(history: History, run: RunDir) -> int:
    """The first iteration of which a stage is not committed."""
    steps: dict[int, bool] = {}
    for report in survey(history, run, upto=run.finished() + 1):
        steps[report.step.iteration] = steps.get(report.step.iteration, True) and report.state in ("fresh", "stale")
    return next((i for i in sorted(steps) if i > 0 and not steps[i]), max(steps) + 1)


@dataclass(frozen=True)
class Plan:
    """What a configuration would do to a run as it stands; ``adopt`` makes it so.

    reports: every step as if the configuration had held from the start. changes: what would be recorded, each with the first
    iteration that it applies to. fixed: keys whose change no iteration can begin with, or what else cannot. history: the run's
    with the changes; old: the run's without.
    """

    reports: list[Report]
    changes: list[dict[str, Any]]
    fixed: list[str]
    history: History
    old: History

    @property
    def stale(self) -> bool:
        """Whether committed stages contradict the configuration, so that its changes must be accepted."""
        return any(r.state == "stale" for r in self.reports)


def plan(config: Pipeline, run: RunDir, record: Mapping[str, Any]) -> Plan:
    """What ``config`` would do to the run with this ``record``. Reads manifests only.

    A change applies from the first iteration of which nothing committed contradicts it; fewer iterations than are finished
    are no change.
    """
    old, known = open_history(run), record["changes"]
    if config.run.iterations < run.finished():
        config = _with(config, old.config, "run.iterations")
    before, after = configuration.flatten(old.config), configuration.flatten(config)
    changed: list[dict[str, Any]] = [
        {"key": k, "old": before.get(k), "new": after.get(k)}
        for k in sorted({*before, *after})
        if before.get(k) != after.get(k)
    ]
    shown = {f"files of {c['key']} changed": show(c) for c in changed}
    reports = [
        replace(r, reasons=tuple(shown.get(reason, reason) for reason in r.reasons))
        for r in survey(History(config, known), run)
    ]
    stale = any(r.state == "stale" for r in reports)
    if not stale and not (changed and run.iterations()):  # nothing depends on the old values yet
        return Plan(reports, [], [], History(config, known), old)
    versions, first = _version_changes(old, run), unsettled(old, run)
    renewed = [*known, *({"iteration": first, **v} for v in versions)]
    fixed = fixed_at_setup(History(config, renewed), run)
    if fixed:
        mine = [c["key"] for c in changed if _alone(old.config, config, c["key"], renewed, run, setup=True)]
        others = _reasons(fixed_at_setup(History(old.config, renewed), run))
        return Plan(reports, changed, [*mine, *others] or _reasons(fixed), History(config, known), old)
    for start in (first, first + 1):
        changes = [{"iteration": start, **c, "at": now()} for c in [*changed, *versions]]
        history = History(config, [*known, *changes])
        left = [r for r in survey(history, run) if r.state == "stale"]
        if not left:
            break
    return Plan(reports, changes, _reasons(left), history, old)


def _with(config: Pipeline, other: Pipeline, key: str) -> Pipeline:
    """``config`` with one value of ``other``, unchecked."""
    section, name = key.split(".")
    value = getattr(getattr(other, section), name)
    return config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})


def _alone(old: Pipeline, new: Pipeline, key: str, changes: Sequence[Change], run: RunDir, *, setup: bool) -> bool:
    """Whether the change of ``key`` by itself makes a committed stage stale; setup: one that every iteration builds on."""
    try:
        history = History(_with(old, new, key), changes)
        return bool(fixed_at_setup(history, run)) if setup else any(r.state == "stale" for r in survey(history, run))
    except UserError:  # no valid pipeline without the other changes
        return not setup


def show(change: Change) -> str:
    """A change for reading: its key, old -> new."""
    texts = [json.dumps(change[k], ensure_ascii=False) for k in ("old", "new")]
    return f"{change['key']} {' -> '.join(t if len(t) <= 60 else t[:57] + '...' for t in texts)}"


def outlook(found: Plan, run: RunDir) -> str:
    """What can be done about the stale stages of a plan: which changes --accept takes and which it does not."""
    if found.fixed:
        old, new, known = found.old.config, found.history.config, found.old.changes
        others = [c["key"] for c in found.changes if c["key"] not in found.fixed and not c["key"].startswith(VERSION)]
        free = [k for k in others if _alone(old, new, k, known, run, setup=False)]
        can, rest = (f"; can be: {', '.join(free)}", " (--accept then takes the rest)") if free else ("", "")
        again = "start another run (--run NEW)" if run.iterations() else f"nothing is trained yet, so delete {run.root}"
        return (
            f"Cannot be accepted, for committed stages build on it: {', '.join(found.fixed)}{can}. Ways on: set it "
            f"back{rest}; {again}"
        )
    lines = [f"--accept applies the change from iteration {found.changes[0]['iteration']} on and records it"]
    if any(reason.startswith("run.iterations ") for reason in _reasons(found.reports)):
        end = found.old.config.run.iterations
        lines.append(f"with --set seed.schedule_end={end} too the schedule of seed.share stays as it was")
    if run.finished():
        lines.append("tseeds fork RUN --at N --run NEW --set … redoes from an earlier one")
    return f"Ways on: set the value back; {'; '.join(lines)}"


def adopt(config: Pipeline, run: RunDir, *, accept: bool, listener: Listener | None = None) -> History:
    """Make ``config`` the run's configuration, or refuse it where it contradicts what is committed; see ``plan``.

    run.json records the changes; ``accept`` is needed where they would make committed stages stale if they applied from the
    start.

    Raises:
        Stale: committed stages were made with other values and accept is False, or a value cannot change; every value is
        named.
    """
    with disk.refusals(run.root):
        disk.make_directories(run.root)
    record = read_record(run)
    if "pipeline" not in record and not run.pipeline.is_file():
        write_record(run, {"created": now(), **record}, config)
        return History(config, record["changes"])
    found = plan(config, run, record)
    if found.fixed or (found.stale and not accept):
        raise Stale(f"{run.root}: {explain(found.reports, found.changes)}. {outlook(found, run)}")
    if "pipeline" not in record or found.changes or found.history.config != found.old.config:
        write_record(run, {**record, "changes": [*record["changes"], *found.changes]}, found.history.config)
    for change in found.changes:
        log.info("%s: changed from iteration %d on: %s", run.root, change["iteration"], show(change))
        if listener is not None:
            listener.changed(change)
    return found.history


def fixed_at_setup(history: History, run: RunDir) -> list[Report]:
    """Stages of set-up that contradict ``history``: every iteration builds on them, so no change can apply later on."""
    return [r for r in survey(history, run, upto=0) if r.state == "stale" and r.step.module is not evaluate]


def now() -> str:
    """UTC time for records."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _version_changes(history: History, run: RunDir) -> list[dict[str, Any]]:
    """Stages whose committed artifacts were made by another version of the stage than this tseeds has."""
    found: dict[str, dict[str, Any]] = {}
    for step in (r.step for r in survey(history, run) if r.state == "stale"):
        manifest = store.read_manifest(step.out)
        stage, now = step.module.STAGE, step.module.VERSION
        if manifest is not None and manifest.identity.version != now:
            found[stage] = {"key": VERSION + stage, "old": manifest.identity.version, "new": now}
    return list(found.values())


def _reasons(reports: Sequence[Report]) -> list[str]:
    """Why reports are stale, each reason once."""
    return list(dict.fromkeys(reason for r in reports if r.state == "stale" for reason in r.reasons))


def explain(found: Sequence[Report], changes: Sequence[Change] = ()) -> str:
    """One line: which values changed (``changes`` where stages only say that other inputs did), which stages that makes stale, and what redoing them would cost."""
    stale = [r for r in found if r.state == "stale"]
    follow = [r for r in found if r.follows]
    reasons = _reasons(stale)
    named = [r for r in reasons if not r.startswith("input ")] or [*map(show, changes), *reasons]
    stages = list(dict.fromkeys(r.step.module.STAGE for r in stale))
    first, cost = stale[0].step.iteration, sum(r.seconds for r in [*stale, *follow])
    also = f" and the {len(follow)} that follow from them" if follow else ""
    return (
        f"{'; '.join(named)}: makes {len(stale)} committed {'stage' if len(stale) == 1 else 'stages'} stale "
        f"({', '.join(stages)}; from {f'iteration {first}' if first else 'set-up'} on); redoing "
        f"{'it' if len(stale) == 1 else 'them'}{also} would take about {cost:.0f} s"
    )


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

    def changed(self, change: Change) -> None:
        """A changed value was recorded; before ``started``."""

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

    def changed(self, change: Change) -> None:
        for listener in self._listeners:
            listener.changed(change)

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
        history = adopt(config, run, accept=accept, listener=listener)
        context.run = run.root
        _sweep(run)
        done = run.finished()
        known = {line.get("iteration") for line in store.read_lines(run.metrics)}
        listener.started(run, config, done)
        for step in setup_steps(history.at(0), run):
            context.check_stop()
            manifest, ran = execute(history, step, context)
            listener.stage(step, ran, manifest)
        if done:
            retention.collect(history, run, done)
        for i in range(1, config.run.iterations + 1):
            for step in iteration_steps(history, run, i):
                context.check_stop()
                manifest, ran = execute(history, step, context)
                listener.stage(step, ran, manifest)
            if i > done:
                retention.collect(history, run, i, newest=True)
            if i not in known:  # only now: an evaluation that was interrupted belongs into the line
                line = metrics_line(run, i)
                store.fault("run", "metrics")
                store.append_line(run.metrics, line)
                listener.iteration(i, line)
    return run


def _sweep(run: RunDir) -> None:
    """Remove what killed processes left behind."""
    places = [run.root, run.root / "snapshots", *(run.stage(i, "x").parent for i in run.iterations())]
    for folder in [*places, *sorted((run.root / "evaluations").glob("*"))]:
        if folder.is_dir():
            store.sweep(folder)


def attempt_log(run: RunDir) -> Path:
    """Path of the next log file of a run: logs/attempt-0001.log and so on."""
    folder = run.root / "logs"
    with disk.refusals(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1_000_000):
            path = folder / f"attempt-{number:04d}.log"
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
                return path
            except FileExistsError:
                continue
    raise AssertionError("a million attempts")
