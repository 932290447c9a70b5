"""A new run from an iteration of another: counterfactual training from one point.

The fork shares its parent's committed artifacts up to iteration N (hard links; copies where the file system cannot link)
and nothing else: artifacts never change in place, so neither run can touch the other. Changed values apply from N + 1 on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tseeds import config as configuration
from tseeds import pipeline, retention
from tseeds.artifacts import disk, store
from tseeds.artifacts.rundir import RunDir
from tseeds.errors import Stale, UserError
from tseeds.history import History


def fork(source: RunDir, at: int, target: Path, sets: Sequence[str] = ()) -> RunDir:
    """Make the run ``target`` from iteration ``at`` of ``source``; without ``sets`` it goes on bit for bit like its parent.

    Appears whole or not at all, also while the parent is training.

    Raises:
        UserError: no such iteration, what it needs was pruned, or ``target`` exists. Stale: a set value changes what
        iterations 1..at were made from.
    """
    record, done, target = pipeline.read_record(source), source.finished(), Path(target)
    if not 0 <= at <= done:
        raise UserError(f"--at {at}: {source.root} has finished {done}, so 0 (its start) to {done} can be shared")
    if target.exists():
        raise UserError(f"{target}: exists already; choose another place for the fork")
    old = pipeline.open_history(source)
    _check_kept(old, source, at)
    history = _changed(old, at, sets)
    with disk.refusals(target):
        disk.make_directories(target.resolve().parent)
        aside = target.resolve().with_name(f".{target.resolve().name}.forking-{os.getpid()}")
        for left in aside.parent.glob(f".{target.resolve().name}.forking-*"):
            if not psutil.pid_exists(int(left.name.rpartition("-")[2])):
                shutil.rmtree(left, ignore_errors=True)  # of a fork that was killed
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir()
            run = RunDir(aside)
            _share(source, run, at)
            for line in store.read_lines(source.metrics):
                if line["iteration"] <= at:
                    store.append_line(run.metrics, line)
            update = store.read_manifest(source.stage(at, "update")) if at else None
            parent = {
                "run": str(source.root.resolve()),
                "at": at,
                "update": update.digest if update else None,
                "parent": record.get("parent"),
            }
            new = {"created": pipeline.now(), "parent": parent, "changes": list(history.changes)}
            pipeline.write_record(run, new, history.config)
            stale = pipeline.fixed_at_setup(History(history.config, history.changes_until(at)), run)
            stale = stale or [r for r in pipeline.survey(history, run, upto=at) if r.state == "stale"]
            if stale:
                raise Stale(f"{target}: {pipeline.explain(stale)}; a fork shares {span(at)} unchanged")
            store.publish(aside, target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return RunDir(target)


def span(at: int) -> str:
    """What a fork at an iteration shares, in words.

    >>> [span(n) for n in (0, 1, 50)]
    ['the start', 'iteration 1', 'iterations 1 to 50']
    """
    return f"iterations 1 to {at}" if at > 1 else "iteration 1" if at else "the start"


def _check_kept(history: History, source: RunDir, at: int) -> None:
    """Raise where retention has removed what iteration at + 1 begins with."""
    keep = history.at(at).snapshot
    if at and not _has_state(source, at):
        left = [i for i in source.iterations() if _has_state(source, i)]
        there = f"it still has those of {', '.join(map(str, left[-8:]))}" if left else "it has none at all"
        raise UserError(
            f"{source.root}: retention removed weights and trainer state of iteration {at} (snapshot.keep_states = "
            f"{keep.keep_states}); {there}. snapshot.keep_states_every keeps some for forks"
        )
    pool = history.pool(at + 1, snapshot_bytes=retention.snapshot_bytes(source))
    gone = [step for step in pool if store.pruned(source.snapshot(step))]
    if gone:
        raise UserError(
            f"{source.root}: retention removed the snapshot of step {gone[0]}, which may write seeds in iteration {at + 1}; "
            "fork at a later iteration, or keep more with snapshot.keep_last and snapshot.keep_every"
        )


def _has_state(run: RunDir, iteration: int) -> bool:
    folder = run.stage(iteration, "update")
    return store.read_manifest(folder) is not None and not {"policy", "state"} & set(store.pruned(folder))


def _changed(history: History, at: int, sets: Sequence[str]) -> History:
    """The parent's history with the set values from iteration at + 1 on, in place of later changes of the same keys."""
    data = history.config.model_dump(mode="json", exclude_none=True)
    for assignment in sets:
        configuration.set_value(data, assignment)
    config = configuration.parse(data, "--set")
    then, after = configuration.flatten(history.at(at)), configuration.flatten(config)
    wanted = {".".join(assignment.partition("=")[0].strip().split(".")[:2]) for assignment in sets}
    changes: list[dict[str, Any]] = [dict(c) for c in history.changes if c["iteration"] <= at or c["key"] not in wanted]
    for key in sorted(wanted):
        if then.get(key) != after.get(key):
            changes.append(
                {"iteration": at + 1, "key": key, "old": then.get(key), "new": after.get(key), "at": pipeline.now()}
            )
    return History(config, changes)


def _share(source: RunDir, run: RunDir, at: int) -> None:
    """Link the committed artifacts of the parent up to iteration ``at``."""
    for folder in _artifacts(source, at):
        manifest = store.require(folder, "artifact")
        into = run.root / folder.relative_to(source.root)
        for name in [*(entry.path for entry in manifest.files), store.MANIFEST, store.PRUNED]:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                store.link_or_copy(folder / name, into / name)
            except FileNotFoundError:
                gone = store.pruned(folder)
                if name != store.PRUNED and not any(name == g or name.startswith(f"{g}/") for g in gone):
                    raise UserError(
                        f"{folder / name}: missing; tseeds verify {source.root} says what is damaged"
                    ) from None
    if at and not _has_state(run, at):
        raise UserError(f"{source.root}: its retention removed iteration {at} meanwhile; fork at a later one")


def _artifacts(source: RunDir, at: int) -> Iterator[Path]:
    """Committed artifacts of set-up and of iterations 1..at."""
    yield source.problems
    if (source.curriculum / store.MANIFEST).is_file():
        yield source.curriculum
    for parent in ("snapshots", "evaluations", "iterations"):
        for folder in sorted((source.root / parent).glob("*")):
            number = folder.name.removeprefix("step-")
            if not number.isdigit() or int(number) > at:
                continue
            for artifact in [folder] if parent == "snapshots" else sorted(folder.iterdir()):
                if not artifact.name.startswith(".") and (artifact / store.MANIFEST).is_file():
                    yield artifact
