"""Unusual pipelines on the toy task: each does what it says or is refused in one line, never something else in silence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tseeds import config as configuration
from tseeds import evaluate, pipeline, score, toy, verify
from tseeds.artifacts import store
from tseeds.artifacts.rundir import RunDir
from tseeds.config import Pipeline
from tseeds.context import Context
from tseeds.errors import StageFailed, UserError


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    toy.make(folder)
    return folder


def small(task: Path, **sections: dict[str, Any]) -> Pipeline:
    data: dict[str, dict[str, Any]] = {
        "run": {"iterations": 2},
        "policy": {"path": str(task / "policy"), "dtype": "float32"},
        "problems": {
            "path": str(task / "train.jsonl"), "task": "countdown", "prompt": "plain", "max_prompt_tokens": 16, "limit": 4,
        },
        "snapshot": {"every": 1, "keep_states": 9},
        "seed": {"lo": 0.2, "hi": 0.8},
        "rollout": {"problems_per_iteration": 4, "group_size": 4, "max_response_tokens": 24},
        "update": {"learning_rate": 1e-4, "minibatches": 2},
        "engine": {"backend": "transformers"},
    }  # fmt: skip
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    return configuration.parse(data)


def train(config: Pipeline, root: Path, *, accept: bool = False) -> RunDir:
    with Context(config) as context:
        return pipeline.run_pipeline(config, root, context, accept=accept)


def metrics(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def test_a_suffix_is_sampled_at_the_seeds_temperature_by_whoever_the_sampler_names(task: Path, tmp_path: Path) -> None:
    config = small(task, seed={"position": "suffix", "sampler": "current", "temperature": 1.5})
    run = train(config, tmp_path / "run")
    rows = pl.read_parquet(f"{run.root}/iterations/000002/rollout/*.parquet").filter(pl.col("position") == "suffix")
    assert rows["snapshot_step"].to_list() == rows["policy_step"].to_list() == [1] * 8
    found = verify.check_logprobs(run.root, rows=16)  # at any other temperature they would differ by tenths
    assert found.damages == []
    assert found.tokens > 400
    assert found.skipped == 0


def test_replayed_chains_keep_the_temperature_that_they_were_sampled_at(task: Path, tmp_path: Path) -> None:
    config = small(task, seed={"source": "replay"}, rollout={"temperature": 1.25})
    run = train(config, tmp_path / "run")
    seeds = pl.read_parquet(f"{run.root}/iterations/000002/seed/*.parquet").filter(pl.col("outcome") == "used")
    assert seeds.height > 0
    assert set(seeds["temperature"]) == {1.25}
    assert verify.check_logprobs(run.root, rows=16).damages == []


def test_a_whole_replay_takes_no_chain_beyond_a_lowered_budget(task: Path, tmp_path: Path) -> None:
    config = small(task, seed={"source": "replay", "position": "whole"})
    run = train(config, tmp_path / "run")
    lower = small(
        task, run={"iterations": 3}, seed={"source": "replay", "position": "whole"}, rollout={"max_response_tokens": 12}
    )
    train(lower, run.root, accept=True)
    rows = pl.read_parquet(f"{run.root}/iterations/000003/rollout/*.parquet")
    assert rows["response_ids"].list.len().max() <= 12
    manifest = store.read_manifest(run.stage(3, "seed"))
    assert manifest is not None
    assert manifest.facts["seeds_no_chain"] == 8  # chains of 18 tokens: counted, not cut


def test_masked_micro_batches_leave_no_hole_in_the_metrics(task: Path, tmp_path: Path) -> None:
    config = small(task, seed={"position": "whole"}, update={"prefix_weight": "mask", "tokens_per_microbatch": 16})
    for line in metrics(train(config, tmp_path / "run")):
        for name in ("entropy_mixture", "effective_entropy", "entropy_all", "ess_all", "kl_k3_all", "ratio_mean_all"):
            assert math.isfinite(line[name]), name


def test_decided_seeds_are_those_whose_continuations_all_end_alike(task: Path, tmp_path: Path) -> None:
    run = train(small(task, seed={"continuations": 2, "lo": 0.5}), tmp_path / "run")
    for iteration, line in enumerate(metrics(run), 1):
        rows = pl.read_parquet(f"{run.root}/iterations/{iteration:06d}/rollout/*.parquet")
        scores = pl.read_parquet(f"{run.root}/iterations/{iteration:06d}/score/*.parquet")
        seeds = (
            rows.join(scores, on="row_id").drop_nulls("seed_id").group_by("seed_id").agg(pl.col("reward").n_unique())
        )
        assert seeds.height == 4
        assert line["decided_seeds"] == pytest.approx((seeds["reward"] == 1).mean())


def test_a_verifier_decides_verdicts_so_its_bytes_are_in_their_keys(task: Path, tmp_path: Path) -> None:
    file = tmp_path / "verifier.py"
    file.write_text("def right(gold, text):\n    return 1.0\n")
    config = small(task, problems={"task": f"python:{file}:right"}, run={"iterations": 1})
    run = train(config, tmp_path / "run")
    inputs = score.Inputs(run.stage(1, "rollout"), run.problems)
    manifest = store.require(run.stage(1, "score"), "scores")
    assert manifest.facts["verdict_correct"] == 16
    assert score.identity(config, inputs).key == manifest.identity.key
    file.write_text("def right(gold, text):\n    return 0.0\n")
    assert score.identity(config, inputs).key != manifest.identity.key
    file.unlink()
    with pytest.raises(UserError, match="the verifier cannot be read"):
        score.identity(config, inputs)


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        ("missing", UserError, "defines no function missing"),
        ("broken", StageFailed, "fails on every row, first with ValueError: never mind"),
    ],
)
def test_a_verifier_that_cannot_grade_stops_the_run(
    task: Path, tmp_path: Path, function: str, error: type[Exception], says: str
) -> None:
    file = tmp_path / "verifier.py"
    file.write_text("def broken(gold, text):\n    raise ValueError('never mind')\n")
    with pytest.raises(error, match=says):
        train(small(task, problems={"task": f"python:{file}:{function}"}), tmp_path / "run")
    assert not (tmp_path / "run" / "iterations" / "000001" / "score").exists()


def test_a_convention_of_the_grader_is_in_the_keys_of_all_that_grade(task: Path, tmp_path: Path) -> None:
    benchmarks = {"benchmarks": [{"name": "b", "path": str(task / "test.jsonl"), "limit": 2}]}
    changed = {"think_end": "</z>"}
    inputs = evaluate.Inputs(task / "policy", 0, "b")
    old, new = (evaluate.identity(small(task, evaluate=benchmarks, score=s), inputs) for s in ({}, changed))
    assert {k for k in new.config if new.config[k] != old.config[k]} == {"score.think_end"}


def test_problems_of_which_none_is_left_are_refused(task: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none of 2048 rows is left \(2048 overlong; first: 6 tokens"):
        train(small(task, problems={"max_prompt_tokens": 1}), tmp_path / "run")
    assert not (tmp_path / "run" / "problems").exists()


def test_an_artifact_of_another_stage_is_named(task: Path, tmp_path: Path) -> None:
    config = small(task, run={"iterations": 1})
    run = train(config, tmp_path / "run")
    with Context(config) as context:
        wrong = score.Inputs(run.stage(1, "seed"), run.problems)
        with pytest.raises(
            UserError, match=r"/seed: a seed artifact, where rollouts are needed: it has no column row_id"
        ):
            score.run(config, wrong, tmp_path / "out", context)
        other = train(small(task, problems={"limit": 2}, rollout={"problems_per_iteration": 2}), tmp_path / "other")
        strange = score.Inputs(run.stage(1, "rollout"), other.problems)
        with pytest.raises(UserError, match=r"/rollout: 2 problems that .*/problems does not hold, such as "):
            score.run(config, strange, tmp_path / "out", context)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="a problems artifact, where a snapshot of stage snapshot is needed"):
        store.require(run.problems, "a snapshot", "snapshot")


def test_verify_looks_at_mixed_inference_too(task: Path, tmp_path: Path) -> None:
    run = train(small(task, run={"iterations": 1}), tmp_path / "run")
    checked, damages = verify.check(run.root)
    assert damages == []
    stray = run.root / "mixed" / "000001" / "b"
    stray.mkdir(parents=True)
    (stray / "part-00000.parquet").write_bytes(b"junk")
    assert verify.check(run.root) == (
        checked + 1,
        [f"{stray}: no manifest; it was never committed, or its manifest is lost"],
    )


def test_the_kl_terms_snapshot_is_the_one_that_its_own_sampler_takes(task: Path, tmp_path: Path) -> None:
    run, pool = RunDir(tmp_path / "run"), list(range(0, 101, 5))

    def taken(**update: Any) -> list[int]:
        update = {"kl_coef": 0.1, "kl_reference": "snapshot", **update}
        config = small(task, update=update, seed={"sampler": "current", "lag": 20, "tau": 5.0})
        found = [pipeline._reference(config, run, 101 + k, pool) for k in range(200)]
        return [int(path.name.removeprefix("step-")) for path in found if path is not None]

    assert set(taken()) == set(pool)  # uniform, whoever writes the seeds
    assert set(taken(kl_sampler="oldest")) == {0}
    assert set(taken(kl_sampler="fixed_lag")) == {80, 85, 90, 95, 100}
    recent = taken(kl_sampler="recent")
    assert sum(step >= 90 for step in recent) / len(recent) == pytest.approx(1 - math.exp(-3), abs=0.06)
    assert taken(kl_coef=0.0) == []
