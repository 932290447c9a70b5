"""Log-probs and entropies of chosen next tokens, without a [tokens, vocabulary] tensor beyond one chunk.

``Policy`` wraps a Hugging Face causal language model: the body runs on packed micro-batches (``batches.Packed``), the
head runs in chunks of tokens whose logits are recomputed in the backward pass.
"""

from __future__ import annotations

import contextlib
import logging
import platform
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from tseeds.artifacts.policy import model_directory
from tseeds.errors import UserError, first_line
from tseeds.training.batches import Packed, pack

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ATTENTION = "tseeds_packed"
_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}  # logits of one chunk; 64 MB in fp32 on CPU


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: Packed | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over the tries of a packed micro-batch; query [1, H, N, D], key and value [1, Hkv, N, D] -> [1, N, H, D].

    Called by the model's attention layers through transformers' attention interface.
    """
    assert packed is not None, f"attention {ATTENTION!r} works on packed micro-batches only"
    heads, _n, dim = query.shape[1:]
    kv_heads, value_dim = key.shape[1], value.shape[-1]
    outputs = []
    for block in packed.blocks:
        rows, tq, tk = block.shape
        q = query[0].index_select(1, block.queries).view(heads, rows, tq, dim).transpose(0, 1)
        k = key[0].index_select(1, block.keys).view(kv_heads, rows, tk, dim).transpose(0, 1)
        v = value[0].index_select(1, block.keys).view(kv_heads, rows, tk, value_dim).transpose(0, 1)
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=block.mask(q.dtype, sliding_window), scale=scaling, enable_gqa=heads != kv_heads
        )
        outputs.append(o.transpose(1, 2).reshape(rows * tq, heads, value_dim))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat.index_select(0, packed.order)[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, packed_attention)


class _Buffers:
    """Two fp32 rectangles [n, V] and one in the model's precision that all chunks of a call share: fresh memory of this size
    costs the kernel more (page faults) than the arithmetic on it."""

    def __init__(self, rows: int, weight: Tensor) -> None:
        self.a, self.b = (torch.empty(rows, len(weight), dtype=torch.float32, device=weight.device) for _ in range(2))
        self.narrow = self.a if weight.dtype == torch.float32 else torch.empty_like(self.a, dtype=weight.dtype)

    def log_softmax(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        """fp32 log-softmax [n, V] of scale [n] * (hidden W^T + b), in rectangle b; scale None stands for ones."""
        n = len(hidden)
        logits = self.a[:n]
        torch.mm(hidden, weight.t(), out=self.narrow[:n])
        if self.narrow is not self.a:
            logits.copy_(self.narrow[:n])
        if bias is not None:
            logits.add_(bias)
        if scale is not None:
            logits.mul_(scale[:, None])
        return torch._log_softmax(logits, -1, False, out=self.b[:n])


def _entropy(p: Tensor, logp: Tensor) -> Tensor:
    """-sum p log p over the last axis, tokens of probability 0 included."""
    entropy = -torch.linalg.vecdot(p, logp)
    if bool(torch.isnan(entropy).any()):  # logits of -inf: 0 * -inf
        entropy = -torch.linalg.vecdot(p, logp.clamp(min=torch.finfo(logp.dtype).min))
    return entropy


class _Head(torch.autograd.Function):
    """(lp [P], entropy [P], kl [P]) of pairs (node, target); logits live one chunk at a time, in both directions.

    hidden [N, d], weight [V, d], bias [V] or None; node, target [P]; scale [P]: inverse temperatures, None for ones;
    reference: the same three of another policy for the exact KL(reference || policy), or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        node: Tensor,
        target: Tensor,
        scale: Tensor | None,
        reference: tuple[Tensor, Tensor, Tensor | None] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        size = len(node)
        lp, entropy = (hidden.new_empty(size, dtype=torch.float32) for _ in range(2))
        kl = hidden.new_zeros(size if reference else 0, dtype=torch.float32)
        chunks = _chunks(size, len(weight), hidden.device)
        work = _Buffers(chunks[0][1] if chunks else 0, weight)
        for a, b in chunks:
            s = scale[a:b] if scale is not None else None
            logp = work.log_softmax(hidden[node[a:b]], weight, bias, s)
            lp[a:b] = logp.gather(1, target[a:b, None])[:, 0]
            if reference:
                ref = _Buffers(b - a, reference[1]).log_softmax(reference[0][node[a:b]], reference[1], reference[2], s)
                kl[a:b] = ref.exp().mul_(ref.sub_(logp)).sum(-1)
                del ref
            entropy[a:b] = _entropy(torch.exp(logp, out=work.a[: b - a]), logp)
        ctx.save_for_backward(hidden, weight, bias, node, target, scale, entropy)
        ctx.reference = reference
        return lp, entropy, kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, node, target, scale, entropy = ctx.saved_tensors
        d_lp, d_entropy, d_kl = grads
        reference = ctx.reference
        d_hidden = torch.zeros_like(hidden)
        chunks = _chunks(len(node), len(weight), hidden.device)
        wide = weight.dtype if len(chunks) <= 1 else torch.float32  # one chunk needs no wider accumulator
        d_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
        work = _Buffers(chunks[0][1] if chunks else 0, weight)
        for a, b in chunks:
            h, s = hidden[node[a:b]], scale[a:b] if scale is not None else None
            logp = work.log_softmax(h, weight, bias, s)
            factor = torch.zeros_like(entropy[a:b])
            if d_lp is not None:
                factor -= d_lp[a:b]
            if d_kl is not None and reference:
                factor += d_kl[a:b]
            if d_entropy is not None:
                # dH / dlogit = -p (log p + H)
                p = torch.exp(logp, out=work.a[: b - a])
                d = logp.clamp_(min=-1e30).add_(entropy[a:b, None]).mul_(-d_entropy[a:b, None])
                d = d.add_(factor[:, None]).mul_(p)
            else:
                d = logp.exp_().mul_(factor[:, None])
            if d_lp is not None:
                d.scatter_add_(1, target[a:b, None], d_lp[a:b, None])
            if d_kl is not None and reference:
                ref = _Buffers(b - a, reference[1]).log_softmax(reference[0][node[a:b]], reference[1], reference[2], s)
                d.sub_(ref.exp_().mul_(d_kl[a:b, None]))
                del ref
            if s is not None:
                d.mul_(s[:, None])
            if d_bias is not None:
                d_bias += d.sum(0)
            if work.narrow is not work.a:
                d = work.narrow[: b - a].copy_(d)
            d_hidden.index_add_(0, node[a:b], d @ weight)
            if d_weight is not None and wide == weight.dtype:
                d_weight.addmm_(d.t(), h)
            elif d_weight is not None:
                d_weight += d.t() @ h
        return (
            d_hidden,
            d_weight.to(weight.dtype) if d_weight is not None else None,
            d_bias.to(bias.dtype) if d_bias is not None else None,
            *[None] * 4,
        )


def _chunks(size: int, vocabulary: int, device: torch.device) -> list[tuple[int, int]]:
    step = max(1, _CHUNK_ELEMENTS.get(device.type, 1 << 27) // vocabulary)
    return [(a, min(a + step, size)) for a in range(0, size, step)]


class Policy(nn.Module):
    """A causal language model that gives log-probs of chosen tokens. ``packable`` False runs plain padded batches."""

    model: Any

    def __init__(self, model: nn.Module, *, packable: bool = True) -> None:
        super().__init__()
        self.model = model
        self.packable = packable

    @property
    def head(self) -> nn.Linear:
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    def hidden(self, packed: Packed) -> Tensor:
        """[N, d] last hidden state of every node."""
        body = self.model.base_model if hasattr(self.model, "base_model") else self.model
        if hasattr(self.model, "get_base_model"):  # peft
            body = self.model.get_base_model().base_model
        if packed.padded is None:
            out = body(input_ids=packed.ids[None], position_ids=packed.positions[None], use_cache=False, packed=packed)
            return out.last_hidden_state[0]
        index, lengths = packed.padded
        mask = torch.arange(index.shape[1], device=index.device)[None] < lengths[:, None]
        out = body(input_ids=packed.ids[index], attention_mask=mask.long(), use_cache=False)
        return out.last_hidden_state.flatten(0, 1).index_select(0, packed.order)

    def forward(
        self, packed: Packed, reference: tuple[Tensor, Tensor, Tensor | None] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(lp [P], entropy [P] in nats, kl [P]) of the micro-batch's pairs, fp32, of the tempered distribution.

        reference: (hidden [N, d'], head weight, head bias) of another policy on the same micro-batch; then kl is the exact
        forward KL(reference || policy) over the vocabulary, else it is empty.
        """
        head, scale = self.head, packed.inverse_temperature
        unit = bool((scale == 1).all())
        hidden = self.hidden(packed)
        return _Head.apply(
            hidden, head.weight, head.bias, packed.pair_node, packed.pair_target, None if unit else scale, reference
        )


@lru_cache(maxsize=1)
def rounds_only() -> bool:
    """Whether "bfloat16" means fp32 arithmetic on bf16-rounded weights here: on CPUs without bf16 instructions, where bf16
    products take 6 to 60 times as long as fp32 ones (AVX2, torch 2.13: 1.3–8.6 against 40–80 GFLOP/s on one core)."""
    if torch.cuda.is_available():
        return False
    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() or _is_arm())


def _is_arm() -> bool:
    return platform.machine().lower() in {"aarch64", "arm64"}


def load_model(policy: Path, *, dtype: str, trust_remote_code: bool = False, packed: bool = True) -> nn.Module:
    """A Hugging Face causal language model from a directory, never from the network, in evaluation mode.

    policy: model directory, or a LoRA adapter, which lies in fp32 on its base. dtype: "float32" or "bfloat16"; see
    ``rounds_only`` for CPUs that cannot compute in the latter.

    Raises:
        UserError: the directory holds no loadable causal language model.
    """
    if not Path(policy).is_dir():
        raise UserError(
            f"{policy}: no such model directory; a run keeps the policies that snapshot retention names (tseeds status)"
        )
    if (base := model_directory(policy)) != policy:
        return with_adapter(load_model(base, dtype=dtype, trust_remote_code=trust_remote_code, packed=packed), policy)
    rounded = dtype == "bfloat16" and rounds_only()
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            policy,
            dtype=torch.float32 if rounded else DTYPES[dtype],
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            attn_implementation=ATTENTION if packed else "sdpa",
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        line = str(error).strip().splitlines()[0]
        raise UserError(f"{policy}: not a causal language model that transformers can load: {line}") from None
    if rounded:
        log.info("%s: this CPU has no bfloat16 arithmetic; computing in float32 on bfloat16 weights", policy)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.bfloat16())
    return model.eval()


def with_adapter(model: nn.Module, adapter: Path, *, trained: bool = False) -> Any:
    """``model`` with a LoRA adapter (peft's format) in fp32 beside its weights, in evaluation mode; trained: with gradients.

    Raises:
        UserError: peft is missing, or the adapter does not fit.
    """
    try:
        from peft import PeftModel
    except ImportError:
        raise UserError(f'{adapter}: a LoRA adapter needs peft: pip install "tseeds[lora]"') from None
    try:
        return PeftModel.from_pretrained(model, str(adapter), is_trainable=trained).eval()  # type: ignore[arg-type]
    except (ValueError, RuntimeError, OSError, KeyError, SafetensorError) as error:
        raise UserError(f"{adapter}: not an adapter of its base: {first_line(error)}") from None


def load_policy(policy: Path, *, dtype: str, trust_remote_code: bool = False) -> Policy:
    """A policy whose packed log-probs were compared with transformers' own on a few probe tokens.

    Models whose attention ignores the packed layout fall back to padded batches; a head that is more than a linear layer
    is refused.

    Raises:
        UserError: the directory is no causal language model, or its head is not one linear layer.
    """
    model = load_model(policy, dtype=dtype, trust_remote_code=trust_remote_code)
    return checked(Policy(model), policy)


def checked(policy: Policy, name: Path | str) -> Policy:
    """``policy``, found to agree with transformers' own forward pass, in packed or at least in padded form."""
    vocabulary = int(policy.model.config.vocab_size)
    base = [(7919 * (i + 1)) % vocabulary for i in range(9)]
    prompts = [np.array(base[:4]), np.array(base[:4])]
    responses = [np.array(base[4:]), np.array(base[6:])]
    expected = [plain_logprobs(policy.model, [*base[:4], *r.tolist()])[3:] for r in responses]
    tolerance = 1e-3 if next(policy.model.parameters()).dtype == torch.float32 else 0.25

    def worst(padded: bool) -> float:
        packed = pack([[0, 1]], prompts, responses, [1.0, 1.0], [0, 5], padded=padded)
        with torch.no_grad(), attention(policy.model, "sdpa" if padded else ATTENTION):
            lp = policy(packed)[0][packed.token_pair]
        got = torch.zeros(8)
        got[packed.tokens] = lp
        return float((got - torch.cat(expected)).abs().max())

    if not isinstance(policy.model.get_output_embeddings(), nn.Linear):
        raise UserError(f"{name}: its output head is not one linear layer; such models cannot be trained here")
    error: float | None
    try:
        error = worst(padded=False)
    except (AssertionError, TypeError, RuntimeError) as why:
        log.info("packed attention does not run on %s: %s", name, why)
        error = None
    if error is not None and error <= tolerance:
        return policy
    padded_error = worst(padded=True)
    if not padded_error <= tolerance:
        raise UserError(
            f"{name}: log-probs of its linear head differ from the model's own by {padded_error:.3g}; models that scale or cap "
            "their logits cannot be trained here"
        )
    log.warning("%s: attention does not take packed batches; training runs on padded ones, which is slower", name)
    policy.packable = False
    policy.model.set_attn_implementation("sdpa")
    return policy


@contextlib.contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    """Run ``model`` with another attention implementation inside the block."""
    before = model.config._attn_implementation
    if before == name:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def plain_logprobs(model: nn.Module, ids: list[int]) -> Tensor:
    """[len(ids) - 1] fp32 log-probs at temperature 1 by transformers' own forward pass on one sequence."""
    with attention(model, "sdpa"):
        logits = model(input_ids=torch.tensor([ids], device=next(model.parameters()).device)).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:], device=logits.device)[:, None])[:, 0].cpu()
