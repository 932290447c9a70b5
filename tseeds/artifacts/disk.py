"""What the operating system refuses, as one clear line; free space before large writes; files that may be damaged."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tseeds.errors import StageFailed, UserError, first_line

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NO_PLACE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP})


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses within the block into one clear line about ``path``.

    Raises:
        StageFailed: the disk is full or broken. UserError: no permission, a read-only file system, or no such place.
    """
    try:
        yield
    except OSError as error:
        refuse(path, error)


def refuse(path: Path, error: BaseException) -> NoReturn:
    """Raise the one clear line for an error of the operating system."""
    number, reason = error_number(error), getattr(error, "strerror", None) or str(error)
    if number in _FULL:
        raise StageFailed(
            f"{path}: disk full ({reason}); everything committed is kept. Free space (tseeds gc RUN --dry-run lists what "
            "can go) and run again"
        ) from error
    if number in _FORBIDDEN:
        raise UserError(
            f"{path}: cannot write here ({reason}); give write permission or choose another place"
        ) from error
    if number in _NO_PLACE:
        raise UserError(f"{path}: cannot write here ({reason}); choose another place") from error
    raise StageFailed(f"{path}: {reason}; everything committed is kept, run again to go on") from error


def error_number(error: BaseException) -> int | None:
    """errno of an error, also of libraries that only print it (safetensors: "(os error 28)", Arrow: "[errno 28]")."""
    number = getattr(error, "errno", None)
    if isinstance(number, int):
        return number
    found = re.search(r"\b(?:os error|errno) (\d+)", str(error))
    return int(found.group(1)) if found else None


def is_refusal(error: BaseException) -> bool:
    """Whether an error of whatever type says that the disk is full, read-only or broken."""
    return error_number(error) in _FULL | {errno.EROFS, errno.EIO}


def check_space(path: Path, needed: int, what: str) -> None:
    """Refuse a large write that would not fit.

    Raises:
        StageFailed: fewer than ``needed`` bytes (plus 5 %) are free on the file system of ``path``.
    """
    place = Path(path)
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed * 1.05:
        raise StageFailed(
            f"{path}: {what} needs about {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free; free space "
            "(tseeds gc RUN --dry-run lists what can go) and run again"
        )


def make_directories(path: Path) -> None:
    """Create a directory with its parents, each entry durable before anything is put into it."""
    path = Path(path)
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def make_parent(path: Path) -> None:
    """Create the directory that a file goes into.

    Raises:
        UserError, StageFailed: as refusals.
    """
    with refusals(path):
        make_directories(Path(path).parent)


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Make the bytes of a file durable."""
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())


def read_object(path: Path, mend: str) -> dict[str, Any]:
    """A JSON object from a file that somebody may have damaged.

    Raises:
        UserError: it is none; the line ends with ``mend``. FileNotFoundError: there is no file.
    """
    try:
        value = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError):
        raise UserError(f"{path}: damaged, not JSON; {mend}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: damaged, not a JSON object; {mend}")
    return value


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what damaged Parquet files raise within the block, in Arrow or polars, into one clear line about ``path``.

    Raises:
        UserError: a file is not readable as Parquet.
    """
    try:
        yield
    except Exception as error:
        from polars.exceptions import PolarsError
        from pyarrow import ArrowException

        if not isinstance(error, (ArrowException, PolarsError, OSError)):
            raise
        raise UserError(
            f"{path}: not readable as Parquet ({first_line(error)}); tseeds verify names damaged files"
        ) from None


def inside(name: Any) -> bool:
    """Whether a recorded name can be a file's and stays inside the directory that it was recorded for.

    >>> [inside(n) for n in ("policy/model.safetensors", "../x", "/etc/passwd", "a/../../x", "", 3, "x" * 256, "\\ud800")]
    [True, False, False, False, False, False, False, False]
    """
    if not isinstance(name, str) or not name or "\0" in name or Path(name).is_absolute():
        return False
    parts = Path(name).parts
    try:
        return ".." not in parts and len(name.encode()) < 1024 and all(len(part.encode()) <= 255 for part in parts)
    except UnicodeEncodeError:
        return False
