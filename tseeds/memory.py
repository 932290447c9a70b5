"""Memory of this process: how much it took at most, and keeping freed blocks while an update runs on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h
_DEFAULTS = {_TRIM_THRESHOLD: 128 * 1024, _MMAP_MAX: 65536}


def peak() -> int:
    """Largest resident memory of this process so far, in bytes.

    Linux counts per program here; ``getrusage`` also counts the process that started this one, up to its ``exec``.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Inside the block freed memory stays with the process, at its end all of it goes back. No-op without glibc.

    glibc gives every large block back to the kernel as soon as it is freed and asks for it anew a moment later; the page
    faults of activations and logits then cost a tenth of the update (SmolLM2-135M, fp32, one core).
    """
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_MAX, 0)
    libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        for option, value in _DEFAULTS.items():
            libc.mallopt(option, value)
        libc.malloc_trim(0)
