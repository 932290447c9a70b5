"""Re-checks what is committed: files against manifests, artifacts against the run they lie in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tseeds import pipeline
from tseeds.artifacts import store
from tseeds.artifacts.rundir import RunDir
from tseeds.errors import UserError


def check(path: Path) -> tuple[int, list[str]]:
    """(artifacts looked at, one line per damage) of a run directory or a single artifact.

    Raises:
        UserError: there is nothing to check at ``path``.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such run or artifact")
    run = RunDir(path)
    if run.pipeline.exists() or run.record.exists():
        folders = list(_artifacts(run))
        damages = [line for folder in folders for line in _damages(folder)]
        return len(folders), [*damages, *_of_run(run, damaged=bool(damages))]
    if not (path / store.MANIFEST).exists():
        if any(path.glob("*.parquet")) or any(path.glob("*.safetensors")):
            return 1, [f"{path}: no manifest; it was never committed, or its manifest is lost"]
        raise UserError(f"{path}: holds no committed artifact")
    return 1, list(_damages(path))


def _artifacts(run: RunDir) -> Iterator[Path]:
    """Every directory of a run that should be a committed artifact; interrupted ones are none."""
    yield from (folder for folder in (run.problems, run.curriculum) if folder.is_dir())
    for parent in (
        run.root / "snapshots",
        *sorted((run.root / "iterations").glob("*")),
        *sorted((run.root / "evaluations").glob("*")),
    ):
        if parent.is_dir():
            yield from sorted(
                p
                for p in parent.iterdir()
                if p.is_dir() and not p.name.startswith(".") and not p.name.endswith(".partial")
            )


def _damages(folder: Path) -> Iterator[str]:
    try:
        manifest = store.read_manifest(folder)
        if manifest is None:
            yield f"{folder}: no manifest; it was never committed, or its manifest is lost"
        else:
            yield from store.damages(manifest)
    except UserError as error:
        yield str(error)


def _of_run(run: RunDir, *, damaged: bool) -> Iterator[str]:
    """What is wrong between artifacts: one of another run, or made with other values than the run's record says."""
    try:
        for file in (run.metrics, *run.root.glob("iterations/*/*.partial/parts.jsonl")):
            store.read_lines(file)
        history = pipeline.open_history(run)
        if damaged:
            return  # the comparison below reads manifests that may be the damaged ones
        for report in pipeline.survey(history, run):
            if report.state == "stale":
                yield f"{report.step.out}: does not belong to this run as it stands ({'; '.join(report.reasons)})"
    except UserError as error:
        yield str(error)
