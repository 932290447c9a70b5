"""The evaluate stage with a real policy and engine: rows, resume, common random numbers, mixed inference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from tseeds import config as configuration
from tseeds import evaluate
from tseeds.artifacts import schema, store
from tseeds.context import Context
from tseeds.errors import Interrupted, UserError
from tseeds.toy import make

PROBLEMS, SAMPLES = 6, 4


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def config(toy: dict[str, Path]) -> configuration.Pipeline:
    return configuration.parse(
        {
            "policy": {"path": str(toy["policy"]), "dtype": "float32"},
            "problems": {"path": str(toy["train"]), "task": "countdown", "prompt": "plain", "max_prompt_tokens": 16},
            "rollout": {"max_response_tokens": 24},
            "engine": {"backend": "transformers", "part_rows": 8},
            "evaluate": {
                "samples": SAMPLES,
                "temperature": 1.0,
                "top_p": 1.0,
                "greedy": True,
                "benchmarks": [{"name": "held-out", "path": str(toy["test"]), "limit": PROBLEMS}],
            },
        }
    )


@pytest.fixture(scope="module")
def context(config: configuration.Pipeline) -> Iterator[Context]:
    with Context(config) as opened:
        yield opened


@pytest.fixture(scope="module")
def done(
    config: configuration.Pipeline, toy: dict[str, Path], context: Context, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("evaluation") / "held-out"
    evaluate.run(config, evaluate.Inputs(toy["policy"], 0, "held-out"), out, context)
    return out


def test_rows_and_tables(done: Path, config: configuration.Pipeline) -> None:
    rows = pl.read_parquet(done / "*.parquet")
    assert rows.columns == schema.EVALUATION.names
    assert rows.height == PROBLEMS * (SAMPLES + 1)
    assert rows["row_id"].n_unique() == rows.height
    assert (rows["response_ids"].list.len() == rows["logprobs"].list.len()).all()
    assert rows.filter(pl.col("sample") == evaluate.GREEDY)["temperature"].to_list() == [0.0] * PROBLEMS
    problems = pl.read_parquet(done / "tables" / "problems.parquet")
    assert rows.join(problems, on="problem_id", how="anti").is_empty()
    summary = store.require(done, "evaluation").facts["summary"]
    sampled = rows.filter(pl.col("sample") >= 0)
    assert summary["pass@1"] == pytest.approx(sampled["reward"].mean())
    solved = sampled.group_by("problem_id").agg(pl.col("reward").max())["reward"]
    assert summary[f"pass@{SAMPLES}"] == pytest.approx(solved.mean())
    lo, hi = summary["ci"]["pass@1"]
    assert 0 <= lo <= summary["pass@1"] <= hi <= 1
    assert evaluate.metrics_of(done).num_rows == len(pl.read_parquet(done / "tables" / "metrics.parquet"))


def test_rows_that_a_benchmark_cannot_use_are_kept_and_said(
    config: configuration.Pipeline, toy: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = toy["test"].read_text().splitlines()[:2]
    data, out = tmp_path / "some.jsonl", tmp_path / "evaluation"
    data.write_text("\n".join([lines[0], "{oops", '{"problem": "1 2 3 4 -> 10", "gold": ""}', lines[1]]) + "\n")
    entry = configuration.BenchmarkConfig(name="some", path=str(data))
    evaluation = config.evaluate.model_copy(update={"benchmarks": [entry], "samples": 1, "greedy": False})
    mine = config.model_copy(update={"evaluate": evaluation})
    with Context(mine) as context, caplog.at_level("WARNING"):
        manifest = evaluate.run(mine, evaluate.Inputs(toy["policy"], 0, "some"), out, context)
    assert manifest.rows == 2
    counts = {"rows": 4, "kept": 2, "quarantined": {"no_gold": 1, "unreadable": 1}}
    assert manifest.facts["benchmark"] == counts
    assert "benchmark some: 2 of 4 rows left out: 1 no_gold, 1 unreadable" in caplog.text
    tables = out / "tables"
    assert pl.read_parquet(tables / "quarantine.parquet")["row"].to_list() == [1, 2]
    report = json.loads((tables / "report.json").read_text())
    assert {k: report[k] for k in counts} == counts


def test_an_interrupted_evaluation_goes_on_where_it_was(
    done: Path, config: configuration.Pipeline, toy: dict[str, Path], tmp_path: Path
) -> None:
    inputs, out = evaluate.Inputs(toy["policy"], 0, "held-out"), tmp_path / "held-out"
    with Context(config) as context:
        grade = context.grade

        def stop_after_one(items: list[tuple[str, str, str]]) -> list:
            context.stop_requested = True
            return grade(items)

        context.grade = stop_after_one  # type: ignore[method-assign, assignment]
        with pytest.raises(Interrupted):
            evaluate.run(config, inputs, out, context)
        parts = sorted(out.with_name("held-out.partial").glob("part-*"))
        assert 0 < len(parts) < 4
        times = [p.stat().st_mtime_ns for p in parts]
        context.stop_requested = False
        context.grade = grade  # type: ignore[method-assign]
        evaluate.run(config, inputs, out, context)
    assert [(out / p.name).stat().st_mtime_ns for p in parts] == times
    columns = [c for c in schema.EVALUATION.names if c != "wall_ms"]
    assert pl.read_parquet(out / "*.parquet", columns=columns).equals(
        pl.read_parquet(done / "*.parquet", columns=columns)
    )


def test_another_step_draws_the_same_numbers(
    done: Path, config: configuration.Pipeline, toy: dict[str, Path], context: Context, tmp_path: Path
) -> None:
    evaluate.run(config, evaluate.Inputs(toy["policy"], 7, "held-out"), tmp_path / "held-out", context)
    now, before = (pl.read_parquet(p / "*.parquet") for p in (tmp_path / "held-out", done))
    assert now["policy_step"].unique().to_list() == [7]
    assert now["response_ids"].to_list() == before["response_ids"].to_list()


def test_identity_names_what_matters(config: configuration.Pipeline, toy: dict[str, Path]) -> None:
    inputs = evaluate.Inputs(toy["policy"], 0, "held-out")
    changed = configuration.parse(
        {
            **config.model_dump(exclude_none=True),
            "evaluate": {**config.evaluate.model_dump(exclude_none=True), "samples": 5},
        }
    )
    workers = config.model_copy(update={"score": config.score.model_copy(update={"workers": 1})})
    assert evaluate.identity(workers, inputs).key == evaluate.identity(config, inputs).key
    assert evaluate.identity(changed, inputs).differences(evaluate.identity(config, inputs)) == [
        "evaluate.samples 4 -> 5"
    ]


def test_mixed_inference(
    done: Path, config: configuration.Pipeline, toy: dict[str, Path], context: Context, tmp_path: Path
) -> None:
    """One policy as its own snapshot: every cell is its distribution, and a seed is the chain's own beginning."""
    inputs = evaluate.MixedInputs(toy["policy"], 4, "held-out", {0: toy["policy"], 2: toy["policy"]}, (3, 6))
    manifest = evaluate.run_mixed(config, inputs, tmp_path / "mixed", context)
    rows = pl.read_parquet(tmp_path / "mixed" / "*.parquet")
    assert rows.columns == schema.MIXED.names
    assert rows.height == PROBLEMS * SAMPLES * (1 + 2 * 3)
    alone = rows.filter(pl.col("seed_length") == 0).sort("problem_id", "sample")
    plain = pl.read_parquet(done / "*.parquet").filter(pl.col("sample") >= 0).sort("problem_id", "sample")
    assert alone["response_ids"].to_list() == plain["response_ids"].to_list()
    keys = ["problem_id", "sample", "snapshot_step"]
    chains = rows.filter(pl.col("seed_length") == -1).select(*keys, chain="response_ids", chain_logprobs="logprobs")
    for row in rows.filter(pl.col("seed_length") > 0).join(chains, on=keys).to_dicts():
        length = min(row["seed_length"], len(row["chain"]))
        assert row["off_stop"] == length
        assert row["response_ids"][:length] == row["chain"][:length]
        assert row["logprobs"][:length] == row["chain_logprobs"][:length]
        assert row["lag"] == 4 - row["snapshot_step"]
        assert len(row["response_ids"]) <= 24
    cells = {(c["snapshot_step"], c["seed_length"]) for c in manifest.facts["cells"]}
    assert cells == {(None, 0), *((s, n) for s in (0, 2, None) for n in (-1, 3, 6))}
    with pytest.raises(UserError, match="seed length 24"):
        evaluate.run_mixed(
            config,
            evaluate.MixedInputs(toy["policy"], 4, "held-out", {0: toy["policy"]}, (24,)),
            tmp_path / "x",
            context,
        )
