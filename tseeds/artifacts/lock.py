"""One writer at a time: a lock file that names its owner; a dead owner's lock is reaped, a live one's is named."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tseeds.errors import Locked

log = logging.getLogger(__name__)


def _me() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def owner(path: Path) -> dict[str, Any] | None:
    """Who holds the lock now (pid, started, host, since), or None where nobody alive does. Never blocks."""
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        return None
    try:
        who = json.loads(text)
        if who["host"] != socket.gethostname():
            return who  # another machine's process cannot be checked from here
        alive = abs(psutil.Process(who["pid"]).create_time() - who["started"]) < 0.02
        return who if alive else None
    except (ValueError, KeyError, TypeError, psutil.NoSuchProcess):
        return None


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock at ``path`` during the block.

    The file is read and written under a short flock, so that two starters cannot both reap a dead owner; ownership itself
    is pid + start time + host, which no child process inherits.

    Raises:
        Locked: a live process of this host, or any process of another host, holds it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(path, "a+") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not path.exists() or os.fstat(handle.fileno()).st_ino != path.stat().st_ino:
                continue  # removed by its owner between open and flock
            who = owner(path)
            if who is not None:
                there = who["host"] != socket.gethostname()
                mend = f"if {who['host']} no longer runs it, delete {path}" if there else "wait for it or stop it"
                raise Locked(
                    f"{what} is being written by process {who['pid']} on {who['host']} since {who['since']}; {mend}"
                )
            handle.seek(0)
            left = handle.read()
            if left:
                log.info("%s: reaped the lock of a dead process", path)
            handle.seek(0)
            handle.truncate()
            handle.write(json.dumps(_me()))
            handle.flush()
            break
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
