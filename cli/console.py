"""What the commands share for the terminal: quiet libraries, progress, signals, readable numbers."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tseeds.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from tseeds.artifacts.store import Manifest
    from tseeds.config import Pipeline
    from tseeds.context import Context
    from tseeds.pipeline import Step


def quiet(log_file: Path | None = None, say: Callable[[str], None] | None = None) -> None:
    """Keep library noise off the terminal: our own warnings are said in one line each, everything goes to the log file.

    say: prints a line beside whatever is shown live; default: standard error.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    handlers: list[logging.Handler] = [_Said(say or (lambda line: print(line, file=sys.stderr)))]
    if log_file is not None:
        file = logging.FileHandler(log_file, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append(file)
    logging.raiseExceptions = False  # a full disk under the log file must not spill tracebacks
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)


class _Said(logging.Handler):
    """Warnings of tseeds, each distinct text once in a row."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.addFilter(logging.Filter("tseeds"))
        self._say, self._last = say, ""

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line != self._last:
            self._last = line
            self._say(f"tseeds: {line}")


GRACE_SECONDS = 25.0
"""After SIGTERM (Slurm kills 30 s later) a part or update that is not finished by then is left, as kill -9 would."""


@contextmanager
def stoppable(context: Context) -> Iterator[None]:
    """Ctrl-C or SIGTERM once: finish the current part and stop resumable. Twice, or GRACE_SECONDS after SIGTERM: at once."""
    timers: list[threading.Timer] = []

    def ask(number: int, _frame: object) -> None:
        if context.stop_requested:
            _leave("stopped at once")
        context.stop_requested = True
        _say(f"{signal.Signals(number).name}: finishing the current part (again to stop at once)")
        if number == signal.SIGTERM:
            timers.append(
                threading.Timer(GRACE_SECONDS, _leave, [f"the current part took longer than {GRACE_SECONDS:.0f} s"])
            )
            timers[0].daemon = True
            timers[0].start()

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    """A line on stderr from a signal handler, where buffered streams must not be entered."""
    with suppress(OSError):
        os.write(2, f"\ntseeds: {text}\n".encode())


def _leave(why: str) -> None:
    """End this process and its children now. Nothing is lost: everything committed survives kill -9."""
    import psutil

    _say(f"{why}; everything committed is kept, run again to go on")
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    os._exit(EXIT_INTERRUPTED)


def plain_progress() -> Any:
    """A Progress that shows a bar with rate and time left on a terminal, and one line per stage elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from tseeds.context import Progress

    console = Console(stderr=True)

    class Shown(Progress):
        def begin(self, stage: str, total: int, done: int = 0) -> None:
            self._stage, self._total, self._tokens, self._start = stage, total, 0, time.monotonic()
            self._rows = done
            self._bar = None
            if console.is_terminal:
                self._bar = Bar(
                    TextColumn("{task.description:10}"),
                    BarColumn(),
                    MofNCompleteColumn(),
                    TextColumn("{task.fields[rate]}"),
                    TimeRemainingColumn(),
                    console=console,
                    transient=True,
                )
                self._bar.start()
                self._task = self._bar.add_task(stage, total=total, completed=done, rate="")

        def advance(self, rows: int, tokens: int = 0) -> None:
            self._rows += rows
            self._tokens += tokens
            if self._bar is not None:
                rate = self._tokens / max(1e-9, time.monotonic() - self._start)
                self._bar.update(self._task, advance=rows, rate=f"{rate:,.0f} tok/s" if self._tokens else "")

        def end(self) -> None:
            if self._bar is not None:
                self._bar.stop()
            spent = time.monotonic() - self._start
            tokens = f", {self._tokens:,} tokens, {self._tokens / max(spent, 1e-9):,.0f} tok/s" if self._tokens else ""
            rows = f"{self._rows} of {self._total} rows" if self._total > 1 else "done"  # a stage that counts no rows
            sys.stderr.write(f"{self._stage}: {rows}{tokens}, {spent:.1f} s\n")

        def note(self, message: str) -> None:
            sys.stderr.write(f"{message}\n")

    return Shown()


def run_stage(config: Pipeline, step: Step, *, as_json: bool, run: Path | None = None) -> Manifest:
    """Run one stage by hand with progress, and say what happened and where the result lies."""
    import json

    from tseeds.context import Context
    from tseeds.pipeline import execute

    quiet()
    with Context(config, progress=plain_progress(), run=run) as context, stoppable(context):
        manifest, ran = execute(config, step, context)
    rows = manifest.rows
    if as_json:
        record = {
            "stage": step.module.STAGE,
            "path": str(step.out),
            "ran": ran,
            "rows": rows,
            "digest": manifest.digest,
        }
        sys.stdout.write(json.dumps({**record, "facts": dict(manifest.facts)}) + "\n")
    else:
        what = f"{step.out} ({rows} rows)" if rows else f"{step.out}"
        sys.stdout.write(f"{what}\n" if ran else f"{what}: already there and up to date, nothing to do\n")
    return manifest


def size(count: float) -> str:
    """Bytes for reading: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds for reading: 3 h 02 min, 4 min 10 s, 8.2 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
