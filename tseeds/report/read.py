"""What figures are made of: runs and groups of runs, read from their committed artifacts alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tseeds import config as configuration
from tseeds.artifacts import store
from tseeds.artifacts.disk import readable
from tseeds.artifacts.rundir import RunDir, open_run
from tseeds.config import Pipeline
from tseeds.errors import UserError

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class Run:
    """One run, read when asked."""

    root: Path

    @property
    def directory(self) -> RunDir:
        """Where its files lie."""
        return RunDir(self.root)

    @cached_property
    def config(self) -> Pipeline:
        """The resolved pipeline."""
        return configuration.load(self.directory.pipeline)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl by iteration."""
        return store.read_lines(self.directory.metrics)

    @cached_property
    def ages(self) -> list[dict[str, Any]]:
        """{age, advantage, reward, rows}: means over seeded rows by the snapshot's age in iterations."""
        if self._rows is None:
            return []
        import polars as pl

        seeded = self._rows.filter(pl.col("snapshot_age").is_not_null(), pl.col("seed_tokens") > 0)
        means = pl.col("advantage", "reward").cast(pl.Float64).mean()
        return seeded.group_by(age="snapshot_age").agg(means, rows=pl.len()).sort("age").to_dicts()

    @cached_property
    def seed_lengths(self) -> list[dict[str, Any]]:
        """{share, reward, rows}: mean reward of seeded rows by the share of the response that the seed is (tenths)."""
        if self._rows is None:
            return []
        import polars as pl

        whole = pl.col("seed_tokens") + pl.col("continuation_tokens")
        tenth = (pl.col("seed_tokens") * 10 // whole.clip(lower_bound=1)).clip(upper_bound=9)
        return (
            self._rows.filter(pl.col("seed_tokens") > 0)
            .group_by(tenth=tenth)
            .agg(reward=pl.col("reward").cast(pl.Float64).mean(), rows=pl.len())
            .sort("tenth")
            .select(share=pl.col("tenth") / 10 + 0.05, reward="reward", rows="rows")
            .to_dicts()
        )

    @cached_property
    def _rows(self) -> pl.DataFrame | None:
        import polars as pl

        files = sorted(self.root.glob("iterations/*/update/rows.parquet"))
        columns = ("reward", "advantage", "snapshot_age", "seed_tokens", "continuation_tokens")
        with readable(self.root):
            return pl.scan_parquet(files).select(columns).collect() if files else None

    @cached_property
    def bins(self) -> dict[str, list[float]]:
        """{"clipped_mass_seed": [10 means by position]}, over the optimizer steps of all iterations; NaN: no tokens."""
        import numpy as np
        import pyarrow.parquet as pq

        sums: dict[str, list[Any]] = {}
        for file in sorted(self.root.glob("iterations/*/update/steps.parquet")):
            with readable(file):
                table = pq.read_table(file, partitioning=None)
            for name in table.column_names:
                if name.endswith("_bins"):
                    sums.setdefault(name.removesuffix("_bins"), []).extend(table[name].to_pylist())
        found = {}
        for name, steps in sums.items():
            values = np.array(steps, dtype=float)
            # a bin without tokens reports 0 for everything, entropy included: it says nothing about the others
            empty = np.array(sums.get(f"ess_share_{name.rsplit('_', 1)[1]}", steps), dtype=float) == 0
            values[empty] = np.nan
            held = ~np.isnan(values)
            total = np.where(held, values, 0).sum(axis=0)
            found[name] = [t / n if n else math.nan for t, n in zip(total, held.sum(axis=0), strict=True)]
        return found

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """Rows of every evaluation's metrics table (EVALUATION_METRICS)."""
        import pyarrow.parquet as pq

        files = sorted(self.root.glob("evaluations/*/*/tables/metrics.parquet"))
        rows = []
        for file in files:
            with readable(file):
                table = pq.read_table(file, partitioning=None)
            rows += [row | {"benchmark": file.parents[1].name} for row in table.to_pylist()]
        return rows

    @cached_property
    def mixed(self) -> dict[tuple[int, str], list[dict[str, Any]]]:
        """(policy step, benchmark) -> cells of a mixed inference grid."""
        found = {}
        for place in sorted(self.root.glob("mixed/*/*")):
            manifest = store.read_manifest(place)
            if manifest is not None:
                found[int(place.parent.name), place.name] = manifest.facts["cells"]
        return found


@dataclass(frozen=True)
class Group:
    """Runs that differ in their random seed alone (or that the user named one): a mean and a band."""

    name: str
    runs: tuple[Run, ...]


def groups(arguments: Sequence[str]) -> list[Group]:
    """Groups from the command line's arguments: RUN, or NAME=RUN to name a group.

    Unnamed runs whose pipelines are equal except for run.seed (and paths) are one group.

    Raises:
        UserError: no run directory at a path, or no finished iteration anywhere.
    """
    named: dict[str, list[Run]] = {}
    equal: dict[str, list[Run]] = {}
    order: list[tuple[str, dict[str, list[Run]]]] = []
    seen: set[Path] = set()
    for argument in arguments:
        name, sep, place = argument.partition("=")
        path = Path(place) if sep and not Path(argument).exists() else Path(argument)
        run = Run(open_run(path).root)
        if run.root.resolve() in seen:
            continue
        seen.add(run.root.resolve())
        place_in, key = (named, name) if sep and not Path(argument).exists() else (equal, _arm(run))
        if key not in place_in:
            order.append((key, place_in))
        place_in.setdefault(key, []).append(run)
    if not any(r.metrics for _, place_in in order for runs in place_in.values() for r in runs):
        raise UserError(f"{', '.join(arguments)}: no finished iteration yet; nothing to report")
    found = []
    for key, place_in in order:
        runs = place_in[key]
        found.append(Group(key if place_in is named else common_name([r.root.resolve() for r in runs]), tuple(runs)))
    return _distinct(found)


def _arm(run: Run) -> str:
    """What makes runs one arm: every value except the run seed, the length and where things lie."""
    neutral = {"run.seed", "run.iterations"}
    values = configuration.flatten(run.config)
    kept = {
        k: v
        for k, v in values.items()
        if k not in neutral
        and not k.endswith((".path", ".workers", ".threads", ".processes"))
        and not k.startswith("log.")
    }
    run_dir = RunDir(run.root)
    for name, place in (("policy", run_dir.snapshot(0)), ("problems", run_dir.problems)):
        manifest = store.read_manifest(place)
        kept[f"{name}.digest"] = None if manifest is None else manifest.digest
    return repr(sorted(kept.items(), key=lambda item: item[0]))


def common_name(paths: Sequence[Path]) -> str:
    """Name of a group from its runs' folders: the folder of one, else what the names share.

    >>> common_name([Path("runs/clip-seed0"), Path("runs/clip-seed1")])
    'clip'
    >>> common_name([Path("runs/claims/mask/seed-000"), Path("runs/claims/mask/seed-001")])
    'mask'
    """
    if len(paths) == 1:
        return paths[0].name
    names = [p.name for p in paths]
    if all(re.fullmatch(r"(seed|s|run)?[-_. ]*\d+", name) for name in names):
        return paths[0].parent.name or names[0]
    shared = names[0]
    for name in names[1:]:
        while not name.startswith(shared):
            shared = shared[:-1]
    shared = re.sub(r"([-_. ]+(seed|s|run))?[-_. ]*$", "", shared)
    return shared or paths[0].parent.name or names[0]


def _distinct(found: Iterable[Group]) -> list[Group]:
    """Groups of equal name get numbers."""
    seen: dict[str, int] = {}
    out = []
    for group in found:
        seen[group.name] = seen.get(group.name, 0) + 1
        name = group.name if seen[group.name] == 1 else f"{group.name} ({seen[group.name]})"
        out.append(Group(name, group.runs))
    return out
