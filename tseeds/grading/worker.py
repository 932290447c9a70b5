"""The process that grades what may hang: started bare, limited in memory, silent, and killed without regret.

Messages in: a list of numbered jobs, or None to end. Messages out, one tuple each: ("ready",), ("importing",), ("imported",),
("begin", number), ("done", number, result, seconds).

What needs sympy runs in a child forked from this process, which has one thread and has sympy loaded: killing the child costs
milliseconds, where a new process would import for seconds. Nobody outlives the parent for long: this process ends at the end
of file, and it and its child have an alarm set whose default action ends them half a second after the limit, which no library
code can hold off.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from tseeds.grading import tasks
from tseeds.grading.options import GradingOptions
from tseeds.grading.verdict import Verdict

GRACE = 0.5


class Worker:
    """Serves jobs of one parent."""

    def __init__(self, options: GradingOptions, inbox: Connection, outbox: Connection) -> None:
        self.options = options
        self.inbox, self.outbox = inbox, outbox
        self.loaded = False
        self.not_counted = 0.0

    def serve(self) -> None:
        """Run jobs until told to end or until the parent has gone."""
        while True:
            try:
                jobs = self.inbox.recv()
            except (EOFError, OSError):
                return
            if jobs is None:
                return
            for number, job in jobs:
                self.outbox.send(("begin", number))
                _alarm(self.options.time_limit + GRACE)
                self.not_counted = 0.0
                start = time.perf_counter()
                result = self.run(job)
                _alarm(0)
                self.outbox.send(("done", number, result, time.perf_counter() - start - self.not_counted))

    def run(self, job: tuple[str, ...]) -> Any:
        """One job: ("grade", gold, answer, form) or ("check", gold, task)."""
        try:
            if job[0] == "check":
                return tasks.check_gold_in_worker(job[1], job[2], self.heavy)
            return tasks.in_worker(job[1], job[2], self.options, self.heavy)
        except TimeoutError:
            return tasks.Outcome(Verdict.timeout, detail=f"more than {self.options.time_limit} s")
        except MemoryError:
            return tasks.Outcome(Verdict.error, detail=f"more than {self.options.memory_limit_mb} MiB of memory")
        except Exception as error:
            return tasks.Outcome(Verdict.error, detail=f"{type(error).__name__}: {error}"[:500])

    def heavy(self, name: str, *arguments: str) -> bool:
        """`fallback.name(*arguments)` in a child of its own.

        Raises:
            TimeoutError, MemoryError: the child was killed at its limit.
        """
        _alarm(0)
        if not self.loaded:
            start = time.perf_counter()
            self.outbox.send(("importing",))
            from tseeds.grading import fallback

            fallback.warm_up()
            self.loaded = True
            self.outbox.send(("imported",))
            self.not_counted += time.perf_counter() - start
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            _alarm(self.options.time_limit + GRACE)
            _in_child(name, arguments, Connection(write, readable=False))
        os.close(write)
        results = Connection(read, writable=False)
        try:
            if not results.poll(self.options.time_limit):
                raise TimeoutError
            result = results.recv()
        except EOFError:
            raise MemoryError from None
        finally:
            results.close()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if isinstance(result, Exception):
            raise result
        return bool(result)


def _in_child(name: str, arguments: tuple[str, ...], results: Connection) -> None:
    from tseeds.grading import fallback

    try:
        result: Any = getattr(fallback, name)(*arguments)
    except MemoryError:
        os._exit(1)
    except Exception as error:
        result = ValueError(f"{type(error).__name__}: {error}"[:500])
    results.send(result)
    os._exit(0)


def _alarm(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)


def main(read_fd: int, write_fd: int, options_json: str) -> None:
    """The process: limits, imports, then jobs."""
    options = GradingOptions.model_validate_json(options_json)
    sys.setrecursionlimit(20_000)
    sys.set_int_max_str_digits(0)
    limit = options.memory_limit_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    worker = Worker(options, Connection(read_fd, writable=False), Connection(write_fd, readable=False))
    if tasks.kind(options.task) == "python":
        tasks.load_quietly(options.task)
    else:
        import tseeds.grading.compare  # noqa: F401  (loaded before the clock of the first answer runs)
    worker.outbox.send(("ready",))
    worker.serve()
    os._exit(0)
