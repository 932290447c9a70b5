"""The toy task: its problems, its tokenizer, the shipped policy and the promise to make them again bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tseeds import toy
from tseeds.config import load
from tseeds.errors import UserError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("toy")
    toy.make(directory)
    return directory


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("numbers", "target", "text", "right"),
    [
        ([3, 8, 5, 2], 23, "8 - 3 = 5 ; 5 * 5 = 25 ; 25 - 2 = 23", True),
        ([3, 8, 5, 2], 24, "8 - 3 = 5 ; 5 * 5 = 25 ; 25 - 2 = 23", False),  # another target
        ([3, 8, 5, 2], 23, "8 - 3 = 5 ; 5 * 5 = 25 ; 25 - 2 = 24", False),  # a wrong result
        ([3, 8, 5, 2], 25, "8 - 3 = 5 ; 5 * 5 = 25", False),  # 2 is left over
        ([3, 8, 5, 2], 23, "8 - 3 = 5 ; 5 * 5 = 25 ; 25 - 2 = 23 ; 23 * 1 = 23", False),  # no 1 there
        ([3, 8, 5, 2], 16, "3 - 8 = -5 ; 5 * 5 = 25 ; 25 - 9 = 16", False),  # below 1
        ([9, 9, 9, 9], 81, "9 * 9 = 81 ; 9 - 9 = 0 ; 81 + 0 = 81", False),  # 0 is no result
        ([1, 2, 3, 4], 10, "", False),
    ],
)
def test_solutions_by_hand(numbers: list[int], target: int, text: str, right: bool) -> None:
    assert toy.is_solution(numbers, target, text) is right


def test_chains_are_valid_and_complete() -> None:
    table = toy.chains()
    ones = table[(table[:, :4] == 1).all(axis=1)]
    # By hand from 1 1 1 1: the first step gives 2 or 1 (1 - 1 = 0 is none), so at most 1+1+1+1 = 4 or (1+1)*(1+1) = 4.
    assert sorted(set(ones[:, 15].tolist())) == [1, 2, 3, 4]
    assert len(np.unique(table[:, :4], axis=0)) == 495  # multisets of 4 out of 9: C(12, 4)
    for row in table[:: len(table) // 500].tolist():
        steps = [f"{row[s]} {toy.SIGNS[row[s + 1]]} {row[s + 2]} = {row[s + 3]}" for s in (4, 8, 12)]
        assert toy.is_solution(row[:4], row[15], " ; ".join(steps)), row


def test_problems_are_disjoint_solvable_and_always_the_same(made: Path) -> None:
    train, test = rows_of(made / "train.jsonl"), rows_of(made / "test.jsonl")
    assert (len(train), len(test)) == (2048, 256)
    solvable = {(*sorted(r[:4]), r[15]) for r in toy.chains().tolist()}
    keys = []
    for row in [*train, *test]:
        gold = json.loads(row["gold"])
        assert row["problem"] == " ".join(map(str, gold["numbers"])) + f" -> {gold['target']}"
        assert all(1 <= n <= 9 for n in gold["numbers"])
        assert 10 <= gold["target"] <= 60
        keys.append((*sorted(gold["numbers"]), gold["target"]))
    assert len(set(keys)) == len(keys) == len({r["id"] for r in [*train, *test]})
    assert set(keys) <= solvable
    digest = hashlib.sha256((made / "train.jsonl").read_bytes() + (made / "test.jsonl").read_bytes()).hexdigest()
    assert digest == DIGEST


DIGEST = "8acc7cb87454739b891677f975f3c47e408b0de5d0be8e598d3e95f5d1b4b89a"


def test_other_seeds_draw_other_problems_and_keep_the_test_set_held_out() -> None:
    train, test = toy.countdown_problems(seed=1)
    first, _ = toy.countdown_problems(seed=0)
    assert {r["problem"] for r in train} != {r["problem"] for r in first}
    assert all(toy.held_out(*json.loads(r["gold"]).values()) for r in test)
    assert not any(toy.held_out(*json.loads(r["gold"]).values()) for r in [*train, *first])


def test_warm_start_never_sees_a_held_out_problem() -> None:
    ids, start, responses = toy.TASKS["countdown"].source(0, 0.3)(2000)
    prompts = ids[:, : start + 1]
    assert prompts.shape == (2000, 6)
    assert responses.shape == (2000, 18)
    missed = 0
    for prompt, response in zip(prompts.tolist(), responses.tolist(), strict=True):
        numbers, target = prompt[:4], prompt[5]
        assert not toy.held_out(numbers, target)
        text = " ".join(toy.WORDS[i] for i in response[:-1])
        assert response[-1] == toy.IDS[toy.EOS]
        assert toy.is_solution(numbers, response[16], text)  # always a valid chain, to some result
        missed += response[16] != target
    assert 0.2 < missed / 2000 < 0.32  # 30 % go astray, a few of them to the target


def test_tokenizer_is_one_token_a_word_for_transformers(made: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made / "policy")
    text = "3 8 5 2 -> 23"
    ids = tokenizer(text)["input_ids"]
    assert ids == [3, 8, 5, 2, toy.IDS["->"], 23]
    assert tokenizer.decode(ids) == text
    chain = "8 - 3 = 5 ; 5 * 5 = 25 ; 25 - 2 = 23"
    assert tokenizer.decode([*tokenizer(chain)["input_ids"], tokenizer.eos_token_id], skip_special_tokens=True) == chain
    assert tokenizer.eos_token_id == toy.IDS[toy.EOS]
    assert tokenizer.bos_token_id is None


def test_shipped_policy_is_small_and_explores(made: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    assert (made / "policy" / "model.safetensors").stat().st_size < 2_000_000
    model = AutoModelForCausalLM.from_pretrained(made / "policy")
    assert model.dtype == torch.float32
    rows, samples = rows_of(made / "test.jsonl")[:64], 16
    prompts = torch.tensor([[toy.IDS[w] for w in r["problem"].split()] for r in rows]).repeat_interleave(samples, 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=24, do_sample=True, top_k=0
        )
    right = []
    for k, ids in enumerate(output[:, prompts.shape[1] :].tolist()):
        gold = json.loads(rows[k // samples]["gold"])
        text = " ".join(toy.WORDS[i] for i in ids[: ids.index(toy.IDS[toy.EOS])]) if toy.IDS[toy.EOS] in ids else ""
        right.append(toy.is_solution(gold["numbers"], gold["target"], text))
    solved = np.array(right).reshape(64, samples)
    assert 0.15 < solved.mean() < 0.35
    assert solved.any(axis=1).mean() > 0.7


def test_make_is_idempotent_and_never_overwrites(made: Path) -> None:
    before = {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in made.rglob("*") if f.is_file()}
    toy.make(made)
    assert before == {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in made.rglob("*") if f.is_file()}
    with pytest.raises(UserError, match=r"train\.jsonl: exists with other content"):
        toy.make(made, seed=1)
    assert before == {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in made.rglob("*") if f.is_file()}


def test_warm_start_gives_the_same_bits_and_leaves_torch_as_it_was() -> None:
    import torch

    torch.manual_seed(5)
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    once, again, other = (toy.policy_contents(toy.warm_start(seed=s, steps=2, batch=16)) for s in (0, 0, 1))
    assert once == again
    assert once["model.safetensors"] != other["model.safetensors"]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_training_runs_in_a_process_held_to_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the caller has set, and for the steps asked for."""
    here = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.backends.cpu.get_cpu_capability())"],
        env={**os.environ, **toy.PORTABLE}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert here.stdout.strip() == "AVX2"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")  # what the caller has set does not count
    once, longer = (toy.trained("countdown", steps=n) for n in (1, 2))
    assert once.keys() == longer.keys() == {f.name for f in toy.SHIPPED.iterdir()}
    assert once["model.safetensors"] != longer["model.safetensors"]


def test_shipped_files_are_those_that_training_would_write() -> None:
    """All but the weights, which take minutes: `tseeds toy DIR --train` makes them again."""
    import torch
    from safetensors.torch import load_file

    fresh = toy.policy_contents(toy.warm_start(steps=1, batch=2))
    shipped = {f.name: f.read_bytes() for f in toy.SHIPPED.iterdir()}
    assert fresh.keys() == shipped.keys()
    for name in fresh:
        if name != "model.safetensors":
            assert fresh[name].decode() == shipped[name].decode(), name
    weights = load_file(toy.SHIPPED / "model.safetensors")
    assert all(v.dtype == torch.float32 for v in weights.values())


def test_pipelines_of_this_task_name_what_make_writes(made: Path) -> None:
    config = load(Path(__file__).parents[2] / "pipelines" / "toy.toml")
    for path in (config.policy.path, str(config.problems.path), config.evaluate.benchmarks[0].path):
        assert (made / Path(path).relative_to("toy")).exists()
