"""Rows of data files as plain dictionaries, whatever the format; what cannot be read becomes a Broken with its reason.

Reads JSONL, JSON arrays, Parquet, CSV (the text formats also gzipped), directories and patterns of such files, hf:// files
through polars and reasoning-gym's generators. Nothing here runs code that comes with the data: no pickle, no loading scripts.
"""

from __future__ import annotations

import csv
import glob
import gzip
import hashlib
import io
import json
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import parse_qsl

from tseeds.artifacts.policy import file_digest
from tseeds.errors import UserError

HUB = "hf://"
GYM = "reasoning-gym:"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
_NOT_DATA = {"manifest.json", "dataset_infos.json", "dataset_info.json", "state.json"}
_LONGEST_CELL = 2**24

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Broken:
    """A row that cannot be read."""

    detail: str


Numbered = tuple[str, int, Row | Broken]
"""File, 0-based position in it, row."""


def _kind(path: str) -> str:
    name = path.lower().removesuffix(".gz")
    return next((s for s in SUFFIXES if name.endswith(s)), "")


def expand(path: str | list[str]) -> list[str]:
    """The files that one or several paths stand for: themselves, the parts of directories, the matches of patterns.

    Raises:
        UserError: nothing is there, or it is no format that can be read.
    """
    found: list[str] = []
    for place in [path] if isinstance(path, str) else path:
        if place.startswith((HUB, GYM)):
            found.append(place)
            continue
        where = Path(place)
        if where.is_dir():
            parts = sorted(
                str(f)
                for f in where.rglob("*")
                if f.is_file()
                and _kind(f.name)
                and f.name not in _NOT_DATA
                and not any(part.startswith((".", "_")) for part in f.relative_to(where).parts)
            )
            if not parts:
                raise UserError(f"problems.path {place}: the directory holds no {', '.join(SUFFIXES)} file")
            found += parts
        elif where.is_file():
            if not _kind(place):
                raise UserError(f"problems.path {place}: unknown format; use {', '.join(SUFFIXES)} (or .gz of text)")
            found.append(place)
        else:
            parts = sorted(p for p in glob.glob(place, recursive=True) if _kind(p) and Path(p).is_file())
            if not parts:
                raise UserError(f"problems.path {place}: no such file or directory")
            found += parts
    return found


def digests(path: str | list[str]) -> dict[str, str]:
    """What the data is: sha256 of each local file by its position; of hub files and generators only their name."""
    return {f"data {n}": _digest(place) for n, place in enumerate(expand(path))}


def digest(path: str | list[str]) -> str:
    """One sha256 over ``digests``: equal bytes, equal digest, wherever they lie."""
    lines = [
        d if place.startswith((HUB, GYM)) else hashlib.sha256(bytes.fromhex(d)).hexdigest()
        for place, d in zip(expand(path), digests(path).values(), strict=True)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _digest(place: str) -> str:
    """A name for what is not on this machine, else the file's digest, computed once for each state of it."""
    if place.startswith((HUB, GYM)):
        return place
    stat = Path(place).stat()
    return _file_digest(place, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4096)
def _file_digest(place: str, size: int, mtime_ns: int) -> str:
    return file_digest(Path(place))


def read(path: str | list[str]) -> Iterator[Numbered]:
    """All rows in the order of files and positions.

    Raises:
        UserError: a file cannot be opened, or is damaged as a whole.
    """
    for place in expand(path):
        try:
            if place.startswith(GYM):
                yield from _gym(place)
            elif place.startswith(HUB):
                yield from _hub(place)
            else:
                yield from {
                    ".jsonl": _jsonl,
                    ".ndjson": _jsonl,
                    ".json": _json,
                    ".parquet": _parquet,
                    ".csv": _csv,
                }[_kind(place)](place)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise UserError(f"problems.path {place}: cannot be read ({reason})") from error


def _bytes(path: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb"))


def _parsed(text: bytes) -> Row | Broken:
    """One JSON object."""
    try:
        value = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Broken(f"not UTF-8 at byte {error.start}")
    except RecursionError:
        return Broken("JSON nested too deeply")
    except ValueError as error:
        return Broken(f"not JSON: {error}")
    return value if isinstance(value, dict) else Broken(f"a JSON object is wanted, not {type(value).__name__}")


def _jsonl(path: str) -> Iterator[Numbered]:
    with _bytes(path) as handle:
        for number, line in enumerate(handle):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
            if line.strip():
                yield path, number, _parsed(line)


def _json(path: str) -> Iterator[Numbered]:
    """A JSON array of objects, or one object a line under the wrong suffix."""
    with _bytes(path) as handle:
        start = handle.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):
        yield from _jsonl(path)
        return
    with _bytes(path) as handle:
        try:
            rows = json.loads(handle.read().decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"problems.path {path}: not JSON: {error}") from None
    for number, row in enumerate(rows):
        yield path, number, row if isinstance(row, dict) else Broken(f"an object is wanted, not {type(row).__name__}")


def _parquet(path: str) -> Iterator[Numbered]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        number = 0
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                try:
                    rows: list[Any] = batch.to_pylist()
                except (UnicodeDecodeError, ValueError, OverflowError):
                    rows = [_one(batch.slice(k, 1)) for k in range(batch.num_rows)]
                for row in rows:
                    yield path, number, row
                    number += 1
    except (pa.ArrowException, ValueError) as error:
        raise UserError(f"problems.path {path}: not a whole Parquet file ({str(error).splitlines()[0]})") from None


def _one(batch: Any) -> Row | Broken:
    try:
        return batch.to_pylist()[0]
    except (UnicodeDecodeError, ValueError, OverflowError) as error:
        return Broken(f"a value cannot be read: {error}")


class _Lines:
    """The lines of a file, of which those since ``taken`` was emptied can be read again."""

    def __init__(self, handle: io.TextIOWrapper) -> None:
        self._handle = handle
        self._back: deque[str] = deque()
        self.taken: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.taken.append(self._back.popleft() if self._back else next(self._handle))
        return self.taken[-1]

    def back(self) -> None:
        """Take back all but the first: a stray quote spoils its own line, not those that it seems to enclose."""
        self._back.extendleft(reversed(self.taken[1:]))


def _csv(path: str) -> Iterator[Numbered]:
    """Header line, then rows; all values are text."""
    csv.field_size_limit(_LONGEST_CELL)
    with _bytes(path) as raw, io.TextIOWrapper(raw, "utf-8-sig", errors="surrogateescape", newline="") as handle:
        lines = _Lines(handle)
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader, None)
        except csv.Error as error:
            raise UserError(f"problems.path {path}: not CSV: {error}") from None
        if header is None:
            return
        number = 0
        while True:
            lines.taken.clear()
            wrong = None
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                wrong = f"not CSV: {error}"
            else:
                if not cells:
                    continue
                if len(cells) != len(header):
                    wrong = f"{len(cells)} cells under {len(header)} columns"
            if wrong is None:
                yield path, number, dict(zip(header, cells, strict=True))
            else:
                yield path, number, Broken(wrong)
                lines.back()
                reader = csv.reader(lines, strict=True)
            number += 1


def _hub(path: str) -> Iterator[Numbered]:
    """A file (or pattern of Parquet files) of a hub data set, hf://datasets/OWNER/NAME/FILE."""
    import polars as pl

    readers: dict[str, Any] = {
        ".parquet": pl.read_parquet,
        ".csv": lambda p: pl.read_csv(p, infer_schema=False),
        ".jsonl": pl.read_ndjson,
        ".ndjson": pl.read_ndjson,
    }
    kind = _kind(path)
    if kind not in readers:
        raise UserError(f"problems.path {path}: name a file, such as {path.rstrip('/')}/data/train-*.parquet")
    try:
        frame = readers[kind](path)
    except Exception as error:  # polars passes many kinds of network and format errors on
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"problems.path {path}: cannot be read from the hub ({reason}); check the name and the network, or download the "
            "file and name it"
        ) from error
    for number, row in enumerate(frame.iter_rows(named=True)):
        yield path, number, row


def _gym(path: str) -> Iterator[Numbered]:
    """reasoning-gym:NAME?size=500&seed=0&…: generated problems; further values go to the generator."""
    name, _, query = path.removeprefix(GYM).partition("?")
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(f"problems.path {path}: {error.name} is not installed; pip install 'tseeds[gym]'") from None
    values: dict[str, Any] = {"size": 500, "seed": 0}
    for key, text in parse_qsl(query, keep_blank_values=True):
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    try:
        dataset = reasoning_gym.create_dataset(name, **values)
        rows = [dataset[n] for n in range(len(dataset))]
    except Exception as error:  # the generators assert on their settings
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"problems.path {path}: reasoning-gym refuses it: {reason}") from error
    mark = hashlib.sha256(path.encode()).hexdigest()[:8]
    for number, row in enumerate(rows):
        yield (
            path,
            number,
            {
                "id": f"{name}-{mark}-{number}",
                "problem": row["question"],
                "gold": row["answer"],
                "source": f"{GYM}{name}",
                "difficulty": None,
            },
        )
