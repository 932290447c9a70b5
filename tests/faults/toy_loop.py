"""The pipeline that the tests of this folder kill: seconds per run."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tiny_policy(toy: Path) -> Path:
    """A one-layer policy of random weights with the toy's tokenizer, for runs of many iterations: a tenth of the time."""
    import json

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tseeds.artifacts.policy import policy_files

    out = toy / "tiny"
    if not out.is_dir():
        out.mkdir()
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = {**json.loads((toy / "policy" / "config.json").read_text()), **shape, "num_key_value_heads": 2}
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**{**config, "head_dim": 16})).save_pretrained(out)
        for file in policy_files(toy / "policy"):
            if file.name.startswith("tokenizer"):
                (out / file.name).write_bytes(file.read_bytes())
    return out


def loop_config(toy: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A pipeline of two iterations in which every stage has several parts; ``sections`` override single values."""
    config: dict[str, dict[str, Any]] = {
        "run": {"iterations": 2},
        "policy": {"path": str(toy / "policy"), "dtype": "float32"},
        "problems": {
            "path": str(toy / "train.jsonl"),
            "task": "countdown",
            "prompt": "plain",
            "max_prompt_tokens": 16,
            "limit": 8,
        },
        "snapshot": {"every": 1, "keep_states": 9},
        "seed": {"lo": 0.0, "hi": 0.5},
        "rollout": {"problems_per_iteration": 2, "group_size": 4, "max_response_tokens": 20},
        "update": {"learning_rate": 1e-3, "minibatches": 2, "kl_coef": 0.01, "kl_reference": "snapshot"},
        "evaluate": {
            "every": 2,
            "samples": 2,
            "benchmarks": [{"name": "countdown", "path": str(toy / "test.jsonl"), "limit": 2}],
        },
        "engine": {"backend": "transformers", "part_rows": 2},
    }
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    return config
