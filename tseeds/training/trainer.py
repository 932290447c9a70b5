"""One policy update: an iteration's rows in, a new policy and its metrics out (METHOD sections 3, 5 and 7).

Precision: master weights and AdamW moments are fp32, the forward and backward pass run in ``dtype``; gradients are added
up in fp32. Denominators and advantages come from all rows of a step before it begins, so micro-batches and ranks only
split a sum.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tseeds.artifacts import schema
from tseeds.artifacts.policy import policy_files, probe_sequences, write_probe
from tseeds.config import UpdateConfig
from tseeds.errors import UserError
from tseeds.training import loss as L
from tseeds.training import metrics
from tseeds.training.advantages import Advantages, advantages, overlong_penalty
from tseeds.training.batches import Packed, micro_batches, pack, shuffled
from tseeds.training.logprobs import Policy, load_model, load_policy, plain_logprobs
from tseeds.training.rows import Rows

__all__ = ["Rows", "StepResult", "Trainer", "write_probe_for"]

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ONE_THREAD = 20_000_000  # parameters up to which barriers cost more than a second thread brings


@dataclass(slots=True)
class StepResult:
    """rows, steps, tokens: tables of ``schema.UPDATE_*`` (tokens None unless save_tokens); summary: headline metrics."""

    rows: pa.Table
    steps: pa.Table
    tokens: pa.Table | None
    summary: dict[str, float]


@dataclass(slots=True)
class _Micro:
    """A packed micro-batch; carries: its rows have a gradient."""

    packed: Packed
    carries: bool
    local: Tensor  # [M] number of each token's row inside the micro-batch
    count: int


class _Flat:
    """All response tokens of an iteration, one behind the other; see ``loss.Tokens`` for the names."""

    def __init__(self, rows: Rows) -> None:
        lengths = np.array([len(r) for r in rows.response_ids], dtype=np.int64)
        self.rows = len(rows)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        total = int(self.offsets[-1])
        row = np.repeat(np.arange(len(rows)), lengths)
        position = np.arange(total) - self.offsets[row]
        start, stop = np.array(rows.off_start, dtype=np.int64), np.array(rows.off_stop, dtype=np.int64)
        self.row = torch.from_numpy(row)
        self.position = torch.from_numpy(position)
        self.length = torch.from_numpy(lengths[row])
        self.seed = torch.from_numpy((position >= start[row]) & (position < stop[row]))
        recorded = np.concatenate(rows.logprobs) if total else np.zeros(0)
        lp_mu = torch.from_numpy(recorded.astype(np.float32))
        self.valid = torch.isfinite(lp_mu)
        self.lp_mu = torch.where(self.valid, lp_mu, torch.zeros_like(lp_mu))
        self.lp_old, self.entropy, self.lp = (torch.full((total,), math.nan) for _ in range(3))
        self.ratio, self.weight = torch.zeros(total), torch.zeros(total)
        self.kept = torch.zeros(total, dtype=torch.bool)
        self.used = torch.zeros(total, dtype=torch.bool)
        self.filtered = torch.zeros(total, dtype=torch.bool)
        self.reference: Tensor | None = None
        self.advantage = torch.zeros(total)

    def values(self) -> metrics.TokenValues:
        lp = torch.where(torch.isnan(self.lp), self.lp_old, self.lp)
        return metrics.TokenValues(
            self.row, self.position, self.length, self.seed, self.used, self.advantage, lp, self.lp_old, self.lp_mu,
            self.entropy, self.ratio, self.weight, self.kept,
        )  # fmt: skip


class Trainer:
    """Holds a policy with its optimizer between iterations.

    A trainer that stayed in memory and one that was loaded from the directories it saved go on bit for bit the same
    (CPU, fp32 policy, or bf16 policy with its fp32 master weights in ``state``).
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
        self.config, self.dtype, self.run_seed = config, dtype, run_seed
        self.max_response_tokens = max_response_tokens
        self.trust_remote_code = trust_remote_code
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.layout = {f.name: _tensor_types(f) for f in policy_files(policy) if f.suffix == ".safetensors"}
        self.copied = {
            f.name: f.read_bytes()
            for f in [*policy_files(policy), *(policy.glob("*.py") if trust_remote_code else ())]
            if f.suffix != ".safetensors"
        }
        self.policy = load_policy(policy, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code)
        self.parameters = {n: p for n, p in self.policy.model.named_parameters() if p.requires_grad}
        size = sum(p.numel() for p in self.parameters.values())
        self.threads = config.threads or (1 if size <= _ONE_THREAD else len(os.sched_getaffinity(0)))
        torch.set_num_threads(self.threads)
        log.info("trainer: %.1f M parameters, %s, %d threads, %s", size / 1e6, dtype, self.threads, self.device)
        self.steps = self.tokens = 0
        self.masters = self._masters(policy, state)
        self.policy.to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        if state is not None:
            self._restore(state)
        self._reference: tuple[Path, Policy] | None = None

    def _masters(self, policy: Path, state: Path | None) -> dict[str, torch.nn.Parameter]:
        """fp32 weights by name: the model's own when it computes in fp32, else copies that its gradients are added to."""
        saved = state / "master.safetensors" if state is not None else None
        if saved is not None and saved.is_file():
            weights = load_file(saved)
            self._same_names(weights, saved)
        elif all(p.dtype == torch.float32 for p in self.parameters.values()):
            weights = {}
        else:
            full = load_model(policy, dtype=torch.float32, trust_remote_code=self.trust_remote_code)
            weights = {n: p.detach() for n, p in full.named_parameters()}
        masters: dict[str, torch.nn.Parameter] = {}
        for name, p in self.parameters.items():
            if name in weights:
                p.data.copy_(weights[name])
            if p.dtype == torch.float32:
                masters[name] = p  # type: ignore[assignment]
            else:
                masters[name] = torch.nn.Parameter(weights[name].to(self.device))
                p.register_post_accumulate_grad_hook(_adds_to(masters[name]))
        return masters

    def _same_names(self, found: dict[str, Tensor], where: Path) -> None:
        missing = [n for n, p in self.parameters.items() if n not in found or found[n].shape != p.shape]
        if missing:
            raise UserError(f"{where}: no {missing[0]} of the policy's shape; this state belongs to another policy")

    def _restore(self, state: Path) -> None:
        try:
            facts = json.loads((state / "trainer.json").read_text())
            moments = load_file(state / "optimizer.safetensors") if facts["steps"] else {}
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{state}: no trainer state ({error}); name an update's state directory") from None
        self.steps, self.tokens = facts["steps"], facts["tokens"]
        for kind in ("exp_avg", "exp_avg_sq") if moments else ():
            part = {n: moments[f"{kind}.{n}"] for n in self.masters if f"{kind}.{n}" in moments}
            self._same_names(part, state / "optimizer.safetensors")
            for name, p in self.masters.items():
                self.optimizer.state[p][kind] = part[name].to(p.device)
                self.optimizer.state[p]["step"] = torch.tensor(float(self.steps))

    # ---------------------------------------------------------------- one iteration

    def step(self, rows: Rows, *, iteration: int, reference: Path | None = None) -> StepResult:
        """Train on an iteration's rows: ``epochs`` passes over ``minibatches`` optimizer steps.

        reference: policy directory of the KL term (kl_coef > 0).

        Raises:
            UserError: rows do not fit together.
        """
        start = time.perf_counter()
        rows.check()
        torch.set_num_threads(self.threads)
        config = self.config
        flat, adv, row_keep = self._prepare(rows)
        plan = self._plan(rows, flat, adv, row_keep, iteration)
        total_steps = len(plan) * config.epochs
        early = total_steps > 1 or config.continuation_correction == "reject" or config.prefix_top_entropy < 1
        early = early or config.token_filter != "none" or config.ratio == "m2po"
        for m, micros in enumerate(plan):
            for micro in micros:
                needed = not micro.carries or m > 0 or total_steps == 1 and early or self._needs_all_old()
                if needed:
                    self._old(flat, micro)
        if config.continuation_correction == "reject":
            keep = L.continuation_weight(flat.lp_old, flat.lp_mu, flat.seed, flat.row, flat.rows, config)[1]
            assert keep is not None
            row_keep &= keep
        mask = L.loss_mask(
            valid=flat.valid, seed=flat.seed, row=flat.row, rows=flat.rows, row_keep=row_keep,
            entropy=flat.entropy, config=config,
        )  # fmt: skip
        flat.used = mask
        ref = self._load_reference(reference) if config.kl_coef > 0 else None
        if ref is not None and config.kl_reference == "base":
            flat.reference = torch.zeros(len(flat.row))
            for micros in plan:
                for micro in micros:
                    if micro.carries:
                        with torch.no_grad():
                            lp = ref(micro.packed)[0][micro.packed.token_pair]
                        flat.reference[micro.packed.tokens] = lp.cpu()
        steps: list[dict[str, Any]] = []
        for epoch in range(config.epochs):
            order = shuffled([str(m) for m in range(len(plan))], self.run_seed, iteration, "update", epoch)
            # the first minibatch of the first epoch got its lp_old for free: it must come first
            order = list(range(len(plan))) if epoch == 0 else order
            for m in order:
                steps.append(self._minibatch(flat, plan[m], mask, ref, epoch=epoch, minibatch=m, iteration=iteration))
        self.tokens += len(flat.row)
        return self._result(rows, flat, adv, row_keep, steps, iteration, time.perf_counter() - start)

    def _needs_all_old(self) -> bool:
        c = self.config
        return (
            c.continuation_correction == "reject" or c.prefix_top_entropy < 1 or c.token_filter != "none" or c.ratio == "m2po"
        )

    def _prepare(self, rows: Rows) -> tuple[_Flat, Advantages, Tensor]:
        """Flat tokens, advantages, and [rows] bool: which trajectories may carry loss."""
        config = self.config
        flat = _Flat(rows)
        reward = np.array(rows.reward, dtype=np.float64)
        length = np.array([len(r) for r in rows.response_ids])
        if config.overlong == "penalty":
            assert self.max_response_tokens, "overlong penalty needs max_response_tokens"
            reward = reward + [overlong_penalty(n, self.max_response_tokens, config.overlong_buffer) for n in length]
        seeds = [s if b > a else None for s, a, b in zip(rows.seed_id, rows.off_start, rows.off_stop, strict=True)]
        adv = advantages(reward, rows.group_id, seeds, config.advantage)
        keep = torch.ones(len(rows), dtype=torch.bool)
        if config.overlong == "mask":
            keep &= torch.tensor([f != "length" for f in rows.finish_reason], dtype=torch.bool)
        if config.drop_degenerate:
            keep &= ~torch.from_numpy(adv.degenerate)
        flat.advantage = torch.from_numpy(adv.advantage).float()[flat.row]
        return flat, adv, keep

    def _plan(
        self, rows: Rows, flat: _Flat, adv: Advantages, row_keep: Tensor, iteration: int
    ) -> list[list[_Micro]]:
        """Minibatches of micro-batches. Rows that cannot have a gradient go into micro-batches of their own, which are only
        run forward: the others keep the same neighbours in every pass, so that lp_old is bit for bit the first lp."""
        config = self.config
        groups: dict[str, list[int]] = {}
        for i, group in enumerate(rows.group_id):
            groups.setdefault(group, []).append(i)
        names = list(groups)
        order = [names[i] for i in shuffled(names, self.run_seed, iteration, "update", "order")]
        always = config.kl_coef > 0 or config.entropy_coef != 0
        carries = row_keep.numpy() & ((adv.advantage != 0) | always)
        share = self.policy.packable
        plan: list[list[_Micro]] = []
        for part in np.array_split(np.arange(len(order)), min(config.minibatches, max(len(order), 1))):
            micros: list[_Micro] = []
            for kind in (True, False):
                chosen = [[r for r in groups[order[i]] if carries[r] == kind] for i in part]
                for batch in micro_batches(
                    chosen, rows.prompt_ids, rows.response_ids, config.tokens_per_microbatch, share=share
                ):
                    packed = pack(
                        batch, rows.prompt_ids, rows.response_ids, rows.temperature, flat.offsets,
                        share=share, padded=not share,
                    )  # fmt: skip
                    number = {r: k for k, r in enumerate(packed.rows)}
                    local = torch.tensor([number[r] for r in flat.row[packed.tokens].tolist()], dtype=torch.int64)
                    micros.append(_Micro(packed.to(self.device), kind, local, len(packed.rows)))
            plan.append(micros)
        return plan

    @torch.no_grad()
    def _old(self, flat: _Flat, micro: _Micro) -> None:
        lp, entropy, _ = self.policy(micro.packed)
        self._keep_old(flat, micro, lp[micro.packed.token_pair].cpu(), entropy[micro.packed.token_pair].cpu())

    @staticmethod
    def _keep_old(flat: _Flat, micro: _Micro, lp: Tensor, entropy: Tensor) -> None:
        where = micro.packed.tokens
        good = torch.isfinite(lp)
        flat.valid[where] &= good
        flat.lp_old[where] = torch.where(good, lp, flat.lp_mu[where])
        flat.entropy[where] = torch.nan_to_num(entropy)

    def _load_reference(self, reference: Path | None) -> Policy:
        if reference is None:
            raise UserError("update.kl_coef > 0 needs a reference policy: name one, or set update.kl_coef = 0")
        if self._reference is None or self._reference[0] != reference:
            self._reference = None
            policy = load_policy(reference, dtype=DTYPES[self.dtype], trust_remote_code=self.trust_remote_code)
            self._reference = (reference, policy.requires_grad_(False).to(self.device))
        return self._reference[1]

    def _minibatch(
        self, flat: _Flat, micros: list[_Micro], mask: Tensor, ref: Policy | None,
        *, epoch: int, minibatch: int, iteration: int,
    ) -> dict[str, Any]:  # fmt: skip
        """One optimizer step."""
        config = self.config
        mine = torch.cat([m.packed.tokens for m in micros]) if micros else torch.zeros(0, dtype=torch.int64)
        here = torch.zeros_like(mask)
        here[mine] = True
        scale = L.token_scale(mask & here, flat.row, flat.rows, config, self.max_response_tokens)
        carrying = [m for m in micros if m.carries and bool(scale[m.packed.tokens].any())]
        if config.token_filter != "none" or config.ratio == "m2po":
            self._select(flat, carrying, mask & here & ~flat.seed, first=epoch == 0 and minibatch == 0)
        value = self.accumulate(flat, carrying, scale, config, ref, record=True)
        facts = self._apply(bool(carrying))
        values = flat.values().select(mine)
        return {
            "iteration": iteration, "epoch": epoch, "minibatch": minibatch, "step": self.steps,
            "loss": value, **facts, "rows": sum(m.count for m in micros),
            "loss_tokens": int((mask & here).sum()), "values": values,
            **metrics.by_region(values), **metrics.by_bin(values),
        }  # fmt: skip

    def _select(self, flat: _Flat, micros: list[_Micro], mask: Tensor, *, first: bool) -> None:
        """Choose the tokens of Clip-Cov, KL-Cov or M2PO over the whole minibatch, by the current policy."""
        config = self.config
        lp = flat.lp_old.clone()
        if not first:
            with torch.no_grad():
                for micro in micros:
                    lp[micro.packed.tokens] = self.policy(micro.packed)[0][micro.packed.token_pair].cpu()
        lp = L.finite(lp)
        if config.ratio == "m2po":
            chosen = L.m2po_filter(lp, L.finite(flat.lp_old), flat.advantage, mask, config.m2po_threshold)
        else:
            chosen = L.covariance_filter(lp, flat.advantage, mask, config.token_filter_share)
        flat.filtered = torch.where(mask, chosen, flat.filtered)

    def accumulate(
        self, flat: _Flat, micros: Sequence[_Micro], scale: Tensor, config: UpdateConfig, ref: Policy | None = None,
        *, record: bool = False,
    ) -> float:  # fmt: skip
        """Add the gradient of sum(scale * loss) over micro-batches to the masters; returns the loss."""
        total = 0.0
        for micro in micros:
            packed, where = micro.packed, micro.packed.tokens
            distribution = None
            if ref is not None and config.kl_reference == "snapshot":
                with torch.no_grad():
                    distribution = (ref.hidden(packed), ref.head.weight, ref.head.bias)
            pair_lp, pair_entropy, pair_kl = self.policy(packed, distribution)
            raw = pair_lp[packed.token_pair]
            if torch.isnan(flat.lp_old[where]).any():
                entropy = pair_entropy.detach()[packed.token_pair]
                self._keep_old(flat, micro, raw.detach().cpu(), entropy.cpu())
            device = raw.device
            local = micro.local.to(device)
            part = scale[where].to(device) * torch.isfinite(raw)
            lp = L.finite(raw)
            seed, lp_old, lp_mu = (x[where].to(device) for x in (flat.seed, flat.lp_old, flat.lp_mu))
            weight = L.continuation_weight(lp_old, lp_mu, seed, local, micro.count, config)[0]
            filtered = None
            if config.token_filter != "none" or config.ratio == "m2po":
                filtered = flat.filtered[where].to(device)
            tokens = L.Tokens(
                lp, lp_old, lp_mu, flat.advantage[where].to(device), seed, local, micro.count, weight, filtered
            )
            terms = L.mixed(tokens, config)
            per_token = terms.loss
            if ref is not None and config.kl_coef > 0:
                if distribution is not None:
                    kl = pair_kl[packed.token_pair]
                else:
                    assert flat.reference is not None
                    kl = L.k3(flat.reference[where].to(device), lp)
                per_token = per_token + config.kl_coef * kl
            if config.entropy_coef:
                per_token = per_token - config.entropy_coef * pair_entropy[packed.token_pair]
            loss = (part * per_token).sum()
            loss.backward()
            total += float(loss.detach())
            if record:
                flat.lp[where] = lp.detach().cpu()
                flat.ratio[where], flat.weight[where] = terms.ratio.detach().cpu(), terms.weight.detach().cpu()
                flat.kept[where] = terms.kept.cpu()
        return total

    def _apply(self, any_gradient: bool) -> dict[str, Any]:
        """Clip, step, refresh the compute copy; a step without any gradient is skipped and leaves everything as it is."""
        facts: dict[str, Any] = {"grad_norm": 0.0, "learning_rate": self._learning_rate(), "skipped": True}
        if any_gradient:
            norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self.config.grad_clip)
            facts["grad_norm"] = float(norm)
            if math.isfinite(facts["grad_norm"]):
                for group in self.optimizer.param_groups:
                    group["lr"] = facts["learning_rate"]
                self.optimizer.step()
                self.steps += 1
                facts["skipped"] = False
                self._refresh()
            else:
                log.warning("update: gradient norm is %s; the optimizer step is skipped", facts["grad_norm"])
        else:
            log.warning("update: no token carries a gradient; the optimizer step is skipped")
        self.optimizer.zero_grad(set_to_none=True)
        return facts

    def _learning_rate(self) -> float:
        warm = self.config.warmup_steps
        return self.config.learning_rate * (min(1.0, (self.steps + 1) / warm) if warm else 1.0)

    @torch.no_grad()
    def _refresh(self) -> None:
        pairs = [(p, self.masters[n]) for n, p in self.parameters.items() if p is not self.masters[n]]
        if pairs:
            torch._foreach_copy_([p.data for p, _ in pairs], [m.data for _, m in pairs])

    # ---------------------------------------------------------------- results

    def _result(
        self, rows: Rows, flat: _Flat, adv: Advantages, row_keep: Tensor, steps: list[dict[str, Any]], iteration: int,
        seconds: float,
    ) -> StepResult:  # fmt: skip
        values = flat.values()
        last = {s["minibatch"]: s for s in steps}  # the last epoch's view of every token
        for s in steps:
            s.pop("values")
        summary = _summary(rows, values, adv, row_keep, steps, list(last.values()), flat)
        summary |= {"tokens": float(len(flat.row)), "tokens_per_second": len(flat.row) / max(seconds, 1e-9)}
        summary |= {"optimizer_steps": float(self.steps), "train_tokens": float(self.tokens)}
        return StepResult(
            rows=_rows_table(rows, values, adv, row_keep),
            steps=pa.Table.from_pylist(steps, schema=schema.UPDATE_STEPS),
            tokens=_tokens_table(rows, values) if self.config.save_tokens else None,
            summary=summary,
        )

    # ---------------------------------------------------------------- files

    def save(self, policy: Path, state: Path) -> None:
        """Write a model directory with its probe, and the trainer state; equal trainers write equal bytes.

        Tensors keep the names, files and precision of the policy that training started from.
        """
        policy.mkdir(parents=True, exist_ok=True)
        state.mkdir(parents=True, exist_ok=True)
        for name, data in self.copied.items():
            (policy / name).write_bytes(data)
        weights = {n: t.detach() for n, t in self.policy.model.state_dict().items()}
        weights |= {n: m.detach() for n, m in self.masters.items()}
        tied = self.policy.head.weight
        by_identity = {id(p): self.masters[n] for n, p in self.parameters.items()}
        exact = True
        for file, types in self.layout.items():
            tensors: dict[str, Tensor] = {}
            for name, kind in types.items():
                source = weights.get(name)
                if source is None and id(tied) in by_identity:
                    source = by_identity[id(tied)].detach()
                if name.endswith("lm_head.weight") and id(tied) in by_identity:
                    source = by_identity[id(tied)].detach()
                assert source is not None, f"the model has no tensor {name} of its own file"
                tensors[name] = source.to("cpu", kind).contiguous()
                exact &= kind == torch.float32 or kind == DTYPES[self.dtype]
            save_file(tensors, policy / file, metadata={"format": "pt"})
        if any(kind != torch.float32 for types in self.layout.values() for kind in types.values()):
            save_file({n: m.detach().cpu().contiguous() for n, m in self.masters.items()}, state / "master.safetensors")
        moments = {
            f"{kind}.{n}": self.optimizer.state[m][kind].cpu().contiguous()
            for kind in ("exp_avg", "exp_avg_sq")
            for n, m in self.masters.items()
            if m in self.optimizer.state
        }
        if moments:
            save_file(moments, state / "optimizer.safetensors")
        facts = {"steps": self.steps, "tokens": self.tokens}
        (state / "trainer.json").write_text(json.dumps(facts, sort_keys=True))
        if exact:
            _write_probe(self.policy.model, policy, self.dtype)
        else:
            write_probe_for(policy, self.dtype, trust_remote_code=self.trust_remote_code)


def write_probe_for(policy: Path, dtype: str, *, trust_remote_code: bool = False) -> None:
    """Write probe.json of a model directory: its log-probs of the probe sequences when loaded afresh in ``dtype``."""
    model = load_model(policy, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code, packed=False)
    _write_probe(model, policy, dtype)


def _write_probe(model: Any, policy: Path, dtype: str) -> None:
    ids = probe_sequences(int(model.config.vocab_size))
    write_probe(policy, [plain_logprobs(model, s).tolist() for s in ids], ids, dtype)


def _adds_to(master: torch.nn.Parameter) -> Any:
    """A hook that adds a parameter's fresh gradient to its master's in fp32."""

    def hook(p: Tensor) -> None:
        assert p.grad is not None
        if master.grad is None:
            master.grad = p.grad.float()
        else:
            master.grad.add_(p.grad)
        p.grad = None

    return hook


def _tensor_types(file: Path) -> dict[str, torch.dtype]:
    """{tensor name: dtype} of a safetensors file, from its header."""
    with safe_open(file, framework="pt") as handle:
        return {k: handle.get_tensor(k).dtype for k in sorted(handle.keys())}  # noqa: SIM118


def _summary(
    rows: Rows, values: metrics.TokenValues, adv: Advantages, row_keep: Tensor, steps: list[dict[str, Any]],
    last: list[dict[str, Any]], flat: _Flat,
) -> dict[str, float]:  # fmt: skip
    """The iteration's headline metrics; NaN where there is nothing to average."""
    reward = np.array(rows.reward, dtype=np.float64)
    seeded = np.array(rows.off_stop) > np.array(rows.off_start)
    lengths = np.array([len(r) for r in rows.response_ids], dtype=np.float64)

    def mean(x: np.ndarray) -> float:
        return float(x.mean()) if len(x) else math.nan

    unseeded_tokens = values.select(torch.from_numpy(~seeded)[values.row] if len(rows) else values.seed)
    done = [s for s in steps if not s["skipped"]]
    return {
        "reward": mean(reward),
        "reward_seeded": mean(reward[seeded]),
        "reward_unseeded": mean(reward[~seeded]),
        "advantage_seeded": mean(adv.advantage[seeded]),
        "rows": float(len(rows)),
        "seeded_share": mean(seeded.astype(float)),
        "entropy": float(unseeded_tokens.entropy.double().mean()) if len(unseeded_tokens.lp) else math.nan,
        **metrics.by_region(values),
        **metrics.mismatch(values),
        "effective_entropy": metrics.clipping(values)["effective_entropy"],
        "retained_entropy": metrics.clipping(values)["retained_entropy"],
        "zero_variance_share": adv.degenerate_groups / max(adv.groups, 1),
        "singleton_groups": float(adv.singletons),
        "truncated_share": mean(np.array([f == "length" for f in rows.finish_reason], dtype=float)),
        "dropped_rows": float((~row_keep).sum()),
        "invalid_tokens": float((~flat.valid).sum()),
        "response_length": mean(lengths),
        "seed_length": mean((np.array(rows.off_stop) - np.array(rows.off_start))[seeded].astype(float)),
        "loss": metrics.mean([s["loss"] for s in steps]),
        "grad_norm": metrics.mean([s["grad_norm"] for s in done]),
        "grad_norm_max": max((s["grad_norm"] for s in steps), default=0.0),
        "learning_rate": steps[-1]["learning_rate"] if steps else 0.0,
        "skipped_steps": float(sum(s["skipped"] for s in steps)),
    }


def _rows_table(rows: Rows, values: metrics.TokenValues, adv: Advantages, row_keep: Tensor) -> pa.Table:
    n = len(rows)

    def per_row(x: Tensor, where: Tensor) -> list[float | None]:
        count = torch.zeros(n, dtype=torch.float64).index_add(0, values.row, where.double())
        total = torch.zeros(n, dtype=torch.float64).index_add(0, values.row, torch.where(where, x.double(), 0.0))
        return [t / c if c else None for t, c in zip(total.tolist(), count.tolist(), strict=True)]

    live = values.used & (values.advantage != 0)
    columns: dict[str, Any] = {
        "row_id": rows.row_id,
        "problem_id": rows.problem_id,
        "group_id": rows.group_id,
        "reward": rows.reward,
        "advantage": adv.advantage.tolist(),
        "used": row_keep.tolist(),
        "snapshot_age": [
            None if s is None else p - s for s, p in zip(rows.snapshot_step, rows.policy_step, strict=True)
        ],
        "seed_tokens": [b - a for a, b in zip(rows.off_start, rows.off_stop, strict=True)],
        "continuation_tokens": [
            len(r) - b + a for r, a, b in zip(rows.response_ids, rows.off_start, rows.off_stop, strict=True)
        ],
    }
    for name in ("seed", "continuation"):
        mine = values.seed if name == "seed" else ~values.seed
        columns[f"ratio_{name}"] = per_row(values.ratio, mine & live)
        columns[f"clip_fraction_{name}"] = per_row((~values.kept).double(), mine & live)
        columns[f"entropy_{name}"] = per_row(values.entropy, mine)
        columns[f"log_ratio_behaviour_{name}"] = per_row(values.lp_old - values.lp_mu, mine)
    return pa.table(columns, schema=schema.UPDATE_ROWS)


def _tokens_table(rows: Rows, values: metrics.TokenValues) -> pa.Table:
    names = pa.array(rows.row_id, pa.string())
    return pa.table(
        {
            "row_id": names.take(pa.array(values.row.numpy())),
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
