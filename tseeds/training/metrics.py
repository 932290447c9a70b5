"""Metrics of METHOD section 5 from flat per-token tensors, split by region and by position bin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tseeds.training.loss import k1, k3, ratio

BINS = 10
REGIONS = ("all", "seed", "continuation")
BIN_METRICS = ("entropy", "ratio_mean", "ess_share", "clip_fraction", "clipped_mass")


@dataclass(slots=True)
class TokenValues:
    """What happened to each token, [M] each: the inputs of the metrics (see ``training.loss`` for the names).

    used: bool, carried loss. position: index in the response; length: response tokens of its row.
    """

    row: Tensor
    position: Tensor
    length: Tensor
    seed: Tensor
    used: Tensor
    advantage: Tensor
    lp: Tensor
    lp_old: Tensor
    lp_mu: Tensor
    entropy: Tensor
    ratio: Tensor
    weight: Tensor
    kept: Tensor

    def select(self, where: Tensor) -> TokenValues:
        """The tokens at a bool mask or index."""
        return TokenValues(*(getattr(self, name)[where] for name in self.__slots__))


def share(part: Tensor, whole: Tensor) -> float:
    """sum(part) / sum(whole), 0 where the denominator is 0."""
    below = float(whole.double().sum())
    return float(part.double().sum()) / below if below else 0.0


def ess(weights: Tensor) -> float:
    """Effective sample size (sum w)^2 / sum w^2; 0 for no weights.

    >>> ess(torch.tensor([1.0, 1.0, 0.0]))
    2.0
    """
    w = weights.double()
    below = float((w * w).sum())
    return float(w.sum()) ** 2 / below if below else 0.0


def clipping(v: TokenValues) -> dict[str, float]:
    """Clipping and entropy of loss tokens with A != 0.

    clip_fraction: share of them whose gradient is clipped away, and by sign of A and side (positive_high, negative_low,
    negative_dual); clipped_mass: sum (1 - k)|w A| / sum |w A|, w what multiplies A grad(lp) unclipped;
    effective_entropy: sum k H / sum k; retained_entropy: sum k H / sum H over all loss tokens.
    """
    live = v.used & (v.advantage != 0)
    k = live & v.kept
    lost = live & ~v.kept
    positive = v.advantage > 0
    mass = (v.weight * v.advantage).abs() * live
    n = max(int(live.sum()), 1)
    return {
        "clip_fraction": int(lost.sum()) / n,
        "clip_fraction_positive_high": int((lost & positive).sum()) / n,
        "clip_fraction_negative_low": int((lost & ~positive & (v.ratio < 1)).sum()) / n,
        "clip_fraction_negative_dual": int((lost & ~positive & (v.ratio >= 1)).sum()) / n,
        "clipped_mass": share(mass * lost, mass),
        "effective_entropy": share(v.entropy * k, k),
        "retained_entropy": share(v.entropy * k, v.entropy * v.used),
    }


def region(v: TokenValues) -> dict[str, float]:
    """All metrics of one set of tokens: clipping, ratio statistics, KL to the behaviour policy, entropy."""
    used = v.select(v.used)
    n = len(used.lp)
    behaviour = ratio(used.lp, used.lp_mu)
    return {
        "tokens": float(n),
        "entropy": float(used.entropy.double().mean()) if n else 0.0,
        **clipping(v),
        "ratio_mean": float(used.ratio.double().mean()) if n else 0.0,
        "ratio_max": float(used.ratio.max()) if n else 0.0,
        "ess": ess(behaviour),
        "ess_share": ess(behaviour) / n if n else 0.0,
        "kl_k1": float(k1(used.lp, used.lp_mu).double().mean()) if n else 0.0,
        "kl_k3": float(k3(used.lp, used.lp_mu).double().mean()) if n else 0.0,
    }


def by_region(v: TokenValues) -> dict[str, float]:
    """``region`` for all tokens, the seed and the continuation, as {"clipped_mass_seed": ...}."""
    out: dict[str, float] = {}
    for name in REGIONS:
        part = v if name == "all" else v.select(v.seed if name == "seed" else ~v.seed)
        out |= {f"{key}_{name}": value for key, value in region(part).items()}
    return out


def by_bin(v: TokenValues) -> dict[str, list[float]]:
    """{"ratio_mean_seed_bins": [10 values]} for seed and continuation; bin = floor(10 * position / response length)."""
    index = (BINS * v.position // v.length.clamp(min=1)).clamp(max=BINS - 1)
    out: dict[str, list[float]] = {f"{m}_{r}_bins": [] for r in REGIONS[1:] for m in BIN_METRICS}
    for name in REGIONS[1:]:
        mine = v.seed if name == "seed" else ~v.seed
        for b in range(BINS):
            values = region(v.select(mine & (index == b)))
            for metric in BIN_METRICS:
                out[f"{metric}_{name}_bins"].append(values[metric])
    return out


def mismatch(v: TokenValues) -> dict[str, float]:
    """Difference between engine and trainer on continuation tokens: max and mean |lp_old - lp_mu|, k3 KL."""
    gap = (v.lp_old - v.lp_mu)[~v.seed & torch.isfinite(v.lp_mu) & torch.isfinite(v.lp_old)]
    n = len(gap)
    return {
        "mismatch": float(gap.abs().max()) if n else 0.0,
        "mismatch_mean": float(gap.abs().double().mean()) if n else 0.0,
        "mismatch_kl": float(k3(gap, torch.zeros_like(gap)).double().mean()) if n else 0.0,
    }


def mean(values: list[float]) -> float:
    """Arithmetic mean, 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def weighted(steps: list[Mapping[str, float]], key: str, weight: str) -> float:
    """Mean of ``key`` over optimizer steps, weighted by ``weight``; 0 where all weights are 0."""
    below = sum(s[weight] for s in steps)
    return sum(s[key] * s[weight] for s in steps) / below if below else 0.0
