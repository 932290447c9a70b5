"""Advantages of trajectories from rewards (docs/loss.md), on float64 numpy vectors, one element per row."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

STD_EPS = 1e-4


@dataclass(frozen=True, slots=True)
class Advantages:
    """advantage [rows] float64; degenerate bool [rows]: every advantage of the row's group is 0; groups, degenerate_groups:
    counts; singletons: sets of one row, which has nothing to be compared with."""

    advantage: np.ndarray
    degenerate: np.ndarray
    groups: int
    degenerate_groups: int
    singletons: int


def overlong_penalty(length: int, max_response_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (2503.14476 eq. 13): 0 up to max - buffer, then linear to -1 at max.

    >>> overlong_penalty(90, 100, 20)
    -0.5
    """
    return -min(max(length - (max_response_tokens - buffer), 0) / buffer, 1.0)


def centred(rewards: np.ndarray, kind: str) -> np.ndarray:
    """Advantages within one comparison set: r - mean; group_std divides by (std, ddof 1) + 1e-4; leave_one_out compares
    with the mean of the others. Equal rewards (tested exactly) and single rows give exactly 0.

    >>> centred(np.array([1.0, 0, 0, 1]), "leave_one_out").round(5).tolist()
    [0.66667, -0.66667, -0.66667, 0.66667]
    """
    n = len(rewards)
    if n < 2 or rewards.max() == rewards.min():
        return np.zeros(n)
    a = rewards - rewards.mean()
    if kind == "group_std":
        return a / (rewards.std(ddof=1) + STD_EPS)
    if kind == "leave_one_out":
        return a * n / (n - 1)
    return a


def advantages(
    rewards: Sequence[float] | np.ndarray,
    groups: Sequence[Hashable],
    seeds: Sequence[Hashable | None],
    kind: str = "group",
) -> Advantages:
    """Advantage of each row against the rows it is compared with.

    rewards, groups (group ids), seeds (seed id, None for unseeded rows): [rows]. kind: group, group_std, leave_one_out
    compare within the group; split within the seeded and the unseeded part of it; per_seed within the continuations of
    one seed, and the unseeded rows of the group among themselves.
    """
    reward = np.asarray(rewards, dtype=np.float64)
    out, degenerate = np.zeros(len(reward)), np.zeros(len(reward), dtype=bool)
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    flat = singles = 0
    for rows in members.values():
        parts: dict[Hashable, list[int]] = {}
        for i in rows:
            key = (seeds[i] is not None) if kind == "split" else seeds[i] if kind == "per_seed" else None
            parts.setdefault(key, []).append(i)
        for part in parts.values():
            out[part] = centred(reward[part], kind)
            singles += len(part) == 1
        degenerate[rows] = not out[rows].any()
        flat += bool(degenerate[rows[0]])
    return Advantages(out, degenerate, len(members), flat, singles)
