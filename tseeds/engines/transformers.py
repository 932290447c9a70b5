"""Sampling with transformers alone: the reference for vLLM, and the engine of machines without it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tseeds.config import EngineConfig
from tseeds.engines import policies, probe, requests, threads
from tseeds.engines.base import Completion, Request
from tseeds.errors import StageFailed, UserError

logger = logging.getLogger(__name__)

MAX_ROWS = 256
"""Rows that decode together."""


class TransformersEngine:
    """An engine that holds one policy at a time (see Engine).

    Rows decode together in batches of similar length, padded on the left, with one KV cache; finished rows leave it
    when half of a batch is done. A row's tokens come from its own seed: one uniform number a token, looked up in the
    cumulative distribution, so what a row gets does not depend on its neighbours beyond floating point. Rows of different
    parts are never neighbours (see Request).
    """

    def __init__(
        self, config: EngineConfig, *, dtype: str, max_model_len: int, trust_remote_code: bool = False
    ) -> None:
        self.config, self.dtype, self.max_model_len = config, dtype, max_model_len
        self.trust_remote_code = trust_remote_code
        self._model: Any = None
        self._started: policies.Policy | None = None
        self._held: policies.Policy | None = None
        self._probe: probe.Probe | None = None
        self._threads = 1
        self.swaps: list[float] = []
        """Seconds of each swap, check included: a measurement."""

    def load(self, policy: Path) -> str:
        """Make ``policy`` the one that is sampled from; see Engine.load."""
        wanted = policies.describe(policy)
        if self._held is not None and self._held.digest == wanted.digest:
            return wanted.digest
        if self._started is not None and (why := policies.difference(self._started, wanted)):
            raise UserError(f"{policy}: cannot follow {self._started.path} in one engine: {why}")
        expected = probe.stored(wanted.path)
        begin = time.perf_counter()
        if self._started is None:
            self._threads = threads.choose(wanted.parameters, self.config.threads)
            logger.info(
                "transformers engine on %s, %d CPU threads for %.1f M parameters (engine.threads changes it)",
                _device(),
                self._threads,
                wanted.parameters / 1e6,
            )
        self._held = None  # until the check is done
        if self._model is None or not probe.refill(self._model, wanted.path):
            self._model = None  # frees it before the next one is opened
            self._model = probe.open_model(
                wanted.path, self.dtype, device=_device(), trust_remote_code=self.trust_remote_code
            )
        if expected is not None:
            with threads.limited(self._threads):
                found = probe.score(self._model, expected.ids)
            probe.check(wanted.path, expected, found, self.dtype, self._probe)
        self.swaps.append(time.perf_counter() - begin)
        self._started = self._started or wanted
        self._held, self._probe = wanted, expected
        return wanted.digest

    def sample(self, requests_: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """Yield (index, completion) as completions finish; see Engine.sample."""
        if self._held is None:
            raise StageFailed("the engine holds no verified policy: load one before sampling")
        requests.check(requests_, vocab_size=self._held.vocab_size, max_model_len=self.max_model_len)
        return self._run(requests_, self._held)

    def _run(self, requests_: Sequence[Request], policy: policies.Policy) -> Iterator[tuple[int, Completion]]:
        self._model.to(_device())
        for rows in batches(requests_, self.room(), self.max_model_len):
            yield from self._batch(rows, requests_, policy)

    def room(self) -> int:
        """Tokens that the KV cache of one batch may hold; a policy must be held."""
        import torch

        assert self._held is not None
        config = self._model.config.get_text_config()
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = torch.finfo(self._model.dtype).bits // 8
        if _device() == "cpu":
            room = self.config.kv_cache_gb * 2**30
        else:
            free = torch.cuda.get_device_properties(0).total_memory * self.config.gpu_memory_utilization
            room = (free - self._held.parameters * width) / 2  # the other half: activations and logits
        return int(room / (2 * config.num_hidden_layers * heads * head * width))

    def _batch(
        self, rows: list[int], requests_: Sequence[Request], policy: policies.Policy
    ) -> Iterator[tuple[int, Completion]]:
        """Decode ``rows`` (indices of requests) together. Shapes: B rows, P padded prompt tokens, V vocabulary."""
        import torch

        device = _device()
        batch = [requests_[i] for i in rows]
        budget = [min(r.max_tokens, self.max_model_len - len(r.ids)) for r in batch]
        width = max(len(r.ids) for r in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros(len(batch), width, dtype=torch.long)
        for b, request in enumerate(batch):
            tokens[b, width - len(request.ids) :] = torch.tensor(request.ids)
            mask[b, width - len(request.ids) :] = 1
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        draws = torch.stack([_uniforms(r.seed, n, max(budget)) for r, n in zip(batch, budget, strict=True)]).to(device)
        knobs = torch.tensor([[r.temperature, r.top_p, r.top_k] for r in batch], dtype=torch.float32, device=device)
        tokens, mask, positions = tokens.to(device), mask.to(device), positions.to(device)
        made: list[list[tuple[int, float, float]]] = [[] for _ in batch]
        live = list(range(len(batch)))
        done: set[int] = set()
        cache: Any = None
        for step in range(max(budget)):
            with threads.limited(self._threads), torch.inference_mode():
                output = self._model(
                    tokens,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                cache = output.past_key_values
                logprobs = tempered(output.logits[:, -1].float(), knobs)
                chosen = pick(logprobs, draws[:, step], greedy=knobs[:, 0] < 1e-5)
                value = logprobs.gather(-1, chosen[:, None])[:, 0]
                # exp(-inf) * -inf is nan: tokens that top-p removed carry no entropy
                entropy = -(logprobs.exp() * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)
            columns = zip(live, chosen.tolist(), value.tolist(), entropy.tolist(), strict=True)
            for b, token, logprob, spread in columns:
                if b in done:
                    continue
                made[b].append((token, logprob, spread))
                if token in policy.eos or len(made[b]) == budget[b]:
                    done.add(b)
                    yield rows[b], _completion(made[b], batch[b], stopped=token in policy.eos)
            if len(done) == len(batch):
                return
            with torch.inference_mode():
                keep = [k for k, b in enumerate(live) if b not in done]
                if len(keep) <= len(live) // 2:
                    index = torch.tensor(keep, device=device)
                    cache.batch_select_indices(index)
                    live = [live[k] for k in keep]
                    chosen, mask, positions = chosen[index], mask[index], positions[index]
                    draws, knobs = draws[index], knobs[index]
                tokens = chosen[:, None]
                mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)
                positions = positions[:, -1:] + 1

    def sleep(self) -> None:
        """Move the weights off the device until the next sample; nothing to do on CPU. Not yet measured on a GPU."""
        if self._model is not None and self.config.sleep_during_update and _device() != "cpu":
            import torch

            self._model.to("cpu")
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._model = self._held = self._started = self._probe = None


def tempered(logits: Any, knobs: Any) -> Any:
    """Log-probs of the distribution that is sampled from, in vLLM's order: temperature, then top-k, then top-p.

    logits [B, V] float32; knobs [B, 3]: temperature (0 is greedy and scored at 1), top_p (1 is off), top_k (0 is off).
    """
    import torch

    temperature, top_p, top_k = knobs.T
    logits = logits / torch.where(temperature < 1e-5, 1.0, temperature)[:, None]
    if bool((top_k > 0).any()) or bool((top_p < 1).any()):
        ordered, order = logits.sort(-1, descending=True)
        ranks = torch.arange(logits.shape[-1], device=logits.device)
        limit = torch.where(top_k > 0, top_k, logits.shape[-1])[:, None]
        ordered = ordered.masked_fill(ranks >= limit, -math.inf)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        ordered = ordered.masked_fill((before >= top_p[:, None]) & (ranks > 0) & (top_p[:, None] < 1), -math.inf)
        logits = torch.full_like(logits, -math.inf).scatter(-1, order, ordered)
    return logits.log_softmax(-1)


def pick(logprobs: Any, draws: Any, *, greedy: Any) -> Any:
    """The token at which the cumulative distribution passes the draw; the likeliest one for greedy rows.

    logprobs [B, V]; draws [B] in [0, 1), float64; greedy [B] bool. Returns ids [B].
    """
    import torch

    mass = logprobs.double().exp().cumsum(-1)
    # scaled by the total, which rounding leaves beside 1; right=True skips tokens without mass
    found = torch.searchsorted(mass, (draws * mass[:, -1])[:, None], right=True)[:, 0]
    return torch.where(greedy, logprobs.argmax(-1), found.clamp_max(logprobs.shape[-1] - 1))


def _uniforms(seed: int, number: int, width: int) -> Any:
    """``number`` uniform draws of a row's own generator, float64, padded to ``width``."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    row = torch.zeros(width, dtype=torch.float64)
    row[:number] = torch.rand(number, generator=generator, dtype=torch.float64)
    return row


def batches(requests_: Sequence[Request], room: int, max_model_len: int) -> Iterator[list[int]]:
    """Indices in batches of one part and of similar length, longest first, at most MAX_ROWS rows and ``room`` tokens each."""
    size = [min(len(r.ids) + r.max_tokens, max_model_len) for r in requests_]
    order = sorted(range(len(requests_)), key=lambda i: (requests_[i].part, -len(requests_[i].ids), i))
    batch: list[int] = []
    longest = 0
    for i in order:
        if size[i] > room:
            raise UserError(
                f"request {i}: its {size[i]} tokens need more KV cache than there is (room for {room}): "
                "raise engine.kv_cache_gb (on a GPU engine.gpu_memory_utilization)"
            )
        longest = max(longest, size[i])
        other = bool(batch) and requests_[batch[0]].part != requests_[i].part
        if batch and (other or len(batch) == MAX_ROWS or longest * (len(batch) + 1) > room):
            yield batch
            batch, longest = [], size[i]
        batch.append(i)
    if batch:
        yield batch


def _completion(made: list[tuple[int, float, float]], request: Request, *, stopped: bool) -> Completion:
    return Completion(
        ids=[m[0] for m in made],
        logprobs=[m[1] for m in made],
        finish_reason="stop" if stopped else "length",
        entropies=[m[2] for m in made] if request.entropies else None,
    )


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
