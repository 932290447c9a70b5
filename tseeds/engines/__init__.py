"""Engines: what samples tokens. ``open_engine`` picks one; nothing heavy is imported before an engine is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tseeds.config import EngineConfig, LoraConfig
from tseeds.engines.base import Completion, Engine, Request

__all__ = ["Completion", "Engine", "Request", "open_engine", "sample_each"]


def open_engine(
    config: EngineConfig,
    *,
    dtype: str,
    max_model_len: int,
    trust_remote_code: bool = False,
    lora: LoraConfig | None = None,
    run: Path | None = None,
) -> Engine:
    """The engine that the pipeline names; it starts at its first load.

    dtype: compute precision. max_model_len: most tokens of prompt and response together. lora: of the adapters that
    it will be given; None where it is given none, or one as its first policy. run: where ``tseeds engine serve``
    keeps an engine warm for this run directory, that one is used.
    """
    if run is not None and config.backend == "vllm" and (run / "engine.json").is_file():
        from tseeds.engines.client import find

        served = find(run, config, dtype=dtype, max_model_len=max_model_len)
        if served is not None:
            return served
    if config.workers > 1 or config.ray_address is not None:
        from tseeds.engines.pool import PoolEngine

        return PoolEngine(
            config,
            dtype=dtype,
            max_model_len=max_model_len,
            trust_remote_code=trust_remote_code,
            lora=lora,
        )
    if config.backend == "transformers":
        from tseeds.engines.transformers import TransformersEngine

        return TransformersEngine(config, dtype=dtype, max_model_len=max_model_len, trust_remote_code=trust_remote_code)
    from tseeds.engines.vllm import VllmEngine

    return VllmEngine(config, dtype=dtype, max_model_len=max_model_len, trust_remote_code=trust_remote_code, lora=lora)


def sample_each(
    engine: Engine, work: Sequence[tuple[Path, Sequence[Request]]]
) -> Iterator[tuple[int, int, str, Completion]]:
    """Sample from several policies: yields (position in ``work``, index of the request, digest, completion).

    LoRA adapters of one base share the batches of an engine that serves several at once; whole policies are swapped one by one.
    """
    from tseeds.engines import policies

    if work:
        engine.load(work[0][0])  # a vLLM engine starts here, and knows then whether it serves adapters
    bases = {(described.base or described).digest for policy, _ in work for described in [policies.describe(policy)]}
    if len(bases) != 1 or not getattr(engine, "shares_batches", False):
        for position, (policy, requests) in enumerate(work):
            digest = engine.load(policy)
            for index, done in engine.sample(requests):
                yield position, index, digest, done
        return
    rows = []
    for position, (policy, requests) in enumerate(work):
        digest = engine.load(policy)
        rows.append((position, digest, engine.sample(requests)))
    while rows:
        for row in list(rows):
            position, digest, completions = row
            found = next(completions, None)
            if found is None:
                rows.remove(row)
            else:
                yield position, found[0], digest, found[1]
