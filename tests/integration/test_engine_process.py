"""Engines in a process of their own: silence, random state, a second start, LoRA adapters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import random, sys
from pathlib import Path
import torch
from tseeds.config import EngineConfig
from tseeds.engines import Request, open_engine, sample_each
from tseeds.errors import UserError

first, second, *adapters = map(Path, sys.argv[1:])
requests = [Request(ids=[7, 8 + s], max_tokens=8, seed=s) for s in range(12)]

def rows(engine, policy):
    digest = engine.load(policy)
    return digest, dict(engine.sample(requests))

before = torch.get_rng_state(), random.getstate()
engine = open_engine(EngineConfig(kv_cache_gb=0.25), dtype="bfloat16", max_model_len=64)
engine.load(first)
assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
assert len(rows(engine, second)[1]) == 12
engine.close()

engine = open_engine(EngineConfig(kv_cache_gb=0.25), dtype="float32", max_model_len=64)
one_by_one = [rows(engine, policy) for policy in (adapters[0], adapters[1], first)]
assert engine.shares_batches and len(engine.swaps) == 3
assert len({digest for digest, _ in one_by_one}) == 3
assert one_by_one[0][1] != one_by_one[1][1] != one_by_one[2][1]
together = {(position, index): done for position, index, _, done in
            sample_each(engine, [(policy, requests) for policy in (adapters[0], adapters[1], first)])}
assert together == {(p, i): done for p, (_, found) in enumerate(one_by_one) for i, done in found.items()}
engine.close()

merged = open_engine(EngineConfig(backend="transformers"), dtype="float32", max_model_len=64)
merged.load(adapters[0])
model = merged._model
for request, done in zip(requests, (one_by_one[0][1][i] for i in range(12)), strict=True):
    tokens = torch.tensor([[*request.ids, *done.ids]])
    with torch.inference_mode():
        logprobs = model(tokens).logits[0, len(request.ids) - 1 : -1].log_softmax(-1)
    assert torch.allclose(logprobs.gather(-1, torch.tensor(done.ids)[:, None])[:, 0], torch.tensor(done.logprobs), atol=2e-4)
"""


@pytest.fixture(scope="module")
def adapters(tied_policies: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two LoRA adapters of the first policy with random weights."""
    peft = pytest.importorskip("peft", reason="adapters need the optional peft")
    import torch
    from transformers import AutoModelForCausalLM

    made = []
    for seed in (0, 1):
        base = AutoModelForCausalLM.from_pretrained(tied_policies[0], dtype=torch.float32)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        made.append(tmp_path_factory.mktemp("adapters") / f"adapter-{seed}")
        model.save_pretrained(made[-1])
    return made


def test_silent_start_second_start_and_adapters_in_one_batch(tied_policies: list[Path], adapters: list[Path]) -> None:
    """Not a byte on stdout or stderr; generators as they were; adapters share batches with the same results as alone."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM", "GLOO"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, [*tied_policies[:2], *adapters])],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
