"""Optional loggers beside metrics.jsonl: TensorBoard, Weights & Biases, trackio.

Named by one line of the pipeline (``[log] to = ["tensorboard"]``). Each keeps a cursor, the last iteration that it has
recorded: a resumed run repeats nothing, and a logger that is added in mid-run first records what came before it.
"""

from __future__ import annotations

import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tseeds import config as configuration
from tseeds.artifacts import store
from tseeds.artifacts.rundir import RunDir
from tseeds.config import Pipeline
from tseeds.errors import UserError
from tseeds.pipeline import Listener

log = logging.getLogger(__name__)


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one metrics.jsonl line, nested ones as "evaluation/countdown/pass@4"; intervals stay in the file.

    >>> scalars({"iteration": 3, "reward": 0.5, "loss": None, "policy": "ab", "seconds": {"seed": 1.0}})
    {'reward': 0.5, 'seconds/seed': 1.0}
    """
    found: dict[str, float] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if key not in ("ci", "iteration"):
                    walk(f"{prefix}/{key}" if prefix else str(key), inner)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[prefix] = float(value)

    walk("", metrics)
    return found


class Logger(Listener, ABC):
    """Records every finished iteration once. Subclasses open on first use, ``write`` one step and ``close``."""

    name = ""

    def __init__(self, config: Pipeline, run: RunDir) -> None:
        self.config, self.run = config, run
        self.folder = run.root / "logs" / self.name
        self._cursor_file = run.root / "logs" / f"{self.name}.json"

    @property
    def cursor(self) -> int:
        """The last iteration that was recorded; 0 for none."""
        try:
            return int(json.loads(self._cursor_file.read_text())["iteration"])
        except FileNotFoundError:
            return 0
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{self._cursor_file}: damaged; delete it to record all iterations again") from None

    def started(self, run: RunDir, config: Pipeline, finished: int) -> None:
        self.config = config
        self._catch_up()

    def iteration(self, number: int, metrics: dict[str, Any]) -> None:
        self._catch_up()

    def _catch_up(self) -> None:
        done = self.cursor
        self._cursor_file.parent.mkdir(parents=True, exist_ok=True)
        for line in store.read_lines(self.run.metrics):
            if line["iteration"] > done:
                self.write(line["iteration"], scalars(line))
                store.write_file(self._cursor_file, json.dumps({"iteration": line["iteration"]}))

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record one iteration."""

    def close(self) -> None:
        """Flush and free."""


class TensorBoard(Logger):
    """Event files in RUN/logs/tensorboard: ``tensorboard --logdir RUN/logs/tensorboard``."""

    name = "tensorboard"

    def __init__(self, config: Pipeline, run: RunDir) -> None:
        super().__init__(config, run)
        from torch.utils.tensorboard import SummaryWriter

        self._open = SummaryWriter
        self._writer: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            # steps that a crash recorded without moving the cursor are hidden
            self._writer = self._open(str(self.folder), purge_step=step if step > 1 else None)
        for key, value in values.items():
            self._writer.add_scalar(key.replace("@", "_at_"), value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB(Logger):
    """Weights & Biases; offline (``wandb sync RUN/logs/wandb/offline-run-*`` later) unless WANDB_MODE says otherwise."""

    name = "wandb"

    def __init__(self, config: Pipeline, run: RunDir) -> None:
        super().__init__(config, run)
        import wandb

        self._wandb = wandb
        self._run: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            name = _identifier(self.run.root)
            mode: Any = os.environ.get("WANDB_MODE", "offline")
            self._run = self._wandb.init(
                project=self.config.log.project,
                id=name,
                name=self.run.root.name,
                dir=str(self.folder.parent),
                mode=mode,
                resume=None if mode == "offline" else "allow",
                config=configuration.flatten(self.config),
                settings=self._wandb.Settings(silent=True, console="off"),
            )
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class Trackio(Logger):
    """trackio, kept in RUN/logs/trackio: ``TRACKIO_DIR=RUN/logs/trackio trackio show``."""

    name = "trackio"

    def __init__(self, config: Pipeline, run: RunDir) -> None:
        super().__init__(config, run)
        os.environ.setdefault("TRACKIO_DIR", str(self.folder.resolve()))
        import trackio

        self._trackio = trackio
        self._run: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        with _silent():
            if self._run is None:
                self._run = self._trackio.init(
                    project=self.config.log.project,
                    name=_identifier(self.run.root),
                    config=configuration.flatten(self.config),
                    resume="allow",
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            with _silent():
                self._trackio.finish()


LOGGERS: dict[str, type[Logger]] = {c.name: c for c in (TensorBoard, WandB, Trackio)}


def _identifier(root: Path) -> str:
    """Name of a run that stays the same over its attempts and differs between runs of one folder name."""
    import hashlib

    place = root.resolve()
    return f"{place.name}-{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"


@contextmanager
def _silent() -> Iterator[None]:
    """Keep what a logger prints off standard output, which belongs to results."""
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        yield
    for line in said.getvalue().splitlines():
        log.info("%s", line)


@contextmanager
def open_loggers(config: Pipeline, run: RunDir) -> Iterator[list[Logger]]:
    """The loggers that ``log.to`` names, as listeners of the loop; closed at the end, whatever happens.

    Raises:
        UserError: one of them is not installed.
    """
    with ExitStack() as stack:
        opened = []
        for name in dict.fromkeys(config.log.to):
            try:
                logger = LOGGERS[name](config, run)
            except ImportError as error:
                raise UserError(f"log.to = {name}: {error}; pip install {name}, or take it off the list") from None
            stack.callback(logger.close)
            opened.append(logger)
        yield opened
