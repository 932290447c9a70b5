"""Where things lie in a run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tseeds.artifacts.policy import policy_digest, policy_files
from tseeds.artifacts.store import MANIFEST, read_manifest
from tseeds.errors import UserError


@dataclass(frozen=True)
class RunDir:
    """Paths of one run; nothing here reads or writes more than directory entries."""

    root: Path

    @property
    def pipeline(self) -> Path:
        """The resolved pipeline that the run follows."""
        return self.root / "pipeline.toml"

    @property
    def record(self) -> Path:
        """run.json: name, creation, lineage, accepted changes."""
        return self.root / "run.json"

    @property
    def metrics(self) -> Path:
        """One JSON line per finished iteration."""
        return self.root / "metrics.jsonl"

    @property
    def lock(self) -> Path:
        """Lock of the one writer."""
        return self.root / "run.lock"

    @property
    def problems(self) -> Path:
        """The ingested problems."""
        return self.root / "problems"

    @property
    def curriculum(self) -> Path:
        """Pass rates of the base policy on the problems."""
        return self.root / "curriculum"

    def snapshot(self, step: int) -> Path:
        """Snapshot of the policy of ``step``: itself a model directory."""
        return self.root / "snapshots" / f"step-{step:06d}"

    def stage(self, iteration: int, stage: str) -> Path:
        """Artifact of a stage of an iteration."""
        return self.root / "iterations" / f"{iteration:06d}" / stage

    def evaluation(self, step: int, name: str) -> Path:
        """Evaluation of the policy of ``step`` on one benchmark."""
        return self.root / "evaluations" / f"{step:06d}" / name

    def policy(self, step: int) -> Path:
        """Model directory of the policy of ``step``."""
        return self.snapshot(0) if step == 0 else self.stage(step, "update") / "policy"

    def state(self, step: int) -> Path | None:
        """Trainer state after ``step``; None at step 0."""
        return None if step == 0 else self.stage(step, "update") / "state"

    def iterations(self) -> list[int]:
        """Numbers of the iterations that have a directory, ascending."""
        parent = self.root / "iterations"
        return sorted(int(p.name) for p in parent.iterdir() if p.name.isdigit()) if parent.is_dir() else []

    def finished(self) -> int:
        """Iterations whose update is committed, counted from 1 without a gap."""
        done = 0
        while (self.stage(done + 1, "update") / MANIFEST).is_file():
            done += 1
        return done


def open_run(path: Path | str) -> RunDir:
    """An existing run directory.

    Raises:
        UserError: there is none at ``path``.
    """
    run = RunDir(Path(path))
    if not run.pipeline.is_file():
        raise UserError(
            f"{path}: not a run directory (no pipeline.toml); start one with tseeds run PIPELINE --run {path}"
        )
    return run


_digests: dict[tuple[tuple[str, int, int], ...], str] = {}


def digest_of(policy: Path) -> str:
    """Digest of a policy directory, computed once per process and state of its files."""
    stats = [(p, p.stat()) for p in policy_files(policy)]
    mark = tuple((str(p), s.st_size, s.st_mtime_ns) for p, s in stats)
    if mark not in _digests:
        _digests[mark] = policy_digest(policy)
    return _digests[mark]


def recorded_digest(policy: Path) -> str:
    """Digest of a policy as its manifest records it, without reading weights; computed where there is no manifest."""
    for place in (policy, policy.parent):
        manifest = read_manifest(place)
        if manifest is not None and "policy" in manifest.facts:
            return manifest.facts["policy"]
    return digest_of(policy)
