"""What tseeds adds to a vLLM worker: swap weights in place, and exact entropies.

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

    def tseeds_hook_sampler(self) -> bool:
        """Replace what the sampler gathers beside each token by [log-prob, entropy]; True where that was possible.

        vLLM's own gather finds the top k and the token's rank, which nothing here reads, and compiles the rank with a
        C++ compiler on first use (seconds, and an error on machines without one). The newer GPU model runner has
        another sampler; there entropies come from the top log-probs.
        """
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
