"""The second toy task: expressions, their chains, the shipped policy, and what the ordinary grader says."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from tseeds import arithmetic, toy
from tseeds.config import load
from tseeds.grading import Grader, GradingOptions


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("arithmetic")
    toy.make(directory, "arithmetic")
    return directory


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("expression", "response", "right"),
    [
        ("2 + 9 - 4 + 6", r"9 - 4 = 5 ; 2 + 6 = 8 ; 5 + 8 = 13 ; \boxed{ 13 }", True),
        ("2 + 9 - 4 + 6", r"2 + 9 = 11 ; 11 - 4 = 7 ; 6 + 7 = 13 ; \boxed{ 13 }", True),
        ("2 + 9 - 4 + 6", r"4 - 2 = 2 ; 6 + 9 = 15 ; 15 - 2 = 13 ; \boxed{ 13 }", True),  # - 4 + 2 is - 2
        ("2 + 9 - 4 + 6", r"9 - 4 = 6 ; 2 + 6 = 8 ; 6 + 8 = 14 ; \boxed{ 14 }", False),  # a wrong result
        ("2 + 9 - 4 + 6", r"9 + 4 = 13 ; 2 + 6 = 8 ; 8 + 13 = 21 ; \boxed{ 21 }", False),  # the sign of 4
        ("2 + 9 - 4 + 6", r"9 - 4 = 5 ; 2 + 6 = 8 ; 5 + 8 = 13 ; \boxed{ 12 }", False),  # another answer
        ("2 + 9 - 4 + 6", r"9 - 4 = 5 ; 2 + 6 = 8 ; \boxed{ 8 }", False),  # a step is missing
        ("3 * ( 5 - 4 + 6 )", r"5 + 6 = 11 ; 11 - 4 = 7 ; 3 * 7 = 21 ; \boxed{ 21 }", True),
        ("3 * ( 5 - 4 + 6 )", r"3 * 5 = 15 ; 6 - 4 = 2 ; 15 + 2 = 17 ; \boxed{ 17 }", False),  # out of the parentheses
        ("20 - ( 5 - 4 + 6 )", r"6 - 4 = 2 ; 5 + 2 = 7 ; 20 - 7 = 13 ; \boxed{ 13 }", True),
        ("20 - ( 5 - 4 + 6 )", r"20 - 5 = 15 ; 6 - 4 = 2 ; 15 - 2 = 13 ; \boxed{ 13 }", False),
        ("2 + 3 * 4 + 5", r"2 + 5 = 7 ; 3 * 4 = 12 ; 7 + 12 = 19 ; \boxed{ 19 }", True),
        ("2 + 3 * 4 + 5", r"2 + 3 = 5 ; 4 * 5 = 20 ; 20 + 5 = 25 ; \boxed{ 25 }", False),  # * binds tighter
        ("2 + 9 - 4 + 6", "", False),
    ],
)
def test_chains_by_hand(expression: str, response: str, right: bool) -> None:
    assert arithmetic.is_solution(expression, response) is right


def test_chains_are_solutions_with_python_s_value_and_go_wrong_on_request() -> None:
    rng = random.Random(3)
    found, wrong = 0, 0
    for expression in (arithmetic.draw(rng) for _ in range(1000)):
        for slip in (False, True):
            made = arithmetic.chain(expression, rng, wrong=slip)
            if made is None:
                continue
            response, answer = made
            assert len(response.split()) == 21
            assert {int(w) for w in response.split() if w.isdigit()} <= set(range(arithmetic.LARGEST + 1))
            assert arithmetic.is_solution(expression, response) is not slip, (expression, response)
            if not slip:
                assert answer == eval(expression)
            found, wrong = found + 1, wrong + (slip and answer != eval(expression))
    assert found > 500
    assert wrong > 150


def test_many_expressions_have_several_chains() -> None:
    rng = random.Random(5)
    forms = []
    for expression in (arithmetic.draw(rng) for _ in range(300)):
        chains = {made for _ in range(60) if (made := arithmetic.chain(expression, rng)) is not None}
        forms.append(len(chains))
        assert len({answer for _, answer in chains}) <= 1
    assert np.mean([f >= 2 for f in forms if f]) > 0.6


def test_problems_are_disjoint_and_always_the_same(made: Path) -> None:
    train, test = rows_of(made / "train.jsonl"), rows_of(made / "test.jsonl")
    assert (len(train), len(test)) == (toy.TRAIN_PROBLEMS, toy.TEST_PROBLEMS)
    assert not {r["problem"] for r in train} & {r["problem"] for r in test}
    assert [arithmetic.held_out(r["problem"]) for r in test] == [True] * len(test)
    assert not any(arithmetic.held_out(r["problem"]) for r in train)
    assert all(eval(r["problem"]) == int(r["gold"]) for r in (*train, *test))
    shown = itertools.islice(arithmetic.examples(0, misses=0.3), 2000)
    assert not any(arithmetic.held_out(expression) for expression, _ in shown)
    assert arithmetic.problems(seed=0, train=2048, test=256) == (train, test)
    assert arithmetic.problems(seed=1, train=20, test=5)[0] != train[:20]


def test_warm_start_targets_are_the_response_alone() -> None:
    ids, start, targets = toy.TASKS["arithmetic"].source(0, 0.3)(64)
    assert start == 0
    for row, wanted in zip(ids.tolist(), targets.tolist(), strict=True):
        at = [k for k, target in enumerate(wanted) if target != toy.IGNORED]
        assert at == list(range(at[0], at[0] + 22))
        assert wanted[at[-1]] == toy.IDS[toy.EOS]
        assert row[at[0] + 1 : at[-1] + 1] == wanted[at[0] : at[-1]]
        prompt = " ".join(toy.WORDS[i] for i in row[: at[0] + 1])
        assert prompt.count("(") == prompt.count(")")
        assert len(arithmetic.parse(prompt)) == 2


def test_shipped_policy_explores_and_the_ordinary_grader_reads_it(made: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert (made / "policy" / "model.safetensors").stat().st_size < 2_000_000
    model = AutoModelForCausalLM.from_pretrained(made / "policy")
    tokenizer = AutoTokenizer.from_pretrained(made / "policy")
    assert model.num_parameters() < 1_000_000
    rows = [r for r in rows_of(made / "test.jsonl") if len(r["problem"].split()) == 9][:64]
    prompts = torch.tensor([tokenizer(r["problem"])["input_ids"] for r in rows]).repeat_interleave(16, 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=24, do_sample=True, top_k=0
        )
    texts = tokenizer.batch_decode(output[:, prompts.shape[1] :], skip_special_tokens=True)
    pairs = [(rows[k // 16]["gold"], text) for k, text in enumerate(texts)]
    with Grader(GradingOptions(task="math")) as grader:
        verdicts = [str(g.verdict) for g in grader.grade(pairs)]
    solved = np.array([v == "correct" for v in verdicts]).reshape(len(rows), 16)
    assert 0.15 < solved.mean() < 0.45
    assert solved.any(axis=1).mean() > 0.7
    assert verdicts.count("no_answer") < 0.02 * len(verdicts)


def test_the_pipeline_names_what_make_writes(made: Path) -> None:
    config = load(Path(__file__).parents[2] / "pipelines" / "arithmetic.toml")
    for path in (config.policy.path, str(config.problems.path), config.evaluate.benchmarks[0].path):
        assert (made / Path(path).relative_to("toy-arithmetic")).exists()


def test_shipped_files_are_those_that_training_would_write() -> None:
    """All but the weights: `tseeds toy DIR --task arithmetic --train` makes them again."""
    fresh = toy.policy_contents(toy.warm_start("arithmetic", steps=1, batch=2))
    shipped = {f.name: f.read_bytes() for f in toy.TASKS["arithmetic"].shipped.iterdir()}
    assert fresh.keys() == shipped.keys()
    assert all(fresh[name] == shipped[name] for name in fresh if name != "model.safetensors")
