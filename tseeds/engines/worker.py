"""What tseeds adds to a vLLM worker: swap weights in place, exact entropies, adapters on a CPU.

Named by path, so vLLM loads it wherever its workers run: in this process, in tensor-parallel processes, behind
``vllm serve``. Written for vllm 0.32.0.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


class PolicyWorker:
    """Mixed into vLLM's worker through ``worker_extension_cls``; called with ``collective_rpc``."""

    model_runner: Any
    reload_weights: Any
    tseeds_digest: str = ""

    def tseeds_hook(self) -> bool:
        """Replace what the sampler gathers beside each token by [log-prob, entropy]; True where that was possible.

        vLLM's own gather finds the top k and the token's rank, which nothing here reads, and compiles the rank with a
        C++ compiler on first use (seconds, and an error on machines without one). The newer GPU model runner has
        another sampler; there entropies come from the top log-probs.
        """
        _repair_adapters()
        sampler: Any = getattr(self.model_runner, "sampler", None)
        if not hasattr(type(sampler), "gather_logprobs"):
            return False
        sampler.gather_logprobs = gather
        return True

    def tseeds_swap(self, path: str) -> None:
        """Load the weights of the policy at ``path`` into the running model; it counts as unknown until confirmed."""
        self.tseeds_digest = ""
        self.reload_weights(weights_path=path)
        _repair_heads(self.model_runner.get_model())

    def tseeds_confirm(self, digest: str) -> None:
        """The weights were proven to be those of the policy of this digest."""
        self.tseeds_digest = digest

    def tseeds_held(self) -> dict[str, str]:
        """Digest of the proven policy, or an empty one."""
        return {"digest": self.tseeds_digest}


def gather(logprobs: Any, num_logprobs: int, token_ids: Any) -> Any:
    """Stands in for Sampler.gather_logprobs: column 0 the token's log-prob, column 1 (where asked for) the entropy.

    logprobs [tokens, vocabulary] of the distribution that is sampled from; token_ids [tokens]; num_logprobs >= 1 asks
    for the entropy in nats, exact over the vocabulary.
    """
    import torch
    from vllm.v1.outputs import LogprobsTensors

    ids = token_ids.unsqueeze(-1)
    values = logprobs.gather(-1, ids)
    ranks = torch.zeros(len(logprobs), dtype=torch.int64, device=logprobs.device)
    if num_logprobs > 0:
        # exp(-inf) * -inf is nan: tokens that top-p removed carry no entropy
        entropy = -(logprobs.exp() * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1, keepdim=True)
        values = torch.cat([values, entropy], dim=1)
        ids = torch.cat([ids, torch.full_like(ids, -1)], dim=1)
    return LogprobsTensors(ids.to(torch.int32), values, ranks)


def _repair_heads(model: Any) -> None:
    """Repack output heads on the CPU build, which keeps the old prepacked head of a tied model after a reload."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


LEAST_ROWS = 16
"""Rows of a product with an adapter's matrix, filled up with zeros: kernels for fewer add up in another order."""


def _repair_adapters() -> None:
    """Replace the arithmetic of LoRA adapters on the CPU build.

    vLLM copies an adapter's matrices once per token (minutes where the products take seconds), and reads "no adapter" as
    its last slot, so that a row of the base beside rows of other policies is sampled with one of them. Here the tokens of
    each adapter go through one product, and those without one are left alone.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    wrapper: Any = PunicaWrapperCPU
    wrapper.update_metadata, wrapper._apply_shrink, wrapper._apply_expand = _group, _shrink, _expand


def _group(
    self: Any, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **_: Any
) -> None:
    """Stands in for update_metadata: self.groups = (slot, its tokens [n], or None where they are all) of each adapter."""
    import torch

    self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
    slots = self.token_lora_indices
    found = torch.unique(slots).tolist()
    everywhere = len(found) == 1
    self.groups = [(s, None if everywhere else torch.nonzero(slots == s)[:, 0]) for s in found if s >= 0]


def _product(x: Any, weight: Any, tokens: Any) -> Any:
    """fp32 [n, out] of the chosen tokens of x [N, in] with weight [out, in]."""
    import torch

    chosen = (x if tokens is None else x.index_select(0, tokens)).float()
    if (rows := len(chosen)) < LEAST_ROWS:
        chosen = torch.nn.functional.pad(chosen, (0, 0, 0, LEAST_ROWS - rows))
    return torch.nn.functional.linear(chosen, weight.float())[:rows]


def _shrink(self: Any, y: Any, x: Any, w_t_all: Any, scale: float) -> None:
    """y [N, rank] = scale x A^T of each token's adapter; w_t_all [slots, 1, rank, in]."""
    y = y.view(-1, y.shape[-1])
    for slot, tokens in self.groups:
        made = _product(x, w_t_all[slot, 0], tokens) * scale
        if tokens is None:
            y[: len(made)] = made
        else:
            y[tokens] = made.to(y.dtype)


def _expand(self: Any, y: Any, x: Any, w_t_all: Any, y_offset: int, y_slice_size: int, add_inputs: bool = True) -> None:
    """y [N, out], columns y_offset to y_offset + y_slice_size: plus x B^T of each token's adapter; w_t_all [slots, 1, out, rank]."""
    assert add_inputs, "vllm adds adapters to the linear layer's output"
    part = y.view(-1, y.shape[-1])[:, y_offset : y_offset + y_slice_size]
    for slot, tokens in self.groups:
        made = _product(x, w_t_all[slot, 0], tokens).to(y.dtype)
        if tokens is None:
            part[: len(made)] += made
        else:
            part.index_add_(0, tokens, made)
