"""Locks and signals: one writer, readers that never wait, a stop that loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from equal import Reference
from forked import Forked
from toy_loop import loop_config

from tseeds import pipeline
from tseeds.artifacts import store
from tseeds.artifacts.lock import locked, owner
from tseeds.artifacts.rundir import RunDir
from tseeds.errors import Locked
from tseeds.verify import check


def test_a_second_run_on_one_directory_is_refused(toy: Path, forked: Forked, begun: Callable[[str], Path]) -> None:
    run = begun("iterations/000002/score")
    with locked(run / "run.lock", f"run {run}"):
        refused = forked.tseeds("run", run)
        assert refused["status"] == 3
        assert f"is being written by process {os.getpid()}" in refused["error"]
        assert forked.tseeds("status", run)["status"] == 0
        assert forked.tseeds("gc", run)["status"] == 3
    with locked(run / "iterations/000002/.score.lock", "artifact score"):
        assert forked.tseeds("score", run, "--iteration", 2)["status"] == 3


def test_locks_of_the_dead_are_taken_over_and_those_of_other_hosts_are_not(
    toy: Path, forked: Forked, begun: Callable[[str], Path]
) -> None:
    run = begun("evaluations/000002/countdown")
    with locked(run / "run.lock", "run"):
        who = json.loads((run / "run.lock").read_text())
    (run / "run.lock").write_text(json.dumps({**who, "host": "elsewhere"}))
    refused = forked.tseeds("run", run)
    assert refused["status"] == 3
    assert f"if elsewhere no longer runs it, delete {run / 'run.lock'}" in refused["error"]
    (run / "run.lock").write_text(
        json.dumps({**who, "started": who["started"] - 100})
    )  # its pid was given to another process
    assert owner(run / "run.lock") is None
    (run / "run.lock").write_text('{"pid": 12')
    assert owner(run / "run.lock") is None
    assert forked.tseeds("run", run)["status"] == 0


def test_a_lock_is_of_its_boot_and_namespace_and_is_removed_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with locked(path, "x"):
        held = json.loads(path.read_text())
        path.write_text(json.dumps(held | {"boot": "another"}))
        assert owner(path) is None  # pids of an earlier boot say nothing
        path.write_text(json.dumps(held | {"namespace": "pid:[1]"}))
        found = owner(path)
        assert found is not None
        assert "another container" in found["host"]
        with pytest.raises(Locked, match="another container"), locked(path, "x"):
            pass
    assert path.exists()  # not ours any more
    path.write_text(json.dumps(held | {"started": held["started"] - 1}))
    assert owner(path) is None  # the pid was given to another process
    path.write_text(json.dumps(held))
    assert owner(path) is not None


def test_a_killed_process_that_nobody_waited_for_owns_nothing(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from tseeds.artifacts.lock import locked\n"
    code += "with locked(Path(sys.argv[1]), 'run'):\n print('held', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "l")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    assert owner(tmp_path / "l") is not None
    child.kill()
    deadline = time.monotonic() + 10
    while owner(tmp_path / "l") is not None:  # the child stays a zombie: nobody waits for it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.wait()


def test_a_lock_is_never_held_twice_while_owners_come_and_go(tmp_path: Path) -> None:
    code = """
import sys, os
from pathlib import Path
from tseeds.artifacts.lock import locked
from tseeds.errors import Locked
won = 0
while won < 60:
    try:
        with locked(Path(sys.argv[1]), "x"):
            os.close(os.open(sys.argv[2], os.O_CREAT | os.O_EXCL))
            won += 1
            os.unlink(sys.argv[2])
    except Locked:
        pass
"""
    words = [sys.executable, "-c", code, str(tmp_path / "lock"), str(tmp_path / "inside")]
    children = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for child in children:
        _, error = child.communicate(timeout=120)
        assert child.returncode == 0, error  # FileExistsError: two were inside


def test_readers_never_wait_and_never_see_half_of_anything(
    toy: Path, forked: Forked, begun: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    from tseeds_cli.show import load
    from tseeds_cli.status import status
    from tseeds_cli.watch import state

    path = begun("iterations/000002/seed")
    run, answer = RunDir(path), {}
    config = loop_config(toy, run={"iterations": 3}, snapshot={"keep_states": 1, "keep_last": 1})
    thread = threading.Thread(target=lambda: answer.update(forked.run(config, path)))
    thread.start()
    looks, slowest, seen = 0, 0.0, set()
    while thread.is_alive():
        begin = time.monotonic()
        status(path, as_json=True)
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert not [s for s in told["stages"] if s["state"] == "stale"]
        slowest = max(slowest, time.monotonic() - begin)
        table, scores = load(path)
        assert table.num_rows == 8
        assert scores is None or scores.num_rows == 8
        state(run)
        assert check(path)[1] == []
        seen.add(told["finished"])
        looks += 1
    assert answer["status"] == 0, answer
    assert looks >= 3
    assert len(seen) >= 2  # it was really writing meanwhile
    assert slowest < 5


def rollout_parts(run: Path) -> int:
    return len(store.read_lines(run / "iterations/000002/rollout.partial/parts.jsonl"))


def test_one_interrupt_finishes_the_part_and_says_how_to_go_on(
    toy: Path, forked: Forked, begun: Callable[[str], Path], reference: Reference
) -> None:
    run = begun("iterations/000002/rollout")
    stop = {"signal": signal.SIGINT, "when": str(run / "iterations/000002/rollout.partial")}
    done = forked.tseeds("run", run, stop=stop)
    assert done["status"] == 130, done
    assert "finishing the current part" in done["error"]
    assert f"tseeds run {run} goes on from here" in done["error"]
    assert "Traceback" not in done["error"]
    assert rollout_parts(run) >= 1 or (run / "iterations/000002/rollout").is_dir()
    assert owner(run / "run.lock") is None
    assert forked.tseeds("run", run)["status"] == 0
    assert reference.differences(run, finished=True) == []


def test_two_interrupts_stop_at_once(
    toy: Path, forked: Forked, begun: Callable[[str], Path], reference: Reference
) -> None:
    run = begun("iterations/000002/seed")
    stop = {"signal": signal.SIGINT, "when": str(run / "iterations/000002/seed.partial"), "times": 2}
    done = forked.tseeds("run", run, stop=stop)
    assert done["status"] == 130
    assert "stopped at once" in done["error"] or "goes on from here" in done["error"]
    assert forked.tseeds("run", run)["status"] == 0
    assert reference.differences(run, finished=True) == []


def test_sigterm_ends_resumable_within_30_seconds(
    toy: Path, forked: Forked, begun: Callable[[str], Path], reference: Reference
) -> None:
    run = begun("iterations/000002/update")
    stop = {"signal": signal.SIGTERM, "when": str(run / "iterations/000002/update.partial")}
    done = forked.tseeds("run", run, stop=stop)
    assert done["status"] == 130, done
    assert done["stopping"] < 30
    assert forked.tseeds("run", run)["status"] == 0
    assert reference.differences(run, finished=True) == []


def test_sigterm_does_not_wait_for_what_takes_longer() -> None:
    code = """
import subprocess, sys, time
import tseeds_cli.console as console
from types import SimpleNamespace
console.GRACE_SECONDS = 1.0
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with console.stoppable(SimpleNamespace(stop_requested=False)):
    print(child.pid, flush=True)
    while True:  # an update that never looks at the wish to stop
        sum(range(1000))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    begin = time.monotonic()
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - begin > 0.9
    assert "took longer than 1 s; everything committed is kept, run again to go on" in error
    with pytest.raises(ProcessLookupError):
        for _ in range(200):
            os.kill(grandchild, 0)
            time.sleep(0.05)


def test_the_run_directory_says_who_writes(begun: Callable[[str], Path]) -> None:
    run = RunDir(begun("iterations/000002/seed"))
    with locked(run.lock, "run"):
        who = owner(run.lock)
    assert who is not None
    assert who["pid"] == os.getpid()
    assert pipeline.read_record(run)["created"]
