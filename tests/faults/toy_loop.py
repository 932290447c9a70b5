"""The pipeline that the tests of this folder kill: seconds per run."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
