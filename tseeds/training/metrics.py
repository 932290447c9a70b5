"""Metrics of docs/loss.md from flat per-token tensors, split by region and by position bin."""

from __future__ import annotations

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
    dual: Tensor

    def select(self, where: Tensor) -> TokenValues:
        """The tokens at a bool mask or index."""
        return TokenValues(*(getattr(self, name)[where] for name in self.__slots__))


def ess(weights: Tensor) -> float:
    """Effective sample size (sum w)^2 / sum w^2; 0 for no weights.

    >>> ess(torch.tensor([1.0, 1.0, 0.0]))
    2.0
    """
    w = weights.double()
    below = float((w * w).sum())
    return float(w.sum()) ** 2 / below if below else 0.0


_SUMS = (
    "tokens", "entropy", "live", "kept", "high", "low", "dual", "mass", "lost_mass", "kept_entropy", "ratio", "w", "w2",
    "k1", "k3",
)  # fmt: skip


def _sums(v: TokenValues, key: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """(sums [groups, len(_SUMS)] float64, largest ratio [groups]) of the loss tokens, grouped by key [M]."""
    used = v.used.double()
    live = v.used & (v.advantage != 0)
    k, lost, positive = live & v.kept, live & ~v.kept, v.advantage > 0
    mass = (v.weight * v.advantage).abs().double() * live
    w = ratio(v.lp, v.lp_mu).double() * used
    entropy = v.entropy.double() * used
    columns = [
        used, entropy, live.double(), k.double(), (lost & positive).double(),
        (lost & ~positive & ~v.dual).double(), (lost & ~positive & v.dual).double(),
        mass, mass * lost, entropy * k, v.ratio.double() * used, w, w * w,
        k1(v.lp, v.lp_mu).double() * used, k3(v.lp, v.lp_mu).double() * used,
    ]  # fmt: skip
    sums = torch.zeros(groups, len(columns), dtype=torch.float64).index_add_(0, key, torch.stack(columns, 1))
    top = torch.zeros(groups, dtype=torch.float64).scatter_reduce(0, key, v.ratio.double() * used, "amax")
    return sums, top


def _finish(sums: Tensor, top: float) -> dict[str, float]:
    """Metrics from one group's sums; every empty denominator gives 0.

    clip_fraction: share of loss tokens with A != 0 whose gradient is clipped away, and by sign of A and side; clipped_mass:
    sum (1 - k)|w A| / sum |w A|, w what multiplies A grad(lp) unclipped; effective_entropy: sum k H / sum k;
    retained_entropy: sum k H / sum H; ess, ess_share, kl: of exp(lp - lp_mu).
    """
    s = dict(zip(_SUMS, sums.tolist(), strict=True))

    def over(a: str, b: str) -> float:
        return s[a] / s[b] if s[b] else 0.0

    size = s["w"] ** 2 / s["w2"] if s["w2"] else 0.0
    return {
        "tokens": s["tokens"],
        "entropy": over("entropy", "tokens"),
        "clip_fraction": (s["live"] - s["kept"]) / s["live"] if s["live"] else 0.0,
        "clip_fraction_positive_high": over("high", "live"),
        "clip_fraction_negative_low": over("low", "live"),
        "clip_fraction_negative_dual": over("dual", "live"),
        "clipped_mass": over("lost_mass", "mass"),
        "effective_entropy": over("kept_entropy", "kept"),
        "retained_entropy": over("kept_entropy", "entropy"),
        "ratio_mean": over("ratio", "tokens"),
        "ratio_max": top,
        "ess": size,
        "ess_share": size / s["tokens"] if s["tokens"] else 0.0,
        "kl_k1": over("k1", "tokens"),
        "kl_k3": over("k3", "tokens"),
    }


def split(v: TokenValues) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Metrics by region, {"clipped_mass_seed": x, ...}, and by position bin, {"ratio_mean_seed_bins": [10 values]}.

    Bin b of a token is floor(10 * position / response length).
    """
    place = (BINS * v.position // v.length.clamp(min=1)).clamp(max=BINS - 1)
    sums, top = _sums(v, torch.where(v.seed, place, place + BINS), 2 * BINS)
    regions: dict[str, float] = {}
    bins: dict[str, list[float]] = {}
    for name, where in zip(REGIONS, (slice(None), slice(0, BINS), slice(BINS, None)), strict=True):
        regions |= {f"{k}_{name}": x for k, x in _finish(sums[where].sum(0), float(top[where].max())).items()}
        if name != "all":
            each = [_finish(a, float(b)) for a, b in zip(sums[where], top[where], strict=True)]
            bins |= {f"{m}_{name}_bins": [x[m] for x in each] for m in BIN_METRICS}
    return regions, bins


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
