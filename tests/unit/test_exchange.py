"""Trajectories out to other systems' layouts and back, without loss; what cannot come back is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import polars as pl
import pytest

from tests.synthetic import make_run
from tseeds import exchange
from tseeds.artifacts import schema
from tseeds.artifacts.rundir import RunDir
from tseeds.errors import UserError
from tseeds_cli.export import export


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(
        tmp_path_factory.mktemp("exchange") / "run", iterations=1, problems=6, per_iteration=6, group_size=4
    )


def _exported(run: RunDir, layout: exchange.Layout):
    return exchange.export_rows(run.stage(1, "rollout"), layout, scores=run.stage(1, "score"), problems=run.problems)


@pytest.mark.parametrize("layout", ["trl", "verl"])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_round_trip_loses_nothing(run: RunDir, tmp_path: Path, layout: exchange.Layout, ending: str) -> None:
    file = tmp_path / f"rows.{ending}"
    exchange.write_file(_exported(run, layout), file)
    rollouts, scores = exchange.import_rows(file, tmp_path / "back")
    assert scores is not None
    columns = schema.ROLLOUT.names
    before, after = (pl.read_parquet(p / "*.parquet") for p in (run.stage(1, "rollout"), rollouts.path))
    assert before.select(columns).equals(after.select(columns))
    for column in ("row_id", "reward", "verdict", "extracted", "canonical", "grader", "detail"):
        here, there = (pl.read_parquet(p / "*.parquet")[column] for p in (run.stage(1, "score"), scores.path))
        assert here.equals(there)
    assert exchange.import_rows(file, tmp_path / "back")[0].digest == rollouts.digest  # a second time: nothing to do


def test_columns_are_the_other_system_s(run: RunDir, tmp_path: Path) -> None:
    exchange.write_file(_exported(run, "verl"), tmp_path / "v.jsonl")
    row = json.loads((tmp_path / "v.jsonl").read_text().splitlines()[0])
    assert {"input", "output", "gts", "score", "step"} <= set(row)
    gold = pl.read_parquet(run.problems / "*.parquet").filter(pl.col("problem_id") == row["problem_id"])["gold"][0]
    assert row["gts"] == gold
    assert {"prompt", "completion", "reward", "completion_ids"} <= set(_exported(run, "trl").column_names)


def test_a_bare_file_of_another_system_is_completed_without_invention(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": "a",
            "completion": "b",
            "prompt_ids": [1],
            "completion_ids": [2, 3],
            "logprobs": [-1.0, -2.0],
            "reward": 1.0,
        },
        {"prompt": "a", "completion": "c", "prompt_ids": [1], "completion_ids": [4], "logprobs": [-1.0], "reward": 0.0},
        {"prompt": "d", "completion": "c", "prompt_ids": [9], "completion_ids": [4], "logprobs": [-1.0], "reward": 0.5},
    ]
    file = tmp_path / "bare.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    exchange.import_rows(file, tmp_path / "out")
    back = pl.read_parquet(tmp_path / "out" / "rollout" / "*.parquet")
    assert back["group_id"].to_list() == ["prompt-00000", "prompt-00000", "prompt-00001"]
    assert back["sample"].to_list() == [0, 1, 0]
    assert back["off_stop"].to_list() == [0, 0, 0]
    grades = pl.read_parquet(tmp_path / "out" / "score" / "*.parquet")
    assert grades["reward"].to_list() == [1.0, 0.0, 0.5]
    assert grades["verdict"].to_list() == ["correct", "wrong", "wrong"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a", "completion": "b", "reward": 1}\n', "no column prompt_ids"),
        ('{"input": "a", "output": "b", "prompt_ids": [1], "logprobs": [0]}\n', "no column response_ids"),
        (
            '{"prompt": "a", "completion": "b", "prompt_ids": [1], "completion_ids": [1, 2], "logprobs": [-1]}\n',
            "row 1: 2 response ids but 1 logprobs",
        ),
        ('{"question": "a"}\n', "neither TRL's columns"),
        ("{oops\n", "line 1: not JSON"),
        ("[1]\n", "line 1: not an object"),
        ("\n", "holds no rows"),
    ],
)
def test_what_cannot_be_imported_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=said):
        exchange.import_rows(file, tmp_path / "out")
    assert not (tmp_path / "out" / "rollout").exists()


GOOD = {
    "prompt": "a",
    "completion": "b",
    "prompt_ids": [1],
    "completion_ids": [2, 3],
    "logprobs": [-1.0, 0],
    "reward": 1,
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": "good"}, "reward 'good' is not a finite number"),
        ({"reward": True}, "reward True is not a finite number"),
        ({"reward": float("nan")}, "reward nan is not a finite number"),
        ({"reward": 1e300}, "reward 1e.300 is not a finite number"),
        ({"reward": 2**40}, "is not a finite number"),
        ({"reward": None}, "reward is missing, but other rows have one"),
        ({"completion_ids": 5}, "completion_ids 5 is not a list of whole numbers from 0"),
        ({"completion_ids": [3, None]}, r"completion_ids \[3, None\] is not a list of whole numbers from 0"),
        ({"completion_ids": [3, 0.5]}, "is not a list of whole numbers"),
        ({"completion_ids": [3, -1]}, "is not a list of whole numbers"),
        ({"completion_ids": [3, 2**31]}, "is not a list of whole numbers"),
        ({"completion_ids": None}, "completion_ids is missing"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": "a"}, "prompt_ids 'a' is not a list of whole numbers"),
        ({"logprobs": [-1.0, 0.5]}, "is not a list of finite log-probs, at most 0"),
        ({"logprobs": [-1.0, float("-inf")]}, "is not a list of finite log-probs"),
        ({"logprobs": [-1.0, None]}, "is not a list of finite log-probs"),
        ({"step": "last"}, "step 'last' is not a whole number"),
        ({"completion": ["b"]}, "completion .* is not text"),
        ({"completion": "\ud800"}, "completion .* is not text"),
        ({"row_id": [1]}, "row_id .* is not text"),
        ({"verdict": "good"}, "verdict 'good' is not one of correct, wrong"),
        ({"off_start": -1}, "off_start, off_stop do not lie within the response"),
    ],
)
def test_every_row_is_checked_before_anything_is_written(tmp_path: Path, change: dict, said: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in (GOOD, GOOD | change)))
    with pytest.raises(UserError, match=rf"rows.jsonl: row 2: .*{said}"):
        exchange.import_rows(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_column_that_only_later_rows_have_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(GOOD | more) + "\n" for more in ({}, {"problem_id": "p7", "reward": 0})))
    assert exchange.import_rows(file, tmp_path / "out")[1] is not None
    assert pl.read_parquet(tmp_path / "out/score/*.parquet")["problem_id"].to_list() == ["prompt-00000", "p7"]


def test_why_a_grade_failed_goes_along(tmp_path: Path) -> None:
    failed = GOOD | {"reward": 0, "verdict": "timeout", "detail": "more than 2 s"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (GOOD, failed)))
    rollouts, scores = exchange.import_rows(tmp_path / "rows.jsonl", tmp_path / "out")
    assert scores is not None
    back = exchange.export_rows(rollouts.path, "trl", scores=scores.path)
    assert back["detail"].to_pylist() == [None, "more than 2 s"]
    assert back["verdict"].to_pylist() == ["correct", "timeout"]


def test_rewards_that_are_all_null_are_none(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(GOOD | {"reward": None}) + "\n")
    assert exchange.import_rows(file, tmp_path / "out")[1] is None
    assert not (tmp_path / "out" / "score").exists()
    file.write_text(json.dumps(GOOD) + "\n")
    with pytest.raises(UserError, match="something else is committed here"):
        exchange.import_rows(file, tmp_path / "out")


def test_a_policy_is_copied_without_state_or_probe(tmp_path: Path) -> None:
    source = tmp_path / "policy"
    shutil.copytree(_toy_policy(), source)
    (source / "probe.json").write_text("{}")
    (source / "optimizer.pt").write_text("state")
    digest = exchange.export_policy(source, tmp_path / "model")
    names = {p.name for p in (tmp_path / "model").iterdir()}
    assert {"config.json", "tokenizer.json"} <= names
    assert not names & {"probe.json", "optimizer.pt"}
    from tseeds.artifacts.policy import policy_digest

    assert digest == policy_digest(source)
    with pytest.raises(UserError, match="exists already"):
        exchange.export_policy(source, tmp_path / "model")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("iterations/000001/score", "a score artifact, where rollouts are needed: it has no column"),
        ("problems", "a problems artifact, where rollouts are needed: it has no column"),
        ("evaluations/000000/held-out", "a evaluate artifact, where rollouts are needed: it has no column"),
        ("iterations", "not a run and not a rollout artifact"),
        ("pipeline.toml", "not a run and not a rollout artifact"),
        ("nowhere", "not a run and not a rollout artifact"),
    ],
)
def test_only_rollouts_are_exported(run: RunDir, tmp_path: Path, what: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        export(run.root / what, tmp_path / "rows.jsonl")
    assert not any(tmp_path.iterdir())


def test_an_export_makes_its_folder_or_says_why_not(run: RunDir, tmp_path: Path) -> None:
    export(run.stage(1, "rollout"), tmp_path / "a" / "b" / "rows.jsonl")
    assert (tmp_path / "a" / "b" / "rows.jsonl").is_file()
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "rows.jsonl", Path("/proc/rows.jsonl"), tmp_path / ("x" * 300 + ".jsonl")):
        with pytest.raises(UserError, match=r"cannot write here .*choose another place"):
            export(run.stage(1, "rollout"), out)
        with pytest.raises(UserError, match=r"cannot write here .*choose another place"):
            export(_toy_policy(), out, policy=True)


def test_a_base_is_for_adapters(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no LoRA adapter; leave --base out"):
        export(_toy_policy(), tmp_path / "model", policy=True, base=_toy_policy())
    with pytest.raises(UserError, match="--base goes with --policy"):
        export(tmp_path, tmp_path / "rows.jsonl", base=_toy_policy())
    with pytest.raises(UserError, match="--iteration goes with a run"):
        export(_toy_policy(), tmp_path / "model", policy=True, iteration=2)
    assert not any(tmp_path.iterdir())


def _toy_policy() -> Path:
    from tseeds.toy import SHIPPED

    return next(SHIPPED.rglob("config.json")).parent
