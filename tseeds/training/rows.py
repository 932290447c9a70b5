"""The rows of one iteration as the trainer reads them: rollouts joined with their grades."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from tseeds.errors import UserError


@dataclass(slots=True)
class Rows:
    """Parallel lists, one element per trajectory, in rollout order. Token lists are numpy arrays (int64, float32; a null or
    missing log-prob is NaN); [off_start, off_stop) is the span of the response that a snapshot wrote."""

    row_id: list[str]
    problem_id: list[str]
    group_id: list[str]
    seed_id: list[str | None]
    snapshot_step: list[int | None]
    policy_step: list[int]
    prompt_ids: list[np.ndarray]
    response_ids: list[np.ndarray]
    logprobs: list[np.ndarray]
    off_start: list[int]
    off_stop: list[int]
    finish_reason: list[str]
    temperature: list[float]
    reward: list[float]

    def __len__(self) -> int:
        return len(self.row_id)

    def select(self, index: Sequence[int]) -> Rows:
        """The rows at ``index``, in its order."""
        return Rows(*([getattr(self, f.name)[i] for i in index] for f in fields(self)))

    @classmethod
    def from_tables(cls, rollout: pa.Table | list[pa.Table], score: pa.Table | list[pa.Table]) -> Rows:
        """Rows of rollout tables with the rewards of score tables, joined on row_id (``artifacts.schema`` names the columns).

        Raises:
            UserError: a row has no grade, two grades or a duplicate, or its spans and log-probs do not fit its ids.
        """
        rollout = pa.concat_tables(rollout) if isinstance(rollout, list) else rollout
        score = pa.concat_tables(score) if isinstance(score, list) else score
        ids = score["row_id"].to_pylist()
        reward = dict(zip(ids, score["reward"].to_pylist(), strict=True))
        if len(reward) != len(ids):
            raise UserError("scores: a row_id appears twice; grade the rollouts again")
        columns: dict[str, Any] = {
            f.name: rollout[f.name].to_pylist()
            for f in fields(cls)
            if f.name not in {"reward", "prompt_ids", "response_ids", "logprobs"}
        }
        if len(set(columns["row_id"])) != len(columns["row_id"]):
            raise UserError("rollouts: a row_id appears twice; sample them again")
        for row in columns["row_id"]:
            if reward.get(row) is None:
                raise UserError(f"scores: row {row} has no reward; grade the rollouts again")
        rows = cls(
            **columns,
            prompt_ids=_arrays(rollout["prompt_ids"], np.int64),
            response_ids=_arrays(rollout["response_ids"], np.int64),
            logprobs=_arrays(rollout["logprobs"], np.float32),
            reward=[reward[row] for row in columns["row_id"]],
        )
        rows.check()
        return rows

    def check(self) -> None:
        """Raises UserError, naming the row, where lengths and spans do not fit together."""
        for i, row in enumerate(self.row_id):
            size = len(self.response_ids[i])
            if len(self.prompt_ids[i]) == 0:
                raise UserError(
                    f"rollouts: row {row} has an empty prompt; a policy needs at least one token to start from"
                )
            if len(self.logprobs[i]) != size:
                raise UserError(f"rollouts: row {row} has {size} response tokens but {len(self.logprobs[i])} log-probs")
            if not 0 <= self.off_start[i] <= self.off_stop[i] <= size:
                raise UserError(
                    f"rollouts: row {row}: span [{self.off_start[i]}, {self.off_stop[i]}) leaves its {size} response tokens"
                )
            if not self.temperature[i] > 0:
                raise UserError(f"rollouts: row {row} has temperature {self.temperature[i]}; it must be above 0")


def _arrays(column: pa.ChunkedArray, dtype: type) -> list[np.ndarray]:
    """A list column as numpy arrays; null elements of a float list become NaN, a null list an empty one."""
    out: list[np.ndarray] = []
    for chunk in column.chunks:
        values = chunk.values.to_numpy(zero_copy_only=False).astype(dtype)
        starts = chunk.offsets.to_numpy()
        out += [values[a:b] for a, b in pairwise(starts)]
    return out
