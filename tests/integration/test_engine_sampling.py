"""What engines return is what a plain forward pass of the same policy says."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tseeds.engines import Engine, Request
from tseeds.errors import StageFailed, UserError

EOS = {1, 5}


@pytest.fixture(params=["vllm_engine", "transformers_engine"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def model(tied_policies: list[Path]):
    return AutoModelForCausalLM.from_pretrained(tied_policies[0], dtype=torch.float32).eval()


def reference(model, request: Request, ids: list[int]) -> torch.Tensor:
    """Log-probs [T, vocabulary] of the tempered distributions that the response tokens were drawn from."""
    tokens = torch.tensor([[*request.ids, *ids]])
    with torch.inference_mode():
        logits = model(tokens).logits[0, len(request.ids) - 1 : -1].float()
    return (logits / request.temperature).log_softmax(-1)


def test_logprobs_and_entropies_are_of_the_tempered_distribution(engine, model, tied_policies, sample_requests) -> None:
    engine.load(tied_policies[0])
    wanted = [replace(r, entropies=True) for r in sample_requests]
    found = dict(engine.sample(wanted))
    assert sorted(found) == list(range(len(wanted)))
    temperatures = set()
    for index, done in found.items():
        expected = reference(model, wanted[index], done.ids)
        chosen = expected.gather(-1, torch.tensor(done.ids)[:, None])[:, 0]
        assert done.logprobs == pytest.approx(chosen.tolist(), abs=2e-5)
        entropy = -(expected.exp() * expected).sum(-1)
        assert done.entropies == pytest.approx(entropy.tolist(), abs=1e-4)
        temperatures.add(wanted[index].temperature)
    assert temperatures == {0.7, 1.0, 1.3}


def test_responses_end_at_any_eos_or_at_the_budget(engine, tied_policies, sample_requests) -> None:
    engine.load(tied_policies[0])
    many = [replace(r, seed=r.seed ^ salt, max_tokens=40) for r in sample_requests for salt in range(3)]
    ends = Counter()
    for index, done in engine.sample(many):
        assert len(done.ids) == len(done.logprobs) <= many[index].max_tokens
        assert not EOS & set(done.ids[:-1])
        if done.finish_reason == "stop":
            ends[done.ids[-1]] += 1
            assert done.ids[-1] in EOS
        else:
            assert done.finish_reason == "length"
            assert len(done.ids) == many[index].max_tokens
            assert done.ids[-1] not in EOS
    assert ends[1] > 0
    assert ends[5] > 0


def test_a_result_depends_on_its_own_request_only(vllm_engine, tied_policies, sample_requests) -> None:
    vllm_engine.load(tied_policies[0])
    whole = dict(vllm_engine.sample(sample_requests))
    last = len(sample_requests) - 1
    backwards = dict(vllm_engine.sample(sample_requests[::-1]))
    assert all(backwards[last - i] == whole[i] for i in whole)
    for start in range(0, len(sample_requests), 12):
        part = dict(vllm_engine.sample(sample_requests[start : start + 12]))
        assert all(part[i] == whole[start + i] for i in part)
    assert dict(vllm_engine.sample([sample_requests[5]]))[0] == whole[5]
    other = dict(vllm_engine.sample([replace(sample_requests[5], seed=3, max_tokens=20)]))[0]
    assert other.ids[: len(whole[5].ids)] != whole[5].ids


def test_more_prompt_tokens_than_one_step_takes(vllm_engine, tied_policies) -> None:
    """Prompts are whole in one step or wait for the next: half a prompt would cost its row a draw, and fail on a CPU."""
    vllm_engine.load(tied_policies[0])
    many = [
        Request(ids=[6 + (7 * n + i) % 50 for i in range(100 + n % 9)], max_tokens=6, seed=n) for n in range(80)
    ]  # 8,320 tokens; vLLM's CPU build takes 4,096 in a step
    together = dict(vllm_engine.sample(many))
    for n in (0, 39, 79):
        ((_, alone),) = vllm_engine.sample([many[n]])
        assert together[n] == alone


def test_two_calls_at_once_keep_their_rows_apart(vllm_engine, tied_policies, sample_requests) -> None:
    vllm_engine.load(tied_policies[0])
    whole = dict(vllm_engine.sample(sample_requests))
    first, second = vllm_engine.sample(sample_requests[:24]), vllm_engine.sample(sample_requests[24:])
    found = {}
    for (i, a), (j, b) in zip(first, second, strict=True):
        found[i], found[24 + j] = a, b
    assert found == whole


def test_transformers_results_do_not_depend_on_the_batch(transformers_engine, tied_policies, sample_requests) -> None:
    transformers_engine.load(tied_policies[0])
    whole = dict(transformers_engine.sample(sample_requests))
    alone = [dict(transformers_engine.sample([r]))[0] for r in sample_requests[:16]]
    for index, done in enumerate(alone):
        assert done.ids == whole[index].ids
        assert done.logprobs == pytest.approx(whole[index].logprobs, abs=2e-5)


def test_greedy_tokens_are_the_same_in_both_engines(
    vllm_engine, transformers_engine, tied_policies, sample_requests
) -> None:
    greedy = [replace(r, temperature=0.0, max_tokens=20) for r in sample_requests]
    found = []
    for engine in (vllm_engine, transformers_engine):
        engine.load(tied_policies[1])
        found.append(dict(engine.sample(greedy)))
    for index in range(len(greedy)):
        assert found[0][index].ids == found[1][index].ids
        assert found[0][index].logprobs == pytest.approx(found[1][index].logprobs, abs=2e-5)


def test_frequencies_follow_the_distribution(engine, model, tied_policies) -> None:
    """2000 draws of one next token: every frequency within five standard errors of its probability."""
    engine.load(tied_policies[0])
    request = Request(ids=[7, 8, 9], max_tokens=1, seed=0, temperature=0.7)
    draws = Counter(done.ids[0] for _, done in engine.sample([replace(request, seed=s) for s in range(2000)]))
    expected = reference(model, request, [0])[0].exp().tolist()
    for token, probability in enumerate(expected):
        error = math.sqrt(probability * (1 - probability) / 2000)
        assert abs(draws[token] / 2000 - probability) <= 5 * error + 1e-9
    assert sum(1 for p in expected if p > 0.05) >= 2


def test_truncated_sampling_stays_inside_and_scores_the_renormalised_distribution(engine, model, tied_policies) -> None:
    engine.load(tied_policies[0])
    request = Request(ids=[7, 8, 9], max_tokens=1, seed=0, temperature=1.3, top_k=3, entropies=True)
    probabilities = reference(model, request, [0])[0].exp()
    top = probabilities.topk(3)
    allowed = dict(zip(top.indices.tolist(), (top.values / top.values.sum()).log().tolist(), strict=True))
    entropy = -sum(math.exp(v) * v for v in allowed.values())
    for _, done in engine.sample([replace(request, seed=s) for s in range(200)]):
        assert done.logprobs[0] == pytest.approx(allowed[done.ids[0]], abs=2e-5)
        assert done.entropies == pytest.approx([entropy], abs=1e-4)
    nucleus = replace(request, top_k=0, top_p=0.5)
    order = probabilities.sort(descending=True)
    inside = int((order.values.cumsum(0) < 0.5).sum()) + 1
    kept = set(order.indices[:inside].tolist())
    drawn = {done.ids[0] for _, done in engine.sample([replace(nucleus, seed=s) for s in range(300)])}
    assert drawn == kept


@pytest.mark.parametrize(
    ("ids", "max_tokens", "says"),
    [
        ([7] * 128, 4, "request 1 of 2: 128 prompt tokens where the engine takes 127"),
        ([], 4, "request 1 of 2: no token ids"),
        ([7, 110], 4, "request 1 of 2: token id 110 is outside the policy's vocabulary of 110"),
        ([7, -1], 4, "token id -1 is outside"),
        ([7], 0, "max_tokens 0"),
    ],
)
def test_impossible_requests_are_named(engine, tied_policies, ids, max_tokens, says) -> None:
    engine.load(tied_policies[0])
    good = Request(ids=[7], max_tokens=1, seed=0)
    with pytest.raises(UserError, match=says):
        engine.sample([good, Request(ids=ids, max_tokens=max_tokens, seed=0)])
    assert len(dict(engine.sample([good]))) == 1


def test_the_longest_prompt_that_fits_gets_its_one_token(engine, tied_policies) -> None:
    engine.load(tied_policies[0])
    done = dict(engine.sample([Request(ids=[7] * 127, max_tokens=5, seed=0)]))[0]
    assert len(done.ids) == 1


def test_leaving_early_aborts_what_is_in_flight(vllm_engine, tied_policies, sample_requests) -> None:
    vllm_engine.load(tied_policies[0])
    expected = dict(vllm_engine.sample(sample_requests))
    rows = vllm_engine.sample([replace(r, max_tokens=60) for r in sample_requests])
    next(rows)
    rows.close()
    assert not vllm_engine._llm.llm_engine.has_unfinished_requests()
    assert not vllm_engine._owners
    assert dict(vllm_engine.sample(sample_requests)) == expected


def test_sampling_before_a_load_is_refused() -> None:
    from tseeds.config import EngineConfig
    from tseeds.engines import open_engine

    for backend in ("vllm", "transformers"):
        engine = open_engine(EngineConfig(backend=backend), dtype="float32", max_model_len=16)
        with pytest.raises(StageFailed, match="load one before sampling"):
            engine.sample([Request(ids=[1], max_tokens=1, seed=0)])
        engine.close()
        engine.close()
