"""A comparison as a user runs it: killed in the middle, run again with more seeds, run again for nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = [
    "run.iterations=2", "rollout.problems_per_iteration=4", "rollout.group_size=4", "snapshot.every=1",
    "update.minibatches=2", "update.probe_every=1", "evaluate.every=2", "evaluate.samples=2", "problems.limit=32",
    'evaluate.benchmarks=[{name="countdown", path="toy/test.jsonl", limit=8}]',
]  # fmt: skip


def command(arms: list[str], *more: str) -> list[str]:
    files = [str(ROOT / "pipelines" / "arms" / f"{a}.toml") for a in arms]
    sets = [part for value in SMALL for part in ("--set", value)]
    return [sys.executable, "-m", "tseeds_cli.main", "compare", *files, "--out", "out", "--workers", "1", *sets, *more]


def records(folder: Path) -> dict[tuple[str, int], dict]:
    lines = (folder / "out" / "records.jsonl").read_text().splitlines()
    found = {(r["arm"], r["seed"]): r for r in map(json.loads, lines)}
    assert len(found) == len(lines), "a run was recorded twice"
    return found


def test_a_killed_comparison_goes_on_and_a_recorded_run_is_not_run_again(tmp_path: Path) -> None:
    from tseeds import toy

    toy.make(tmp_path / "toy")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    arms = ["on-policy", "seeds"]
    with subprocess.Popen(
        command(arms, "--seeds", "1"), cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as first:
        assert first.stderr is not None
        heard = ""
        while "seeds, seed 0: running" not in heard:  # the first arm is recorded, the second has begun
            line = first.stderr.readline()
            assert line, heard
            heard += line
        first.send_signal(signal.SIGKILL)
    assert set(records(tmp_path)) == {("on-policy", 0)}

    # at once: the orphan of the killed comparison may still hold its run for a moment
    again = subprocess.run(
        command(arms, "--seeds", "2"), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert again.returncode == 0, again.stderr[-3000:]
    assert "4 runs: 1 recorded, 3 to do" in again.stderr
    found = records(tmp_path)
    assert set(found) == {(a, s) for a in arms for s in (0, 1)}
    for (arm, seed), record in found.items():
        assert len(record["curves"]["entropy"]) == 2
        assert set(record["evaluations"]) == {"0", "2"}
        assert len(record["evaluations"]["2"]["countdown"]["correct"]) == 8
        assert record["tokens"]["sampled"] >= record["tokens"]["trained"] > 0
        assert (record["tokens"]["sampled"] > record["tokens"]["trained"]) == (arm == "seeds")  # cut chains are lost
        assert record["values"]["run.seed"] == seed
    start = "evaluations/000000/countdown/manifest.json"
    same = [(tmp_path / "out" / arm / "seed-001" / start).stat().st_ino for arm in arms]
    assert same[0] == same[1], "the policy that all arms start from was evaluated twice"

    for folder in (tmp_path / "out").iterdir():
        if folder.is_dir():
            folder.rename(tmp_path / f"gone-{folder.name}")
    nothing = subprocess.run(
        command(arms, "--seeds", "2", "--json"),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert nothing.returncode == 0, nothing.stderr[-3000:]
    assert "4 recorded, 0 to do" in nothing.stderr
    assert set(json.loads(nothing.stdout)["arms"]["seeds"]["pass@1"]) == {"0", "1"}
