"""Full, read-only and lying disks: said in one line, nothing committed is lost, nothing damaged is ever trained on."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from equal import Reference
from forked import Forked
from toy_loop import loop_config

from tseeds.artifacts import store
from tseeds.artifacts.store import Identity
from tseeds.engines.policies import describe
from tseeds.errors import StageFailed, UserError
from tseeds.verify import check, remakable

WHO = Identity("rollout", 1, {}, {})


def rows(count: int) -> pa.Table:
    """A table that does not compress: 32 bytes a row."""
    return pa.table({"row_id": [os.urandom(16).hex() for _ in range(count)]})


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """tmpfs("size=1m"): a file system of its own; called again it is mounted anew with other options, contents kept."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> Path:
        options = f"remount,{options}" if place.is_mount() else options
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", str(place)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"mounting a tmpfs needs root: {done.stderr.strip()}")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_keeps_the_parts_and_takes_the_rest_later(tmpfs: Callable[[str], Path]) -> None:
    disk = tmpfs("size=300k")
    out = disk / "run" / "rollout"
    with pytest.raises(StageFailed, match=r"disk full.*tseeds gc"), store.writing(out, WHO) as writer:
        for number in range(99):
            writer.part(number, rows(1000))
    assert store.read_manifest(out) is None
    assert not list(disk.rglob(".*.tmp"))  # what did not fit gives its space back
    tmpfs("size=9m")
    with store.writing(out, WHO) as writer:
        kept = writer.parts
        assert kept == frozenset(range(len(kept)))
        assert kept
        for number in range(len(kept), 20):
            writer.part(number, rows(1000))
    assert not list(store.damages(store.require(out, "rows")))


def test_a_library_that_meets_a_full_disk_is_one_line_too(tmpfs: Callable[[str], Path]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    disk = tmpfs("size=200k")
    with pytest.raises(StageFailed, match="disk full"), store.writing(disk / "update", WHO) as writer:
        save_file({"w": np.zeros(500_000, dtype=np.float32)}, writer.path("policy") / "model.safetensors")
    assert store.read_manifest(disk / "update") is None


def test_a_file_size_limit_is_said(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            with store.writing(tmp_path / "a", WHO) as writer:
                writer.part(0, rows(10_000))
        except StageFailed as error:
            status = 0 if "disk full" in str(error) and "\n" not in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_read_only_place_is_said(tmpfs: Callable[[str], Path]) -> None:
    place = tmpfs("size=1m")
    (place / "logs").mkdir()
    tmpfs("ro")
    with pytest.raises(UserError, match=r"cannot write here.*choose another place"), store.writing(place / "a", WHO):
        pass
    with pytest.raises(UserError, match="cannot write here"):
        store.append_line(place / "metrics.jsonl", {"a": 1})


def test_the_loop_says_that_its_disk_is_full_and_goes_on_when_it_is_not(
    tmpfs: Callable[[str], Path], toy: Path, forked: Forked, reference: Reference
) -> None:
    run = tmpfs("size=4m") / "run"
    config = loop_config(toy)
    done = forked.run(config, run)
    assert done["status"] == 1
    assert "needs about" in done["error"]
    assert "Traceback" not in done["error"]
    tmpfs("size=64m")
    assert forked.run(config, run)["status"] == 0
    assert reference.differences(run, finished=True) == []


@pytest.mark.parametrize(
    ("file", "size", "why"),
    [
        ("model.safetensors", 1000, "policy/model.safetensors: damaged safetensors file (header longer than the file)"),
        ("tokenizer.json", 100, "policy/tokenizer.json: not readable JSON (Expecting property name"),
        ("tokenizer.json", None, "policy: its tokenizer does not load: it has no tokenizer.json"),
    ],
)
def test_a_policy_that_does_not_load_is_never_committed(
    file: str, size: int | None, why: str, toy: Path, forked: Forked, tmp_path: Path
) -> None:
    policy = shutil.copytree(toy / "policy", tmp_path / "policy")
    if size is None:
        (policy / file).unlink()
    else:
        os.truncate(policy / file, size)
    config = loop_config(toy, policy={"path": str(policy)}, run={"iterations": 0}, evaluate={"every": 0})
    done = forked.run(config, tmp_path / "run")
    assert done["status"] == 2
    assert f"{tmp_path}/{why}" in done["error"]
    assert "again" in done["error"]
    assert len(done["error"].splitlines()) == 1
    assert not (tmp_path / "run" / "snapshots" / "step-000000").exists()
    shutil.copy(toy / "policy" / file, policy / file)
    assert forked.run(config, tmp_path / "run")["status"] == 0


def test_a_tokenizer_that_is_cut_short_is_named_without_its_configuration_too(toy: Path, tmp_path: Path) -> None:
    policy = shutil.copytree(toy / "policy", tmp_path / "policy")
    (policy / "tokenizer_config.json").unlink()
    os.truncate(policy / "tokenizer.json", 100)
    with pytest.raises(UserError, match=r"policy/tokenizer.json: not a tokenizer \(.*copy the model again"):
        describe(policy)


def flip(file: Path) -> None:
    """One bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    replace(file, bytes(data))


def replace(file: Path, data: bytes) -> None:
    """New content under a new inode: the copies of other runs stay as they are."""
    file.unlink()
    file.write_bytes(data)


HARMS: dict[str, tuple[str, str, Callable[[Path, Path], Any]]] = {
    "truncated part": (
        "iterations/000002/update",
        "iterations/000002/rollout/part-00001.parquet",
        lambda file, _: replace(file, file.read_bytes()[:-9]),
    ),
    "flipped part": (
        "iterations/000002/update",
        "iterations/000002/rollout/part-00001.parquet",
        lambda file, _: flip(file),
    ),
    "flipped scores": (
        "iterations/000002/update",
        "iterations/000002/score/part-00000.parquet",
        lambda file, _: flip(file),
    ),
    "missing part": (
        "iterations/000002/update",
        "iterations/000002/rollout/part-00002.parquet",
        lambda file, _: file.unlink(),
    ),
    "flipped weights": (
        "iterations/000002/rollout",
        "iterations/000001/update/policy/model.safetensors",
        lambda file, _: flip(file),
    ),
    "truncated weights": (
        "iterations/000002/rollout",
        "iterations/000001/update/policy/model.safetensors",
        lambda file, _: replace(file, file.read_bytes()[:-100]),
    ),
    "flipped optimizer state": (
        "iterations/000002/update",
        "iterations/000001/update/state/optimizer.safetensors",
        lambda file, _: flip(file),
    ),
    "flipped snapshot": (
        "iterations/000002/seed",
        "snapshots/step-000000/model.safetensors",
        lambda file, _: flip(file),
    ),
    "flipped manifest": (
        "iterations/000002/update",
        "iterations/000002/rollout/manifest.json",
        lambda file, _: flip(file),
    ),
    "newer manifest": (
        "iterations/000002/update",
        "iterations/000002/rollout/manifest.json",
        lambda file, _: replace(file, json.dumps({**json.loads(file.read_text()), "format": 99}).encode()),
    ),
    "part of another run": (
        "iterations/000002/update",
        "iterations/000002/rollout/part-00000.parquet",
        lambda file, other: replace(file, (other / "iterations/000002/rollout/part-00000.parquet").read_bytes()),
    ),
    "damaged log of metrics": (
        "iterations/000002/update",
        "metrics.jsonl",
        lambda file, _: file.write_bytes(b'{"iteration": 1, "rew\n' + file.read_bytes()),
    ),
}


@pytest.fixture(scope="module")
def other(toy: Path, forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of another seed."""
    run = tmp_path_factory.mktemp("other") / "run"
    assert forked.run(loop_config(toy, run={"seed": 1}, evaluate={"every": 0}), run)["status"] == 0
    return run


@pytest.mark.parametrize("harm", HARMS)
def test_damage_is_named_by_verify_and_never_trained_on(
    harm: str, toy: Path, forked: Forked, begun: Callable[[str], Path], other: Path
) -> None:
    before, name, act = HARMS[harm]
    run = begun(before)
    assert check(run)[1] == []
    act(run / name, other)
    artifacts, damages = check(run)
    assert artifacts >= 8
    assert len(damages) == 1
    assert str(run / name) in damages[0]
    done = forked.run(loop_config(toy), run)
    assert done["status"] == 2, done["error"]
    last = done["error"].strip().splitlines()[-1]
    assert str(run / Path(name).parent) in last
    assert any(word in last for word in ("restore", "upgrade", "copy the model again"))
    assert store.read_manifest(run / before) is None


def test_a_lost_manifest_is_named_and_nothing_is_overwritten(
    toy: Path, forked: Forked, begun: Callable[[str], Path]
) -> None:
    run = begun("iterations/000002/update")
    (run / "iterations/000002/rollout/manifest.json").unlink()
    assert "no manifest" in check(run)[1][0]
    done = forked.run(loop_config(toy), run)
    assert done["status"] == 2
    assert "exists without a manifest" in done["error"]


def test_strangers_are_named(begun: Callable[[str], Path], other: Path) -> None:
    run = begun("iterations/000002/update")
    stranger = run / "iterations/000002/rollout/part-00077.parquet"
    shutil.copy(other / "iterations/000002/rollout/part-00000.parquet", stranger)
    assert check(run)[1] == [f"{stranger}: not part of this artifact (copied here from elsewhere?); remove it"]
    stranger.unlink()
    shutil.rmtree(run / "iterations/000002/score")
    shutil.copytree(other / "iterations/000002/score", run / "iterations/000002/score")
    damages = check(run)[1]
    assert len(damages) == 1
    assert "iterations/000002/score: does not belong to this run" in damages[0]


def test_an_artifact_of_another_run_is_never_trained_on(
    toy: Path, forked: Forked, begun: Callable[[str], Path], other: Path
) -> None:
    run = begun("iterations/000002/update")
    shutil.rmtree(run / "iterations/000002/rollout")
    shutil.copytree(other / "iterations/000002/rollout", run / "iterations/000002/rollout")
    done = forked.run(loop_config(toy), run)
    assert done["status"] == 4
    assert "run.seed 1 -> 0" in done["error"]
    assert store.read_manifest(run / "iterations/000002/update") is None


@pytest.mark.parametrize("gone", ["iterations/000001/rollout", "snapshots/step-000001", "run.json", "metrics.jsonl"])
def test_what_is_missing_is_named(gone: str, uninterrupted: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run, copy_function=os.link)
    assert check(run)[1] == []
    (shutil.rmtree if (run / gone).is_dir() else os.unlink)(run / gone)  # type: ignore[operator]
    damages = check(run)[1]
    assert damages
    assert str(run / gone) in damages[0]


def test_only_what_can_be_remade_is_offered_for_deletion(uninterrupted: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    second = run / "iterations" / "000002"
    for stage in ("rollout", "update"):
        file = next(p for p in (second / stage).glob("*.parquet"))
        file.write_bytes(file.read_bytes() + b"x")
    damages = check(run)[1]
    assert remakable(run, damages) == ([second / "rollout", second / "update"], [])
    store.prune(run / "iterations" / "000001" / "update", ["policy", "state"], "test")
    assert remakable(run, damages) == ([], [second / "rollout", second / "update"])
    with pytest.raises(UserError, match="removed by retention"):
        describe(run / "iterations" / "000001" / "update" / "policy")


def test_a_directory_that_was_moved_and_linked_is_unlinked_by_retention(uninterrupted: Path, tmp_path: Path) -> None:
    update, away = tmp_path / "update", tmp_path / "away"
    shutil.copytree(uninterrupted / "iterations" / "000001" / "update", update)
    (update / "policy").rename(away)
    (update / "policy").symlink_to(away)
    store.prune(update, ["policy"], "test")
    assert not (update / "policy").is_symlink()
    assert (away / "model.safetensors").is_file()


def test_a_damaged_manifest_is_named_with_what_can_be_done(uninterrupted: Path, forked: Forked, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    for stage in ("rollout", "score"):
        (run / "iterations" / "000002" / stage / "manifest.json").write_text("{")
    found = forked.tseeds("verify", run)
    assert found["status"] == 1
