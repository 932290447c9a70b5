"""A fork shares its parent's past and nothing else; unchanged it repeats its parent's future."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from equal import Reference, artifacts
from forked import KILLED, Forked
from toy_loop import loop_config

from tseeds import pipeline
from tseeds.artifacts.rundir import RunDir
from tseeds.errors import Stale, UserError
from tseeds.fork import fork
from tseeds.verify import check
from tseeds_cli.fork import fork as command


def state(run: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file of a run."""
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in run.rglob("*") if p.is_file()}


def test_a_fork_without_change_goes_on_like_its_parent(
    forked: Forked, uninterrupted: Path, reference: Reference, tmp_path: Path
) -> None:
    before = state(uninterrupted)
    done = forked.tseeds("fork", uninterrupted, "--at", 1, "--run", tmp_path / "new")
    assert done["status"] == 0, done["error"]
    new = RunDir(tmp_path / "new")
    assert new.finished() == 1
    assert check(new.root)[1] == []
    shared = new.root / "iterations/000001/update/policy/model.safetensors"
    assert shared.stat().st_ino == (uninterrupted / shared.relative_to(new.root)).stat().st_ino
    assert forked.tseeds("run", new.root)["status"] == 0
    assert reference.differences(new.root, finished=True) == []
    record = json.loads(new.record.read_text())
    assert record["parent"]["at"] == 1
    assert record["parent"]["run"] == str(uninterrupted)
    shutil.rmtree(new.root)
    assert state(uninterrupted) == before


def test_a_fork_with_a_change_differs_from_the_next_iteration_on(
    forked: Forked, uninterrupted: Path, reference: Reference, tmp_path: Path
) -> None:
    new = fork(RunDir(uninterrupted), 1, tmp_path / "new", ["update.prefix_weight=mask"])
    assert forked.tseeds("run", new.root)["status"] == 0
    shared = [n for n in artifacts(new.root) if n.startswith("iterations/000001") or n == "problems"]
    assert reference.differences(new.root, finished=False, only=[*shared, "iterations/000002/rollout"]) == []
    assert reference.differences(new.root, finished=False, only=["iterations/000002/update"])
    history = pipeline.open_history(new)
    assert [history.at(i).update.prefix_weight for i in (1, 2)] == ["clip", "mask"]
    status = forked.tseeds("status", new.root)["error"]
    assert "stale" not in status
    assert f"forked from {uninterrupted} at iteration 1" in status
    again = fork(new, 2, tmp_path / "again")
    assert json.loads(again.record.read_text())["parent"]["parent"]["at"] == 1


def test_what_is_shared_is_said(uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for at, shared in enumerate(("the start", "iteration 1", "iterations 1 to 2")):
        command(uninterrupted, at, tmp_path / str(at))
        assert f": {shared} shared with {uninterrupted};" in capsys.readouterr().out


def test_a_fork_refuses_what_it_cannot_share(uninterrupted: Path, forked: Forked, toy: Path, tmp_path: Path) -> None:
    parent = RunDir(uninterrupted)
    with pytest.raises(UserError, match=r"has finished 2, so 0 \(its start\) to 2 can be shared"):
        fork(parent, 3, tmp_path / "new")
    with pytest.raises(Stale, match=r"problems\.limit 8 -> 4.*a fork shares iteration 1 unchanged"):
        fork(parent, 1, tmp_path / "new", ["problems.limit=4"])
    with pytest.raises(UserError, match="exists already"):
        fork(parent, 1, tmp_path)
    assert list(tmp_path.iterdir()) == []
    pruned = tmp_path / "pruned"
    config = loop_config(toy, run={"iterations": 2}, snapshot={"keep_states": 1, "keep_last": 1}, evaluate={"every": 0})
    assert forked.run(config, pruned)["status"] == 0
    with pytest.raises(
        UserError, match=r"retention removed weights and trainer state of iteration 1.*still has those of 2"
    ):
        fork(RunDir(pruned), 1, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_fork_appears_whole_or_not_at_all(forked: Forked, uninterrupted: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    died = forked.tseeds("fork", uninterrupted, "--at", 1, "--run", new, fault="run:record:1")
    assert died["status"] == KILLED
    assert not new.exists()
    assert forked.tseeds("fork", uninterrupted, "--at", 1, "--run", new)["status"] == 0
    assert check(new)[1] == []
    assert not list(tmp_path.glob(".new.forking-*"))


def test_a_fork_copies_where_the_file_system_cannot_link(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    new = fork(RunDir(uninterrupted), 1, tmp_path / "new")
    assert check(new.root)[1] == []
    assert (new.root / "problems/manifest.json").stat().st_nlink == 1
