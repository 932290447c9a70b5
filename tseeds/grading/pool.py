"""Worker processes that may be killed at any moment without losing an answer of the batch.

Each is started with a bare interpreter (no fork: the caller may hold torch or engine threads; no re-import of the caller's
main module), talks over two pipes, and is used by one thread at a time.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tseeds.grading.options import GradingOptions

log = logging.getLogger(__name__)

START_LIMIT = 120.0
GRACE = 0.25
CHUNK = 16
START = """
import json, sys
sys.path[:] = json.loads(sys.argv[3])
from tseeds.grading.worker import main
main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4])
"""
SOURCE = str(Path(__file__).resolve().parents[2])

Job = tuple[str, ...]


class TimedOut:
    """The result of a job whose worker was killed at the time limit."""


class Died:
    """The result of a job whose worker died twice under it."""


class WorkerStartError(RuntimeError):
    """A worker did not come up."""


class Worker:
    """One worker process and its pipes."""

    def __init__(self, options: GradingOptions) -> None:
        child_in, parent_out = os.pipe()
        parent_in, child_out = os.pipe()
        path = [SOURCE, *(entry for entry in sys.path if entry != SOURCE)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        arguments = [str(child_in), str(child_out), json.dumps(path), options.model_dump_json()]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(child_in, child_out),
                env=environment,
                start_new_session=True,
            )
        finally:
            os.close(child_in)
            os.close(child_out)
        self.inbox, self.outbox = Connection(parent_in, writable=False), Connection(parent_out, readable=False)
        try:
            if not self.inbox.poll(START_LIMIT) or self.inbox.recv() != ("ready",):
                raise EOFError
        except (EOFError, OSError):
            self.kill()
            raise WorkerStartError(
                f"a grading worker did not start (exit status {self.process.returncode}): "
                f"is score.memory_limit_mb = {options.memory_limit_mb} enough?"
            ) from None

    def kill(self) -> None:
        """End it now and leave no zombie."""
        self.process.kill()
        self.process.wait()
        self.inbox.close()
        self.outbox.close()

    def close(self) -> None:
        """Ask it to end, then make it."""
        try:
            self.outbox.send(None)
            self.process.wait(timeout=1.0)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            pass
        self.kill()


class Pool:
    """Up to `options.workers` workers, started when there is work for them. All methods may be called from any thread."""

    def __init__(self, options: GradingOptions) -> None:
        self.options = options
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._alive: set[Worker] = set()
        self._threads = ThreadPoolExecutor(options.workers, thread_name_prefix="tseeds-grading")
        self._closed = False

    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        with self._lock:
            return [worker.process.pid for worker in self._alive]

    def run(self, jobs: Sequence[Job]) -> list[tuple[Any, float]]:
        """Results in order, each with the seconds it took; `TimedOut` or `Died` where there is none."""
        if self._closed:
            raise RuntimeError("the grader is closed")
        results: list[tuple[Any, float]] = [(Died, 0.0)] * len(jobs)
        size = max(1, min(CHUNK, -(-len(jobs) // self.options.workers)))
        todo = deque(list(range(start, min(start + size, len(jobs)))) for start in range(0, len(jobs), size))
        futures = [
            self._threads.submit(self._serve, jobs, todo, results) for _ in range(min(self.options.workers, len(todo)))
        ]
        for future in futures:
            future.result()
        return results

    def _serve(self, jobs: Sequence[Job], todo: deque[list[int]], results: list[tuple[Any, float]]) -> None:
        tries: dict[int, int] = {}
        worker: Worker | None = None
        try:
            while True:
                try:
                    numbers = todo.popleft()
                except IndexError:
                    return
                while numbers:
                    worker = worker or self._take()
                    numbers, alive = self._feed(worker, jobs, numbers, results, tries)
                    if not alive:
                        self._drop(worker)
                        worker = None
        finally:
            if worker is not None:
                self._give(worker)

    def _feed(
        self,
        worker: Worker,
        jobs: Sequence[Job],
        numbers: list[int],
        results: list[tuple[Any, float]],
        tries: dict[int, int],
    ) -> tuple[list[int], bool]:
        """Run jobs on a worker until they are done or it is: what is left, and whether the worker lives."""
        rest = list(numbers)
        limit = self.options.time_limit
        try:
            worker.outbox.send([(number, jobs[number]) for number in rest])
            # A worker that runs sympy in a child ends that child itself at the limit and lives on.
            limit += GRACE
            deadline = time.monotonic() + limit
            while rest:
                if not worker.inbox.poll(max(0.0, deadline - time.monotonic())):
                    log.info("grading: an answer took more than %.1f s", self.options.time_limit)
                    results[rest[0]] = (TimedOut, limit)
                    return rest[1:], False
                message = worker.inbox.recv()
                if message[0] == "importing":
                    deadline = time.monotonic() + START_LIMIT
                elif message[0] == "done":
                    results[message[1]] = (message[2], message[3])
                    rest.remove(message[1])
                    deadline = time.monotonic() + limit
                else:
                    deadline = time.monotonic() + limit
        except (EOFError, OSError, ValueError):
            if rest:
                first = rest[0]
                tries[first] = tries.get(first, 0) + 1
                log.info("grading: a worker died, %d answers go to another one", len(rest))
                if tries[first] >= 2:
                    results[first] = (Died, 0.0)
                    return rest[1:], False
            return rest, False
        return [], True

    def _take(self) -> Worker:
        with self._lock:
            if self._closed:
                raise RuntimeError("the grader is closed")
            if self._idle:
                return self._idle.pop()
        worker = Worker(self.options)
        with self._lock:
            self._alive.add(worker)
        return worker

    def _give(self, worker: Worker) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        self._drop(worker)

    def _drop(self, worker: Worker) -> None:
        with self._lock:
            self._alive.discard(worker)
        worker.kill()

    def close(self) -> None:
        """Finish the batches in progress, then end all workers."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in list(self._alive):
            worker.close()
        self._alive.clear()
        self._idle.clear()
