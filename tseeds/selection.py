"""Which problems a curriculum chooses, and how often: measured pass rates become weights for ``schedule.groups``.

Stages seed and rollout lay out the same groups, each from the artifacts problems and curriculum alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tseeds.artifacts.store import read_rows, require
from tseeds.config import CurriculumConfig, Pipeline
from tseeds.errors import UserError


def identity(config: Pipeline, curriculum: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    """What the choice adds to a stage's (config values, input digests): nothing without a curriculum.

    Raises:
        UserError: the pipeline has a curriculum and no pass rates are given, or they are not committed.
    """
    if curriculum is None:
        if config.curriculum.samples:
            raise UserError(
                "curriculum.samples asks for measured pass rates: name their artifact with --curriculum, or set "
                'curriculum.samples = 0, lo = 0, hi = 1 and weight = "equal"'
            )
        return {}, {}
    values = {f"curriculum.{name}": getattr(config.curriculum, name) for name in ("lo", "hi", "weight")}
    return values, {"curriculum": require(curriculum, "pass rates").digest}


def weights(config: Pipeline, problem_ids: Sequence[str], curriculum: Path | None) -> list[float] | None:
    """Weight of each problem by the curriculum artifact; None without one, where all come equally often.

    Raises:
        UserError: as problem_weights, or the artifact is missing or damaged.
    """
    if curriculum is None:
        return None
    table = read_rows(curriculum, "pass rates", ["rewards"])
    rewards = dict(zip(table["problem_id"].to_pylist(), table["rewards"].to_pylist(), strict=True))
    return problem_weights(config.curriculum, problem_ids, rewards)


def total(rewards: Sequence[float]) -> float:
    """Sum of n rewards, at least 0 and at most n; over n it is the pass rate that lo and hi are compared with.

    >>> total([1.0, 0.0, 1.5, -3.0]), total([1.5, 1.5])
    (0.0, 2.0)
    """
    return min(max(math.fsum(rewards), 0.0), float(len(rewards)))


def problem_weights(
    config: CurriculumConfig, problem_ids: Sequence[str], rewards: Mapping[str, Sequence[float]]
) -> list[float]:
    """Weight of each problem from the rewards of the base policy's responses; 0 for those outside [lo, hi].

    With n responses of total reward c, weight "variance" is the mean of p(1 - p) over the posterior of p under a uniform
    prior, (c + 1)(n - c + 1) / ((n + 2)(n + 3)); "hard" is that of 1 - p, (n - c + 1) / (n + 2). Ours.

    >>> problem_weights(CurriculumConfig(samples=2, lo=0.5, weight="variance"), ["a", "b"], {"a": [1, 0], "b": [0, 0]})
    [0.2, 0.0]

    Raises:
        UserError: a problem was not measured, or none lies within [lo, hi].
    """
    weights = []
    for problem in problem_ids:
        if problem not in rewards:
            raise UserError(f"curriculum: problem {problem} has no measured pass rate; run the stage on these problems")
        n = len(rewards[problem])
        c = total(rewards[problem])
        if not config.lo <= c / n <= config.hi:
            weights.append(0.0)
        elif config.weight == "variance":
            weights.append((c + 1) * (n - c + 1) / ((n + 2) * (n + 3)))
        else:
            weights.append((n - c + 1) / (n + 2) if config.weight == "hard" else 1.0)
    if not any(weights):
        raise UserError(
            f"curriculum: none of {len(weights)} problems has a pass rate within [{config.lo:g}, {config.hi:g}]; widen it"
        )
    return weights
