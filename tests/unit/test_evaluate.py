"""Evaluation metrics against numbers worked out by hand or by counting every subset."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tseeds import config as configuration
from tseeds import evaluate, sources
from tseeds.artifacts import schema
from tseeds.errors import UserError
from tseeds.grading import Grade, Verdict


def test_pass_at_k_of_the_method() -> None:
    assert evaluate.pass_at_k(8, 2, 1) == 0.25
    assert round(evaluate.pass_at_k(8, 2, 4), 6) == 0.785714
    assert evaluate.pass_at_k(8, 2, 8) == 1.0
    assert evaluate.pass_at_k(8, 0, 8) == 0.0


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_counts_the_subsets_that_hold_a_correct_sample(case: tuple[int, int, int]) -> None:
    n, c, k = case
    subsets = list(itertools.combinations([i < c for i in range(n)], k))
    assert evaluate.pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets), abs=1e-12)


def test_majority() -> None:
    assert evaluate.majority(["4", "5", "4"], [True, False, True]) == 1.0
    assert evaluate.majority(["5", "5", "4"], [False, False, True]) == 0.0
    assert evaluate.majority(["4", "5", "6"], [True, False, False]) == pytest.approx(1 / 3)
    assert evaluate.majority([None, None, "4"], [False, False, True]) == 1.0  # rows without an answer do not vote
    assert evaluate.majority([None, None], [False, False]) == 0.0


def test_majority_at_k_averages_disjoint_blocks() -> None:
    votes, right = ["4", "4", "5", "4", "9"], [True, True, False, True, False]
    assert evaluate.majority_at_k(votes, right, 2) == pytest.approx(
        (1.0 + 0.5) / 2
    )  # (4 4), (5 4); the fifth is left over
    assert evaluate.majority_at_k(votes, right, 1) == pytest.approx(3 / 5)


def _row(problem: str, sample: int, answer: str | None, *, right: bool, **other: Any) -> dict[str, Any]:
    verdict = "correct" if right else "no_answer" if answer is None else "wrong"
    row = {
        "row_id": f"{problem}-{sample}", "problem_id": problem, "benchmark": "b", "difficulty": None, "sample": sample,
        "policy": "d", "policy_step": 3, "response_ids": [1, 2], "logprobs": [-1.0, -0.5], "finish_reason": "stop",
        "temperature": 0.6, "extracted": answer, "canonical": answer, "verdict": verdict, "reward": float(right),
        "rng_seed": 0, "text": "", "wall_ms": 0.0,
    }  # fmt: skip
    return row | other


def _table(rows: list[dict[str, Any]], columns: pa.Schema = schema.EVALUATION) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=columns)


def test_summary_by_hand() -> None:
    rows = [
        _row("p", 0, "4", right=True, difficulty="easy"),
        _row("p", 1, "2+2", right=True, difficulty="easy"),
        _row("p", 2, "5", right=False, difficulty="easy", finish_reason="length", logprobs=[-3.0], response_ids=[7]),
        _row("p", 3, None, right=False, difficulty="easy"),
        *[_row("q", s, "9", right=False, difficulty="hard") for s in range(4)],
        _row("p", evaluate.GREEDY, "4", right=True, difficulty="easy", temperature=0.0),
        _row("q", evaluate.GREEDY, "9", right=False, difficulty="hard", temperature=0.0),
    ]
    found = evaluate.summary(evaluate.metrics_table(_table(rows)), _table(rows))
    assert found["pass@1"] == found["avg@4"] == found["reward"] == pytest.approx(0.25)
    assert found["pass@2"] == pytest.approx((1 - 1 / 6) / 2)
    assert found["pass@4"] == 0.5
    assert found["maj@4"] == pytest.approx((2 / 3) / 2)  # of 4, 2+2 and 5 one vote each: two of three ties are right
    assert found["distinct"] == 1.0  # two different correct solutions of p, none of q
    assert found["extraction_failures"] == found["truncated"] == 0.125
    assert found["length"] == pytest.approx((2 + 2 + 1 + 2 + 4 * 2) / 8)
    assert found["surprisal"] == pytest.approx((0.75 * 7 + 3.0) / 8)
    assert found["greedy"] == 0.5
    assert (found["problems"], found["samples"], found["rows"]) == (2, 4, 10)
    assert found["difficulty"]["easy"]["pass@1"] == 0.5
    assert found["difficulty"]["hard"]["pass@4"] == 0.0
    assert found["ci"]["pass@1"] == [0.0, 0.5]  # resamples of two problems: both p, both q, or one of each


def test_bootstrap_covers_the_true_mean() -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for trial in range(200):
        values = rng.binomial(1, 0.3, (120, 1)).astype(float)
        lo, hi = evaluate.bootstrap(values, seed=trial, resamples=400)
        hits += bool(lo[0] <= 0.3 <= hi[0])
    assert 0.88 <= hits / 200 <= 0.99
    again = [evaluate.bootstrap(values, seed=1) for _ in range(2)]
    assert np.array_equal(*again)


def test_all_equal_values_have_no_width() -> None:
    lo, hi = evaluate.bootstrap(np.ones((7, 2)), seed=0)
    assert (lo == 1).all()
    assert (hi == 1).all()


def test_every_k_and_every_level_is_in_the_table() -> None:
    rows = [_row(p, s, "4", right=s == 0, difficulty=d) for p, d in (("p", "1"), ("q", "2")) for s in range(3)]
    table = evaluate.metrics_table(_table(rows)).to_pylist()
    assert [(r["k"], round(r["value"], 6)) for r in table if r["metric"] == "pass" and r["difficulty"] is None] == [
        (1, 0.333333), (2, 0.666667), (3, 1.0),
    ]  # fmt: skip
    assert {r["difficulty"] for r in table} == {None, "1", "2"}


def test_mixture_of_snapshots_has_as_many_samples_as_a_cell() -> None:
    """Snapshot 0 solves p alone, snapshot 2 solves q alone: only their mixture solves both."""
    rows = []
    for step, length in ((None, 0), (0, 2), (2, 2), (0, -1), (2, -1)):
        for problem in ("p", "q"):
            for sample in range(4):
                right = (step, problem) in ((0, "p"), (2, "q"))
                extra = {
                    "snapshot": None, "snapshot_step": step, "lag": None if step is None else 3 - step,
                    "seed_length": length, "off_start": 0, "off_stop": max(0, length),
                }  # fmt: skip
                rows.append(_row(problem, sample, "4", right=right) | extra)
    cells = {(c["snapshot_step"], c["seed_length"]): c for c in evaluate.mixed_cells(_table(rows, schema.MIXED))}
    assert cells[None, 0]["pass@4"] == 0.0
    assert cells[0, 2]["pass@4"] == cells[2, 2]["pass@4"] == 0.5
    assert cells[None, 2]["pass@4"] == 1.0
    assert {c["samples"] for c in cells.values()} == {4}
    assert cells[2, 2]["lag"] == 1


def _pipeline(tmp_path: Path, **evaluate_values: Any) -> configuration.Pipeline:
    (tmp_path / "bench.jsonl").write_text('{"problem": "1 + 1", "gold": "2"}\n')
    return configuration.parse(
        {
            "policy": {"path": "x"},
            "problems": {"path": "y", "task": "countdown", "template": "Q {problem}"},
            "evaluate": {"benchmarks": [{"name": "b", "path": str(tmp_path / "bench.jsonl")}], **evaluate_values},
        }
    )


def test_benchmarks_inherit_prompt_settings_and_task(tmp_path: Path) -> None:
    config = _pipeline(tmp_path)
    made = evaluate.problems_config(config, config.evaluate.benchmarks[0])
    assert (made.path, made.task, made.template) == (str(tmp_path / "bench.jsonl"), "countdown", "Q {problem}")
    with pytest.raises(UserError, match=r"no benchmark c \(b\)"):
        evaluate.benchmark_config(config, "c")


def test_greedy_takes_one_sample_and_is_refused_nowhere(tmp_path: Path) -> None:
    assert evaluate.samples(_pipeline(tmp_path, samples=3)) == [0, 1, 2]
    assert evaluate.samples(_pipeline(tmp_path, samples=3, greedy=True)) == [0, 1, 2, evaluate.GREEDY]
    assert evaluate.samples(_pipeline(tmp_path, samples=3, temperature=0.0, greedy=True)) == [0]


def test_random_seeds_are_common_to_all_steps(tmp_path: Path) -> None:
    config = _pipeline(tmp_path, samples=2)
    problems = pa.Table.from_pylist([{"problem_id": "p", "prompt_ids": [1]}, {"problem_id": "q", "prompt_ids": [2]}])
    seeds = [r.rng_seed for r in evaluate._plan(config, "b", problems)]
    assert len(set(seeds)) == 4  # problems and samples differ; the plan has no step to differ by
    assert seeds != [r.rng_seed for r in evaluate._plan(config, "c", problems)]


def test_the_benchmark_s_bytes_decide_not_its_place(tmp_path: Path) -> None:
    one, two = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    one.write_text("same\n")
    two.write_text("same\n")
    assert sources.digest(str(one)) == sources.digest(str(two))
    two.write_text("other\n")
    assert sources.digest(str(one)) != sources.digest(str(two))
    assert sources.digest([str(one), str(two)]) != sources.digest([str(two), str(one)])
    config = _pipeline(tmp_path)
    (tmp_path / "bench.jsonl").unlink()
    with pytest.raises(UserError, match=r"evaluate.benchmarks b: .*bench.jsonl: no such file"):
        evaluate.identity(config, evaluate.Inputs(tmp_path, 0, "b"))


def test_importing_the_stage_brings_no_torch_and_no_vllm() -> None:
    code = "import sys, tseeds.evaluate; print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_votes_are_answers_and_correct_ones_are_one_answer() -> None:
    def vote(task: str, verdict: str, canonical: str | None = None, extracted: str | None = None) -> str | None:
        return evaluate._vote(task, "28", Grade(Verdict(verdict), extracted, canonical), "text")

    assert vote("math", "correct", "28") == vote("math", "correct", "28%") == "28"
    assert vote("math", "wrong", "27") == "27"
    assert vote("math", "no_answer") is None
    assert vote("countdown", "correct", "1+2") != vote("countdown", "correct", "2+1")  # several solutions
    assert vote("countdown", "wrong", None, "3*4") == "3*4"  # wrong answers vote too
    assert vote("python:v.py:f", "correct") == "28"
    assert vote("python:v.py:f", "wrong") == "text"
