"""What ``tseeds watch`` says of a run, from its files alone."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.synthetic import make_run
from tseeds.artifacts.lock import locked
from tseeds.artifacts.rundir import RunDir
from tseeds_cli import watch


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(
        tmp_path / "run",
        iterations=3,
        problems=4,
        per_iteration=2,
        group_size=4,
        tokens=False,
        sets=("run.iterations=5",),
    )


def test_a_run_in_the_middle_of_an_iteration(run: RunDir) -> None:
    partial = run.stage(4, "rollout").with_name("rollout.partial")
    partial.mkdir(parents=True)
    (partial / "parts.jsonl").write_text(
        "".join(json.dumps({"path": f"part-{k:05d}.parquet", "rows": 3}) + "\n" for k in range(2))
    )
    with locked(run.lock, "run"):
        now = watch.state(run)
        assert now["writer"]["host"]
    assert (now["finished"], now["iterations"], now["iteration"]) == (3, 5, 4)
    assert (now["stage"], now["rows"], now["total"]) == ("rollout", 6, 8)
    spent = [sum(m["seconds"].values()) for m in now["metrics"]]
    assert now["seconds_left"] == pytest.approx(sum(spent) / 3 * 2)
    text = io.StringIO()
    Console(file=text, width=120).print(watch.render(now))
    assert "rollout" in text.getvalue()
    assert "6/8" in text.getvalue()
    assert f"{now['metrics'][-1]['reward']:.3f}" in text.getvalue()


def test_without_a_writer_it_says_so_and_ends(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    watch.watch(run.root, once=False, interval=0.01, as_json=False)
    said = capsys.readouterr().out
    assert said.count("iteration ") == 3
    assert "no process trains here: 3 of 5 iterations" in said
