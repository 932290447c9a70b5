"""Notice an engine that makes no progress: between steps by the clock, inside a step by a thread."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tseeds.errors import EXIT_FAILED, StageFailed

logger = logging.getLogger(__name__)

GRACE = 30.0
"""Seconds that a stuck step gets to react to the exception before the process is ended."""


class Watch:
    """Raises StageFailed when no token was made for ``limit`` seconds.

    A step that returns empty-handed is found by the clock. A step that never returns is found by a thread: it raises
    StageFailed inside the step, and where that step sits in native code and cannot take it, ends the process with the
    same line on stderr. Committed parts stay and the stage resumes.
    """

    def __init__(self, limit: float, *, grace: float = GRACE, end: Callable[[int], Any] = os._exit) -> None:
        self.limit, self.grace, self.end = limit, grace, end
        self._last = time.monotonic()
        self._lock = threading.Lock()
        self._stepping: int | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def follow(self, core: Any) -> None:
        """Count tokens that come out of vLLM's in-process client ``core``."""
        get = core.get_output

        def counted() -> Any:
            outputs = get()
            if outputs.outputs:
                self._last = time.monotonic()
            return outputs

        core.get_output = counted

    def begin(self) -> None:
        """Start the clock."""
        self._last = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="tseeds-engine-watch", daemon=True)
            self._thread.start()

    def progress(self) -> None:
        """A token was made."""
        self._last = time.monotonic()

    def message(self) -> str:
        """The one line for a dead engine."""
        return (
            f"the engine made no token for {self.limit:g} seconds and counts as dead; everything committed so far is "
            "kept, run the same command again (raise engine.stall_seconds if the machine is only slow)"
        )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one engine step."""
        with self._lock:
            self._stepping = threading.get_ident()
        try:
            yield
        except StageFailed as error:
            if error.args:
                raise
            raise StageFailed(self.message()) from None  # raised from _look, as a class without words
        finally:
            with self._lock:
                self._stepping = None
        if time.monotonic() - self._last > self.limit:
            raise StageFailed(self.message())

    def _look(self) -> None:
        while not self._closed.wait(min(1.0, self.limit / 4)):
            with self._lock:
                thread = self._stepping
                late = thread is not None and time.monotonic() - self._last > self.limit
                if late:
                    logger.error(self.message())
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread or 0), ctypes.py_object(StageFailed)
                    )
            if late:
                deadline = time.monotonic() + self.grace
                while time.monotonic() < deadline and self._stepping == thread:
                    if self._closed.wait(0.1):
                        return
                if self._stepping == thread:
                    print(f"error: {self.message()}", file=sys.stderr, flush=True)
                    self.end(EXIT_FAILED)
                    return
                self._last = time.monotonic()

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()
