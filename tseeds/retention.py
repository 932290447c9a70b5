"""What may be deleted when: snapshots by the pool's own rule, trainer states and policies of old iterations.

Nothing is deleted that a committed artifact still needs: the policy of an iteration stays until the next iteration is
finished, snapshots of the pool stay, step 0 stays. Manifests, metrics and trajectories are never deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tseeds.artifacts import store
from tseeds.artifacts.rundir import RunDir
from tseeds.config import Pipeline
from tseeds.schedule import pool_steps, snapshot_steps


@dataclass(frozen=True)
class Removal:
    """names of the artifact at path that can go, how many bytes that frees, and why."""

    path: Path
    names: tuple[str, ...]
    bytes: int
    reason: str


def snapshot_bytes(run: RunDir) -> int:
    """Size of one snapshot: that of step 0."""
    manifest = store.read_manifest(run.snapshot(0))
    return manifest.bytes if manifest else 0


def removals(config: Pipeline, run: RunDir) -> Iterator[Removal]:
    """What retention would remove now, oldest first."""
    done = run.finished()
    pool = set(pool_steps(config.snapshot, done, snapshot_bytes=snapshot_bytes(run)))
    for step in snapshot_steps(config.snapshot, done):
        manifest = store.read_manifest(run.snapshot(step))
        if manifest is not None and step not in pool:
            names = tuple(f.path for f in manifest.files if (run.snapshot(step) / f.path).is_file())
            if names:
                yield Removal(run.snapshot(step), names, _size(run.snapshot(step), names), "left the snapshot pool")
    keep = config.snapshot
    for step in range(1, done):
        path = run.stage(step, "update")
        every = keep.keep_states_every
        if step > done - keep.keep_states or (every and step % every == 0):
            continue
        names = tuple(n for n in ("policy", "state") if (path / n).is_dir())
        if names:
            yield Removal(path, names, _size(path, names), f"older than the newest {keep.keep_states} iterations")


def collect(config: Pipeline, run: RunDir) -> int:
    """Remove it; returns the bytes freed."""
    return sum(store.prune(r.path, list(r.names), r.reason) for r in removals(config, run))


def _size(path: Path, names: tuple[str, ...]) -> int:
    """Bytes on disk that would be freed: files with other hard links free nothing."""
    files = [f for n in names for f in ((path / n).rglob("*") if (path / n).is_dir() else [path / n]) if f.is_file()]
    return sum(f.stat().st_size for f in files if f.stat().st_nlink == 1)
