"""What happens in which iteration: problem order, groups, seeded share, snapshot pool, random seeds.

Everything is a pure function of the configuration and the iteration, so that a resumed run repeats nothing and skips
nothing. Iterations count from 1; iteration i samples from the policy of step i - 1 and makes the policy of step i.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tseeds.config import Pipeline, SeedConfig, SnapshotConfig
from tseeds.errors import UserError

Key = str | int


def rng_seed(*parts: Key) -> int:
    """63-bit random seed: a hash of its parts, such as (run seed, iteration, stage, problem_id, slot).

    >>> rng_seed(0, 1, "rollout", "p", 3) == rng_seed(0, 1, "rollout", "p", 3) != rng_seed(0, 1, "rollout", "p", 4)
    True
    """
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return struct.unpack("<Q", hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8])[0] >> 1


def uniform(*parts: Key) -> float:
    """Uniform number in [0, 1) from a hash of its parts."""
    return (rng_seed(*parts) >> 10) / 2**53


@dataclass(frozen=True, slots=True)
class Group:
    """One problem of one iteration; index is its row in the problems table, occurrence counts repeats in the iteration."""

    group_id: str
    index: int
    problem_id: str
    occurrence: int


@lru_cache(maxsize=8)
def _epoch_order(
    problem_ids: tuple[str, ...], run_seed: int, epoch: int, weights: tuple[float, ...] | None = None
) -> tuple[int, ...]:
    order = sorted(range(len(problem_ids)), key=lambda k: rng_seed(run_seed, "order", epoch, problem_ids[k]))
    if weights is None:
        return tuple(order)
    times = _counts([weights[k] for k in order], uniform(run_seed, "counts", epoch))
    visits = [(k, n) for k, count in zip(order, times, strict=True) for n in range(count)]
    # a first visit has the same key as without weights, so that equal weights change nothing
    key = {(k, n): rng_seed(run_seed, "order", epoch, problem_ids[k], *([n] if n else [])) for k, n in visits}
    return tuple(k for k, _ in sorted(visits, key=key.__getitem__))


def _counts(weights: Sequence[float], offset: float) -> list[int]:
    """Visits of each problem in an epoch of as many visits as problems have weight: its expected number rounded up or down.

    Systematic sampling: expected numbers are laid end to end, and a problem gets the whole numbers - offset in its stretch.

    >>> _counts([3.0, 1.0, 0.0, 2.0], 0.5), _counts([1.0, 1.0, 0.0], 0.5)
    ([2, 0, 0, 1], [1, 1, 0])
    """
    size, total = sum(w > 0 for w in weights), math.fsum(weights)
    reached, counts, covered = 0, [], 0.0
    last = max(k for k, w in enumerate(weights) if w > 0)
    for k, weight in enumerate(weights):
        covered += weight
        now = size if k >= last else min(size, math.floor(covered * size / total + offset))
        counts.append(now - reached)
        reached = now
    return counts


def groups(
    problem_ids: Sequence[str],
    *,
    run_seed: int,
    iteration: int,
    per_iteration: int,
    weights: Sequence[float] | None = None,
) -> list[Group]:
    """The groups of an iteration: a window of the endless sequence of seeded epochs.

    An epoch is a permutation of the problems; with ``weights`` (one per problem, 0 leaves it out) it has as many visits as
    problems are left, and each comes its expected number of times, rounded up or down by a seeded draw per epoch.
    The window of iteration i begins where that of i - 1 ended, so the cursor is the iteration itself.

    Raises:
        UserError: there is no problem.
    """
    ids = tuple(problem_ids)
    weighted = None if weights is None else tuple(weights)
    size = len(ids) if weighted is None else sum(w > 0 for w in weighted)
    if not size:
        raise UserError("there is no problem to train on: none was kept at ingest (tseeds show RUN/problems)")
    chosen: list[Group] = []
    seen: dict[str, int] = {}
    for n in range(per_iteration):
        epoch, place = divmod((iteration - 1) * per_iteration + n, size)
        index = _epoch_order(ids, run_seed, epoch, weighted)[place]
        occurrence = seen.get(ids[index], 0)
        seen[ids[index]] = occurrence + 1
        chosen.append(Group(f"{iteration:06d}-{n:05d}", index, ids[index], occurrence))
    return chosen


def row_id(group_id: str, sample: int) -> str:
    """Id of one trajectory: "000012-00003-007" is sample 7 of group 3 of iteration 12."""
    return f"{group_id}-{sample:03d}"


def seeded_share(config: Pipeline, iteration: int) -> float:
    """Share of a group that is seeded in this iteration, by the schedule."""
    seed = config.seed
    if seed.schedule == "constant" or seed.share == 0:
        return seed.share
    end = seed.schedule_end or config.run.iterations
    progress = min(1.0, (iteration - 1) / max(1, end - 1))
    return seed.share * ((1 - progress) if seed.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress)))


def seeded_samples(config: Pipeline, iteration: int) -> range:
    """Sample numbers within a group that are seeded: the last ones, a multiple of seed.continuations."""
    size, per_seed = config.rollout.group_size, config.seed.continuations
    count = min(size, round(seeded_share(config, iteration) * size))
    count -= count % per_seed
    return range(size - count, size)


def snapshot_steps(config: SnapshotConfig, step: int) -> list[int]:
    """Steps up to ``step`` at which a snapshot is taken, 0 included."""
    return list(range(0, step + 1, config.every))


def retained(config: SnapshotConfig, steps: Sequence[int], *, snapshot_bytes: int = 0) -> list[int]:
    """Those of the taken snapshots (ascending, step 0 first) that retention keeps; step 0 always stays.

    snapshot_bytes is the size of one snapshot on disk, for the budget.

    >>> retained(SnapshotConfig(keep_last=2, keep_every=10), [0, 5, 10, 15, 20, 25])
    [0, 10, 20, 25]
    """
    kept = list(steps)
    if config.keep_last:
        newest = set(kept[-config.keep_last :])
        kept = [s for s in kept if s == 0 or s in newest or (config.keep_every and s % config.keep_every == 0)]
    if config.disk_budget_gb and snapshot_bytes:
        room = max(1, int(config.disk_budget_gb * 1e9 // snapshot_bytes) - 1)
        kept = kept[:1] + kept[1:][-room:]
    return kept


def pool_steps(config: SnapshotConfig, step: int, *, snapshot_bytes: int = 0) -> list[int]:
    """Steps of the snapshots that retention keeps when the current policy is that of ``step``, under one configuration."""
    return retained(config, snapshot_steps(config, step), snapshot_bytes=snapshot_bytes)


def draw_snapshots(config: SeedConfig, steps: Sequence[int], *, run_seed: int, iteration: int) -> list[int]:
    """Steps of the snapshots that write seeds in this iteration, drawn without replacement, ascending."""
    count = min(config.snapshots_per_iteration, len(steps))
    current = iteration - 1
    if config.sampler == "oldest":
        return [steps[0]]
    if config.sampler == "fixed_lag":
        old = [s for s in steps if current - s >= config.lag]
        return [old[-1] if old else steps[0]]
    if config.sampler == "spread":
        if count == 1:
            return [steps[(iteration - 1) % len(steps)]]
        return sorted({steps[round(k * (len(steps) - 1) / (count - 1))] for k in range(count)})
    weight = {s: math.exp(-(current - s) / config.tau) if config.sampler == "recent" else 1.0 for s in steps}
    # Efraimidis–Spirakis: the count largest u^(1/w) are a weighted sample without replacement; logs avoid underflow.
    rank = {
        s: math.log(max(uniform(run_seed, "snapshot", iteration, s), 1e-300)) / max(weight[s], 1e-300) for s in steps
    }
    return sorted(sorted(steps, key=lambda s: rank[s], reverse=True)[:count])


def pass_rates(history: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """Mean reward per problem from (sum of rewards, rows)."""
    return {problem: total / rows for problem, (total, rows) in history.items() if rows}
