"""Child processes that must not outlive the process that started them."""

from __future__ import annotations

import ctypes
import signal
import sys


def end_with_parent() -> None:
    """In a child: SIGTERM when its parent dies, however that dies (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
