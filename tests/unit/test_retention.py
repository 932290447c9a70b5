"""Retention keeps what the next iteration may need, whatever the rules and however they change; the rest goes and is said."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tseeds import config as configuration
from tseeds import retention
from tseeds.artifacts import store
from tseeds.artifacts.rundir import RunDir
from tseeds.artifacts.store import Identity
from tseeds.config import Pipeline
from tseeds.errors import UserError
from tseeds.history import History
from tseeds.schedule import pool_steps

SIZE = 1000  # bytes of a snapshot


def pipeline(**snapshot: Any) -> Pipeline:
    return configuration.parse({"policy": {"path": "p"}, "problems": {"path": "d"}, "snapshot": snapshot})


def commit(out: Path, stage: str, files: dict[str, bytes]) -> None:
    with store.writing(out, Identity(stage, 1, {"out": out.name}, {})) as writer:
        for name, data in files.items():
            (writer.path(str(Path(name).parent)) / Path(name).name).write_bytes(data)


def finish(run: RunDir, config: Pipeline, iteration: int) -> None:
    """What an iteration leaves on disk, in miniature."""
    files = {"policy/w.safetensors": b"x" * SIZE, "state/o.safetensors": b"y" * 2 * SIZE, "rows.parquet": b"z"}
    commit(run.stage(iteration, "update"), "update", files)
    if iteration % config.snapshot.every == 0:
        commit(run.snapshot(iteration), "snapshot", {"w.safetensors": b"x" * SIZE})


def kept(run: RunDir, step: int) -> bool:
    return (run.snapshot(step) / "w.safetensors").is_file()


rules = st.fixed_dictionaries(
    {
        "every": st.integers(1, 3),
        "keep_last": st.integers(0, 3),
        "keep_every": st.sampled_from([0, 2, 4]),
        "disk_budget_gb": st.sampled_from([0.0, 3 * SIZE / 1e9]),
        "keep_states": st.integers(1, 3),
        "keep_states_every": st.sampled_from([0, 3]),
    }
)


@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(before=rules, after=rules, at=st.integers(1, 8))
def test_what_the_next_iteration_needs_is_there_and_nothing_superfluous(
    before: dict[str, Any], after: dict[str, Any], at: int
) -> None:
    old, new = pipeline(**before), pipeline(**after)
    changes = [
        {"iteration": at, "key": f"snapshot.{k}", "old": before[k], "new": after[k]}
        for k in before
        if before[k] != after[k]
    ]
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        commit(run.snapshot(0), "snapshot", {"w.safetensors": b"x" * SIZE})
        for i in range(1, 9):
            # a run knows only the changes that were made so far
            history = History(new, changes) if i >= at else History(old)
            if i == at and i > 1:
                retention.collect(history, run, i - 1)  # values change between processes; each begins like this
            for step in history.pool(i, snapshot_bytes=retention.snapshot_bytes(run)):
                assert kept(run, step), f"iteration {i} may draw the snapshot of step {step}"
            assert i == 1 or (run.stage(i - 1, "update") / "state").is_dir()
            finish(run, history.at(i), i)
            retention.collect(history, run, i, newest=True)
            assert list(retention.removals(history, run, i)) == []  # newest misses nothing
            assert kept(run, 0)
            config = history.at(i + 1).snapshot
            for step in range(1, i + 1):
                there = (run.stage(step, "update") / "policy").is_dir()
                wanted = step > i - config.keep_states or bool(
                    config.keep_states_every and step % config.keep_states_every == 0
                )
                assert there or not wanted or history.at(step).snapshot != config
        for manifest in run.root.rglob("manifest.json"):
            assert list(store.damages(store.require(manifest.parent, "x"))) == []


@settings(max_examples=200, deadline=None)
@given(rule=rules, iteration=st.integers(1, 60))
def test_the_pool_of_a_run_without_changes_is_the_rule_itself(rule: dict[str, Any], iteration: int) -> None:
    config = pipeline(**rule)
    assert History(config).pool(iteration, snapshot_bytes=SIZE) == pool_steps(
        config.snapshot, iteration - 1, snapshot_bytes=SIZE
    )


def test_a_snapshot_that_left_the_pool_never_comes_back() -> None:
    changes = [{"iteration": 7, "key": "snapshot.keep_last", "old": 1, "new": 9}]
    history = History(pipeline(every=1, keep_last=9), changes)
    assert history.pool(6) == [0, 5]
    assert history.pool(7) == [0, 6]
    assert history.pool(9) == [0, 6, 7, 8]


def test_gc_says_what_goes_why_and_how_much(tmp_path: Path) -> None:
    history = History(pipeline(every=2, keep_last=1, keep_states=1))
    run = RunDir(tmp_path)
    commit(run.snapshot(0), "snapshot", {"w.safetensors": b"x" * SIZE})
    for i in range(1, 5):
        finish(run, history.at(i), i)
    found = list(retention.removals(history, run, 4))
    assert [(r.path.relative_to(tmp_path).as_posix(), r.names, r.bytes, r.reason) for r in found] == [
        ("snapshots/step-000002", ("w.safetensors",), SIZE, "left the snapshot pool"),
        *(
            (f"iterations/{i:06d}/update", ("policy", "state"), 3 * SIZE, "older than the newest 1 iterations")
            for i in (1, 2, 3)
        ),
    ]
    assert retention.collect(history, run, 4) == 10 * SIZE
    assert store.read_manifest(run.stage(1, "update")) is not None  # manifests and rows stay
    assert (run.stage(1, "update") / "rows.parquet").is_file()


@pytest.mark.parametrize("names", [["../other"], ["/etc"], "policy", [3], [""]])
def test_a_record_of_removals_cannot_name_anything_outside(tmp_path: Path, names: Any) -> None:
    commit(tmp_path / "a", "update", {"policy/w.safetensors": b"x"})
    (tmp_path / "other").mkdir()
    (tmp_path / "a" / "pruned.json").write_text(json.dumps({"removed": names}))
    with pytest.raises(UserError, match=r"pruned\.json: damaged"):
        store.prune(tmp_path / "a", ["policy"], "old")
    assert (tmp_path / "other").is_dir()


def test_hard_linked_files_free_nothing(tmp_path: Path) -> None:
    commit(tmp_path / "a", "update", {"policy/w.safetensors": b"x" * SIZE})
    (tmp_path / "twin").hardlink_to(tmp_path / "a/policy/w.safetensors")
    assert retention._size(tmp_path / "a", ("policy",)) == 0


def test_committed_files_are_durable_before_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut only what was synced exists: every rename follows the sync of what it names."""
    import os

    synced: set[int] = set()
    real_sync, real_replace, real_rename = os.fsync, os.replace, os.rename

    def sync(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        real_sync(handle)

    def replace(source: Any, target: Any) -> None:
        assert os.stat(source).st_ino in synced, f"{target} is named before it is durable"
        real_replace(source, target)

    def rename(source: Any, target: Any) -> None:
        for path in [Path(source), *Path(source).rglob("*")]:
            if path.name not in (store.KEY, store.PARTS):
                assert path.stat().st_ino in synced, f"{path} is not durable when {target} is named"
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "rename", rename)
    out = tmp_path / "deep" / "er" / "a"
    with store.writing(out, Identity("update", 1, {}, {})) as writer:
        (writer.path("policy") / "w.safetensors").write_bytes(b"x")
        writer.part(0, pa.table({"a": [1]}))
    assert {p.stat().st_ino for p in (tmp_path, tmp_path / "deep", out.parent)} <= synced
