"""CPU threads of an engine: chosen by model size, set before torch and vllm read them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

SMALL = 100_000_000
"""Parameters below which one thread is fastest on a shared machine (docs/engines.md)."""


def choose(parameters: int, asked: int = 0) -> int:
    """Threads of one engine: ``asked`` where positive, one below SMALL parameters, else the cores of this process.

    Every OpenMP barrier waits for the slowest thread; a small model spends its time in barriers, and one thread that
    the operating system put aside then stops all others (20 times slower on a busy machine).

    >>> choose(3_400_000)
    1
    >>> choose(3_400_000, asked=2)
    2
    """
    if asked > 0:
        return asked
    return 1 if parameters < SMALL else cores()


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(threads: int) -> None:
    """Environment that torch's OpenMP and vllm read once, at import; call it before the first import of either.

    Where torch is already imported (the trainer lives in this process), ``limited`` still sets the number at run time.
    VLLM_CPU_OMP_THREADS_BIND=nobind: binding would pin the trainer's threads too, and two engines to the same cores.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"


@contextmanager
def limited(threads: int) -> Iterator[None]:
    """Run the body with this many torch threads and put the number back.

    OpenMP keeps the number per calling thread, so it is set around every engine step, whichever thread steps.
    """
    import torch

    before = torch.get_num_threads()
    if before != threads:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if before != threads:
            torch.set_num_threads(before)
