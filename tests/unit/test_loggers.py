"""Loggers: what TensorBoard, W&B (offline) and trackio hold afterwards, each iteration exactly once."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from tests.synthetic import make_run
from tseeds import config as configuration
from tseeds.artifacts import store
from tseeds.artifacts.rundir import RunDir
from tseeds.errors import UserError
from tseeds.loggers import LOGGERS, open_loggers, scalars


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run", iterations=4, problems=4, per_iteration=2, group_size=4, tokens=False)


def _config(run: RunDir, *names: str) -> configuration.Pipeline:
    return configuration.load(run.pipeline, [f"log.to={json.dumps(names)}"])


def _follow(run: RunDir, config: configuration.Pipeline, upto: int, lines: list[dict]) -> None:
    """Play the loop: the first half exists when the loggers open, the rest finishes one by one."""
    with open_loggers(config, run) as loggers:
        for logger in loggers:
            logger.started(run, config, 0)
        for line in lines[len(store.read_lines(run.metrics)) : upto]:
            store.append_line(run.metrics, line)
            for logger in loggers:
                logger.iteration(line["iteration"], line)


def test_tensorboard_holds_every_iteration_once(run: RunDir) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = store.read_lines(run.metrics)
    run.metrics.write_text("")
    config = _config(run, "tensorboard")
    store.append_line(run.metrics, lines[0])
    _follow(run, config, 2, lines)
    _follow(run, config, 4, lines)  # a second attempt
    held = EventAccumulator(str(run.root / "logs" / "tensorboard")).Reload()
    rewards = held.Scalars("reward")
    assert [e.step for e in rewards] == [1, 2, 3, 4]
    assert [e.value for e in rewards] == pytest.approx([line["reward"] for line in lines])
    assert held.Scalars("evaluation/held-out/pass_at_1")[0].step == 4


def test_wandb_offline_keeps_a_run_to_sync(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is an optional logger")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    _follow(run, _config(run, "wandb"), 4, store.read_lines(run.metrics))
    files = list((run.root / "logs").glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 1
    held = files[0].read_bytes()
    assert b"clipped_mass_seed" in held
    assert b"reward" in held
    assert LOGGERS["wandb"](_config(run, "wandb"), run).cursor == 4


def test_trackio_holds_every_iteration(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="trackio is an optional logger")
    monkeypatch.setenv("TRACKIO_DIR", str(run.root / "logs" / "trackio"))
    import trackio.utils

    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", run.root / "logs" / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", run.root / "logs" / "trackio")
    lines = store.read_lines(run.metrics)
    _follow(run, _config(run, "trackio"), 4, lines)
    (file,) = (run.root / "logs" / "trackio").glob("*.db")
    with sqlite3.connect(file) as held:
        rows = held.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, _ in rows] == [1, 2, 3, 4]
    assert json.loads(rows[2][1])["reward"] == pytest.approx(lines[2]["reward"])


def test_scalars_flatten_and_leave_text_and_gaps_out() -> None:
    line = {
        "iteration": 3, "reward": 0.5, "loss": None, "policy": "digest", "seconds": {"seed": 1.0}, "skipped": True,
        "evaluation": {"b": {"pass@1": 0.25, "ci": {"pass@1": [0.1, 0.4]}}},
    }  # fmt: skip
    assert scalars(line) == {"reward": 0.5, "seconds/seed": 1.0, "evaluation/b/pass@1": 0.25}


def test_a_logger_that_is_not_installed_is_one_clear_line(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"), open_loggers(_config(run, "wandb"), run):
        pass
