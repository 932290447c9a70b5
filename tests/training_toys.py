"""Small random policies and made-up rows for tests of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tseeds.training.rows import Rows

VOCAB = 97
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_policy(
    out: Path,
    kind: str = "qwen2",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    vocab: int = VOCAB,
    **values: Any,
) -> Path:
    """A random model directory of an architecture that transformers knows, weights large enough to have opinions."""
    config = CONFIG_MAPPING[kind](vocab_size=vocab, max_position_embeddings=256, **(SHAPE | values))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(4)
    model.to(dtype).save_pretrained(out)
    assert AutoConfig.from_pretrained(out).model_type == kind
    return out


def make_rows(
    *,
    groups: int = 6,
    size: int = 4,
    share: float = 0.5,
    vocab: int = VOCAB,
    prompt: int = 5,
    longest: int = 14,
    seed: int = 0,
    level: float | None = None,
    temperature: float = 1.0,
) -> Rows:
    """Groups of ragged rows with common beginnings, a seeded share, random rewards and log-probs near uniform."""
    rng = np.random.default_rng(seed)
    level = -np.log(vocab) if level is None else level
    out: dict[str, list] = {name: [] for name in Rows.__slots__}
    for g in range(groups):
        head, trunk = rng.integers(0, vocab, prompt + g % 3), rng.integers(0, vocab, longest)
        for s in range(size):
            length = int(rng.integers(3, longest + 1))
            common = int(rng.integers(0, length))
            off = int(rng.integers(1, length)) if s < share * size else 0
            out["row_id"].append(f"r{g}.{s}")
            out["problem_id"].append(f"p{g}")
            out["group_id"].append(f"g{g}")
            out["seed_id"].append(f"s{g}.{s}" if off else None)
            out["snapshot_step"].append(s if off else None)
            out["policy_step"].append(10)
            out["prompt_ids"].append(head)
            out["response_ids"].append(np.concatenate([trunk[:common], rng.integers(0, vocab, length - common)]))
            out["logprobs"].append(rng.normal(level, 0.3, length).astype(np.float32))
            out["off_start"].append(0)
            out["off_stop"].append(off)
            out["finish_reason"].append("length" if s == size - 1 else "stop")
            out["temperature"].append(temperature)
            out["reward"].append(float(rng.integers(0, 2)) if s > 1 else float(s))
    return Rows(**out)
