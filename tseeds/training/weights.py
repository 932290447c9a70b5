"""The weights that are trained: precision, optimizer, shards over ranks, adapters, and their files.

Master weights and AdamW moments are fp32; the model computes in its own precision. In bf16 the model holds a rounded copy
of the masters, refreshed after every optimizer step, and its gradients are added to the masters in fp32 as soon as each is
there: parameters kept in bf16 alone would swallow updates of lr 1e-6.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tseeds.artifacts.policy import (
    ADAPTER_WEIGHTS,
    check_base,
    model_directory,
    policy_files,
    probe_sequences,
    write_adapter_config,
    write_probe,
)
from tseeds.artifacts.rundir import digest_of
from tseeds.config import LoraConfig, UpdateConfig
from tseeds.errors import StageFailed, UserError
from tseeds.training import ranks
from tseeds.training.logprobs import DTYPES, Policy, load_model, load_policy, plain_logprobs, rounds_only, with_adapter

log = logging.getLogger(__name__)

_ONE_THREAD = 20_000_000  # parameters up to which barriers cost more than a second thread brings
_ACTIVE = ".default."  # peft's name of an adapter in memory; files leave it out
_MASTER, _MOMENTS, _FACTS = "master.safetensors", "optimizer.safetensors", "trainer.json"


class Weights:
    """A policy, its fp32 masters and its optimizer, loaded from and saved to plain directories.

    policy: the callable model. masters: {parameter name: fp32 parameter}. threads: CPU threads chosen for it.
    """

    def __init__(
        self,
        config: UpdateConfig,
        policy: Path,
        *,
        dtype: str,
        state: Path | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """
        policy: model directory; with lora also an adapter, which is trained on. state: directory written by ``save``, None to
        start afresh.

        Raises:
            UserError: something cannot be loaded, or does not fit together.
        """
        self.config, self.dtype, self.trust = config, dtype, trust_remote_code
        self.device = ranks.device()
        self.base = model_directory(policy)
        if config.lora is None and self.base != policy:
            raise UserError(
                f"{policy}: a LoRA adapter; set update.lora to train it on, or merge it first: tseeds export {policy} --policy "
                "-o MODEL"
            )
        self.policy = load_policy(self.base, dtype=dtype, trust_remote_code=trust_remote_code)
        if config.lora is None:
            files = policy_files(policy)
            self.layout = {f.name: _tensor_types(f) for f in files if f.suffix == ".safetensors"}
            code = sorted(policy.glob("*.py")) if trust_remote_code else []
            self.copied = {f.name: f.read_bytes() for f in [*files, *code] if f.suffix != ".safetensors"}
        elif self.base == policy:
            if state is not None:
                raise UserError(
                    f"{state}: a trainer state goes on with the adapter beside it, and {policy} is a whole model"
                )
            self.policy.model = _adapted(self.policy.model, config.lora)
        else:
            self.policy.model = _trained_on(self.policy.model, policy, config.lora)
        size = sum(p.numel() for p in self.policy.parameters())
        cores = max(1, len(os.sched_getaffinity(0)) // ranks.world())
        self.threads = config.threads or (1 if size <= _ONE_THREAD else cores)
        torch.set_num_threads(self.threads)
        self.facts: dict[str, int] = {"steps": 0, "tokens": 0}
        self.masters: dict[str, torch.nn.Parameter] = {}
        self._load_masters(policy, state)
        self.optimizer = torch.optim.AdamW(
            list(self.masters.values()),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=ranks.world() == 1,
        )
        if state is not None:
            self._load_state(state)
        log.info(
            "trainer: %.2f M parameters, %.2f M trained, compute in %s on %s, %d thread(s), %d process(es)",
            size / 1e6, sum(p.numel() for p in self.masters.values()) / 1e6, dtype, self.device, self.threads, ranks.world(),
        )  # fmt: skip

    def _load_masters(self, policy: Path, state: Path | None) -> None:
        """Make the masters: the model's own parameters in fp32 or when sharded, else fp32 copies with gradient hooks."""
        trained = {n: p for n, p in self.policy.model.named_parameters() if p.requires_grad}
        wide = self.dtype == "float32" or self.config.lora is not None  # peft keeps adapters in fp32
        weights: dict[str, Tensor] = {}
        if state is not None and (state / _MASTER).is_file():
            weights = _checked(load_file(state / _MASTER), trained, state / _MASTER)
        elif not wide:
            full = load_model(policy, dtype="float32", trust_remote_code=self.trust)
            weights = {n: p.detach() for n, p in full.named_parameters()}
        for name, tensor in weights.items():
            trained[name].data.copy_(tensor if wide else tensor.to(DTYPES[self.dtype]))
        self.policy.to(self.device)
        if ranks.world() > 1:
            if not wide:
                # FSDP2 keeps fp32 shards and gathers them in bf16
                self.policy.model.float()
                for name, tensor in weights.items():
                    trained[name].data.copy_(tensor)
            _shard(self.policy, torch.float32 if rounds_only() else DTYPES[self.dtype])
            self.masters = {n: p for n, p in self.policy.model.named_parameters() if p.requires_grad}
            return
        for name, p in trained.items():
            if wide:
                assert p.dtype == torch.float32
                self.masters[name] = p  # type: ignore[assignment]
            else:
                self.masters[name] = torch.nn.Parameter(weights[name].to(self.device, copy=True))
                p.register_post_accumulate_grad_hook(_adds_to(self.masters[name]))

    def _load_state(self, state: Path) -> None:
        try:
            self.facts = {k: int(json.loads((state / _FACTS).read_text())[k]) for k in self.facts}
            moments = load_file(state / _MOMENTS) if self.facts["steps"] else {}
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{state}: no trainer state ({error}); name an update's state directory") from None
        for kind in ("exp_avg", "exp_avg_sq") if moments else ():
            part = {n: moments[f"{kind}.{n}"] for n in self.masters if f"{kind}.{n}" in moments}
            for name, tensor in _checked(part, self.masters, state / _MOMENTS).items():
                p = self.masters[name]
                self.optimizer.state[p][kind] = _as_shard(tensor, p)
                place = p.device if ranks.world() == 1 else "cpu"  # fused AdamW counts on the device
                self.optimizer.state[p]["step"] = torch.tensor(float(self.facts["steps"]), device=place)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The masters in a fixed order."""
        return list(self.masters.values())

    def step(self, learning_rate: float) -> float:
        """Clip the gathered gradient, take one AdamW step, refresh the model; returns the norm before clipping.

        A norm that is not finite takes no step.
        """
        # not torch's vector norm: on CPU its fp32 sum is 1 % off at 1e8 elements
        grads = [_local(m.grad) for m in self.parameters() if m.grad is not None]
        squares = sum(
            (g.square().sum().double() for g in grads), torch.zeros((), dtype=torch.float64, device=self.device)
        )
        value = math.sqrt(float(ranks.total(squares)))
        if math.isfinite(value) and value > self.config.grad_clip:
            torch._foreach_mul_(grads, self.config.grad_clip / value)
        if math.isfinite(value):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self.facts["steps"] += 1
            self._refresh()
        return value

    @torch.no_grad()
    def _refresh(self) -> None:
        model = dict(self.policy.model.named_parameters())
        pairs = [(model[n], m) for n, m in self.masters.items() if model[n] is not m]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m.to(DTYPES[self.dtype]) for _, m in pairs])

    def clear(self) -> None:
        """Forget gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def gradient(self) -> Tensor:
        """The gathered gradient as one flat fp32 vector, zeros where a parameter has none."""
        parts = [_whole(m.grad) if m.grad is not None else torch.zeros(m.shape) for m in self.masters.values()]
        return torch.cat([p.reshape(-1).cpu() for p in parts])

    def save(self, policy: Path, state: Path) -> None:
        """Write a model directory with its probe, and the trainer state; equal weights write equal bytes.

        Tensors keep the names, files and precision of the policy that training started from. With lora the policy is an
        adapter in peft's format, which names its base by a path relative to ``policy``. Called on all ranks, written by the
        first.

        Raises:
            StageFailed: a weight is not finite; nothing was written.
        """
        masters = {n: _whole(m.detach()).cpu() for n, m in self.masters.items()}
        broken = [name for name, master in masters.items() if not bool(torch.isfinite(master).all())]
        if broken:
            raise StageFailed(
                f"update: {len(broken)} of {len(masters)} tensors are no longer finite, such as {broken[0]}: training diverged; "
                "lower update.learning_rate (nothing of this iteration was committed)"
            )
        moments = {
            f"{kind}.{n}": _whole(self.optimizer.state[m][kind]).cpu()
            for kind in ("exp_avg", "exp_avg_sq")
            for n, m in self.masters.items()
            if m in self.optimizer.state
        }
        if self.config.lora is not None:
            weights: dict[str, Tensor] = {}  # the masters are the policy
        elif ranks.world() > 1:
            weights = _with_ties(self.policy.model, masters)
        else:
            # buffers and frozen tensors that belong to the files come from the model itself
            weights = {n: t.detach() for n, t in self.policy.model.state_dict().items()} | _with_ties(
                self.policy.model, masters
            )
        if ranks.rank() == 0:
            policy.mkdir(parents=True, exist_ok=True)
            state.mkdir(parents=True, exist_ok=True)
            self._write(policy, state, weights, masters, moments)
        ranks.barrier()

    def _write(
        self,
        policy: Path,
        state: Path,
        weights: dict[str, Tensor],
        masters: dict[str, Tensor],
        moments: dict[str, Tensor],
    ) -> None:
        (state / _FACTS).write_text(json.dumps(self.facts, sort_keys=True))
        if moments:
            save_file({n: t.contiguous() for n, t in moments.items()}, state / _MOMENTS)
        if self.config.lora is not None:
            self._write_adapter(policy, masters)
            return
        for name, data in self.copied.items():
            (policy / name).write_bytes(data)
        kinds = {kind for types in self.layout.values() for kind in types.values()}
        for file, types in self.layout.items():
            missing = [n for n in types if n not in weights]
            if missing:
                raise UserError(
                    f"{policy / file}: the model has no {missing[0]}; save it anew with save_pretrained first"
                )
            # clone: tensors that share memory (a tied head) are refused by safetensors
            tensors = {n: weights[n].to("cpu", kind).clone().contiguous() for n, kind in types.items()}
            save_file(tensors, policy / file, metadata={"format": "pt"})
        if kinds != {torch.float32}:
            save_file({n: t.contiguous() for n, t in masters.items()}, state / _MASTER)
        # no rounding may lie between the model in memory and the files
        self._write_probe(policy, same=kinds <= {torch.float32, DTYPES[self.dtype]})

    def _write_adapter(self, policy: Path, masters: dict[str, Tensor]) -> None:
        tensors = {n.replace(_ACTIVE, "."): t.contiguous() for n, t in masters.items()}
        # one key alone: safetensors writes several in an order that changes from process to process
        save_file(tensors, policy / ADAPTER_WEIGHTS, metadata={"base": digest_of(self.base)})
        config = next(iter(self.policy.model.peft_config.values())).to_dict()
        config |= {"inference_mode": True, "target_modules": sorted(config["target_modules"])}
        write_adapter_config(policy, json.loads(json.dumps(config, default=str)), self.base)
        self._write_probe(policy, same=True)

    def _write_probe(self, policy: Path, *, same: bool) -> None:
        """probe.json of the policy just written; same: a fresh load of it gives the model in memory."""
        if same and ranks.world() == 1:
            _write_probe_of(self.policy.model, policy, self.dtype)
        else:
            write_probe_for(policy, self.dtype, trust_remote_code=self.trust)


def write_probe_for(policy: Path, dtype: str, *, trust_remote_code: bool = False) -> None:
    """Write probe.json of a model directory: its log-probs of the probe sequences when loaded afresh in ``dtype``."""
    model = load_model(policy, dtype=dtype, trust_remote_code=trust_remote_code, packed=False)
    _write_probe_of(model, policy, dtype)


def merge_adapter(base: Path, adapter: Path, out: Path, *, dtype: str = "float32") -> None:
    """Write the model directory that a base policy and an adapter (peft's format) make together.

    Raises:
        UserError: one of them cannot be loaded, or they do not fit.
    """
    merged: Any = with_adapter(load_model(base, dtype=dtype, packed=False), adapter)
    merged = merged.merge_and_unload()
    out.mkdir(parents=True, exist_ok=True)
    tensors = merged.state_dict()
    for file in policy_files(base):
        if file.suffix == ".safetensors":
            types = _tensor_types(file)
            save_file(
                {n: tensors[n].to(kind).clone().contiguous() for n, kind in types.items()},
                out / file.name,
                metadata={"format": "pt"},
            )
        else:
            (out / file.name).write_bytes(file.read_bytes())
    write_probe_for(out, dtype)


def _write_probe_of(model: Any, policy: Path, dtype: str) -> None:
    ids = probe_sequences(int(model.config.vocab_size))
    write_probe(policy, [plain_logprobs(model, s).tolist() for s in ids], ids, dtype)


def _adds_to(master: torch.nn.Parameter) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's fresh gradient to its master's in fp32."""

    def hook(p: Tensor) -> None:
        assert p.grad is not None
        if master.grad is None:
            master.grad = p.grad.float()
        else:
            master.grad.add_(p.grad)
        p.grad = None

    return hook


def _checked(found: dict[str, Tensor], wanted: dict[str, Any], where: Path) -> dict[str, Tensor]:
    """``found`` limited to ``wanted`` names.

    Raises:
        UserError: a name is missing or has another shape.
    """
    for name, p in wanted.items():
        if name not in found or found[name].shape != p.shape:
            raise UserError(f"{where}: no {name} of the policy's shape; this state belongs to another policy")
    return {n: found[n] for n in wanted}


def _tensor_types(file: Path) -> dict[str, torch.dtype]:
    """{tensor name: dtype} of a safetensors file."""
    with safe_open(file, framework="pt") as handle:
        return {name: handle.get_slice(name)[:0].dtype for name in sorted(handle.keys())}


def _with_ties(model: Any, masters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Masters under every name that the model's state dict gives them: a tied head has two."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return masters
    names = {n for n, p in model.named_parameters(remove_duplicate=False) if p is head.weight}
    owner = next(n for n in names if n in masters)
    return masters | {n: masters[owner] for n in names}


def _whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered from all ranks; others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; others as they are."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _as_shard(tensor: Tensor, like: Any) -> Tensor:
    """``tensor`` on the device of ``like``, sharded as it is."""
    if hasattr(like, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor.to(like.device)


def _shard(policy: Policy, dtype: torch.dtype) -> None:
    """FSDP2: fp32 shards on every rank, gathered layer by layer in ``dtype``, gradients reduced in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    names = set(getattr(policy.model, "_no_split_modules", None) or ())
    for module in list(policy.modules()):
        if type(module).__name__ in names:
            fully_shard(module, mp_policy=precision)
    fully_shard(policy, mp_policy=precision, reshard_after_forward=False)


def _adapted(model: Any, lora: LoraConfig) -> Any:
    """The model with fresh adapters on the named linear layers, everything else frozen. B starts at 0, A from a fixed seed."""
    try:
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model
    except ImportError:
        raise UserError('update.lora needs peft: pip install "tseeds[lora]"') from None
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        adapted = get_peft_model(
            model,
            PeftConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,  # type: ignore[arg-type]
                target_modules=list(lora.targets),
                task_type="CAUSAL_LM",
            ),
        )
    except ValueError as error:
        raise UserError(f"update.lora.targets: {str(error).splitlines()[0]}") from None
    finally:
        torch.random.set_rng_state(state)
    return adapted.eval()


def _trained_on(model: Any, adapter: Path, lora: LoraConfig) -> Any:
    """The model with an adapter that was trained before, open to training again.

    Raises:
        UserError: it belongs to another base, or was made with other values than ``lora``.
    """
    check_base(adapter, digest_of(model_directory(adapter)))
    adapted = with_adapter(model, adapter, trained=True)
    made = next(iter(adapted.peft_config.values()))
    found = {"rank": made.r, "alpha": float(made.lora_alpha), "targets": sorted(made.target_modules)}
    wanted = {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
    for key, value in found.items():
        if value != wanted[key]:
            raise UserError(
                f"update.lora.{key}: {wanted[key]}, but the adapter {adapter} was made with {value}; set it back, or start "
                "another run from the merged policy (tseeds export --policy)"
            )
    return adapted
