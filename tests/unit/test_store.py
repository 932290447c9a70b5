"""Commits are atomic, resumable and explain themselves."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from tseeds.artifacts import store
from tseeds.artifacts.lock import locked, owner
from tseeds.artifacts.parts import Parts
from tseeds.artifacts.store import Identity
from tseeds.errors import Interrupted, Locked, StageFailed, UserError

WHO = Identity("rollout", 1, {"rollout.temperature": 1.0}, {"policy": "aa"})


def table(*values: int) -> pa.Table:
    return pa.table({"row_id": [str(v) for v in values], "wall_ms": [float(v) for v in values]})


def test_nothing_exists_for_readers_before_the_commit(tmp_path: Path) -> None:
    out = tmp_path / "a"
    with store.writing(out, WHO) as writer:
        writer.part(0, table(1, 2))
        assert store.read_manifest(out) is None
        assert not list(tmp_path.glob("a/*.parquet"))
    manifest = store.read_manifest(out)
    assert manifest is not None
    assert manifest.rows == 2
    assert store.read_table(manifest)["row_id"].to_pylist() == ["1", "2"]
    assert not list(store.damages(manifest))


def test_an_interrupted_artifact_keeps_its_parts_and_another_key_does_not(tmp_path: Path) -> None:
    out = tmp_path / "a"
    with pytest.raises(RuntimeError), store.writing(out, WHO) as writer:
        writer.part(0, table(1))
        raise RuntimeError
    with pytest.raises(RuntimeError), store.writing(out, WHO) as writer:
        assert writer.parts == {0}
        raise RuntimeError
    with store.writing(out, Identity("rollout", 1, {"rollout.temperature": 0.5}, {"policy": "aa"})) as writer:
        assert writer.parts == frozenset()


def test_a_damaged_part_of_an_interrupted_artifact_is_made_again(tmp_path: Path) -> None:
    out = tmp_path / "a"
    with pytest.raises(RuntimeError), store.writing(out, WHO) as writer:
        writer.part(0, table(1))
        writer.part(1, table(2))
        raise RuntimeError
    (tmp_path / "a.partial" / "part-00000.parquet").write_bytes(b"PAR1")
    with store.writing(out, WHO) as writer:
        assert writer.parts == {1}
        writer.part(0, table(1))
    assert store.read_table(store.require(out, "rows"))["row_id"].to_pylist() == ["1", "2"]


def test_measurements_are_no_part_of_the_digest_but_data_is(tmp_path: Path) -> None:
    digests = []
    for name, ids, ms in (("a", ["1"], [1.0]), ("b", ["1"], [2.0]), ("c", ["2"], [1.0])):
        with store.writing(tmp_path / name, WHO) as writer:
            writer.part(0, pa.table({"row_id": ids, "wall_ms": ms}))
        assert writer.manifest is not None
        digests.append(writer.manifest.digest)
    assert digests[0] == digests[1] != digests[2]


def test_the_key_depends_on_every_value_and_says_what_changed() -> None:
    other = Identity("rollout", 1, {"rollout.temperature": 0.7}, {"policy": "bb"})
    assert WHO.key != other.key
    assert other.differences(WHO) == ["rollout.temperature 1.0 -> 0.7", "input policy changed"]


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_damage_is_found_by_digest_and_named(tmp_path: Path, harm: str) -> None:
    with store.writing(tmp_path / "a", WHO) as writer:
        writer.part(0, table(*range(100)))
    file = tmp_path / "a" / "part-00000.parquet"
    data = bytearray(file.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif harm == "truncate":
        file.write_bytes(data[:-20])
    else:
        file.unlink()
    manifest = store.require(tmp_path / "a", "rows")
    assert len(list(store.damages(manifest))) == 1
    with pytest.raises(UserError, match=r"part-00000\.parquet.*(damaged|missing)"):
        store.read_table(manifest)


def test_a_newer_manifest_is_refused(tmp_path: Path) -> None:
    with store.writing(tmp_path / "a", WHO) as writer:
        writer.part(0, table(1))
    file = tmp_path / "a" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    with pytest.raises(UserError, match="newer tseeds"):
        store.read_manifest(tmp_path / "a")


def test_too_little_space_is_said_before_the_write(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="needs about"):
        store.check_space(tmp_path / "deep" / "out", 10**18, "a policy")


def test_appended_lines_survive_a_torn_one(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    store.append_line(file, {"a": 1})
    with open(file, "ab") as handle:
        handle.write(b'{"a": 2')
    assert store.read_lines(file) == [{"a": 1}]
    store.append_line(file, {"a": 3})
    assert store.read_lines(file) == [{"a": 1}, {"a": 3}]


def test_pruning_is_recorded_and_is_no_damage(tmp_path: Path) -> None:
    with store.writing(tmp_path / "a", WHO) as writer:
        (writer.path("policy") / "w.safetensors").write_bytes(b"12345")
        writer.part(0, table(1))
    assert store.prune(tmp_path / "a", ["policy"], "old") == 5
    assert store.pruned(tmp_path / "a") == ["policy"]
    assert not list(store.damages(store.require(tmp_path / "a", "rows")))


def test_a_live_owner_is_named_and_a_dead_one_is_reaped(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    with locked(path, "run x"):
        who = owner(path)
        assert who is not None
        assert who["pid"] == os.getpid()
        with pytest.raises(Locked, match=f"process {os.getpid()}"), locked(path, "run x"):
            pass
    assert not path.exists()
    path.write_text(json.dumps({**who, "pid": 2**22 + 1}))
    assert owner(path) is None
    with locked(path, "run x"):
        assert owner(path) is not None
    path.write_text(json.dumps({**who, "host": "elsewhere"}))
    with pytest.raises(Locked, match="elsewhere"), locked(path, "run x"):
        pass


def test_only_one_of_many_starters_gets_a_dead_owners_lock(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.write_text("{}")
    won: list[int] = []
    lost: list[int] = []
    everyone, all_tried = threading.Barrier(8), threading.Event()

    def start() -> None:
        everyone.wait()
        try:
            with locked(path, "run"):
                won.append(1)
                assert all_tried.wait(20)
        except Locked:
            lost.append(1)
            if len(lost) == 7:
                all_tried.set()

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lost) == 7
    assert len(won) == 1


def test_parts_in_any_finishing_order_are_equal_files(tmp_path: Path) -> None:
    digests = []
    for order in (range(10), reversed(range(10))):
        out = tmp_path / f"o{len(digests)}"
        with (
            store.writing(out, WHO) as writer,
            Parts(writer, rows=10, part_rows=4, build=lambda a, b: table(*range(a, b))) as parts,
        ):
            assert parts.todo == list(range(10))
            for row in order:
                parts.finish(row)
        assert writer.manifest is not None
        digests.append([f.sha256 for f in writer.manifest.files])
    assert digests[0] == digests[1]
    assert len(digests[0]) == 3


@pytest.mark.parametrize("size", [2, 3, 4, 8, 100])
def test_parts_of_another_size_are_made_again_and_no_row_twice(tmp_path: Path, size: int) -> None:
    with (
        pytest.raises(Interrupted),
        store.writing(tmp_path / "a", WHO) as writer,
        Parts(writer, rows=10, part_rows=4, build=lambda a, b: table(*range(a, b))) as parts,
    ):
        for row in range(8):
            parts.finish(row)
        raise Interrupted("stop")
    with (
        store.writing(tmp_path / "a", WHO) as writer,
        Parts(writer, rows=10, part_rows=size, build=lambda a, b: table(*range(a, b))) as parts,
    ):
        assert parts.todo == (list(range(8, 10)) if size == 4 else list(range(10)))
        for row in parts.todo:
            parts.finish(row)
    manifest = store.require(tmp_path / "a", "rows")
    assert store.read_table(manifest)["row_id"].to_pylist() == [str(r) for r in range(10)]
    assert manifest.rows == 10


def test_a_stop_ends_after_the_current_part_and_keeps_it(tmp_path: Path) -> None:
    stop = False
    with (
        pytest.raises(Interrupted),
        store.writing(tmp_path / "a", WHO) as writer,
        Parts(
            writer, rows=8, part_rows=4, build=lambda a, b: table(*range(a, b)), stop_requested=lambda: stop
        ) as parts,
    ):
        parts.finish(0)
        stop = True
        for row in range(1, 8):
            parts.finish(row)
    with store.writing(tmp_path / "a", WHO) as writer:
        assert writer.parts == {0}
        writer.part(1, table(4, 5, 6, 7))


def test_an_error_of_the_background_writer_is_raised(tmp_path: Path) -> None:
    def build(start: int, stop: int) -> pa.Table:
        raise ZeroDivisionError

    with (
        pytest.raises(ZeroDivisionError),
        store.writing(tmp_path / "a", WHO) as writer,
        Parts(writer, rows=2, part_rows=2, build=build) as parts,
    ):
        parts.finish(0)
        parts.finish(1)
