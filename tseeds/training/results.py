"""The tables and headline metrics of one update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from tseeds.artifacts import schema
from tseeds.training import metrics
from tseeds.training.advantages import Advantages
from tseeds.training.metrics import TokenValues
from tseeds.training.rows import Rows


@dataclass(slots=True)
class StepResult:
    """rows, steps, tokens: tables of ``schema.UPDATE_*`` (tokens None unless save_tokens); summary: headline metrics."""

    rows: pa.Table
    steps: pa.Table
    tokens: pa.Table | None
    summary: dict[str, float]


def summarise(
    rows: Rows, values: TokenValues, adv: Advantages, row_keep: Tensor, valid: Tensor, steps: list[dict[str, Any]]
) -> dict[str, float]:
    """Headline metrics of an iteration; NaN where there is nothing to average.

    values: all response tokens, as their last optimizer step saw them. row_keep [rows], valid [M]: bool, see ``loss_mask``.
    """
    reward = np.array(rows.reward, dtype=np.float64)
    seed_length = np.array(rows.off_stop) - np.array(rows.off_start)
    seeded = seed_length > 0
    lengths = np.array([len(r) for r in rows.response_ids], dtype=np.float64)
    unseeded_entropy = values.entropy[torch.from_numpy(~seeded)[values.row]].double().numpy()
    regions, _ = metrics.split(values)
    done = [s for s in steps if not s["skipped"]]

    def mean(x: Any) -> float:
        return float(np.mean(x)) if len(x) else math.nan

    return {
        "reward": mean(reward),
        "reward_seeded": mean(reward[seeded]),
        "reward_unseeded": mean(reward[~seeded]),
        "advantage_seeded": mean(adv.advantage[seeded]),
        "rows": float(len(rows)),
        "seeded_share": mean(seeded),
        "seed_length": mean(seed_length[seeded]),
        "response_length": mean(lengths),
        "truncated_share": mean([f == "length" for f in rows.finish_reason]),
        "zero_variance_share": adv.degenerate_groups / max(adv.groups, 1),
        "singleton_groups": float(adv.singletons),
        "dropped_rows": float((~row_keep).sum()),
        "invalid_tokens": float((~valid).sum()),
        "entropy": mean(unseeded_entropy),
        "entropy_mixture": mean(-values.lp_mu[valid].double().numpy()),
        "effective_entropy": regions["effective_entropy_all"],
        "retained_entropy": regions["retained_entropy_all"],
        **regions,
        **metrics.mismatch(values),
        "loss": mean([s["loss"] for s in steps]),
        "grad_norm": mean([s["grad_norm"] for s in done]),
        "grad_norm_max": max((s["grad_norm"] for s in done), default=math.nan),
        "learning_rate": steps[-1]["learning_rate"] if steps else math.nan,
        "skipped_steps": float(sum(s["skipped"] for s in steps)),
        "tokens": float(len(values.row)),
        **{k: s[k] for s in steps for k in ("probe_cosine", "probe_norm_ratio") if s[k] is not None},
        **_by_seed(rows, reward, seed_length, seeded),
    }


def _by_seed(rows: Rows, reward: np.ndarray, length: np.ndarray, seeded: np.ndarray) -> dict[str, float]:
    """Reward of seeded rows by snapshot age and by seed length, younger/older and shorter/longer than the median; share of
    decided seeds, whose continuations (two or more) all get one reward."""
    outcomes: dict[str, list[float]] = {}
    for i in np.flatnonzero(seeded):
        outcomes.setdefault(rows.seed_id[i] or rows.row_id[i], []).append(reward[i])
    several = [len(set(r)) == 1 for r in outcomes.values() if len(r) > 1]
    out = {"decided_seeds": float(np.mean(several)) if several else math.nan}
    age = np.array(
        [p - s if s is not None else -1 for s, p in zip(rows.snapshot_step, rows.policy_step, strict=True)], dtype=float
    )
    for name, x in (("age", age), ("length", length.astype(float))):
        if not seeded.any():
            continue
        low = x[seeded] <= np.median(x[seeded])
        for side, where in (("low", low), ("high", ~low)):
            out[f"reward_seed_{name}_{side}"] = float(reward[seeded][where].mean()) if where.any() else math.nan
    return out


def rows_table(rows: Rows, values: TokenValues, adv: Advantages, row_keep: Tensor) -> pa.Table:
    """One row per trajectory."""
    n = len(rows)

    def mean(x: Tensor, where: Tensor) -> list[float | None]:
        count = torch.zeros(n, dtype=torch.float64).index_add(0, values.row, where.double())
        total = torch.zeros(n, dtype=torch.float64).index_add(0, values.row, torch.where(where, x.double(), 0.0))
        return [t / c if c else None for t, c in zip(total.tolist(), count.tolist(), strict=True)]

    live = values.used & (values.advantage != 0)
    seed_tokens = [b - a for a, b in zip(rows.off_start, rows.off_stop, strict=True)]
    ages = [None if s is None else p - s for s, p in zip(rows.snapshot_step, rows.policy_step, strict=True)]
    columns: dict[str, Any] = {
        "row_id": rows.row_id,
        "problem_id": rows.problem_id,
        "group_id": rows.group_id,
        "reward": rows.reward,
        "advantage": adv.advantage.tolist(),
        "used": row_keep.tolist(),
        "snapshot_age": ages,
        "seed_tokens": seed_tokens,
        "continuation_tokens": [len(r) - s for r, s in zip(rows.response_ids, seed_tokens, strict=True)],
    }
    for name in ("seed", "continuation"):
        mine = values.seed if name == "seed" else ~values.seed
        columns[f"ratio_{name}"] = mean(values.ratio, mine & live)
        columns[f"clip_fraction_{name}"] = mean((~values.kept).double(), mine & live)
        columns[f"entropy_{name}"] = mean(values.entropy, mine)
        columns[f"log_ratio_behaviour_{name}"] = mean(values.lp_old - values.lp_mu, mine)
    return pa.table(columns, schema=schema.UPDATE_ROWS)


def steps_table(steps: list[dict[str, Any]]) -> pa.Table:
    """One row per optimizer step."""
    return pa.Table.from_pylist(steps, schema=schema.UPDATE_STEPS)


def tokens_table(rows: Rows, values: TokenValues) -> pa.Table:
    """One row per response token."""
    return pa.table(
        {
            "row_id": pa.array(rows.row_id, pa.string()).take(pa.array(values.row.numpy())),
            "position": values.position.numpy().astype(np.int32),
            "region": pa.array(["continuation", "seed"]).take(pa.array(values.seed.numpy().astype(np.int32))),
            "logprob": values.lp.numpy(),
            "logprob_old": values.lp_old.numpy(),
            "logprob_behaviour": values.lp_mu.numpy(),
            "entropy": values.entropy.numpy(),
            "advantage": values.advantage.numpy(),
            "ratio": values.ratio.numpy(),
            "weight": values.weight.numpy(),
            "used": values.used.numpy(),
            "clipped": (~values.kept & values.used & (values.advantage != 0)).numpy(),
        },
        schema=schema.UPDATE_TOKENS,
    )
