"""Engines in a process of their own: silence, random state, a second start, LoRA adapters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, random, sys, tempfile
from pathlib import Path
import torch
import tseeds.context
import tseeds.engines.vllm as engines
from transformers import PreTrainedTokenizerFast
from tseeds import config as configuration, seed
from tseeds.artifacts.rundir import RunDir
from tseeds.artifacts.store import read_table, require
from tseeds.config import EngineConfig, LoraConfig
from tseeds.context import Context
from tseeds.engines import Request, open_engine, sample_each
from tseeds.pipeline import execute, setup_steps

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

engine._drop_adapters()  # as sleep does on a GPU
assert [rows(engine, policy) for policy in (adapters[0], adapters[1], first)] == one_by_one
calls = []  # an update between two adapters: the engine wakes before it is asked for anything
engine._sleeps, engine._llm.sleep = lambda: True, lambda level: calls.append("sleep")
engine._llm.wake_up = lambda tags: calls.append(tags[0])
engine.load(adapters[0])
engine.sleep()
engine.load(adapters[1])
assert calls == ["sleep", "weights", "kv_cache"] and not engine._asleep, calls
del engine._sleeps, engine._llm.sleep, engine._llm.wake_up

class OneByOne:
    load, sample = engine.load, engine.sample

    def close(self):
        pass

with tempfile.TemporaryDirectory() as folder:
    place = Path(folder)
    problems = [{"problem": f"w{k} w{k + 1}", "answer": "1"} for k in range(6)]
    (place / "problems.jsonl").write_text("".join(json.dumps(p) + "\\n" for p in problems))
    config = configuration.parse({
        "policy": {"path": str(first), "dtype": "float32"},
        "problems": {"path": str(place / "problems.jsonl"), "prompt": "plain", "max_prompt_tokens": 8},
        "rollout": {"problems_per_iteration": 6, "group_size": 4, "max_response_tokens": 16},
        "seed": {"share": 0.5, "snapshots_per_iteration": 2},
        "engine": {"part_rows": 5},
    })
    tseeds.context.load_tokenizer = lambda policy, trust: PreTrainedTokenizerFast.from_pretrained(policy)  # word-level
    run, tables = RunDir(place / "run"), []
    for which in (engine, OneByOne()):
        with Context(config) as context:
            for step in setup_steps(config, run):
                execute(config, step, context)
            context._engine = which
            out = place / f"seeds-{len(tables)}"
            seed.run(config, seed.Inputs(run.problems, dict(enumerate(adapters)), 3), out, context)
            tables.append(read_table(require(out, "seeds")))
    assert tables[0].equals(tables[1])
    assert set(tables[0]["snapshot"].to_pylist()) == {one_by_one[0][0], one_by_one[1][0]}
    assert sum(tables[0]["chain_length"].to_pylist()) > 12
engine.close()

engines.MAX_ADAPTERS = 1  # all slots taken: rows of the base are still rows of the base
full = open_engine(EngineConfig(kv_cache_gb=0.25), dtype="float32", max_model_len=64, lora=LoraConfig(rank=4))
assert rows(full, first) == one_by_one[2] and full.shares_batches
crowded = {(position, index): done for position, index, _, done in
           sample_each(full, [(policy, requests) for policy in (adapters[1], first, adapters[0])])}
assert crowded == {(p, i): done for p, which in enumerate((1, 2, 0)) for i, done in one_by_one[which][1].items()}
full.close()

merged = open_engine(EngineConfig(backend="transformers"), dtype="float32", max_model_len=64)
merged.load(adapters[0])
model = merged._model
for request, done in zip(requests, (one_by_one[0][1][i] for i in range(12)), strict=True):
    tokens = torch.tensor([[*request.ids, *done.ids]])
    with torch.inference_mode():
        logprobs = model(tokens).logits[0, len(request.ids) - 1 : -1].log_softmax(-1)
    assert torch.allclose(logprobs.gather(-1, torch.tensor(done.ids)[:, None])[:, 0], torch.tensor(done.logprobs), atol=2e-4)
"""


BAD_DAYS = """
import logging, sys
from pathlib import Path
import tseeds.engines.vllm as engines
from tseeds.config import EngineConfig
from tseeds.engines import Request, open_engine, sample_each
from tseeds.errors import UserError

first, second, *adapters = map(Path, sys.argv[1:])
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(name)s: %(message)s")
requests = [Request(ids=[7, 8 + s], max_tokens=8, seed=s, temperature=0.0) for s in range(6)]

def refused(length, **values):
    engine = open_engine(EngineConfig(**values), dtype="float32", max_model_len=length)
    try:
        engine.load(first)
    except UserError as error:
        print("tseeds refused:", error)
    engine.close()

refused(256, kv_cache_gb=1e-5)
refused(400, kv_cache_gb=0.25)

open_vllm = engines._open
def without_lora(*arguments):
    if arguments[5]:
        raise ValueError("Model does not support LoRA")
    return open_vllm(*arguments)
engines._open = without_lora
engine = open_engine(EngineConfig(kv_cache_gb=0.25), dtype="float32", max_model_len=64)
found = {}
for position, index, digest, done in sample_each(engine, [(p, requests) for p in (*adapters, first)]):
    found[position, index] = done
assert not engine.shares_batches
reference = open_engine(EngineConfig(backend="transformers"), dtype="float32", max_model_len=64)
for position, policy in enumerate((*adapters, first)):
    reference.load(policy)
    for index, done in reference.sample(requests):
        mine = found[position, index]
        assert mine.ids == done.ids, (position, index, mine, done)
        gap = max(abs(a - b) for a, b in zip(mine.logprobs, done.logprobs))
        assert gap < 2e-5, gap
assert found[0, 0] != found[1, 0] != found[2, 0]
engine.close()
"""


def test_silent_start_second_start_and_adapters_in_one_batch(tied_policies: list[Path], adapters: list[Path]) -> None:
    """Not a byte on stdout or stderr; generators as they were; adapters share batches with the same results as alone,
    in the seed stage too."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM", "GLOO"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, [*tied_policies[:2], *adapters])],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_bad_days_of_a_start_are_one_line_and_adapters_are_swapped_where_none_are_served(
    tied_policies: list[Path], adapters: list[Path]
) -> None:
    """Too little KV memory, too long sequences; a vLLM without LoRA samples merged adapters, as transformers does."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM", "GLOO"))}
    done = subprocess.run(
        [sys.executable, "-c", BAD_DAYS, *map(str, [*tied_policies[:2], *adapters])],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = [line for line in done.stdout.splitlines() if line.startswith("tseeds")]
    memory, length, lacking, swapped = said
    assert "the KV cache is too small for one sequence of 256 tokens: raise engine.kv_cache_gb (1e-05" in memory
    assert "may take 400 tokens, more than the model was made for" in length
    assert lacking.endswith("this vLLM serves no LoRA adapters here (Model does not support LoRA)")
    assert "each adapter is merged into its base and swapped" in swapped
