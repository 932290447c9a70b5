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

from tseeds.artifacts.disk import refusals
from tseeds.errors import Locked

log = logging.getLogger(__name__)

_LENGTH = 512
"""Bytes of a lock file: one write over the former owner, so that a reader never sees half of one."""


def _me() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "boot": _boot(),
        "namespace": _namespace(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _started(pid: int) -> float:
    """When a process started, in a count that no clock step moves: ticks since boot on Linux.

    Raises:
        psutil.NoSuchProcess: there is none.
    """
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return psutil.Process(pid).create_time()


def _boot() -> str | None:
    """The boot that pids and start times belong to, where the system tells."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _namespace() -> str | None:
    """The namespace that pids belong to (containers have their own), where the system tells."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def owner(path: Path) -> dict[str, Any] | None:
    """Who holds the lock now (pid, started, host, since), or None where nobody alive does. Never blocks."""
    try:
        who = json.loads(Path(path).read_text())
        if who["host"] != socket.gethostname():
            return {"pid": None, "since": None, **who, "host": str(who["host"])}  # not to be checked from here
        if who.get("boot") != _boot():
            return None
        if who.get("namespace") != _namespace():
            return who | {"host": f"another container of {who['host']}"}  # not to be checked from here either
        process = psutil.Process(who["pid"])
        alive = abs(_started(who["pid"]) - who["started"]) < 0.02 and process.status() != psutil.STATUS_ZOMBIE
        return who if alive else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError, RecursionError, psutil.NoSuchProcess):
        return None


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock at ``path`` during the block.

    The file is read, written and removed under a short flock, so that two starters cannot both reap a dead owner; ownership
    itself is pid + start time + host, which no child process inherits.

    Raises:
        Locked: a live process of this host, or any process of another host, holds it.
    """
    path = Path(path)
    with refusals(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        while not _taken(path, what):
            pass  # removed by its owner between open and flock
    try:
        yield
    finally:
        _release(path)


def _taken(path: Path, what: str) -> bool:
    """Take the lock; False where its file is no longer the one that was opened."""
    with open(path, "a+b") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not _same(handle.fileno(), path):
            return False
        who = owner(path)
        if who is not None:
            there = who["host"] != socket.gethostname()
            mend = f"if {who['host']} no longer runs it, delete {path}" if there else "wait for it or stop it"
            raise Locked(
                f"{what} is being written by process {who['pid']} on {who['host']} since {who['since']}; {mend}"
            )
        if os.fstat(handle.fileno()).st_size:
            log.info("%s: reaped the lock of a dead process", path)
        # not through the handle: append mode would write behind the former owner
        with open(path, "r+b", buffering=0) as writer:
            writer.write(json.dumps(_me()).encode().ljust(_LENGTH))
    return True


def _release(path: Path) -> None:
    """Remove the lock, under flock: a starter that has just opened it must see that it went."""
    try:
        with open(path, "rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if _same(handle.fileno(), path) and _mine(handle.read()):
                path.unlink()
    except OSError as error:
        log.warning("%s: not removed (%s); it is reaped when this process has ended", path, error.strerror)


def _mine(content: bytes) -> bool:
    """Whether a lock file names this process: one that was taken over meanwhile belongs to somebody else."""
    try:
        who = json.loads(content)
        return (who["pid"], who["namespace"]) == (os.getpid(), _namespace())
    except (ValueError, KeyError, TypeError):
        return False


def _same(handle: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(handle)
    return (mine.st_ino, mine.st_dev) == (there.st_ino, there.st_dev)
