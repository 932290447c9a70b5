"""The process that grades what may hang: started bare, limited in memory, silent, and killed without regret.

Messages in: a list of jobs, or None to end. Messages out, one tuple each: ("ready",), ("importing",), ("imported",), ("begin", i),
("done", i, outcome, seconds). It also ends itself when its parent has gone (end of file) or when an answer overruns its limit
by half a second (an alarm with the default action, so that no library code can hold it off).
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


def main(read_fd: int, write_fd: int, options_json: str) -> None:
    """Serve jobs until told to end."""
    options = GradingOptions.model_validate_json(options_json)
    sys.setrecursionlimit(20_000)
    sys.set_int_max_str_digits(0)
    limit = options.memory_limit_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    inbox, outbox = Connection(read_fd, writable=False), Connection(write_fd, readable=False)
    if tasks.kind(options.task) != "python":
        import tseeds.grading.compare  # noqa: F401  (loaded before the clock of the first answer runs)
    outbox.send(("ready",))
    heavy = False

    def before_import() -> None:
        nonlocal heavy
        if heavy:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        outbox.send(("importing",))
        import math_verify  # noqa: F401

        heavy = True
        outbox.send(("imported",))
        signal.setitimer(signal.ITIMER_REAL, options.time_limit + GRACE)

    if tasks.kind(options.task) == "python":
        try:
            tasks.verifier(options.task)
        except Exception:
            pass  # reported with each answer
    while True:
        try:
            jobs = inbox.recv()
        except (EOFError, OSError):
            os._exit(0)
        if jobs is None:
            os._exit(0)
        for number, job in jobs:
            outbox.send(("begin", number))
            signal.setitimer(signal.ITIMER_REAL, options.time_limit + GRACE)
            start = time.perf_counter()
            outcome = run(job, options, before_import)
            signal.setitimer(signal.ITIMER_REAL, 0)
            outbox.send(("done", number, outcome, time.perf_counter() - start))


def run(job: tuple[str, ...], options: GradingOptions, before_import: Any) -> Any:
    """One job: ("grade", gold, answer, form) or ("check", gold, task)."""
    try:
        if job[0] == "check":
            return tasks.check_gold_in_worker(job[1], job[2], before_import)
        return tasks.in_worker(job[1], job[2], job[3], options, before_import)
    except MemoryError:
        return tasks.Outcome(Verdict.error, detail=f"more than {options.memory_limit_mb} MiB of memory")
    except Exception as error:
        return tasks.Outcome(Verdict.error, detail=f"{type(error).__name__}: {error}"[:500])
