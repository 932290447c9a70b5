"""Arms × seeds: several pipelines, each trained from several run seeds, with paired tests between them.

Every run is an ordinary run directory, ``<out>/<arm>/seed-003``, so that whatever stopped it, it goes on where it was. What
a finished run showed is one line of a records file: evaluations, curves, cost. A recorded run is not run again, even
where its directory is gone: what counts is the record's configuration, run seed included, with the digests of policy
and data in place of their paths. Runs go seed by seed through all arms, so that every prefix of the work is a balanced
comparison.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import PydanticUndefined

from tseeds import config as configuration
from tseeds import sources
from tseeds.artifacts import store
from tseeds.artifacts.lock import locked
from tseeds.artifacts.rundir import RunDir, digest_of
from tseeds.config import Pipeline
from tseeds.errors import Interrupted, Locked, StageFailed, UserError
from tseeds.score import grading

log = logging.getLogger(__name__)

FORMAT = 1
CURVES = (
    "reward_unseeded", "reward_seeded", "entropy", "entropy_mixture", "effective_entropy", "retained_entropy",
    "clip_fraction_all", "clip_fraction_seed", "clip_fraction_continuation", "clipped_mass_all", "clipped_mass_seed",
    "clipped_mass_continuation", "ess_share_seed", "probe_cosine", "probe_norm_ratio", "zero_variance_share",
    "seeded_share", "seed_length", "response_length", "truncated_share", "grad_norm", "grad_norm_max", "kl_k3_seed",
)  # fmt: skip
"""Metrics of an iteration that a record keeps; names as in docs/loss.md, see ``training.results``."""
_NEUTRAL = (
    "log.", "score.workers", "score.memory_limit_mb", "score.time_limit", "update.processes", "update.threads",
    "update.tokens_per_microbatch",
)  # fmt: skip
"""Values that a comparison may differ in: where and how fast a run ran, limits that only a grader in trouble feels."""
_PATHS = ("policy.path", "problems.path", "evaluate.benchmarks", "problems.benchmarks")
_PRELOADED = ["torch", "transformers.models.auto", "transformers.modeling_utils", "tseeds.compare", "tseeds.pipeline"]
_PRELOADED += ["tseeds.training.trainer", "tseeds.engines.transformers"]


@dataclass(frozen=True)
class Job:
    """One run of the comparison."""

    arm: str
    seed: int
    config: Pipeline

    @cached_property
    def values(self) -> dict[str, Any]:
        """{"section.key": value} of all that can matter to the result; digests of policy and data stand for their paths."""
        kept = {k: v for k, v in configuration.flatten(self.config).items() if _matters(k)}
        kept["policy.digest"] = digest_of(Path(self.config.policy.path))
        kept["problems.digest"] = _data_digest(self.config.problems.path)
        for guard in self.config.problems.benchmarks:
            kept[f"problems.benchmark {guard.name}"] = _data_digest(guard.path)
        for task in {self.config.problems.task, *(b.task for b in self.config.evaluate.benchmarks if b.task)}:
            for what, verifier in grading(self.config, task)[1].items():
                kept[f"{what} {task}"] = verifier
        for benchmark in self.config.evaluate.benchmarks:
            dump = benchmark.model_dump(mode="json", exclude={"path"})
            kept[f"evaluate.benchmark {benchmark.name}"] = dump | {"digest": _data_digest(benchmark.path)}
        return dict(_flat(kept))

    @property
    def key(self) -> str:
        """Short digest of ``values``."""
        return digest(self.values)

    @property
    def name(self) -> str:
        """For lines about the run: "seeds, seed 3"."""
        return f"{self.arm}, seed {self.seed}"

    def root(self, out: Path) -> Path:
        """The run directory."""
        return out / self.arm / f"seed-{self.seed:03d}"


def _matters(key: str) -> bool:
    engine = key.startswith("engine.") and key != "engine.backend"
    return not engine and key not in _PATHS and not key.startswith(_NEUTRAL)


def digest(values: Mapping[str, Any]) -> str:
    """First 16 hex digits of the sha256 of a flat configuration."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _data_digest(path: str | list[str]) -> str:
    return digest(sources.digests(path))


def jobs(pipelines: Sequence[Path], seeds: Iterable[int], sets: Sequence[str] = ()) -> list[Job]:
    """Seed by seed, all arms; an arm is called as its file is.

    Raises:
        UserError: a pipeline is unusable, or two of them have one name or are the same.
    """
    arms = {path.stem: path for path in pipelines}
    if len(arms) < len(pipelines):
        twice = next(p.stem for k, p in enumerate(pipelines) if p.stem in {q.stem for q in pipelines[:k]})
        raise UserError(f"two pipelines are called {twice}; an arm takes its name from its file")
    found = [
        Job(arm, seed, configuration.load(arms[arm], [*sets, f"run.seed={seed}"])) for seed, arm in product(seeds, arms)
    ]
    same: dict[str, str] = {}
    for job in found[: len(arms)]:
        if job.key in same:
            raise UserError(f"{arms[job.arm]}: the same pipeline as {arms[same[job.key]]}; leave one out")
        same[job.key] = job.arm
    return found


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, oldest first.

    Raises:
        UserError: damaged, or written by a newer tseeds.
    """
    records = store.read_lines(path)
    for number, record in enumerate(records, 1):
        if record.get("format") != FORMAT or not {"arm", "seed", "values", "curves", "evaluations"} <= record.keys():
            raise UserError(f"{path}: line {number} is no record of format {FORMAT}; move the file away")
    return records


def recorded(job: Job, records: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The record of a job, if there is one: same arm, same seed, same essence."""
    now = essence(job.values)
    for record in records:
        if record["seed"] == job.seed and record["arm"] == job.arm and essence(record["values"]) == now:
            return record
    return None


def essence(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that matter and are not the default.

    So a new option does not make old results stale, for its default is what they did; a changed default does.
    """
    return {k: v for k, v in values.items() if _matters(k) and v != _default(k)}


@cache
def _default(key: str) -> Any:
    """Default of "section.key", None where it has none."""
    model: Any = Pipeline
    default: Any = None
    for part in key.split("."):
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return None
        model, default = field.annotation, field.get_default(call_default_factory=True)
    return TypeAdapter(Any).dump_python(None if default is PydanticUndefined else default, mode="json")


_PATIENCE = 60  # seconds


class Listener:
    """Hears what the comparison does; this one does nothing."""

    def plan(self, done: Sequence[Job], waiting: Sequence[Job]) -> None:
        """Before anything runs."""

    def started(self, job: Job, root: Path) -> None:
        """A run begins or goes on."""

    def finished(self, job: Job, record: Mapping[str, Any]) -> None:
        """A run is recorded."""

    def failed(self, job: Job, reason: str) -> None:
        """A run ended without a result; the others go on."""


def run(
    todo: Sequence[Job],
    out: Path,
    *,
    records: Path,
    workers: int = 1,
    listener: Listener | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Mapping[str, Any]]:
    """Run what has no record yet, ``workers`` runs at once, each in a process of its own; returns all jobs' records.

    records: JSON lines, appended as runs finish. stop: asked about once a second; then running processes finish their
    current part and stop.

    Raises:
        Locked: another comparison writes to ``out``. StageFailed: some runs failed, after all others were run.
        Interrupted: ``stop`` said so.
    """
    listener = listener or Listener()
    out.mkdir(parents=True, exist_ok=True)
    records.parent.mkdir(parents=True, exist_ok=True)
    with locked(out / "compare.lock", f"comparison {out}"):
        known = read_records(records)
        waiting = [job for job in todo if recorded(job, known) is None]
        listener.plan([job for job in todo if job not in waiting], waiting)
        failures = _run_all(waiting, out, records, workers, listener, stop)
    if failures:
        first = failures[0]
        raise StageFailed(f"{len(failures)} of {len(waiting)} runs failed; the first: {first[0].name}: {first[1]}")
    known = read_records(records)
    found = [record for job in todo if (record := recorded(job, known)) is not None]
    if len(found) < len(todo):
        raise Interrupted("stopped at your request; everything finished is committed, run again to go on")
    return found


def _run_all(
    waiting: Sequence[Job], out: Path, records: Path, workers: int, listener: Listener, stop: Callable[[], bool]
) -> list[tuple[Job, str]]:
    from multiprocessing import connection, get_context

    # A fork server imports the heavy libraries once; each run is still a fresh process.
    processes = get_context("forkserver")
    processes.set_forkserver_preload(_PRELOADED)
    queue, failures = list(waiting), []
    running: dict[Any, tuple[Any, Job]] = {}
    try:
        while queue or running:
            while queue and len(running) < workers and not stop():
                job = queue.pop(0)
                receiver, sender = processes.Pipe(duplex=False)
                process = processes.Process(target=_work, args=(job, out, sender), name=job.name)
                process.start()
                sender.close()
                running[receiver] = (process, job)
                listener.started(job, job.root(out))
            if stop():
                queue.clear()
                for process, _ in running.values():
                    process.terminate()  # SIGTERM: finish the part, then stop
            ready: Any
            for ready in connection.wait(list(running), timeout=1.0):
                process, job = running.pop(ready)
                try:
                    state, result = ready.recv()
                except EOFError:
                    state, result = "stopped" if stop() else "failed", "its process died without a word (memory?)"
                process.join()
                if state == "done":
                    store.append_line(records, result)
                    listener.finished(job, result)
                elif state == "failed":
                    log.error("%s: %s", job.name, result)
                    failures.append((job, result))
                    listener.failed(job, result)
    finally:
        for process, _ in running.values():
            process.kill()
    return failures


def _work(job: Job, out: Path, sender: Any) -> None:
    """One run, in its own process; sends ("done", record), ("failed", reason) or ("stopped", None)."""
    from multiprocessing import parent_process

    from tseeds import pipeline as chain
    from tseeds.context import Context

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    root = job.root(out)
    where = RunDir(root)
    with open(chain.attempt_log(where), "ab") as log_file:  # whatever libraries print goes there too
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
    )
    started, before = time.monotonic(), where.finished()
    try:
        share_setup(job.config, where, sorted(out.glob(f"*/{root.name}")) + sorted(out.glob("*/seed-*")))
        with Context(job.config, run=root) as context:

            def ask(*_: object) -> None:
                context.stop_requested = True

            def follow() -> None:
                parent_process().join()  # type: ignore[union-attr]
                ask()

            signal.signal(signal.SIGTERM, ask)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which asks
            threading.Thread(target=follow, daemon=True).start()
            for patience in reversed(range(_PATIENCE)):
                try:
                    chain.run_pipeline(job.config, root, context)
                    break
                except Locked:  # the orphan of a killed comparison is finishing its part
                    if not patience:
                        raise
                    context.check_stop()
                    time.sleep(1)
        spent = None if before else round(time.monotonic() - started, 1)
        sender.send(("done", record(job, where, wall_s=spent, cpu_s=None if before else round(_cpu(), 1))))
    except Interrupted:
        sender.send(("stopped", None))
    except UserError as error:
        sender.send(("failed", str(error)))
    except BaseException as error:
        log.exception("a bug, or a machine in trouble")
        sender.send(("failed", f"{type(error).__name__}: {error} (traceback in {where.root / 'logs'})"))


def _cpu() -> float:
    """CPU seconds of this process and of its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def share_setup(config: Pipeline, run: RunDir, others: Sequence[Path]) -> list[str]:
    """Hard link problems, first snapshot and first evaluation from runs that have them with equal keys; returns names."""
    from tseeds import pipeline as chain

    shared = []
    for step in chain.setup_steps(config, run):
        if store.read_manifest(step.out) is not None:
            continue
        key = step.module.identity(config, step.inputs).key
        for other in others:
            source = other / step.out.relative_to(run.root)
            manifest = store.read_manifest(source)
            if manifest is not None and manifest.identity.key == key:
                store.link_artifact(manifest, step.out)
                shared.append(step.name)
                break
        else:
            break  # what follows needs this one
    return shared


def record(job: Job, run: RunDir, *, wall_s: float | None = None, cpu_s: float | None = None) -> dict[str, Any]:
    """What a finished run showed. Curves are lists over iterations, null where an iteration has no value.

    wall_s, cpu_s: of the whole run if it was one attempt. tokens: trained on, and sampled by the engine (seeds included).
    """
    lines = store.read_lines(run.metrics)
    if len(lines) != job.config.run.iterations:
        raise StageFailed(f"{run.metrics}: {len(lines)} of {job.config.run.iterations} iterations")
    curves = {name: [_short(line.get(name)) for line in lines] for name in CURVES}
    sampled = 0
    for i in range(1, len(lines) + 1):
        found = (store.read_manifest(run.stage(i, stage)) for stage in ("seed", "rollout"))
        sampled += sum(int(m.facts.get("sampled_tokens", 0)) for m in found if m is not None)
    evaluations: dict[str, dict[str, Any]] = {}
    order = {
        b.name: k for k, b in enumerate(job.config.evaluate.benchmarks)
    }  # ``final`` takes the first one configured
    for folder in sorted(
        (run.root / "evaluations").glob("*/*"), key=lambda f: (f.parent.name, order.get(f.name, len(order)), f.name)
    ):
        manifest = store.read_manifest(folder)
        if manifest is not None:
            summary = manifest.facts["summary"]
            kept = {k: _short(v) for k, v in summary.items() if isinstance(v, (int, float))}
            evaluations.setdefault(str(int(folder.parent.name)), {})[folder.name] = kept | {"correct": correct(folder)}
    return {
        "format": FORMAT,
        "key": job.key,
        "arm": job.arm,
        "seed": job.seed,
        "iterations": len(lines),
        "evaluations": evaluations,
        "curves": {k: v for k, v in curves.items() if any(x is not None for x in v)},
        "tokens": {"trained": int(sum(line["tokens"] for line in lines)), "sampled": sampled},
        "seconds": {s: round(sum(line["seconds"].get(s, 0) for line in lines), 1) for s in _STAGES},
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "machine": machine(),
        "versions": dict(store.versions()),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "values": job.values,
    }


_STAGES = ("seed", "rollout", "score", "update")


def correct(folder: Path) -> list[int]:
    """Correct samples of every problem of an evaluation, in the order of problem ids (greedy decodes left out)."""
    import polars as pl

    rows = pl.scan_parquet(sorted(folder.glob("part-*.parquet"))).filter(pl.col("sample") >= 0)
    right = rows.group_by("problem_id").agg((pl.col("verdict") == "correct").sum().alias("n")).sort("problem_id")
    return right.collect()["n"].to_list()


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def machine() -> str:
    """Processor and number of cores, for people."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{model}, {os.cpu_count()} cores"


def final(record: Mapping[str, Any], metric: str, benchmark: str | None = None) -> float | None:
    """A metric of the last evaluation (the first benchmark if none is named), or of the last fifth of training.

    >>> final({"iterations": 2, "evaluations": {"2": {"b": {"pass@1": 0.5}}}, "curves": {}}, "pass@1")
    0.5
    >>> final({"iterations": 5, "evaluations": {}, "curves": {"entropy": [9, 9, 9, 9, 2.0]}}, "entropy")
    2.0
    """
    if metric in record["curves"]:
        curve = record["curves"][metric]
        values = [v for v in curve[-max(1, len(curve) // 5) :] if v is not None]
        return sum(values) / len(values) if values else None
    last = record["evaluations"].get(str(record["iterations"]), {})
    if not last:
        return None
    return last[benchmark or next(iter(last))].get(metric)


def by_arm(records: Iterable[Mapping[str, Any]], metric: str) -> dict[str, dict[int, float]]:
    """arm -> seed -> final value; the newest record of an arm and seed counts."""
    found: dict[str, dict[int, float]] = {}
    for r in records:
        value = final(r, metric)
        if value is not None:
            found.setdefault(r["arm"], {})[r["seed"]] = value
    return found


def mean_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (None of a single value).

    >>> mean_sd([1.0, 3.0])
    (2.0, 1.4142135623730951)
    """
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


@dataclass(frozen=True)
class Paired:
    """Paired difference a - b over the seeds that both have: mean, 95 % t interval, two-sided p of t and of sign flips.

    With n seeds the sign-flip test, which assumes nothing but symmetry, cannot go below 2 / 2^n.
    """

    seeds: int
    mean: float
    low: float
    high: float
    p_t: float
    p_sign: float


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired | None:
    """The paired test of two arms (seed -> value); None with fewer than two seeds in common.

    >>> test = paired({0: 1.0, 1: 2.0, 2: 4.0}, {0: 0.0, 1: 0.0, 2: 1.0})
    >>> test.mean, round(test.low, 3), round(test.high, 3), round(test.p_t, 4), test.p_sign
    (2.0, -0.484, 4.484, 0.0742, 0.25)
    """
    differences = [a[s] - b[s] for s in sorted(a.keys() & b.keys())]
    n = len(differences)
    if n < 2:
        return None
    mean, sd = mean_sd(differences)
    assert sd is not None
    error = sd / math.sqrt(n)
    half = student_quantile(0.975, n - 1) * error
    p_t = 2 * (1 - student_cdf(abs(mean) / error, n - 1)) if error else float(mean == 0)
    return Paired(n, mean, mean - half, mean + half, p_t, _sign_flip(differences))


def _sign_flip(differences: Sequence[float]) -> float:
    """Exact two-sided p: share of the 2^n sign patterns whose |sum| is at least the observed one (16 seeds at most)."""
    kept = differences[:16]
    seen = abs(sum(kept)) * (1 - 1e-12)
    patterns = list(product((1, -1), repeat=len(kept)))
    return sum(abs(sum(s * d for s, d in zip(p, kept, strict=True))) >= seen for p in patterns) / len(patterns)


def student_cdf(t: float, df: int) -> float:
    """Student's t distribution function for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4).

    >>> round(student_cdf(2.776, 4), 4), round(student_cdf(12.706, 1), 4), student_cdf(0.0, 3)
    (0.975, 0.975, 0.5)
    """
    theta = math.atan2(t, math.sqrt(df))
    cos2, odd = math.cos(theta) ** 2, df % 2
    term, total = 1.0, 0.0
    for k in range(df // 2):
        total += term
        term *= cos2 * ((2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2))
    inside = (theta + math.sin(theta) * math.cos(theta) * total) * 2 / math.pi if odd else math.sin(theta) * total
    return 0.5 + inside / 2


def student_quantile(p: float, df: int) -> float:
    """The t with student_cdf(t, df) = p >= 0.5, by bisection.

    >>> round(student_quantile(0.975, 4), 3), round(student_quantile(0.975, 2), 3)
    (2.776, 4.303)
    """
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, df) < p else (low, middle)
    return high
