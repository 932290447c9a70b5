"""What each seed mode would do to the same rows: gradients compared, nothing trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tseeds.config import UpdateConfig
from tseeds.errors import UserError
from tseeds.training import metrics
from tseeds.training.logprobs import load_policy
from tseeds.training.loss import PREFIX_MODES
from tseeds.training.rows import Rows
from tseeds.training.trainer import Trainer

COLUMNS = (
    "grad_norm", "loss", "clip_fraction_seed", "clipped_mass_seed", "clipped_mass_continuation", "clipped_mass_all",
    "effective_entropy", "retained_entropy", "ratio_mean_seed", "ess_share_seed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """modes [n]; values: {mode: {column of COLUMNS: number}}; cosine [n][n] of the modes' gradients (NaN for a zero one)."""

    modes: list[str]
    values: dict[str, dict[str, float]]
    cosine: list[list[float]]


def compare_modes(
    config: UpdateConfig,
    policy: Path,
    rows: Rows,
    modes: Sequence[str],
    *,
    dtype: str,
    run_seed: int = 0,
    max_response_tokens: int | None = None,
    old: Path | None = None,
    trust_remote_code: bool = False,
) -> Comparison:
    """The gradient of one optimizer step over all rows for each ``prefix_weight`` in ``modes``, at ``policy``.

    old: the policy that sampled the rows, pi_old of the ratios; without it pi_old is ``policy``, and the continuation's ratio
    is 1. Name a later policy as ``policy`` and the rows' own as ``old`` to see clipping on the continuation too.

    Raises:
        UserError: an unknown mode, a policy that cannot be loaded, rows that do not fit together, or a KL term.
    """
    unknown = [m for m in modes if m not in PREFIX_MODES]
    if unknown:
        raise UserError(f"--modes: unknown mode {unknown[0]}; known are {', '.join(PREFIX_MODES)}")
    modes = list(dict.fromkeys(modes))
    if not modes:
        raise UserError(f"--modes: name at least one of {', '.join(PREFIX_MODES)}")
    config = config.model_copy(update={"kl_coef": 0.0, "processes": 1, "save_tokens": False})
    trainer = Trainer(
        config, policy, dtype=dtype, run_seed=run_seed, max_response_tokens=max_response_tokens,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    flat, adv, keep = trainer.prepare(rows)
    (micros,) = trainer.plan(rows, flat, adv, keep, 0, minibatches=1)
    before = None
    if old is not None:
        before = load_policy(old, dtype=dtype, trust_remote_code=trust_remote_code).to(trainer.weights.device)
    trainer.fill_old(flat, micros, before)
    del before
    values: dict[str, dict[str, float]] = {}
    gradients: list[torch.Tensor] = []
    for mode in modes:
        trainer.config = config.model_copy(update={"prefix_weight": mode})
        row_keep = keep & trainer.accepted(flat) if config.continuation_correction == "reject" else keep
        flat.used = trainer.mask(flat, row_keep)
        scale = trainer.scale(flat, torch.ones_like(flat.used))
        carrying = [m for m in micros if m.carries and bool(scale[m.packed.tokens].any())]
        trainer.choose_filtered(flat, carrying, flat.used & ~flat.seed, current=old is not None)
        loss = trainer.accumulate(flat, carrying, scale, trainer.config, record=True)
        gradient = trainer.weights.gradient()
        trainer.weights.clear()
        gradients.append(gradient)
        regions, _ = metrics.split(flat.values(trainer.config))
        facts = {"loss": loss, "grad_norm": float(gradient.square().sum().sqrt()), **regions}
        facts |= {k: regions[f"{k}_all"] for k in ("effective_entropy", "retained_entropy")}
        values[mode] = {k: facts[k] for k in COLUMNS}
    cosine = [[_cosine(a, b) for b in gradients] for a in gradients]
    return Comparison(modes, values, cosine)


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    x, y = a.double(), b.double()
    norms = float((x @ x) * (y @ y)) ** 0.5
    return float(x @ y) / norms if norms else float("nan")
