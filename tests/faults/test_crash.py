"""Kill -9 at every step of a commit in every stage: nothing is lost, doubled or different afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from equal import Reference
from forked import KILLED, Forked
from toy_loop import loop_config

from tseeds.artifacts import store

_COMMIT = ("before-manifest", "before-rename", "after-rename")
_PARTS = ("begin", "mid-part", "before-fsync", "after-part", *_COMMIT)
MATRIX = {
    "snapshots/step-000000": ("snapshot", ("begin", "mid-file", *_COMMIT)),
    "problems": ("problems", _PARTS),
    "iterations/000002/seed": ("seed", _PARTS),
    "iterations/000002/rollout": ("rollout", _PARTS),
    "iterations/000002/score": ("score", _PARTS),
    "iterations/000002/update": ("update", ("begin", "mid-part", "before-fsync", "mid-file", *_COMMIT)),
    "snapshots/step-000002": ("snapshot", ("begin", *_COMMIT)),
    "evaluations/000002/countdown": ("evaluate", (*_PARTS[:4], "mid-file", *_COMMIT)),
}


def test_the_matrix_covers_every_stage_and_every_point() -> None:
    assert {stage for stage, _ in MATRIX.values()} == {
        "snapshot", "problems", "seed", "rollout", "score", "update", "evaluate",
    }  # fmt: skip
    assert {point for _, points in MATRIX.values() for point in points} == set(store.FAULT_POINTS)
    assert sum(len(points) for _, points in MATRIX.values()) >= 40


@pytest.mark.parametrize("artifact", MATRIX)
def test_a_kill_at_every_point_of_a_stage_changes_nothing(
    artifact: str, toy: Path, forked: Forked, begun: Callable[[str], Path], reference: Reference
) -> None:
    run = begun(artifact)
    stage, points = MATRIX[artifact]
    for point in points:
        died = forked.run(loop_config(toy), run, fault=f"{stage}:{point}:1")
        assert died["status"] == KILLED, f"{stage}:{point} was never passed: {died}"
        assert reference.differences(run, finished=False) == []
        assert (store.read_manifest(run / artifact) is not None) == (point == "after-rename")
    done = forked.run(loop_config(toy), run)
    assert done["status"] == 0, done["error"]
    assert reference.differences(run, finished=True) == []


def test_parts_survive_until_the_artifact_is_committed(
    toy: Path, forked: Forked, begun: Callable[[str], Path], reference: Reference
) -> None:
    run = begun("iterations/000002/rollout")
    partial = run / "iterations/000002/rollout.partial"
    forked.run(loop_config(toy), run, fault="rollout:after-part:3")
    kept = {p.name: p.stat().st_ino for p in partial.glob("part-*.parquet")}
    assert len(kept) == 3  # of four, in the order in which their rows finished
    forked.run(loop_config(toy), run, fault="rollout:before-rename:1")
    assert {p.name: p.stat().st_ino for p in partial.glob("part-*.parquet")}.items() >= kept.items()
    forked.run(loop_config(toy), run, fault="rollout:after-rename:1")
    committed = {p.name: p.stat().st_ino for p in (run / "iterations/000002/rollout").glob("part-*.parquet")}
    assert committed.items() >= kept.items()
    assert reference.differences(run, finished=False) == []


def test_the_last_bits_do_not_depend_on_which_parts_were_left(
    toy: Path, forked: Forked, begun: Callable[[str], Path], reference: Reference
) -> None:
    run = begun("iterations/000002/rollout")
    for passage in (1, 2):  # of four parts: one is there, then three
        assert forked.run(loop_config(toy), run, fault=f"rollout:after-part:{passage}")["status"] == KILLED
    assert forked.run(loop_config(toy), run, fault="rollout:after-rename:1")["status"] == KILLED
    assert reference.differences(run, finished=False) == []


def test_a_kill_between_the_last_stage_and_its_line_of_metrics(
    toy: Path, forked: Forked, begun: Callable[[str], Path], reference: Reference
) -> None:
    run = begun("evaluations/000002/countdown")
    assert forked.run(loop_config(toy), run, fault="evaluate:begin:1")["status"] == KILLED
    assert forked.run(loop_config(toy), run, fault="run:metrics:1")["status"] == KILLED
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"iteration": 2, "rewa')  # torn in the middle of the write
    assert forked.run(loop_config(toy), run)["status"] == 0
    assert reference.differences(run, finished=True) == []


def test_a_kill_in_the_middle_of_retention(toy: Path, forked: Forked, tmp_path: Path) -> None:
    config = loop_config(toy, snapshot={"keep_states": 1, "keep_last": 1}, evaluate={"every": 0})
    assert forked.run(config, tmp_path / "whole")["status"] == 0
    whole = Reference(tmp_path / "whole")
    assert whole.data["iterations/000001/update"]["pruned"] == ["policy", "state"]
    run = tmp_path / "run"
    for passage in (1, 1, 2):
        assert forked.run(config, run, fault=f"retention:recorded:{passage}")["status"] in (KILLED, 0)
        assert whole.differences(run, finished=False) == []
    assert forked.run(config, run)["status"] == 0
    assert whole.differences(run, finished=True) == []


def test_a_resumed_run_outlives_the_policy_that_its_engine_began_with(
    toy: Path, forked: Forked, tmp_path: Path
) -> None:
    """Retention removes that policy two iterations later, while the engine still compares every new one with it."""
    config = loop_config(toy, snapshot={"keep_states": 1, "keep_last": 1}, evaluate={"every": 0}, seed={"share": 0.0})
    assert forked.run(config, tmp_path, fault="update:begin:2")["status"] == KILLED
    done = forked.run({**config, "run": {"iterations": 5}}, tmp_path)
    assert done["status"] == 0, done["error"]
