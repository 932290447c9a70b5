"""What may be deleted when: snapshots by the pool's own rule, trainer states and policies of old iterations.

Nothing is deleted that a committed artifact still needs: the policy of an iteration stays until the next iteration is
finished, snapshots of the pool stay, step 0 stays. Manifests, metrics and trajectories are never deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tseeds.artifacts import store
from tseeds.artifacts.policy import ADAPTER_CONFIG
from tseeds.artifacts.rundir import RunDir
from tseeds.history import History


@dataclass(frozen=True)
class Removal:
    """names of the artifact at path that can go, how many bytes that frees, and why."""

    path: Path
    names: tuple[str, ...]
    bytes: int
    reason: str


def snapshot_bytes(run: RunDir) -> int:
    """Size of one snapshot: that of step 0, or of iteration 1's adapter where adapters are trained."""
    first = store.read_manifest(run.stage(1, "update"))
    adapter = [f for f in first.files if f.path.startswith("policy/")] if first else []
    if any(f.path == f"policy/{ADAPTER_CONFIG}" for f in adapter):
        return sum(f.bytes for f in adapter)
    manifest = store.read_manifest(run.snapshot(0))
    return manifest.bytes if manifest else 0


def removals(history: History, run: RunDir, done: int, *, newest: bool = False) -> Iterator[Removal]:
    """What retention would remove when ``done`` iterations are finished, oldest first.

    newest: only what iteration ``done`` itself made superfluous; the rest went before.
    """
    newest = newest and history.at(done).snapshot == history.at(done + 1).snapshot  # new rules look at everything
    size = snapshot_bytes(run)
    pool = set(history.pool(done + 1, snapshot_bytes=size))
    before = history.pool(done, snapshot_bytes=size) if done else []
    for step in [*before, done] if newest else _taken(run):
        path = run.snapshot(step)
        manifest = store.read_manifest(path) if step <= done and step not in pool else None
        if manifest is not None:
            names = tuple(f.path for f in manifest.files if (path / f.path).is_file())
            if names:
                yield Removal(path, names, _size(path, names), "left the snapshot pool")
    keep = history.at(done + 1).snapshot
    for step in range(max(1, done - keep.keep_states) if newest else 1, done):
        path = run.stage(step, "update")
        every = keep.keep_states_every
        if step > done - keep.keep_states or (every and step % every == 0):
            continue
        names = tuple(n for n in ("policy", "state") if (path / n).is_dir())
        if names:
            yield Removal(path, names, _size(path, names), f"older than the newest {keep.keep_states} iterations")


def collect(history: History, run: RunDir, done: int, *, newest: bool = False) -> int:
    """Remove it; returns the bytes freed."""
    return sum(store.prune(r.path, list(r.names), r.reason) for r in removals(history, run, done, newest=newest))


def _taken(run: RunDir) -> list[int]:
    """Steps of all snapshots on disk, ascending."""
    folders = (run.root / "snapshots").glob("step-*")
    return sorted(int(p.name[5:]) for p in folders if p.name[5:].isdigit() and (p / store.MANIFEST).is_file())


def _size(path: Path, names: tuple[str, ...]) -> int:
    """Bytes on disk that would be freed: files with other hard links free nothing."""
    files = [f for n in names for f in ((path / n).rglob("*") if (path / n).is_dir() else [path / n]) if f.is_file()]
    return sum(f.stat().st_size for f in files if f.stat().st_nlink == 1)
