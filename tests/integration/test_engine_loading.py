"""A swap is proven or refused: what the engine holds is what rows say they were sampled from."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tseeds.artifacts.policy import policy_digest, write_probe
from tseeds.config import EngineConfig
from tseeds.engines import Engine, Request, open_engine, policies, probe
from tseeds.errors import StageFailed, UserError

ONE = Request(ids=[7, 8], max_tokens=4, seed=1)


@pytest.fixture(params=["vllm_engine", "transformers_engine"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(request.param)


def with_probe(policy: Path) -> probe.Probe:
    """Store the trainer-side probe beside the weights, as the update stage does."""
    made = probe.compute(policy, 110, "float32")
    write_probe(policy, made.logprobs, made.ids, made.dtype)
    return made


def test_swaps_there_and_back_give_the_same_samples(engine, tied_policies, sample_requests) -> None:
    """The head is tied: without the repair vLLM's CPU build keeps the first policy's head, and the probe would fail."""
    digests, samples = [], []
    for policy in (*tied_policies, *tied_policies):
        digests.append(engine.load(policy))
        samples.append(dict(engine.sample(sample_requests[:8])))
    assert digests[:3] == digests[3:] == [policy_digest(p) for p in tied_policies]
    assert samples[:3] == samples[3:]
    assert samples[0] != samples[1] != samples[2]


def test_without_the_head_repair_the_swap_is_refused(vllm_engine, tied_policies, monkeypatch) -> None:
    from tseeds.engines import worker

    vllm_engine.load(tied_policies[0])
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_repair_heads", lambda model: None)
        with pytest.raises(StageFailed, match="does not hold this policy"):
            vllm_engine.load(tied_policies[1])
        with pytest.raises(StageFailed, match="no verified policy"):
            vllm_engine.sample([ONE])
    assert vllm_engine.load(tied_policies[1]) == policy_digest(tied_policies[1])


def test_a_swap_that_never_happened_is_refused_even_where_the_tolerance_would_take_it(
    vllm_engine, tied_policies, copy_policy, monkeypatch
) -> None:
    """An update so small that both policies lie within the tolerance of each other: the engine still is the old one."""
    small = copy_policy(tied_policies[0])
    weights = load_file(small / "model.safetensors")
    name = next(n for n in weights if n.endswith("down_proj.weight"))
    weights[name] += 3e-5 * torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(0))
    save_file(weights, small / "model.safetensors", metadata={"format": "pt"})
    with_probe(small)
    a, b = (probe.compute(p, 110, "float32").logprobs for p in (tied_policies[0], small))
    gaps = [abs(x - y) for r, s in zip(a, b, strict=True) for x, y in zip(r, s, strict=True)]
    assert 1e-5 < sum(gaps) / len(gaps) < probe.TOLERANCE["float32"][0]
    vllm_engine.load(tied_policies[0])
    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine._llm, "collective_rpc", lambda *a, **k: [None])
        with pytest.raises(StageFailed, match="still holds the previous policy"):
            vllm_engine.load(small)
    assert vllm_engine.load(small) == policy_digest(small)


def test_weights_changed_behind_their_probe_stop_the_run(engine, tied_policies, copy_policy) -> None:
    copied = copy_policy(tied_policies[0])
    engine.load(copied)
    engine.load(tied_policies[1])
    weights = load_file(copied / "model.safetensors")
    name = next(n for n in weights if n.endswith("o_proj.weight"))
    weights[name] *= 1.5
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StageFailed, match="differ from the trainer's"):
        engine.load(copied)
    engine.load(tied_policies[1])
    assert len(dict(engine.sample([ONE]))) == 1


def test_a_policy_without_a_probe_is_compared_with_transformers(
    vllm_engine, tied_policies, copy_policy, caplog
) -> None:
    vllm_engine.load(tied_policies[1])
    copied = copy_policy(tied_policies[0])
    (copied / "probe.json").unlink()
    with caplog.at_level(logging.INFO, logger="tseeds"):
        assert vllm_engine.load(copied) == policy_digest(tied_policies[0])
    assert "probe differs by" in caplog.text


def test_loading_what_is_held_costs_nothing(vllm_engine, tied_policies) -> None:
    vllm_engine.load(tied_policies[0])
    swaps = len(vllm_engine.swaps)
    begin = time.perf_counter()
    for _ in range(20):
        vllm_engine.load(tied_policies[0])
    assert time.perf_counter() - begin < 1.0
    assert len(vllm_engine.swaps) == swaps


def test_one_start_serves_many_swaps_with_flat_memory(vllm_engine, tied_policies) -> None:
    import psutil

    for policy in tied_policies:
        vllm_engine.load(policy)
    llm = vllm_engine._llm
    process = psutil.Process()
    before = process.memory_info().rss
    for k in range(30):
        vllm_engine.load(tied_policies[k % 3])
    assert vllm_engine._llm is llm
    assert process.memory_info().rss - before < 30e6


def damaged(kind: str, policy: Path) -> Path:
    """Damage a copy of a policy in one way."""
    config = json.loads((policy / "config.json").read_text())
    weights = policy / "model.safetensors"
    match kind:
        case "missing shard":
            index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
            (policy / "model.safetensors.index.json").write_text(json.dumps(index))
        case "cut short":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "integers":
            tensors = load_file(weights)
            name = next(n for n in tensors if n.endswith("down_proj.weight"))
            tensors[name] = tensors[name].to(torch.int8)
            save_file(tensors, weights, metadata={"format": "pt"})
        case "tensor gone":
            tensors = load_file(weights)
            tensors.pop(next(n for n in tensors if n.endswith("down_proj.weight")))
            save_file(tensors, weights, metadata={"format": "pt"})
        case "no config":
            (policy / "config.json").unlink()
        case "other activation":
            (policy / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
        case "other tokenizer":
            text = (policy / "tokenizer.json").read_text().replace('"w3"', '"other"')
            (policy / "tokenizer.json").write_text(text)
        case "other architecture":
            changed = config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
            (policy / "config.json").write_text(json.dumps(changed))
        case "pickled":
            weights.rename(policy / "pytorch_model.bin")
        case "broken probe":
            (policy / "probe.json").write_text('{"ids": [[1, 2]]}')
    return policy


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing shard", "shard model-00002-of-00002.safetensors named by the index is missing"),
        ("cut short", "damaged safetensors file"),
        ("integers", "is I8; policies hold float32, bfloat16 or float16"),
        ("tensor gone", "down_proj.weight has shape None"),
        ("no config", "no config.json"),
        ("other activation", "hidden_act = 'gelu', the engine runs 'silu'"),
        ("other tokenizer", "tokenizer maps text to other ids"),
        ("other architecture", "architecture LlamaForCausalLM, the engine runs Qwen2ForCausalLM"),
        ("pickled", "only pickled weights"),
        ("broken probe", "damaged probe"),
    ],
)
def test_unusable_policies_are_one_clear_line_and_the_held_one_stays(
    engine, tied_policies, copy_policy, kind, says
) -> None:
    engine.load(tied_policies[0])
    expected = dict(engine.sample([ONE]))
    with pytest.raises(UserError, match=says) as caught:
        engine.load(damaged(kind, copy_policy(tied_policies[1])))
    assert "\n" not in str(caught.value)
    assert dict(engine.sample([ONE])) == expected


def test_another_vocabulary_is_named(engine, tied_policies, make_policy, tmp_path) -> None:
    engine.load(tied_policies[0])
    other = make_policy(tmp_path / "other", seed=0, tied=True, vocabulary=120)
    with pytest.raises(UserError, match="vocabulary of 120 tokens, the engine's has 110"):
        engine.load(other)


def test_the_same_tokenizer_saved_differently_is_the_same(tied_policies, copy_policy) -> None:
    copied = copy_policy(tied_policies[1])
    text = json.loads((copied / "tokenizer.json").read_text())
    (copied / "tokenizer.json").write_text(json.dumps(text, indent=1))
    assert policies.difference(policies.describe(tied_policies[0]), policies.describe(copied)) is None


def test_an_engine_that_raises_in_mid_stage_is_one_error_and_recovers_with_a_load(
    vllm_engine, tied_policies, sample_requests, monkeypatch
) -> None:
    vllm_engine.load(tied_policies[0])
    expected = dict(vllm_engine.sample(sample_requests))
    calls = iter(range(100))
    step = vllm_engine._llm.llm_engine.step

    def failing():
        if next(calls) == 5:
            raise RuntimeError("out of memory\nlong trace")
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine._llm.llm_engine, "step", failing)
        with pytest.raises(StageFailed, match="failed while sampling: out of memory; everything committed"):
            list(vllm_engine.sample(sample_requests))
    with pytest.raises(StageFailed, match="load one before"):
        vllm_engine.sample(sample_requests)
    vllm_engine.load(tied_policies[0])
    assert dict(vllm_engine.sample(sample_requests)) == expected


def test_an_engine_without_progress_is_reported(vllm_engine, tied_policies, sample_requests, monkeypatch) -> None:
    vllm_engine.load(tied_policies[0])
    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine._watch, "limit", 0.3)
        patch.setattr(vllm_engine._llm.llm_engine, "step", lambda: time.sleep(0.05) or [])
        with pytest.raises(StageFailed, match=r"made no token for 0\.3 seconds"):
            list(vllm_engine.sample(sample_requests))
    vllm_engine.load(tied_policies[0])
    assert len(dict(vllm_engine.sample(sample_requests))) == len(sample_requests)


def test_the_trainer_keeps_its_threads_and_random_state(vllm_engine, tied_policies, sample_requests) -> None:
    vllm_engine.load(tied_policies[0])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rows = vllm_engine.sample(sample_requests)
        next(rows)
        assert torch.get_num_threads() == 2
        list(rows)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_thread_choice_is_logged_and_overridable(tied_policies, caplog) -> None:
    engine = open_engine(EngineConfig(backend="transformers", threads=2), dtype="float32", max_model_len=32)
    with caplog.at_level(logging.INFO, logger="tseeds"):
        engine.load(tied_policies[0])
    assert any("2 CPU threads for 0.1 M parameters" in record.getMessage() for record in caplog.records)
    first = dict(engine.sample([ONE]))
    engine.close()
    single = open_engine(EngineConfig(backend="transformers"), dtype="float32", max_model_len=32)
    single.load(tied_policies[0])
    assert single._threads == 1
    assert dict(single.sample([replace(ONE)]))[0].ids == first[0].ids
    single.close()
