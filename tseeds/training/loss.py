"""The mixed loss as pure functions on flat tensors (docs/loss.md).

Every function works on [N] tensors, one element per response token, rows one behind the other. Nothing here knows of
models, batches or files: the trainer calculates log-probs, this module turns them into one number per token, and
``token_scale`` turns those into the loss of an optimizer step. Denominators live in the scale, which is calculated from
the whole step at once, so the sum over any split into micro-batches or ranks is the same loss.

In the table below r is the ratio, A the advantage, sg stop-gradient; each seed mode is one function in ``PREFIX_MODES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tseeds.config import UpdateConfig

_MAX_LOG = 20.0  # exp(20) = 4.9e8: beyond it a ratio says nothing more, and exp must not reach inf


@dataclass(frozen=True, slots=True)
class Tokens:
    """Flat inputs of the loss; every tensor is [N] unless said.

    lp: current log-prob (carries the gradient). lp_old: of pi_old, recomputed by the trainer. lp_mu: of the policy that
    sampled the token, as recorded. advantage: of the token's trajectory. seed: bool, written by a snapshot.
    row: int64 in [0, rows), the token's trajectory. row_weight: [rows] weight of a trajectory's continuation
    (``continuation_weight``). filtered: bool, tokens that Clip-Cov / KL-Cov / M2PO selected; None where unused.
    """

    lp: Tensor
    lp_old: Tensor
    lp_mu: Tensor
    advantage: Tensor
    seed: Tensor
    row: Tensor
    rows: int
    row_weight: Tensor | None = None
    filtered: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """Flat outputs of the loss, all [N].

    loss: with gradient, before scaling. ratio: the ratio that the token's loss is a function of, detached.
    weight: |d loss / d lp| / |A| if nothing were clipped, detached: what multiplies A * grad(lp).
    kept: bool, k_t of docs/loss.md: the gradient is not clipped away. dual: bool, it is the dual clip that takes it away;
    None stands for nowhere.
    """

    loss: Tensor
    ratio: Tensor
    weight: Tensor
    kept: Tensor
    dual: Tensor | None = None


def ratio(lp: Tensor, reference: Tensor) -> Tensor:
    """exp(lp - reference), bounded above so that it stays finite.

    >>> round(ratio(torch.tensor(-1.0), torch.tensor(-1.5)).item(), 5)
    1.64872
    """
    return torch.exp((lp - reference).clamp(max=_MAX_LOG))


def k1(lp: Tensor, reference: Tensor) -> Tensor:
    """The plain estimate -log(pi/ref) of KL(ref || pi) on tokens that ref sampled (Schulman 2020)."""
    return reference - lp


def k3(lp: Tensor, reference: Tensor) -> Tensor:
    """The non-negative, low-variance KL estimate x - log x - 1, x = exp(lp - reference) (Schulman 2020).

    Tokens sampled from ``reference`` estimate KL(reference || pi); with the arguments swapped it is the KL(pi || ref)
    estimate of GRPO (arXiv 2402.03300 eq. 4).

    >>> round(k3(torch.tensor(-1.0), torch.tensor(-1.5)).item(), 5)
    0.14872
    """
    delta = (lp - reference).clamp(max=_MAX_LOG)
    return torch.exp(delta) - delta - 1


def clipped_objective(
    r: Tensor, advantage: Tensor, low: Tensor | float, high: Tensor | float, dual: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    """(min(r A, clip(r, low, high) A), kept, dual): PPO's clip (1707.06347 eq. 7) with the dual clip of 1912.09729 eq. 5.

    For A < 0 the objective is not allowed below dual * A (0 switches that off). The clipped branches are constants, so
    ``kept`` is exactly the set of tokens that have a gradient (where A != 0); ``dual`` those that the dual clip stops.
    """
    with torch.no_grad():
        r_ = r.detach()
        bound = torch.as_tensor(low, dtype=r.dtype, device=r.device)
        bound = torch.where(advantage > 0, torch.as_tensor(high, dtype=r.dtype, device=r.device), bound)
        clipped = torch.where(advantage > 0, r_ > bound, r_ < bound)
        dual_ = torch.as_tensor(dual, dtype=r.dtype, device=r.device)
        over = (advantage < 0) & (dual_ > 0) & (r_ > dual_)
        constant = torch.where(over, dual_ * advantage, bound * advantage)
        kept = ~(clipped | over)
    return torch.where(kept, r * advantage, constant), kept, over


def _ppo(t: Tokens, reference: Tensor, config: UpdateConfig, weight: Tensor | float = 1.0) -> Terms:
    r = ratio(t.lp, reference)
    objective, kept, dual = clipped_objective(r, t.advantage, 1 - config.eps_low, 1 + config.eps_high, config.dual_clip)
    return Terms(-weight * objective, r.detach(), r.detach() * weight, kept, dual)


def clip(t: Tokens, config: UpdateConfig) -> Terms:
    """PPO clip on r = exp(lp - lp_mu): the literal token-level ratio (inferred reading of 2601.21476; RePO 2506.09340)."""
    return _ppo(t, t.lp_mu, config)


def mask(t: Tokens, config: UpdateConfig) -> Terms:
    """No loss: the seed is only context (PrefixRL 2601.18795, PROS, Prefix Sampling 2605.05112)."""
    zero = torch.zeros_like(t.lp_mu)
    return Terms(t.lp * 0, ratio(t.lp.detach(), t.lp_mu), zero, torch.zeros_like(t.seed))


def decoupled(t: Tokens, config: UpdateConfig) -> Terms:
    """sg(min(exp(lp_old - lp_mu), C)) * PPO clip on exp(lp - lp_old) (decoupled PPO 2110.00641, AReaL 2505.24298)."""
    return _ppo(t, t.lp_old, config, ratio(t.lp_old, t.lp_mu).clamp(max=config.prefix_cap))


def truncate(t: Tokens, config: UpdateConfig) -> Terms:
    """-sg(min(exp(lp - lp_mu), C)) A lp: every token keeps a gradient (CISPO 2506.13585 eq. 4)."""
    r = ratio(t.lp.detach(), t.lp_mu)
    weight = r.clamp(max=config.prefix_cap)
    return Terms(-weight * t.advantage * t.lp, r, weight, torch.ones_like(t.seed))


def shaped(r: Tensor, gamma: float) -> Tensor:
    """f(r) = r / (r + gamma), the policy shaping of LUFFY (2504.14945 eq. 7).

    >>> round(shaped(torch.tensor(1.0), 0.1).item(), 6), round(shaped(torch.tensor(0.1), 0.1).item(), 6)
    (0.909091, 0.5)
    """
    return r / (r + gamma)


def _shape(t: Tokens, reference: Tensor, gamma: float) -> Terms:
    r = ratio(t.lp, reference)
    r_ = r.detach()
    return Terms(-shaped(r, gamma) * t.advantage, r_, gamma * r_ / (r_ + gamma) ** 2, torch.ones_like(t.seed))


def shape(t: Tokens, config: UpdateConfig) -> Terms:
    """-f(r) A with r = exp(lp - lp_mu), no clip (ExGRPO 2510.02245). Its gradient factor r f'(r) peaks at r = gamma."""
    return _shape(t, t.lp_mu, config.shape_gamma)


def shape_policy(t: Tokens, config: UpdateConfig) -> Terms:
    """-f(exp(lp)) A: the behaviour probability is taken as 1 (LUFFY 2504.14945)."""
    return _shape(t, torch.zeros_like(t.lp_mu), config.shape_gamma)


def band(t: Tokens, config: UpdateConfig) -> Terms:
    """min(rA, clip(r, b - eps_low, b + eps_high) A), r = exp(lp - lp_mu), b = sg(exp(lp_old - lp_mu)) (ReMix 2507.06892).

    The dual clip bounds the ratio at c * max(b, 1), so that lp = lp_old never clips, whatever b is (ours).
    """
    r, centre = ratio(t.lp, t.lp_mu), ratio(t.lp_old, t.lp_mu)
    objective, kept, dual = clipped_objective(
        r, t.advantage, centre - config.eps_low, centre + config.eps_high, config.dual_clip * centre.clamp(min=1.0)
    )
    return Terms(-objective, r.detach(), r.detach(), kept, dual)


def topr(t: Tokens, config: UpdateConfig) -> Terms:
    """A >= 0: -A lp; A < 0: -sg(clip(exp(lp - lp_mu), 0, 1)) A lp (TOPR 2503.14286 eq. 8)."""
    r = ratio(t.lp.detach(), t.lp_mu)
    weight = torch.where(t.advantage < 0, r.clamp(max=1.0), torch.ones_like(r))
    return Terms(-weight * t.advantage * t.lp, r, weight, torch.ones_like(t.seed))


def on_policy(t: Tokens, config: UpdateConfig) -> Terms:
    """PPO clip on exp(lp - lp_old): pretends that the seed was on-policy (RLEP 2507.07451)."""
    return _ppo(t, t.lp_old, config)


PREFIX_MODES: dict[str, Callable[[Tokens, UpdateConfig], Terms]] = {
    "clip": clip,
    "mask": mask,
    "decoupled": decoupled,
    "truncate": truncate,
    "shape": shape,
    "shape_policy": shape_policy,
    "band": band,
    "topr": topr,
    "on_policy": on_policy,
}


def row_mean(values: Tensor, where: Tensor, row: Tensor, rows: int) -> Tensor:
    """[rows] mean of values [N] over the tokens of each row where ``where`` [N] holds; 0 for rows without any."""
    w = where.to(values.dtype)
    total = values.new_zeros(rows).index_add(0, row, values * w)
    return total / values.new_zeros(rows).index_add(0, row, w).clamp(min=1)


def sequence_ratio(t: Tokens) -> Tensor:
    """GSPO-token (2507.18071 eq. 13): sg(s) exp(lp - sg(lp)), s = exp(mean over the row's continuation of lp - lp_old)."""
    mean = row_mean((t.lp - t.lp_old).detach(), ~t.seed, t.row, t.rows).clamp(max=_MAX_LOG)
    return torch.exp(mean)[t.row] * torch.exp(t.lp - t.lp.detach())


def continuation(t: Tokens, config: UpdateConfig) -> Terms:
    """w_t * PPO clip on exp(lp - lp_old), with w_t = sg(min(exp(lp_old - lp_mu), C_mismatch)): truncated importance
    sampling of the difference between engine and trainer.

    ratio "sequence" takes GSPO's ratio; "m2po" (2510.01161) masks the tokens in ``filtered`` and clips no others;
    "unclipped" is the importance-weighted policy gradient.
    token_filter "clip_cov" takes the gradient off the filtered tokens, "kl_cov" adds a k3 term to them (2505.22617).
    """
    weight = ratio(t.lp_old, t.lp_mu).clamp(max=config.mismatch_cap)
    if t.row_weight is not None:
        weight = weight * t.row_weight[t.row]
    r = sequence_ratio(t) if config.ratio == "sequence" else ratio(t.lp, t.lp_old)
    dual = None
    if config.ratio == "m2po":
        kept = ~t.filtered if t.filtered is not None else torch.ones_like(t.seed)
        objective = torch.where(kept, r * t.advantage, (r * t.advantage).detach())
    elif config.ratio == "unclipped":
        objective, kept = r * t.advantage, torch.ones_like(t.seed)
    else:
        objective, kept, dual = clipped_objective(
            r, t.advantage, 1 - config.eps_low, 1 + config.eps_high, config.dual_clip
        )
    loss = -weight * objective
    if t.filtered is not None and config.token_filter == "clip_cov":
        kept = kept & ~t.filtered
        loss = torch.where(t.filtered, loss.detach(), loss)
    elif t.filtered is not None and config.token_filter == "kl_cov":
        loss = loss + torch.where(t.filtered, config.token_filter_coef * k3(t.lp, t.lp_old), torch.zeros_like(loss))
    return Terms(loss, r.detach(), (r * weight).detach(), kept, dual)


def mixed(t: Tokens, config: UpdateConfig) -> Terms:
    """The loss of every token: the continuation's, and on seed tokens prefix_coef times that of prefix_weight.

    Non-finite log-probs must be masked out by the caller's scale and replaced by finite ones (``finite``).
    """
    on = continuation(t, config)
    if not bool(t.seed.any()):
        return on
    seed_tokens = replace(t, filtered=None)
    off = PREFIX_MODES[config.prefix_weight](seed_tokens, config)
    coef = config.prefix_coef
    pick = t.seed
    return Terms(
        torch.where(pick, coef * off.loss, on.loss),
        torch.where(pick, off.ratio, on.ratio),
        torch.where(pick, coef * off.weight, on.weight),
        torch.where(pick, off.kept, on.kept),
        torch.where(pick, stopped(off), stopped(on)),
    )


def stopped(terms: Terms) -> Tensor:
    """bool [N]: tokens that the dual clip stops."""
    return torch.zeros_like(terms.kept) if terms.dual is None else terms.dual


def unclipped(config: UpdateConfig) -> UpdateConfig:
    """The same loss with nothing clipped, for measuring what clipping costs: infinite range, no dual clip, no filter."""
    return config.model_copy(
        update={
            "eps_low": math.inf,  # 1 would do for a ratio, but mode band's range lies around another centre than 1
            "eps_high": math.inf,
            "dual_clip": 0.0,
            "token_filter": "none",
            "ratio": "token" if config.ratio == "m2po" else config.ratio,
        }
    )


def continuation_weight(
    lp_old: Tensor, lp_mu: Tensor, seed: Tensor, row: Tensor, rows: int, config: UpdateConfig
) -> tuple[Tensor | None, Tensor | None]:
    """(weight [rows] or None, keep bool [rows] or None) of continuation_correction.

    geometric: exp(mean over the seed of lp_old - lp_mu); min_ratio: exp(min over the seed); reject: weight 1, and rows whose
    geometric mean leaves [reject_lo, reject_hi] are dropped. Rows without a seed have weight 1 and are kept.
    """
    if config.continuation_correction == "none":
        return None, None
    log = (lp_old - lp_mu).detach()
    if config.continuation_correction == "min_ratio":
        least = log.new_zeros(rows).scatter_reduce(0, row[seed], log[seed], "amin", include_self=False)
        return torch.exp(least.clamp(max=_MAX_LOG)), None
    mean = torch.exp(row_mean(log, seed, row, rows).clamp(max=_MAX_LOG))
    if config.continuation_correction == "geometric":
        return mean, None
    return None, (mean >= config.reject_lo) & (mean <= config.reject_hi)


def loss_mask(
    *,
    valid: Tensor,
    seed: Tensor,
    row: Tensor,
    rows: int,
    row_keep: Tensor,
    entropy: Tensor | None,
    config: UpdateConfig,
) -> Tensor:
    """bool [N]: the tokens that carry loss; numerator and denominator both come from it.

    valid [N]: recorded log-prob is finite. row_keep bool [rows]: trajectory not dropped (overlong, reject, degenerate).
    prefix_top_entropy keeps the ceil(share * L) seed tokens of highest entropy (nats, pi_old) of each row; ties go to
    the earlier token (Prefix-RFT 2507.01679).
    """
    keep = valid & row_keep[row]
    if config.prefix_weight == "mask":
        return keep & ~seed
    if config.prefix_top_entropy < 1 and bool(seed.any()):
        assert entropy is not None, "prefix_top_entropy needs the entropies of pi_old"
        chosen = torch.zeros_like(seed)
        index = torch.nonzero(keep & seed).squeeze(1)
        owner = row[index]
        for r in torch.unique(owner):
            mine = index[owner == r]
            count = int(-(-config.prefix_top_entropy * len(mine) // 1))
            order = torch.argsort(entropy[mine], descending=True, stable=True)
            chosen[mine[order[:count]]] = True
        keep = keep & (chosen | ~seed)
    return keep


def token_scale(
    mask: Tensor, row: Tensor, rows: int, config: UpdateConfig, max_response_tokens: int | None = None
) -> Tensor:
    """float32 [N]: the factor of each token's loss, so that sum(scale * loss) is the loss of the optimizer step.

    token: 1 / tokens; sequence: 1 / (tokens of the row * rows); constant: 1 / (rows * max_response_tokens) (Dr. GRPO
    2503.20783). Only tokens in ``mask`` and rows with such a token count. All zero where the mask is empty.
    """
    m = mask.to(torch.float64)
    per_row = m.new_zeros(rows).index_add(0, row, m)
    live = per_row.gt(0).sum().clamp(min=1)
    if config.aggregation == "token":
        scale = m / m.sum().clamp(min=1)
    elif config.aggregation == "sequence":
        scale = m / (per_row.clamp(min=1)[row] * live)
    else:
        assert max_response_tokens, "aggregation constant needs max_response_tokens"
        scale = m / (live * max_response_tokens)
    return scale.float()


def covariance_filter(lp: Tensor, advantage: Tensor, mask: Tensor, share: float) -> Tensor:
    """bool [N]: the share of masked tokens with the highest (lp - mean lp)(A - mean A) (2505.22617 eq. 10).

    Clip-Cov draws among tokens above a bound; taking the highest ones is deterministic (ours). At least one token.
    """
    chosen = torch.zeros_like(mask)
    index = torch.nonzero(mask).squeeze(1)
    if len(index) == 0:
        return chosen
    a, b = lp[index].double(), advantage[index].double()
    cov = (a - a.mean()) * (b - b.mean())
    count = max(1, int(share * len(index)))
    chosen[index[torch.argsort(cov, descending=True, stable=True)[:count]]] = True
    return chosen


def m2po_filter(lp: Tensor, lp_old: Tensor, advantage: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """bool [N]: tokens to mask so that the mean of (lp - lp_old)^2 over those left is at most threshold (M2PO 2510.01161).

    Largest first, and only among tokens whose update would go on leaving the trust region (A > 0 and r > 1, or A < 0 and
    r < 1), as PPO's clip does.
    """
    chosen = torch.zeros_like(mask)
    log = (lp - lp_old).double()
    index = torch.nonzero(mask & (log * advantage.double() > 0)).squeeze(1)
    if len(index) == 0:
        return chosen
    square = log[index] ** 2
    order = torch.argsort(square, descending=True, stable=True)
    total, count = (log[mask] ** 2).sum(), int(mask.sum())
    removed = torch.cumsum(square[order], 0)
    left = (count - torch.arange(1, len(order) + 1, device=lp.device)).clamp(min=1)
    if total / count <= threshold:
        return chosen
    fits = torch.nonzero((total - removed) / left <= threshold).squeeze(1)
    stop = int(fits[0]) + 1 if len(fits) else len(order)
    chosen[index[order[:stop]]] = True
    return chosen


def finite(lp: Tensor) -> Tensor:
    """lp with non-finite entries replaced by a constant 0 without gradient (their scale must be 0)."""
    return torch.where(torch.isfinite(lp), lp, torch.zeros_like(lp))
