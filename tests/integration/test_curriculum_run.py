"""A curriculum on the toy task with a real engine: measured once, interrupted, resumed, obeyed by seeds and rollouts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from tseeds import config as configuration
from tseeds import pipeline, rollout, toy
from tseeds.config import Pipeline
from tseeds.context import Context, Progress
from tseeds.errors import Interrupted, Stale, UserError

PIPELINE = Path(__file__).parents[2] / "pipelines/toy.toml"
VALUES = [
    "run.iterations=2", "rollout.problems_per_iteration=8", "rollout.group_size=4", "snapshot.every=1",
    "engine.backend=transformers", "engine.part_rows=32", "evaluate.every=0", "evaluate.benchmarks=[]", "problems.limit=48",
    "curriculum.samples=4", "curriculum.lo=0.25", "curriculum.hi=0.75", "curriculum.weight=variance",
]  # fmt: skip


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    made = toy.make(tmp_path_factory.mktemp("toy"))
    return [*VALUES, f"policy.path={made['policy']}", f"problems.path={made['train']}"]


def train(config: Pipeline, run: Path, *, accept: bool = False, progress: Progress | None = None) -> None:
    with Context(config, progress=progress) as context:
        if isinstance(progress, StopsEarly):
            progress.context = context
        pipeline.run_pipeline(config, run, context, accept=accept)


class StopsEarly(Progress):
    """Asks to stop when ten problems are measured."""

    context: Context
    rows = 0
    measuring = False

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        self.measuring = stage == "curriculum"

    def advance(self, rows: int, tokens: int = 0) -> None:
        self.rows += rows if self.measuring else 0
        self.context.stop_requested = self.rows >= 10


@pytest.fixture(scope="module")
def run(values: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped while it measured, and resumed."""
    path, config = tmp_path_factory.mktemp("runs") / "run", configuration.load(PIPELINE, values)
    with pytest.raises(Interrupted):
        train(config, path, progress=StopsEarly())
    kept = {p.name: p.stat().st_mtime_ns for p in (path / "curriculum.partial").glob("part-*.parquet")}
    assert 0 < len(kept) < 6
    train(config, path)
    assert {name: (path / "curriculum" / name).stat().st_mtime_ns for name in kept} == kept
    return path


def test_groups_are_those_that_the_measured_pass_rates_choose(run: Path) -> None:
    rates = pl.read_parquet(run / "curriculum/*.parquet")
    assert rates.height == 48
    assert (rates["rewards"].list.len() == 4).all()
    assert (rates["rewards"].list.mean() - rates["pass_rate"]).abs().max() < 1e-6
    kept = rates.filter(pl.col("pass_rate").is_between(0.25, 0.75))["problem_id"].to_list()
    assert 8 <= len(kept) < 48
    rows = pl.read_parquet(run / "iterations/*/rollout/*.parquet").select("group_id", "problem_id").unique()
    seeds = pl.read_parquet(run / "iterations/*/seed/*.parquet").select("group_id", "problem_id").unique()
    assert set(rows["problem_id"]) <= set(kept)
    assert rows.sort("group_id").equals(seeds.sort("group_id"))  # both stages laid out the same groups


def test_resumed_equals_uninterrupted(run: Path, values: list[str], tmp_path: Path) -> None:
    train(configuration.load(PIPELINE, [*values, "run.iterations=1"]), tmp_path / "run")
    for table in ("curriculum", "iterations/000001/seed", "iterations/000001/rollout"):
        mine, theirs = (pl.read_parquet(p / table / "*.parquet") for p in (run, tmp_path / "run"))
        assert mine.equals(theirs), table


def test_what_a_run_may_change_and_what_not(run: Path, values: list[str], tmp_path: Path) -> None:
    with pytest.raises(Stale, match=r"curriculum\.samples 4 -> 8"):
        train(configuration.load(PIPELINE, [*values, "curriculum.samples=8"]), run, accept=True)
    with pytest.raises(Stale, match=r"curriculum\.lo 0\.25 -> 0"):
        train(configuration.load(PIPELINE, [*values, "curriculum.lo=0"]), run)
    train(configuration.load(PIPELINE, [*values, "curriculum.lo=0", "run.iterations=3"]), run, accept=True)
    assert {r.state for r in pipeline.survey(pipeline.open_history(pipeline.RunDir(run)), pipeline.RunDir(run))} == {
        "fresh"
    }
    off = ["curriculum.samples=0", "curriculum.lo=0", "curriculum.hi=1", "curriculum.weight=equal", "seed.share=0"]
    plain = configuration.load(PIPELINE, [*values, "run.iterations=1", *off])
    train(plain, tmp_path / "plain")
    with pytest.raises(UserError, match=r"curriculum\.samples was 0 when this run began"):
        train(configuration.load(PIPELINE, [*values, "seed.share=0"]), tmp_path / "plain", accept=True)
    with pytest.raises(UserError, match="--curriculum"):
        inputs = rollout.Inputs(run / "snapshots/step-000000", 0, run / "problems", None, 1)
        rollout.identity(configuration.load(PIPELINE, values), inputs)


def test_the_command_says_what_was_measured(run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tseeds_cli.main", "curriculum", run],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rates = pl.read_parquet(run / "curriculum/*.parquet")["pass_rate"]
    assert f"mean pass rate {rates.mean():.3f}" in done.stdout
    assert f"[0.25, 0.75] keeps {rates.is_between(0.25, 0.75).sum()} of 48" in done.stdout  # as the run began
