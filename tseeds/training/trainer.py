"""One policy update: an iteration's rows in, a new policy and its metrics out (docs/loss.md).

Advantages, masks and denominators come from all rows of an optimizer step before its first backward pass, so micro-batches
and ranks only split a sum. This module moves tensors between ``batches``, ``logprobs``, ``loss`` and ``metrics``; it knows
none of their formulas.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tseeds import memory
from tseeds.config import UpdateConfig
from tseeds.errors import UserError
from tseeds.training import loss as losses
from tseeds.training import metrics, ranks, results
from tseeds.training.advantages import Advantages, advantages, overlong_penalty
from tseeds.training.batches import Packed, micro_batches, pack, shuffled
from tseeds.training.logprobs import Policy, load_policy
from tseeds.training.results import StepResult
from tseeds.training.rows import Rows
from tseeds.training.weights import Weights, write_probe_for

__all__ = ["Rows", "StepResult", "Trainer", "write_probe_for"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Micro:
    """A packed micro-batch of ``rows`` trajectories. carries: they have a gradient; local [M]: each token's row, from 0;
    owner: the rank that runs it."""

    packed: Packed
    carries: bool
    local: Tensor
    rows: int
    owner: int = 0


class Flat:
    """All response tokens of an iteration, one behind the other, [M] each, on the CPU; ``loss.Tokens`` has the names.

    lp, ratio, weight, kept: as the token's last optimizer step saw them. used: carries loss. NaN where not yet known.
    """

    def __init__(self, rows: Rows) -> None:
        lengths = np.array([len(r) for r in rows.response_ids], dtype=np.int64)
        self.rows = len(rows)
        self.offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        total = int(self.offsets[-1])
        row = np.repeat(np.arange(len(rows)), lengths)
        position = np.arange(total) - self.offsets[row]
        start, stop = np.array(rows.off_start, dtype=np.int64), np.array(rows.off_stop, dtype=np.int64)
        self.row, self.position = torch.from_numpy(row), torch.from_numpy(position)
        self.length = torch.from_numpy(lengths[row])
        self.seed = torch.from_numpy((position >= start[row]) & (position < stop[row]))
        recorded = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *rows.logprobs]).astype(np.float32))
        self.valid = torch.isfinite(recorded)
        self.lp_mu = losses.finite(recorded)
        self.lp_old, self.entropy, self.lp = (torch.full((total,), math.nan) for _ in range(3))
        self.ratio, self.weight, self.advantage, self.reference = (torch.zeros(total) for _ in range(4))
        self.kept, self.dual, self.used, self.filtered = (torch.zeros(total, dtype=torch.bool) for _ in range(4))

    def values(self, config: UpdateConfig) -> metrics.TokenValues:
        """The inputs of the metrics; tokens that no optimizer step saw stand at pi_old, with the ratio that they have there."""
        unseen = torch.isnan(self.lp)
        lp = torch.where(unseen, self.lp_old, self.lp)
        lp_mu = torch.where(self.valid, self.lp_mu, self.lp_old)
        there = losses.mixed(
            losses.Tokens(self.lp_old, self.lp_old, lp_mu, self.advantage, self.seed, self.row, self.rows), config
        )
        return metrics.TokenValues(
            self.row, self.position, self.length, self.seed, self.used, self.advantage, lp, self.lp_old, self.lp_mu,
            self.entropy, torch.where(unseen, there.ratio, self.ratio), self.weight, self.kept, self.dual,
        )  # fmt: skip


class Trainer:
    """Holds a policy with its optimizer between iterations.

    A trainer that stayed in memory and one that was loaded from the directories it saved go on bit for bit the same
    (CPU; fp32 policy, or bf16 policy with its fp32 master weights in ``state``).
    """

    def __init__(
        self,
        config: UpdateConfig,
        policy: Path,
        *,
        dtype: str,
        run_seed: int,
        max_response_tokens: int | None = None,
        state: Path | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """
        policy: model directory. dtype: compute precision, "float32" or "bfloat16". max_response_tokens: the rollout's budget,
        for aggregation "constant" and overlong "penalty". state: directory written by ``save``; None starts afresh.

        Raises:
            UserError: policy or state cannot be loaded, or do not fit together.
        """
        if max_response_tokens is None and (config.aggregation == "constant" or config.overlong == "penalty"):
            raise UserError('update: aggregation "constant" and overlong "penalty" need rollout.max_response_tokens')
        self.config, self.dtype, self.run_seed, self.trust = config, dtype, run_seed, trust_remote_code
        self.max_response_tokens = max_response_tokens
        self.weights = Weights(config, policy, dtype=dtype, state=state, trust_remote_code=trust_remote_code)
        self.policy = self.weights.policy
        self._reference: tuple[Path, Policy] | None = None

    def save(self, policy: Path, state: Path) -> None:
        """Write the policy (a model directory with probe.json) and the trainer state; see ``Weights.save``."""
        self.weights.save(policy, state)

    def step(self, rows: Rows, *, iteration: int, reference: Path | None = None) -> StepResult:
        """Train on an iteration's rows: ``epochs`` passes over ``minibatches`` optimizer steps.

        reference: policy directory of the KL term (kl_coef > 0).

        Raises:
            UserError: rows do not fit together, or a reference is needed and not given.
        """
        with memory.kept():
            return self._step(rows, iteration, reference)

    def _step(self, rows: Rows, iteration: int, reference: Path | None) -> StepResult:
        start = time.perf_counter()
        torch.set_num_threads(self.weights.threads)
        flat, adv, row_keep = self.prepare(rows)
        plan = self.plan(rows, flat, adv, row_keep, iteration)
        # the first minibatch reads lp_old off its own first forward pass; everything else needs a pass without gradient
        ahead = self._decides_ahead()
        self.fill_old(flat, [m for k, micros in enumerate(plan) for m in micros if ahead or k > 0 or not m.carries])
        if self.config.continuation_correction == "reject":
            row_keep &= self.accepted(flat)
        flat.used = self.mask(flat, row_keep)
        ref = self._load_reference(reference)
        if ref is not None and self.config.kl_reference == "base":
            self._fill_reference(flat, [m for micros in plan for m in micros if m.carries], ref)
        probing = bool(self.config.probe_every) and iteration % self.config.probe_every == 0
        steps: list[dict[str, Any]] = []
        for epoch in range(self.config.epochs):
            order = list(range(len(plan)))
            if epoch:
                order = shuffled([str(m) for m in order], self.run_seed, iteration, "update", "epoch", epoch)
            for place, m in enumerate(order):
                last = epoch == self.config.epochs - 1 and place == len(plan) - 1
                facts = self._minibatch(flat, plan[m], ref, first=epoch == 0 and place == 0, probe=probing and last)
                steps.append({"iteration": iteration, "epoch": epoch, "minibatch": m, **facts})
        self.weights.facts["tokens"] += len(flat.row)
        values = flat.values(self.config)
        summary = results.summarise(rows, values, adv, row_keep, flat.valid, steps)
        seconds = time.perf_counter() - start
        summary |= {
            "tokens_per_second": len(flat.row) / seconds,
            "update_seconds": seconds,
            "optimizer_steps": float(self.weights.facts["steps"]),
            "tokens_total": float(self.weights.facts["tokens"]),
        }
        self._warn(summary)
        return StepResult(
            rows=results.rows_table(rows, values, adv, row_keep),
            steps=results.steps_table(steps),
            tokens=results.tokens_table(rows, values) if self.config.save_tokens else None,
            summary=summary,
        )

    def prepare(self, rows: Rows) -> tuple[Flat, Advantages, Tensor]:
        """Flat tokens, advantages, and bool [rows]: the trajectories that may carry loss."""
        rows.check()
        config = self.config
        flat = Flat(rows)
        reward = np.array(rows.reward, dtype=np.float64)
        if config.overlong == "penalty":
            assert self.max_response_tokens is not None
            budget = self.max_response_tokens
            reward += [overlong_penalty(len(r), budget, config.overlong_buffer) for r in rows.response_ids]
        seeds = [
            (s or "seed") if b > a else None
            for s, a, b in zip(rows.seed_id, rows.off_start, rows.off_stop, strict=True)
        ]
        adv = advantages(reward, rows.group_id, seeds, config.advantage)
        keep = torch.ones(len(rows), dtype=torch.bool)
        if config.overlong == "mask":
            keep &= torch.tensor([f != "length" for f in rows.finish_reason], dtype=torch.bool)
        if config.drop_degenerate:
            keep &= ~torch.from_numpy(adv.degenerate)
        flat.advantage = torch.from_numpy(adv.advantage).float()[flat.row]
        return flat, adv, keep

    def plan(
        self, rows: Rows, flat: Flat, adv: Advantages, row_keep: Tensor, iteration: int, minibatches: int | None = None
    ) -> list[list[Micro]]:
        """Minibatches of micro-batches, whole groups each, in an order that hashes decide.

        Rows that cannot have a gradient go into micro-batches of their own, which only run forward. So the others keep the
        same neighbours in every pass, and lp_old is bit for bit the first lp.
        """
        config, share, world = self.config, self.policy.packable, ranks.world()
        groups: dict[str, list[int]] = {}
        for i, group in enumerate(rows.group_id):
            groups.setdefault(group, []).append(i)
        names = list(groups)
        order = [names[i] for i in shuffled(names, self.run_seed, iteration, "update")]
        always = config.kl_coef > 0 or config.entropy_coef != 0
        carries = row_keep.numpy() & ((adv.advantage != 0) | always)
        plan: list[list[Micro]] = []
        count = min(minibatches or config.minibatches, max(len(order), 1))
        for part in np.array_split(np.arange(len(order)), count):
            micros: list[Micro] = []
            for kind in (True, False):
                chosen = [[r for r in groups[order[i]] if carries[r] == kind] for i in part]
                batches = micro_batches(
                    chosen, rows.prompt_ids, rows.response_ids, config.tokens_per_microbatch, share=share, least=world
                )
                load = [0] * world
                for batch in batches:
                    packed = pack(
                        batch, rows.prompt_ids, rows.response_ids, rows.temperature, flat.offsets,
                        share=share, padded=not share,
                    )  # fmt: skip
                    owner = load.index(min(load))
                    load[owner] += len(packed.ids)
                    number = torch.zeros(len(rows), dtype=torch.int64)
                    number[packed.rows] = torch.arange(len(packed.rows))
                    local = number[flat.row[packed.tokens]]
                    micros.append(Micro(packed.to(self.weights.device), kind, local, len(packed.rows), owner))
            plan.append(micros)
        return plan

    def _decides_ahead(self) -> bool:
        """Whether masks, and with them denominators, depend on pi_old: then its pass comes first."""
        c = self.config
        return (
            c.continuation_correction == "reject"
            or c.prefix_top_entropy < 1
            or c.token_filter != "none"
            or c.ratio == "m2po"
        )

    def _mine(self, micros: Sequence[Micro]) -> Iterator[tuple[Micro, bool]]:
        """This rank's micro-batches with True, filled up with idle ones (False) so that all ranks run equally many."""
        own = [m for m in micros if m.owner == ranks.rank()]
        longest = max((sum(m.owner == r for m in micros) for r in range(ranks.world())), default=0)
        yield from ((m, True) for m in own)
        yield from ((micros[0], False) for _ in range(longest - len(own)))

    def _own(self, flat: Flat, micros: Sequence[Micro]) -> Tensor:
        """bool [M]: the tokens of these micro-batches that this rank runs."""
        own = torch.zeros(len(flat.row), dtype=torch.bool)
        for micro in micros:
            if micro.owner == ranks.rank():
                own[micro.packed.tokens] = True
        return own

    @torch.no_grad()
    def fill_old(self, flat: Flat, micros: Sequence[Micro], policy: Policy | None = None) -> None:
        """lp_old and entropy of these micro-batches' tokens, by ``policy`` (default: the one in training)."""
        for micro, real in self._mine(micros):
            lp, entropy, _ = (policy or self.policy)(micro.packed)
            if real:
                pair = micro.packed.token_pair
                self._keep_old(flat, micro, lp[pair], entropy[pair])
        self._merge(flat, micros, "lp_old", "entropy", "valid")

    def _merge(self, flat: Flat, micros: Sequence[Micro], *names: str) -> None:
        if ranks.world() > 1:
            own = self._own(flat, micros)
            for name in names:
                ranks.merge(getattr(flat, name), own)

    @staticmethod
    def _keep_old(flat: Flat, micro: Micro, lp: Tensor, entropy: Tensor) -> None:
        where, lp = micro.packed.tokens, lp.detach().cpu()
        good = torch.isfinite(lp)
        flat.valid[where] &= good
        flat.lp_old[where] = torch.where(good, lp, flat.lp_mu[where])
        flat.entropy[where] = torch.nan_to_num(entropy.detach().cpu())

    def accepted(self, flat: Flat) -> Tensor:
        """bool [rows]: trajectories that continuation_correction reject keeps; needs lp_old."""
        lp_mu = torch.where(flat.valid, flat.lp_mu, flat.lp_old)
        keep = losses.continuation_weight(flat.lp_old, lp_mu, flat.seed, flat.row, flat.rows, self.config)[1]
        assert keep is not None
        return keep

    def mask(self, flat: Flat, row_keep: Tensor) -> Tensor:
        """bool [M]: the tokens that carry loss."""
        return losses.loss_mask(
            valid=flat.valid, seed=flat.seed, row=flat.row, rows=flat.rows, row_keep=row_keep, entropy=flat.entropy,
            config=self.config,
        )  # fmt: skip

    def _load_reference(self, reference: Path | None) -> Policy | None:
        if self.config.kl_coef == 0:
            return None
        if reference is None:
            raise UserError("update.kl_coef > 0 needs a reference policy: name one, or set update.kl_coef = 0")
        if self._reference is None or self._reference[0] != reference:
            self._reference = None  # frees the old one first
            policy = load_policy(reference, dtype=self.dtype, trust_remote_code=self.trust)
            self._reference = (reference, policy.requires_grad_(False).to(self.weights.device))
        return self._reference[1]

    @torch.no_grad()
    def _fill_reference(self, flat: Flat, micros: Sequence[Micro], ref: Policy) -> None:
        for micro in micros:
            if micro.owner == ranks.rank():
                lp = ref(micro.packed)[0][micro.packed.token_pair].cpu()
                flat.reference[micro.packed.tokens] = losses.finite(lp)

    def _minibatch(
        self, flat: Flat, micros: Sequence[Micro], ref: Policy | None, *, first: bool, probe: bool
    ) -> dict[str, Any]:
        """One optimizer step; its facts and metrics. Without any gradient the step is skipped and nothing moves."""
        here = torch.zeros_like(flat.used)
        for micro in micros:
            here[micro.packed.tokens] = True
        scale = self.scale(flat, here)
        carrying: list[Micro] = []
        idle: list[Micro] = []
        for micro in micros:
            (carrying if micro.carries and bool(scale[micro.packed.tokens].any()) else idle).append(micro)
        idle = [m for m in idle if bool(torch.isnan(flat.lp_old[m.packed.tokens]).any())]
        if idle:  # their tokens are all masked: no pass with a gradient comes along, but the metrics want pi_old
            self.fill_old(flat, idle)
        self.choose_filtered(flat, micros, flat.used & here & ~flat.seed, current=not first)
        rate = self._learning_rate()
        facts: dict[str, Any] = {"probe_cosine": None, "probe_norm_ratio": None}
        value = norm = 0.0
        if carrying:
            if probe:
                self.accumulate(flat, carrying, scale, losses.unclipped(self.config), ref)
                free = self.weights.gradient()
                self.weights.clear()
            value = self.accumulate(flat, carrying, scale, self.config, ref, record=True)
            if probe:
                facts |= _compare(self.weights.gradient(), free)
            norm = self.weights.step(rate)
            self.weights.clear()
        skipped = not carrying or not math.isfinite(norm)
        if skipped:
            why = f"the gradient norm is {norm}" if carrying else "no token carries a gradient"
            log.warning("update: optimizer step skipped, %s", why)
        regions, bins = metrics.split(flat.values(self.config).select(here))
        return {
            "step": self.weights.facts["steps"],
            "skipped": skipped,
            "rows": sum(m.rows for m in micros),
            "loss_tokens": int((flat.used & here).sum()),
            "loss": value,
            "grad_norm": norm,
            "learning_rate": rate,
            **facts,
            **regions,
            **bins,
        }

    def scale(self, flat: Flat, here: Tensor) -> Tensor:
        """[M] factor of each token's loss in an optimizer step over the tokens ``here``."""
        return losses.token_scale(flat.used & here, flat.row, flat.rows, self.config, self.max_response_tokens)

    def _learning_rate(self) -> float:
        warm = self.config.warmup_steps
        return self.config.learning_rate * (min(1.0, (self.weights.facts["steps"] + 1) / warm) if warm else 1.0)

    def choose_filtered(self, flat: Flat, micros: Sequence[Micro], where: Tensor, *, current: bool) -> None:
        """Choose the tokens of Clip-Cov, KL-Cov or M2PO over the whole step, by the current policy's log-probs.

        current: the policy moved since pi_old, so that these take a pass of their own.
        """
        config = self.config
        if config.token_filter == "none" and config.ratio != "m2po":
            return
        lp = flat.lp_old.clone()
        if current:
            with torch.no_grad():
                for micro, real in self._mine(micros):
                    now = self.policy(micro.packed)[0][micro.packed.token_pair].cpu()
                    if real:
                        lp[micro.packed.tokens] = losses.finite(now)
            if ranks.world() > 1:
                ranks.merge(lp, self._own(flat, micros))
        if config.ratio == "m2po":
            chosen = losses.m2po_filter(lp, flat.lp_old, flat.advantage, where, config.m2po_threshold)
        else:
            chosen = losses.covariance_filter(lp, flat.advantage, where, config.token_filter_share)
        flat.filtered = torch.where(where, chosen, flat.filtered)

    def accumulate(
        self,
        flat: Flat,
        micros: Sequence[Micro],
        scale: Tensor,
        config: UpdateConfig,
        ref: Policy | None = None,
        *,
        record: bool = False,
    ) -> float:
        """Add the gradient of sum(scale * loss) over micro-batches to the masters; returns the loss.

        record: keep ratios, weights and clip flags in ``flat``. lp_old is filled in where it is not yet known.
        """
        value = torch.zeros(1, dtype=torch.float64)
        filtering = config.token_filter != "none" or config.ratio == "m2po"
        for micro, real in self._mine(micros):
            packed, where = micro.packed, micro.packed.tokens
            distribution = None
            if ref is not None and config.kl_reference == "snapshot":
                with torch.no_grad():
                    distribution = (ref.hidden(packed), ref.head.weight, ref.head.bias)
            pair_lp, pair_entropy, pair_kl = self.policy(packed, distribution)
            raw, entropy = pair_lp[packed.token_pair], pair_entropy[packed.token_pair]
            if real and bool(torch.isnan(flat.lp_old[where]).any()):
                self._keep_old(flat, micro, raw, entropy)
            device, local = raw.device, micro.local.to(raw.device)
            lp = losses.finite(raw)

            def at(x: Tensor, where: Tensor = where, device: torch.device = device) -> Tensor:
                return x[where].to(device)

            lp_old, lp_mu, seed = at(flat.lp_old), at(flat.lp_mu), at(flat.seed)
            if not real:
                lp_old = lp.detach()  # known on the rank that owns it; here it only must be finite
            # a log-prob that was not recorded is masked; here it only must not spoil its row's weight
            lp_mu = torch.where(at(flat.valid), lp_mu, lp_old)
            tokens = losses.Tokens(
                lp, lp_old, lp_mu, at(flat.advantage), seed, local, micro.rows,
                row_weight=losses.continuation_weight(lp_old, lp_mu, seed, local, micro.rows, config)[0],
                filtered=at(flat.filtered) if filtering else None,
            )  # fmt: skip
            terms = losses.mixed(tokens, config)
            per_token = terms.loss
            if ref is not None:
                kl = pair_kl[packed.token_pair] if distribution is not None else losses.k3(at(flat.reference), lp)
                per_token = per_token + config.kl_coef * kl
            if config.entropy_coef:
                per_token = per_token - config.entropy_coef * entropy
            part = at(scale) * torch.isfinite(raw) * (1.0 if real else 0.0)
            loss = (part * per_token).sum()
            # FSDP2 averages gradients over ranks, the loss is a sum
            (loss * ranks.world()).backward()
            value += loss.detach().double().cpu()
            if record and real:
                flat.lp[where] = lp.detach().cpu()
                flat.ratio[where], flat.weight[where] = terms.ratio.cpu(), terms.weight.detach().cpu()
                flat.kept[where] = terms.kept.cpu()
                flat.dual[where] = losses.stopped(terms).cpu()
        self._merge(
            flat, micros, "lp_old", "entropy", "valid", *(("lp", "ratio", "weight", "kept", "dual") if record else ())
        )
        return float(ranks.total(value))

    def _warn(self, summary: dict[str, float]) -> None:
        """Say loudly what makes an iteration worthless."""
        for key, what in (
            ("truncated_share", "of trajectories hit the length budget (rollout.max_response_tokens)"),
            ("zero_variance_share", "of groups have equal rewards and teach nothing"),
        ):
            if summary[key] > 0.5:
                log.warning("update: %.0f %% %s", 100 * summary[key], what)
        if summary["invalid_tokens"]:
            log.warning("update: %d tokens without a finite log-prob are masked", summary["invalid_tokens"])


def _compare(kept: Tensor, free: Tensor) -> dict[str, float]:
    """Cosine and norm ratio of the gradient with and without clipping."""
    a, b = kept.double(), free.double()
    norms = float(a @ a) ** 0.5, float(b @ b) ** 0.5
    return {
        "probe_cosine": float(a @ b) / (norms[0] * norms[1]) if min(norms) > 0 else math.nan,
        "probe_norm_ratio": norms[0] / norms[1] if norms[1] > 0 else math.nan,
    }
