"""What ``tseeds validate --estimate`` says about the update, against what the update took on this machine.

    just bench estimate                                # toy policy and a random 19 M policy
    just bench estimate --policy models/SmolLM2-135M-Instruct --dtype bfloat16
    python benchmarks/estimate.py --json

Each row trains two iterations on made-up trajectories of full length in a process of its own, saves policy and state, and
compares that process's peak resident memory and the bytes of its files with the estimate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tseeds import config as configuration
from tseeds import estimate as estimating
from tseeds import memory
from tseeds.config import Pipeline

SMALL = {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
         "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip


def pipeline(
    policy: str, dtype: str, *, problems: int, group: int, prompt: int, response: int, tokens: int
) -> Pipeline:
    """A pipeline whose update has one minibatch of this size."""
    return configuration.parse(
        {
            "policy": {"path": policy, "dtype": dtype},
            "problems": {"path": "none", "max_prompt_tokens": prompt},
            "rollout": {"problems_per_iteration": problems, "group_size": group, "max_response_tokens": response},
            "update": {"minibatches": 1, "tokens_per_microbatch": tokens, "threads": 1},
        }
    )


def make_small(path: Path) -> None:
    """A random Llama policy without tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(path)


def measure(config: Pipeline, out: Path) -> dict[str, Any]:
    """Train twice and save; peak resident bytes of this process and bytes of the files it wrote."""
    import numpy as np

    from tseeds.training.trainer import Rows, Trainer

    trainer = Trainer(config.update, Path(config.policy.path), dtype=config.policy.dtype, run_seed=0)
    rng = np.random.default_rng(0)
    r, vocabulary = config.rollout, trainer.policy.model.config.vocab_size
    rows = r.problems_per_iteration * r.group_size
    prompts = [rng.integers(0, vocabulary, config.problems.max_prompt_tokens) for _ in range(r.problems_per_iteration)]
    group = [k // r.group_size for k in range(rows)]
    made = Rows(
        row_id=[f"r{k}" for k in range(rows)],
        problem_id=[f"p{g}" for g in group],
        group_id=[f"g{g}" for g in group],
        seed_id=[None] * rows,
        snapshot_step=[None] * rows,
        policy_step=[0] * rows,
        prompt_ids=[prompts[g] for g in group],
        response_ids=[rng.integers(0, vocabulary, r.max_response_tokens) for _ in range(rows)],
        logprobs=[np.full(r.max_response_tokens, -1.0, dtype=np.float32) for _ in range(rows)],
        off_start=[0] * rows,
        off_stop=[0] * rows,
        finish_reason=["stop"] * rows,
        temperature=[1.0] * rows,
        reward=[float(k % 2) for k in range(rows)],
    )
    trainer.step(made, iteration=1)
    result = trainer.step(made, iteration=2)  # only now moments and activations are there together
    trainer.save(out / "policy", out / "state")
    files = {f.name: f.stat().st_size for f in sorted(out.rglob("*.safetensors"))}
    return {
        "peak": memory.peak(),
        "files": files,
        "seconds": result.summary["update_seconds"],
    }


def compare(config: Pipeline) -> dict[str, Any]:
    """Estimate and measurement of one pipeline, the latter in a process of its own."""
    model = estimating.read_model(config)
    found = estimating.estimate(config, model, device="cpu", cores=1)
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, __file__, "--measure", config.model_dump_json(exclude_none=True), out]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    measured = json.loads(done.stdout.splitlines()[-1])
    files = {
        **{name: estimating.file_bytes(tensors) for name, tensors in model.files.items()},
        **estimating.state_bytes(config, model),
    }
    return {
        "policy": Path(config.policy.path).name,
        "dtype": config.policy.dtype,
        "parameters": found.parameters,
        "nodes": estimating.nodes(config),
        "estimated_peak": found.trainer_peak,
        "measured_peak": measured["peak"],
        "estimated_files": files,
        "measured_files": measured["files"],
        "seconds": measured["seconds"],
        "parts": {part.name: part.value for part in found.trainer},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", default=[], help="also this model directory")
    parser.add_argument("--dtype", default="float32", help="compute type of --policy")
    parser.add_argument("--only-policy", action="store_true", help="leave the toy and the random policy out")
    parser.add_argument("--tokens", type=int, default=512, help="update.tokens_per_microbatch of --policy")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--measure", nargs=2, metavar=("PIPELINE", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(Pipeline.model_validate_json(arguments.measure[0]), Path(arguments.measure[1]))))
        return
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        cases = []
        if not arguments.only_policy:
            toy = str(Path(estimating.__file__).parent / "data" / "toy")
            make_small(Path(scratch) / "random-19M")
            small = str(Path(scratch) / "random-19M")
            cases += [
                pipeline(toy, "float32", problems=8, group=8, prompt=6, response=18, tokens=16384),
                pipeline(small, "float32", problems=4, group=4, prompt=64, response=128, tokens=1024),
                pipeline(small, "bfloat16", problems=2, group=4, prompt=64, response=128, tokens=512),
            ]
        for policy in arguments.policy:
            cases.append(
                pipeline(policy, arguments.dtype, problems=2, group=4, prompt=40, response=88, tokens=arguments.tokens)
            )
        for case in cases:
            result = compare(case)
            results.append(result)
            if not arguments.json:
                estimated, peak = result["estimated_peak"] / 1e6, result["measured_peak"] / 1e6
                exact = result["estimated_files"] == result["measured_files"]
                print(
                    f"{result['policy']:28} {result['dtype']:9} peak {estimated:7.0f} MB estimated, {peak:7.0f} MB measured "
                    f"({estimated / peak - 1:+.1%}); files {'equal to the byte' if exact else 'DIFFER'}",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
