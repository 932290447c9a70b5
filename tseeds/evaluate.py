"""Stage evaluate: a policy on a benchmark, without seeds.

Reads a policy and one data set of ``evaluate.benchmarks``; writes one row per sample (ids, log-probs, verdict, text)
and ``tables/``: problems.parquet, quarantine.parquet and report.json (the ingested benchmark, as of the problems stage) and
metrics.parquet (every metric with its bootstrap interval, for all problems and by difficulty). Random seeds do not depend on the training step, so that two policies are compared
on common random numbers.

``run_mixed`` is the wider test: snapshots write the first L tokens and the policy finishes.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tseeds import sources
from tseeds.artifacts import schema
from tseeds.artifacts.parts import Parts
from tseeds.artifacts.rundir import recorded_digest
from tseeds.artifacts.store import Identity, Manifest, Writer, read_manifest, writing
from tseeds.config import BenchmarkConfig, Pipeline, ProblemsConfig
from tseeds.context import Context
from tseeds.engines.base import Completion, Request
from tseeds.errors import UserError
from tseeds.schedule import rng_seed
from tseeds.score import grading

if TYPE_CHECKING:
    import numpy as np

    from tseeds.grading import Grade

log = logging.getLogger(__name__)

STAGE = "evaluate"
VERSION = 1
GREEDY = -1
"""Sample number of the greedy decode."""
RESAMPLES = 2000
"""Bootstrap resamples of the intervals."""
LEVEL = 0.95
"""Coverage of the intervals."""


@dataclass(frozen=True)
class Inputs:
    """policy: model directory of step ``step``; benchmark: name of an entry of evaluate.benchmarks."""

    policy: Path
    step: int
    benchmark: str


@dataclass(frozen=True)
class MixedInputs:
    """policy finishes what each snapshot (step -> model directory) began: the first L tokens, for L in lengths."""

    policy: Path
    step: int
    benchmark: str
    snapshots: dict[int, Path]
    lengths: tuple[int, ...]


def benchmark_config(config: Pipeline, name: str) -> BenchmarkConfig:
    """The entry of evaluate.benchmarks called ``name``.

    Raises:
        UserError: there is none.
    """
    for entry in config.evaluate.benchmarks:
        if entry.name == name:
            return entry
    known = ", ".join(b.name for b in config.evaluate.benchmarks) or "none are configured"
    raise UserError(f"evaluate.benchmarks: no benchmark {name} ({known})")


def problems_config(config: Pipeline, benchmark: BenchmarkConfig) -> ProblemsConfig:
    """How a benchmark is ingested: its own path, columns and task over the pipeline's prompt settings.

    Every row that can be graded stays, so that a score is that of the published set: training's policies do not apply.
    """
    kept = dict.fromkeys(("conflicting_gold", "duplicate", "damaged_text", "partial_gold", "contaminated"), "keep")
    return config.problems.model_copy(
        update={
            "findings": config.problems.findings.model_copy(update=kept),
            "path": benchmark.path,
            "columns": benchmark.columns,
            "task": benchmark.task or config.problems.task,
            "limit": benchmark.limit,
        }
    )


def samples(config: Pipeline) -> list[int]:
    """Sample numbers taken of every problem: 0 .. n - 1, then GREEDY where asked for."""
    evaluate = config.evaluate
    drawn = list(range(evaluate.samples if evaluate.temperature > 0 else 1))
    return [*drawn, GREEDY] if evaluate.greedy and evaluate.temperature > 0 else drawn


def budget(config: Pipeline) -> int:
    """Token budget of a response."""
    return config.evaluate.max_response_tokens or config.rollout.max_response_tokens


_NEUTRAL = {"path", "benchmarks", "contamination_ngram", "contamination_overlap"}
"""Values of [problems] that do nothing to a benchmark."""


def _identity(stage: str, config: Pipeline, policy: Path, step: int, benchmark: str) -> Identity:
    entry = benchmark_config(config, benchmark)
    ingest = problems_config(config, entry)
    conventions, verifier = grading(config, ingest.task)
    values: dict[str, Any] = {
        "run.seed": config.run.seed,
        "step": step,
        "policy.dtype": config.policy.dtype,
        "engine.backend": config.engine.backend,
        "evaluate.benchmark": benchmark,
        "evaluate.samples": config.evaluate.samples,
        "evaluate.temperature": config.evaluate.temperature,
        "evaluate.top_p": config.evaluate.top_p,
        "evaluate.greedy": config.evaluate.greedy,
        "evaluate.max_response_tokens": budget(config),
        **conventions,
        **{f"problems.{k}": v for k, v in ingest.model_dump(mode="json").items() if k not in _NEUTRAL},
    }
    with _named(benchmark):
        data = sources.digest(entry.path)
    return Identity(stage, VERSION, values, {"policy": recorded_digest(policy), "benchmark": data, **verifier})


@contextmanager
def _named(benchmark: str) -> Iterator[None]:
    """Say which benchmark a complaint about its data belongs to."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("problems.path", f"evaluate.benchmarks {benchmark}:", 1)) from error


def identity(config: Pipeline, inputs: Inputs) -> Identity:
    """What decides the rows: sampling and prompt values, run seed, and the digests of policy and benchmark file."""
    return _identity(STAGE, config, inputs.policy, inputs.step, inputs.benchmark)


def mixed_identity(config: Pipeline, inputs: MixedInputs) -> Identity:
    """As identity, with the grid and the digests of the snapshots."""
    base = _identity("mixed", config, inputs.policy, inputs.step, inputs.benchmark)
    return Identity(
        base.stage,
        base.version,
        {**base.config, "lengths": list(inputs.lengths)},
        {**base.inputs, **{f"snapshot {s}": recorded_digest(p) for s, p in sorted(inputs.snapshots.items())}},
    )


@dataclass(slots=True)
class _Row:
    """One sample on its way."""

    problem: int
    sample: int
    rng_seed: int
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    snapshot_step: int | None = None
    seed_length: int = 0
    off_stop: int = 0


@dataclass(frozen=True)
class _Benchmark:
    """An ingested data set: problems and quarantine (schema.PROBLEMS, schema.QUARANTINE), report as of ``ingest``."""

    problems: pa.Table
    quarantine: pa.Table
    report: dict[str, Any]

    def write(self, writer: Writer) -> None:
        """tables/problems.parquet, tables/quarantine.parquet and tables/report.json; counts among the facts."""
        folder = writer.path("tables")
        pq.write_table(self.problems, folder / "problems.parquet", compression="zstd")
        pq.write_table(self.quarantine, folder / "quarantine.parquet", compression="zstd")
        (folder / "report.json").write_text(json.dumps(self.report, indent=1, ensure_ascii=False), encoding="utf-8")
        writer.facts["benchmark"] = {k: self.report[k] for k in ("rows", "kept", "quarantined")}


def _benchmark(config: Pipeline, name: str, policy: Path, context: Context) -> _Benchmark:
    """Ingest a benchmark; rows that it cannot use are said, for a score without them is not that of the published set."""
    from tseeds.problems import ingest

    entry = benchmark_config(config, name)
    with _named(name):
        made = _Benchmark(*ingest(problems_config(config, entry), context.tokenizer(policy), score=config.score))
    out = made.report["quarantined"]
    if out:
        reasons = ", ".join(f"{count} {reason}" for reason, count in out.items())
        log.warning("benchmark %s: %d of %d rows left out: %s", name, sum(out.values()), made.report["rows"], reasons)
    if made.problems.num_rows == 0:
        first = made.quarantine["detail"][0] if made.quarantine.num_rows else "it is empty"
        raise UserError(f"evaluate.benchmarks {name}: {entry.path} has no usable row ({first})")
    return made


def _plan(config: Pipeline, benchmark: str, problems: pa.Table) -> list[_Row]:
    ids = problems["problem_id"].to_pylist()
    prompts = problems["prompt_ids"].to_pylist()
    return [
        _Row(p, s, rng_seed(config.run.seed, STAGE, benchmark, ids[p], s), prompts[p])
        for p in range(len(ids))
        for s in samples(config)
    ]


def run(config: Pipeline, inputs: Inputs, out: Path, context: Context) -> Manifest:
    """Commit the evaluation at ``out``; parts that an earlier attempt committed are kept.

    ``facts["summary"]`` holds pass@k, maj@k, avg@n and the other metrics of ``metrics`` with their intervals.

    Raises:
        UserError: the benchmark or the policy is unusable. StageFailed: the engine failed. Interrupted: asked to stop.
    """
    ident = identity(config, inputs)
    benchmark = _benchmark(config, inputs.benchmark, inputs.policy, context)
    problems = benchmark.problems
    rows = _plan(config, inputs.benchmark, problems)
    tokenizer = context.tokenizer(inputs.policy)

    def build(start: int, stop: int) -> pa.Table:
        columns = _columns(config, inputs.benchmark, inputs.step, ident.inputs["policy"], problems, rows[start:stop])
        return _graded(columns, problems, rows[start:stop], context, tokenizer, schema.EVALUATION)

    with writing(out, ident) as writer:
        with Parts(
            writer,
            rows=len(rows),
            part_rows=config.engine.part_rows,
            build=build,
            stop_requested=lambda: context.stop_requested,
        ) as parts:
            todo = parts.todo
            context.progress.begin(STAGE, len(rows), len(rows) - len(todo))
            if todo:
                _load(context, inputs.policy, ident.inputs["policy"])
            requests = [_request(config, r, rows[r], rows[r].prompt_ids, budget(config)) for r in todo]
            for k, done in context.engine().sample(requests) if todo else ():
                row = rows[todo[k]]
                row.ids, row.logprobs, row.finish_reason = list(done.ids), list(done.logprobs), done.finish_reason
                context.progress.advance(1, len(done.ids))
                parts.finish(todo[k])
        benchmark.write(writer)
        _write_metrics(writer, schema.EVALUATION, config.run.seed)
        context.progress.end()
    assert writer.manifest is not None
    return writer.manifest


def _request(config: Pipeline, number: int, row: _Row, ids: Sequence[int], tokens: int, purpose: str = "") -> Request:
    greedy = row.sample == GREEDY or config.evaluate.temperature == 0
    return Request(
        ids=ids,
        max_tokens=tokens,
        seed=rng_seed(row.rng_seed, purpose) if purpose else row.rng_seed,
        temperature=0.0 if greedy else config.evaluate.temperature,
        top_p=1.0 if greedy else config.evaluate.top_p,
        part=number // config.engine.part_rows,
    )


def _load(context: Context, policy: Path, digest: str) -> None:
    if context.engine().load(policy) != digest:
        raise UserError(f"{policy}: damaged, it differs from the digest recorded when it was written; restore it")


def _columns(
    config: Pipeline, benchmark: str, step: int, digest: str, problems: pa.Table, rows: Sequence[_Row]
) -> dict[str, list[Any]]:
    problem_ids, difficulty = problems["problem_id"].to_pylist(), problems["difficulty"].to_pylist()
    ids = [problem_ids[r.problem] for r in rows]
    return {
        "row_id": [
            f"{step:06d}-{benchmark}-{r.problem:05d}-{'greedy' if r.sample == GREEDY else f'{r.sample:03d}'}"
            for r in rows
        ],
        "problem_id": ids,
        "benchmark": [benchmark] * len(rows),
        "difficulty": [difficulty[r.problem] for r in rows],
        "sample": [r.sample for r in rows],
        "policy": [digest] * len(rows),
        "policy_step": [step] * len(rows),
        "response_ids": [r.ids for r in rows],
        "logprobs": [r.logprobs for r in rows],
        "finish_reason": [r.finish_reason for r in rows],
        "temperature": [0.0 if r.sample == GREEDY else config.evaluate.temperature for r in rows],
        "rng_seed": [r.rng_seed for r in rows],
    }


def _graded(
    columns: dict[str, list[Any]],
    problems: pa.Table,
    rows: Sequence[_Row],
    context: Context,
    tokenizer: Any,
    columns_schema: pa.Schema,
) -> pa.Table:
    texts = tokenizer.batch_decode([r.ids for r in rows], skip_special_tokens=True)
    asked = list(zip(*(problems[name].to_pylist() for name in ("task", "gold", "prompt")), strict=True))
    grades = context.grade([(*asked[r.problem], text) for r, text in zip(rows, texts, strict=True)])
    columns |= {
        "extracted": [g.extracted for g in grades],
        "canonical": [
            _vote(task, gold, g, t)
            for (task, gold, _), g, t in zip((asked[r.problem] for r in rows), grades, texts, strict=True)
        ],
        "verdict": [str(g.verdict) for g in grades],
        "reward": [g.reward for g in grades],
        "text": texts,
        "wall_ms": [g.wall_ms for g in grades],
    }
    return pa.table({name: columns[name] for name in columns_schema.names}, schema=columns_schema)


def _vote(task: str, gold: str, grade: Grade, text: str) -> str | None:
    """What an answer counts as: a correct one as the gold where a task has one right answer, a wrong one as what it says."""
    if grade.verdict == "correct":
        return grade.canonical if task == "countdown" else (task.startswith("python:") and grade.canonical) or gold
    return grade.canonical or grade.extracted or text if grade.verdict == "wrong" else None


def _write_metrics(writer: Writer, rows_schema: pa.Schema, run_seed: int) -> None:
    """tables/metrics.parquet beside the rows, and the summary among the facts."""
    folder = writer.path("tables")
    parts = sorted(writer.partial.glob("part-*.parquet"))
    rows = pa.concat_tables([pq.read_table(p, partitioning=None, schema=rows_schema) for p in parts])
    table = metrics_table(rows, run_seed=run_seed)
    pq.write_table(table, folder / "metrics.parquet", compression="zstd")
    writer.facts["summary"] = summary(table, rows)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, c of them correct, hold a correct one: 1 - C(n-c, k) / C(n, k).

    Unbiased for k <= n (Chen et al., arXiv 2107.03374, equation 1).

    >>> round(pass_at_k(8, 2, 4), 6)
    0.785714
    """
    assert 0 <= c <= n >= k >= 1, (n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def powers(n: int) -> list[int]:
    """1, 2, 4, ... up to n, and n itself.

    >>> powers(12)
    [1, 2, 4, 8, 12]
    """
    return sorted({*(2**i for i in range(n.bit_length())), n})


def majority(votes: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Share of the most voted solutions that are correct; rows without a solution do not vote.

    votes: canonical solutions; correct: whether each is. A tie is broken uniformly, so its expectation is returned.

    >>> majority(["4", "4", "5", None], [True, True, False, False]), majority(["4", "5"], [True, False])
    (1.0, 0.5)
    """
    counts: dict[str, int] = {}
    right: dict[str, bool] = {}
    for vote, good in zip(votes, correct, strict=True):
        if vote is not None:
            counts[vote] = counts.get(vote, 0) + 1
            right[vote] = right.get(vote, False) or good
    if not counts:
        return 0.0
    top = max(counts.values())
    first = [vote for vote, count in counts.items() if count == top]
    return sum(right[v] for v in first) / len(first)


def majority_at_k(votes: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """maj@k: mean of ``majority`` over the n // k disjoint blocks of k samples, each an independent draw of k."""
    blocks = len(votes) // k
    return sum(majority(votes[i * k : i * k + k], correct[i * k : i * k + k]) for i in range(blocks)) / blocks


Metric = tuple[str, int | None]
"""Name and k of a metric."""


def problem_values(rows: Sequence[dict[str, Any]]) -> dict[Metric, float]:
    """Every metric of one problem from its rows (EVALUATION columns).

    pass, maj at k; avg (share of correct samples); reward; distinct correct solutions; extraction_failures, truncated as
    shares; length in tokens; surprisal: mean -log p per token in nats, an unbiased estimate of the entropy of the
    distribution that was sampled from. greedy: whether the greedy decode is correct, where there is one.
    """
    drawn = sorted((r for r in rows if r["sample"] != GREEDY), key=lambda r: r["sample"])
    n = len(drawn)
    right = [r["verdict"] == "correct" for r in drawn]
    votes = [r["canonical"] for r in drawn]
    tokens = [len(r["logprobs"]) for r in drawn]
    values: dict[Metric, float] = {("pass", k): pass_at_k(n, sum(right), k) for k in range(1, n + 1)}
    values |= {("maj", k): majority_at_k(votes, right, k) for k in powers(n)}
    values[("avg", n)] = sum(right) / n
    values[("reward", None)] = sum(r["reward"] for r in drawn) / n
    values[("distinct", None)] = len({v for v, good in zip(votes, right, strict=True) if good})
    values[("extraction_failures", None)] = sum(r["verdict"] == "no_answer" for r in drawn) / n
    values[("truncated", None)] = sum(r["finish_reason"] == "length" for r in drawn) / n
    values[("length", None)] = sum(tokens) / n
    values[("surprisal", None)] = sum(-sum(r["logprobs"]) / max(1, len(r["logprobs"])) for r in drawn) / n
    greedy = [r["verdict"] == "correct" for r in rows if r["sample"] == GREEDY]
    if greedy:
        values[("greedy", None)] = float(greedy[0])
    return values


def bootstrap(values: np.ndarray, *, seed: int, resamples: int = RESAMPLES, level: float = LEVEL) -> np.ndarray:
    """Percentile interval of the mean over problems: [2, M] from per-problem values [P, M].

    Problems are drawn with replacement, all metrics of a problem together; the interval says how far another sample of
    problems would move the mean, not what more samples per problem would.
    """
    import numpy as np

    problems = len(values)
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(problems, np.full(problems, 1 / problems), size=resamples)
    means = counts @ values / problems
    tail = 100 * (1 - level) / 2
    return np.percentile(means, [tail, 100 - tail], axis=0)


def metrics_table(rows: pa.Table, *, run_seed: int = 0) -> pa.Table:
    """Every metric for all problems and by difficulty, with intervals (EVALUATION_METRICS), from EVALUATION rows."""
    import numpy as np

    columns = ["problem_id", "difficulty", "sample", "logprobs", "finish_reason", "canonical", "verdict", "reward"]
    by_problem: dict[str, list[dict[str, Any]]] = {}
    for row in rows.select(columns).to_pylist():
        by_problem.setdefault(row["problem_id"], []).append(row)
    values = {p: problem_values(r) for p, r in by_problem.items()}
    metrics = list(next(iter(values.values())))
    levels = sorted({r[0]["difficulty"] for r in by_problem.values()} - {None})
    out: list[dict[str, Any]] = []
    for level in [None, *levels]:
        chosen = [v for p, v in values.items() if level is None or by_problem[p][0]["difficulty"] == level]
        matrix = np.array([[v[m] for m in metrics] for v in chosen])
        lo, hi = bootstrap(matrix, seed=rng_seed(run_seed, "bootstrap", level or ""))
        for j, (name, k) in enumerate(metrics):
            out.append(
                {
                    "benchmark": str(rows["benchmark"][0]),
                    "policy_step": rows["policy_step"][0].as_py(),
                    "difficulty": level,
                    "metric": name,
                    "k": k,
                    "value": float(matrix[:, j].mean()),
                    "lo": float(lo[j]),
                    "hi": float(hi[j]),
                    "problems": len(chosen),
                }
            )
    return pa.Table.from_pylist(out, schema=schema.EVALUATION_METRICS)


def label(metric: str, k: int | None) -> str:
    """Name of a metric in tables: pass@8, length."""
    return metric if k is None else f"{metric}@{k}"


def summary(metrics: pa.Table, rows: pa.Table) -> dict[str, Any]:
    """JSON-ready: metrics at k = 1, 2, 4, ... n, their intervals under "ci", and "difficulty" levels, each the same."""
    listed = metrics.to_pylist()
    n = max(m["k"] for m in listed if m["metric"] == "pass")
    shown = set(powers(n))

    def of(level: str | None) -> dict[str, Any]:
        mine = [m for m in listed if m["difficulty"] == level and (m["k"] is None or m["k"] in shown)]
        values: dict[str, Any] = {label(m["metric"], m["k"]): m["value"] for m in mine}
        values["problems"] = mine[0]["problems"]
        values["ci"] = {label(m["metric"], m["k"]): [m["lo"], m["hi"]] for m in mine}
        return values

    result = of(None) | {"samples": n, "rows": rows.num_rows}
    levels = sorted({m["difficulty"] for m in listed} - {None})
    if levels:
        result["difficulty"] = {level: of(level) for level in levels}
    return result


def run_mixed(config: Pipeline, inputs: MixedInputs, out: Path, context: Context) -> Manifest:
    """Mixed inference on a grid of seed length L and snapshot: pass@k of every cell at equal k.

    Per problem and sample every snapshot writes one full chain (cell L = -1, the snapshot alone); its first L tokens
    are finished by the policy. Cell L = 0 is the policy alone, with the samples of a plain evaluation. A chain that
    ended within L tokens is the response as it stands. ``facts["cells"]`` lists {snapshot_step, lag, seed_length,
    pass@k...}; a cell with snapshot_step null and L != 0 mixes all snapshots in equal parts at the same number of samples.

    Raises:
        UserError: no snapshot, no length, or a length above the budget. StageFailed: the engine failed.
    """
    if not inputs.snapshots:
        raise UserError("mixed inference needs at least one snapshot older than the policy")
    bad = [length for length in inputs.lengths if not 1 <= length < budget(config)]
    if bad or not inputs.lengths:
        raise UserError(
            f"mixed inference: seed length {bad[0] if bad else 'list is empty'}: 1 to {budget(config) - 1} tokens"
        )
    ident = mixed_identity(config, inputs)
    benchmark = _benchmark(config, inputs.benchmark, inputs.policy, context)
    problems = benchmark.problems
    tokenizer = context.tokenizer(inputs.policy)
    alone = [r for r in _plan(config, inputs.benchmark, problems) if r.sample != GREEDY]
    cells = [(s, length) for s in sorted(inputs.snapshots) for length in (-1, *sorted(inputs.lengths))]
    rows = [
        *alone,
        *(
            _Row(r.problem, r.sample, rng_seed(r.rng_seed, s), r.prompt_ids, snapshot_step=s, seed_length=length)
            for s, length in cells
            for r in alone
        ),
    ]

    def build(start: int, stop: int) -> pa.Table:
        chosen = rows[start:stop]
        columns = _columns(config, inputs.benchmark, inputs.step, ident.inputs["policy"], problems, chosen)
        columns["row_id"] = [
            row_id if r.snapshot_step is None else f"{row_id}-s{r.snapshot_step}-L{r.seed_length}"
            for row_id, r in zip(columns["row_id"], chosen, strict=True)
        ]
        written = [r.snapshot_step for r in chosen]
        columns |= {
            "snapshot": [None if s is None else ident.inputs[f"snapshot {s}"] for s in written],
            "snapshot_step": written,
            "lag": [None if s is None else inputs.step - s for s in written],
            "seed_length": [r.seed_length for r in chosen],
            "off_start": [0] * len(chosen),
            "off_stop": [r.off_stop for r in chosen],
        }
        return _graded(columns, problems, chosen, context, tokenizer, schema.MIXED)

    with writing(out, ident) as writer:
        with Parts(
            writer,
            rows=len(rows),
            part_rows=config.engine.part_rows,
            build=build,
            stop_requested=lambda: context.stop_requested,
        ) as parts:
            todo = parts.todo
            context.progress.begin("mixed", len(rows), len(rows) - len(todo))
            if todo:
                _sample_mixed(config, inputs, ident, context, parts, rows, len(alone))
        table = pa.concat_tables(
            [
                pq.read_table(p, partitioning=None, schema=schema.MIXED)
                for p in sorted(writer.partial.glob("part-*.parquet"))
            ]
        )
        benchmark.write(writer)
        writer.facts["cells"] = mixed_cells(table, run_seed=config.run.seed)
        context.progress.end()
    assert writer.manifest is not None
    return writer.manifest


def _sample_mixed(
    config: Pipeline,
    inputs: MixedInputs,
    ident: Identity,
    context: Context,
    parts: Parts,
    rows: Sequence[_Row],
    per_cell: int,
) -> None:
    """Chains of every snapshot first, one swap each, then everything that the policy writes in one go.

    Chains that a resumed attempt needs again are sampled again: equal seeds give equal tokens.
    """
    todo = set(parts.todo)
    engine, limit = context.engine(), budget(config)
    chains: dict[tuple[int, int], Completion] = {}
    for step, snapshot in sorted(inputs.snapshots.items()):
        needed = sorted({k % per_cell for k in todo if rows[k].snapshot_step == step})
        if not needed:
            continue
        _load(context, snapshot, ident.inputs[f"snapshot {step}"])
        starts = [
            next(k for k in range(per_cell, len(rows), per_cell) if rows[k].snapshot_step == step) + n for n in needed
        ]
        requests = [_request(config, k, rows[k], rows[k].prompt_ids, limit) for k in starts]
        for i, done in engine.sample(requests):
            chains[step, needed[i]] = done
    live: list[int] = []
    for k in sorted(todo):
        row = rows[k]
        if row.snapshot_step is not None:
            chain = chains[row.snapshot_step, k % per_cell]
            row.off_stop = len(chain.ids) if row.seed_length < 0 else min(row.seed_length, len(chain.ids))
            row.ids, row.logprobs = list(chain.ids[: row.off_stop]), list(chain.logprobs[: row.off_stop])
            if row.off_stop == len(chain.ids) and (row.seed_length < 0 or chain.finish_reason == "stop"):
                row.finish_reason = chain.finish_reason
        if row.finish_reason is None:
            live.append(k)
        else:
            context.progress.advance(1)
            parts.finish(k)
    _load(context, inputs.policy, ident.inputs["policy"])
    requests = [
        _request(
            config,
            k,
            rows[k],
            [*rows[k].prompt_ids, *rows[k].ids],
            limit - len(rows[k].ids),
            "" if rows[k].snapshot_step is None else "finish",
        )
        for k in live
    ]
    for i, done in engine.sample(requests):
        row = rows[live[i]]
        row.ids, row.logprobs, row.finish_reason = row.ids + done.ids, row.logprobs + done.logprobs, done.finish_reason
        context.progress.advance(1, len(done.ids))
        parts.finish(live[i])


def mixed_cells(rows: pa.Table, *, run_seed: int = 0) -> list[dict[str, Any]]:
    """Metrics of every cell of the grid from MIXED rows, and of the equal mixture of all snapshots at each length."""
    columns = pa.schema([f for f in rows.schema if f.name not in ("response_ids", "text")])
    listed = rows.select(columns.names).to_pylist()
    groups: dict[tuple[int | None, int], list[dict[str, Any]]] = {}
    for row in listed:
        groups.setdefault((row["snapshot_step"], row["seed_length"]), []).append(row)
    steps = sorted({s for s, _ in groups if s is not None})
    if 1 < len(steps) <= len({row["sample"] for row in listed if row["sample"] >= 0}):  # else some would have no sample
        for length in sorted({length for s, length in groups if s is not None}):
            # sample j comes from snapshot j mod S: as many samples as one cell, each snapshot an equal share
            groups[None, length] = [
                r for i, s in enumerate(steps) for r in groups[s, length] if r["sample"] % len(steps) == i
            ]
    final = rows["policy_step"][0].as_py()
    cells = []
    for (step, length), members in sorted(groups.items(), key=lambda g: (g[0][1], -1 if g[0][0] is None else g[0][0])):
        table = metrics_table(pa.Table.from_pylist(members, schema=columns), run_seed=run_seed)
        cell = {k: v for k, v in summary(table, table).items() if k not in ("difficulty", "rows")}
        cells.append(
            {"snapshot_step": step, "lag": None if step is None else final - step, "seed_length": length, **cell}
        )
    return cells


def default_lengths(config: Pipeline) -> tuple[int, ...]:
    """Seed lengths of the grid when none are asked for: 1/16, 1/8, 1/4 and 1/2 of the budget."""
    return tuple(sorted({max(1, budget(config) // d) for d in (16, 8, 4, 2)}))


def metrics_of(path: Path) -> pa.Table:
    """The metrics table of a committed evaluation.

    Raises:
        UserError: there is none at ``path``.
    """
    if read_manifest(path) is None:
        raise UserError(f"{path}: no evaluation is committed here; run tseeds evaluate first")
    return pq.read_table(Path(path) / "tables" / "metrics.parquet")
