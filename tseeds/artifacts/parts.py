"""Rows that finish in any order become part files in a fixed order, written behind the sampler's back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from tseeds.artifacts.store import Writer
from tseeds.errors import Interrupted

GRACE_SECONDS = 20.0
"""After a request to stop, how long the current part may still take (Slurm gives 30 s)."""


class Parts:
    """Commits part k as soon as rows [k * part_rows, (k + 1) * part_rows) have all finished.

    ``build(start, stop)`` makes the table of those rows; it runs in one background thread, so that detokenising, grading
    and writing overlap with sampling. ``tally(start, stop)`` counts what the rows cost (Writer.part's facts). Part borders depend on row numbers alone: a resumed stage makes equal files.
    Use as a context manager; leaving it waits for the last part.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        rows: int,
        part_rows: int,
        build: Callable[[int, int], pa.Table],
        tally: Callable[[int, int], dict[str, float]] = lambda start, stop: {},
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._writer = writer
        self._rows = rows
        self._size = part_rows
        self._build = build
        self._tally = tally
        self._stop_requested = stop_requested
        writer.keep_parts(rows, part_rows)
        self._stop_since: float | None = None
        self._done_at_stop = 0
        self._missing = {
            k: min(part_rows, rows - k * part_rows) for k in range(-(-rows // part_rows)) if k not in writer.parts
        }
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="parts")
        self._writes: deque[Future[None]] = deque()

    @property
    def todo(self) -> list[int]:
        """Row numbers of the parts that are not committed yet, ascending."""
        return [r for k in sorted(self._missing) for r in range(k * self._size, min((k + 1) * self._size, self._rows))]

    def finish(self, row: int) -> None:
        """Row ``row`` is ready for ``build``.

        Raises:
            Interrupted: a stop was requested and the current part is committed (or takes longer than the grace time).
        """
        part = row // self._size
        self._missing[part] -= 1
        if self._missing[part] == 0:
            self._writes.append(self._pool.submit(self._write, part))
        while self._writes and self._writes[0].done():  # one thread writes them: they end in this order
            self._writes.popleft().result()
        if self._stop_requested():
            self._check_stop()

    def _check_stop(self) -> None:
        finished = sum(1 for left in self._missing.values() if left == 0)
        if self._stop_since is None:
            self._stop_since, self._done_at_stop = time.monotonic(), finished
        if finished > self._done_at_stop or time.monotonic() - self._stop_since > GRACE_SECONDS:
            raise Interrupted("stopped at your request; every finished part is committed")

    def _write(self, part: int) -> None:
        start = part * self._size
        stop = min(start + self._size, self._rows)
        self._writer.part(part, self._build(start, stop), self._tally(start, stop))

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._pool.shutdown(wait=True)
        if kind is None:
            for write in self._writes:
                write.result()
            assert all(left == 0 for left in self._missing.values()), "rows were never finished"
