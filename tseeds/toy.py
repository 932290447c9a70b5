"""Toy problems and small warm-started policies: all that ``pipelines/toy.toml`` and ``arithmetic.toml`` need, made here.

Countdown (the second task, nested arithmetic, is in ``arithmetic``): reach a target from four numbers of 1 to 9 with ``+ - *``, using each number once and keeping every result
within 1..99. A response is a chain of three steps, one token for each number and sign, such as
``8 - 3 = 5 ; 5 * 5 = 25 ; 25 - 2 = 23`` for the problem ``3 8 5 2 -> 23``.

Each policy is an ordinary Hugging Face model directory (Llama architecture, float32) that ships with the package. It was
warm-started by supervised learning on chains drawn from all valid chains of a problem's numbers, a share of which miss
the target on purpose: it knows the format, explores widely and fails often. Task and recipe are ours.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from tseeds import arithmetic
from tseeds.artifacts.store import write_file
from tseeds.errors import UserError

log = logging.getLogger(__name__)

PORTABLE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OMP_NUM_THREADS": "1",
}
"""What holds torch to AVX2 while it trains: CPUs with wider vectors add in another order and get other bits."""

TRAIN_PROBLEMS = 2048
TEST_PROBLEMS = 256
LARGEST = 99
TARGETS = range(10, 61)
SIGNS = ("+", "-", "*")
EOS, PAD, UNKNOWN = "<eos>", "<pad>", "<unk>"
WORDS = (
    *map(str, range(LARGEST + 1)),
    *SIGNS,
    "=",
    ";",
    "->",
    "(",
    ")",
    "x",
    "?",
    ",",
    "\\boxed{",
    "}",
    EOS,
    PAD,
    UNKNOWN,
)
IDS = {word: i for i, word in enumerate(WORDS)}
SHIPPED = Path(__file__).parent / "data" / "toy"
IGNORED = -100
Source = Callable[[int], tuple[np.ndarray, int, np.ndarray]]
"""Draws n examples: token ids [n, T], the first position that has a target, the targets [n, T - start] (IGNORED: none)."""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",  # transformers 5 gives every qwen2 directory Qwen's own tokenizer, whatever its files say
    "vocab_size": len(WORDS),
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": True,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
    "attention_dropout": 0.0,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": IDS[EOS],
    "pad_token_id": IDS[PAD],
    "dtype": "float32",
}


@cache
def chains() -> np.ndarray:
    """Every valid chain of every multiset of four numbers: int8 [chains, 16], grouped by multiset.

    Columns: the four numbers in ascending order, then three steps of (a, index into SIGNS, b, result).

    >>> rows = chains(); bool((rows[:, 15] > 0).all())
    True
    """
    numbers = range(1, 10)
    sets = [(a, b, c, d) for a in numbers for b in numbers for c in numbers for d in numbers if a <= b <= c <= d]
    start = np.array(sets, dtype=np.int16)
    states = [(start, start)]  # (numbers and steps so far, numbers left)
    for left in (4, 3, 2):
        following = []
        for done, pool in states:
            for i in range(left):
                for j in range(left):
                    if i == j:
                        continue
                    a, b = pool[:, i], pool[:, j]
                    for sign, result in enumerate((a + b, a - b, a * b)):
                        good = (result >= 1) & (result <= LARGEST)
                        step = np.stack([a, np.full_like(a, sign), b, result], axis=1)
                        rest = np.delete(pool, (i, j), axis=1)
                        following.append((np.hstack([done, step])[good], np.hstack([rest, result[:, None]])[good]))
        states = [(np.concatenate([s[0] for s in following]), np.concatenate([s[1] for s in following]))]
    rows = states[0][0].astype(np.int8)
    halves = np.ascontiguousarray(rows).view(">u8")  # 16 non-negative bytes in column order: sorts as the columns do
    rows = rows[np.lexsort((halves[:, 1], halves[:, 0]))]
    return rows[np.r_[True, (rows[1:] != rows[:-1]).any(axis=1)]]


def held_out(numbers: tuple[int, ...] | list[int], target: int) -> bool:
    """Whether a problem belongs to the tenth of all problems that no training ever sees, whatever the seed."""
    key = f"{sorted(map(int, numbers))} {int(target)}"
    return hashlib.sha256(key.encode()).digest()[0] < 26


def is_solution(numbers: list[int], target: int, text: str) -> bool:
    """Whether a response uses each number once, step by step with results within 1..99, and ends on the target.

    >>> is_solution([3, 8, 5, 2], 23, "8 - 3 = 5 ; 5 * 5 = 25 ; 25 - 2 = 23")
    True
    """
    pool = list(numbers)
    for step in text.split(" ; "):
        words = step.split(" ")
        if (
            len(words) != 5
            or words[1] not in SIGNS
            or words[3] != "="
            or not (words[0] + words[2] + words[4]).isdigit()
        ):
            return False
        a, b, result = int(words[0]), int(words[2]), int(words[4])
        if result != {"+": a + b, "-": a - b, "*": a * b}[words[1]] or not 1 <= result <= LARGEST:
            return False
        for used in (a, b):
            if used not in pool:
                return False
            pool.remove(used)
        pool.append(result)
    return pool == [target]


def countdown_problems(*, seed: int = 0) -> tuple[list[dict], list[dict]]:
    """Train and held-out rows {id, problem, gold}, disjoint by (sorted numbers, target), each solvable.

    A problem is the numbers and the last result of a random chain, so targets with many solutions are commoner.
    """
    table = chains()
    table = table[(table[:, -1] >= TARGETS.start) & (table[:, -1] < TARGETS.stop)]
    rng = random.Random(f"countdown {seed}")
    train: dict[tuple, dict] = {}
    test: dict[tuple, dict] = {}
    while len(train) < TRAIN_PROBLEMS or len(test) < TEST_PROBLEMS:
        row = table[int(rng.random() * len(table))]
        numbers, target = [int(n) for n in row[:4]], int(row[-1])
        key = (*numbers, target)
        into, name, size = (
            (test, "test", TEST_PROBLEMS) if held_out(numbers, target) else (train, "train", TRAIN_PROBLEMS)
        )
        if key in into or len(into) == size:
            continue
        numbers.sort(key=lambda _: rng.random())
        gold = json.dumps({"numbers": numbers, "target": target}, separators=(",", ":"))
        problem = f"{' '.join(map(str, numbers))} -> {target}"
        into[key] = {"id": f"countdown-{name}-{len(into):04d}", "problem": problem, "gold": gold}
    return list(train.values()), list(test.values())


def tokenizer_files() -> dict[str, str]:
    """The word-level tokenizer as files: every number, sign and marker between white space is one token."""
    special = [
        {
            "id": IDS[w],
            "content": w,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for w in (EOS, PAD, UNKNOWN)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": IDS, "unk_token": UNKNOWN},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, indent=1) + "\n",
        "tokenizer_config.json": json.dumps(settings, indent=1) + "\n",
    }


def _countdown_source(seed: int, misses: float) -> Source:
    """Draws prompts [n, 6] and responses [n, 18]; a share ``misses`` of the chains goes astray."""
    table = chains()
    codes = table[:, [0, 1, 2, 3, 15]].astype(np.int64) @ np.array([100_000, 10_000, 1_000, 100, 1])
    _, example, inverse = np.unique(codes, return_index=True, return_inverse=True)
    hidden = np.array([held_out(row[:4].tolist(), int(row[15])) for row in table[example]])[inverse]
    shown = np.flatnonzero((table[:, -1] >= TARGETS.start) & (table[:, -1] < TARGETS.stop) & ~hidden)
    first = np.flatnonzero(np.r_[True, (table[1:, :4] != table[:-1, :4]).any(axis=1)])
    ends = np.r_[first[1:], len(table)]
    of_set = np.searchsorted(first, shown, side="right") - 1
    signs = np.array([IDS[s] for s in SIGNS])
    rng = np.random.default_rng(seed)

    def draw(n: int) -> tuple[np.ndarray, int, np.ndarray]:
        pick = rng.integers(len(shown), size=n)
        rows, sets = shown[pick], of_set[pick]
        astray = first[sets] + (rng.random(n) * (ends - first)[sets]).astype(np.int64)
        chain = table[np.where(rng.random(n) < misses, astray, rows)].astype(np.int64)
        numbers = rng.permuted(chain[:, :4], axis=1)
        arrow, target = np.full((n, 1), IDS["->"]), table[rows, -1:].astype(np.int64)
        prompt = np.hstack([numbers, arrow, target])
        equals, semicolon, end = (np.full((n, 1), IDS[w]) for w in ("=", ";", EOS))
        parts = []
        for s in (4, 8, 12):
            parts += [
                chain[:, s : s + 1],
                signs[chain[:, s + 1 : s + 2]],
                chain[:, s + 2 : s + 3],
                equals,
                chain[:, s + 3 : s + 4],
            ]
            parts.append(semicolon if s < 12 else end)
        response = np.hstack(parts)
        return np.hstack([prompt, response[:, :-1]]), prompt.shape[1] - 1, response

    return draw


def _arithmetic_source(seed: int, misses: float) -> Source:
    """Draws expressions and chains of different lengths, filled up on the right."""
    rows = arithmetic.examples(seed, misses=misses)

    def draw(n: int) -> tuple[np.ndarray, int, np.ndarray]:
        texts = [[text.split() for text in next(rows)] for _ in range(n)]
        width = max(len(prompt) + len(response) for prompt, response in texts)
        ids, targets = np.full((n, width), IDS[PAD]), np.full((n, width), IGNORED)
        for k, (prompt, response) in enumerate(texts):
            words = [IDS[w] for w in (*prompt, *response, EOS)]
            ids[k, : len(words) - 1] = words[:-1]
            targets[k, len(prompt) - 1 : len(words) - 1] = words[len(prompt) :]
        return ids, 0, targets

    return draw


def warm_start(
    task: str = "countdown",
    *,
    seed: int = 0,
    steps: int = 0,
    batch: int = 256,
    learning_rate: float = 3e-3,
    misses: float = 0.3,
) -> Any:
    """Train a task's policy from random weights on one thread; see ``trained`` for the same bits on another machine.

    steps: 0 takes the task's own number.

    Cross-entropy on response tokens, AdamW, warm-up and cosine decay. The network is trained as Qwen2 (biases on q, k, v)
    and returned as the same function in a transformers ``LlamaForCausalLM``, whose directories may bring any tokenizer.
    """
    import torch
    from torch.nn import functional
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type", "attention_bias", "mlp_bias")}
    steps = steps or TASKS[task].steps
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen2ForCausalLM(Qwen2Config(**shape)).float().train()
        decay = [p for p in model.parameters() if p.dim() > 1]
        plain = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": decay, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98))
        draw = TASKS[task].source(seed, misses)
        for step in range(steps):
            rate = learning_rate * min(1.0, (step + 1) / 50) * (0.51 + 0.49 * math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = rate
            ids, start, targets = draw(batch)
            hidden = model.model(input_ids=torch.from_numpy(ids), use_cache=False).last_hidden_state[:, start:]
            logits = model.lm_head(hidden).flatten(0, 1)
            loss = functional.cross_entropy(logits, torch.from_numpy(targets).flatten(), ignore_index=IGNORED)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 100 == 0 or step == steps - 1:
                log.info("warm start step %d of %d: loss %.4f", step + 1, steps, loss.item())
        return _as_llama(model)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def trained(task: str, *, steps: int = 0) -> dict[str, bytes]:
    """The files of a policy that a process of its own has trained from nothing, its progress on stderr.

    With the locked torch they are the shipped bytes on any x86-64 CPU that has AVX2 (seen on one with and one without AVX-512).
    steps: 0 takes the task's own number.
    """
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "tseeds.toy", task, str(steps), place]
        subprocess.run(command, env={**os.environ, **PORTABLE}, check=True)
        return {f.name: f.read_bytes() for f in sorted(Path(place).iterdir())}


def _as_llama(model: Any) -> Any:
    """The Llama model that computes the same function as a Qwen2 model: Llama's further bias, on o, is zero."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):  # building a network draws numbers that are the caller's
        llama = LlamaForCausalLM(LlamaConfig(**CONFIG)).float().eval()
    missing, unexpected = llama.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected, unexpected
    assert all(name.endswith("o_proj.bias") for name in missing), missing
    with torch.no_grad():
        for layer in llama.model.layers:
            layer.self_attn.o_proj.bias.zero_()
    return llama


def policy_contents(model: Any) -> dict[str, bytes]:
    """The files of a policy directory, the same bytes for the same weights."""
    from safetensors.torch import save

    tensors = {name: value.detach().contiguous() for name, value in sorted(model.state_dict().items())}
    generation = {"eos_token_id": IDS[EOS], "pad_token_id": IDS[PAD], "do_sample": True, "temperature": 1.0}
    texts = {
        "config.json": json.dumps(CONFIG, indent=1) + "\n",
        "generation_config.json": json.dumps(generation, indent=1) + "\n",
        **tokenizer_files(),
    }
    return {
        "model.safetensors": save(tensors, {"format": "pt"}),
        **{name: text.encode() for name, text in texts.items()},
    }


@dataclass(frozen=True)
class Task:
    """problems(seed=) makes train and held-out rows; source and steps of the warm start; shipped: the finished policy."""

    problems: Callable[..., tuple[list[dict], list[dict]]]
    source: Callable[[int, float], Source]
    steps: int
    shipped: Path


TASKS = {
    "countdown": Task(countdown_problems, _countdown_source, 1500, SHIPPED),
    "arithmetic": Task(
        partial(arithmetic.problems, train=TRAIN_PROBLEMS, test=TEST_PROBLEMS),
        _arithmetic_source,
        600,
        SHIPPED.with_name("arithmetic"),
    ),
}


def make(directory: Path, task: str = "countdown", *, seed: int = 0, train: bool = False) -> dict[str, Path]:
    """Write ``policy/``, ``train.jsonl`` and ``test.jsonl`` into a directory, the same bytes every time.

    task: a key of TASKS.

    The policy is a copy of the shipped one; ``train`` makes it again from nothing (minutes on one core). ``seed`` draws
    other problems; those that the policy never saw in training stay held out under every seed.

    Raises:
        UserError: no such task, or a file of another content is there already; nothing was written.
    """
    directory = Path(directory)
    if task not in TASKS:
        raise UserError(f"--task {task}: choose one of {', '.join(TASKS)}")
    chosen = TASKS[task]
    rows = dict(zip(("train.jsonl", "test.jsonl"), chosen.problems(seed=seed), strict=True))
    contents = {
        name: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table).encode()
        for name, table in rows.items()
    }
    shipped = {f.name: f.read_bytes() for f in sorted(chosen.shipped.iterdir())} if not train else {}
    policy = trained(task) if train else shipped
    contents |= {f"policy/{name}": data for name, data in policy.items()}
    for name, data in contents.items():
        file = directory / name
        if file.exists() and (not file.is_file() or file.read_bytes() != data):
            raise UserError(f"{file}: exists with other content; choose an empty directory or remove it")
    for name, data in contents.items():
        file = directory / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, data)
    return {"policy": directory / "policy", "train": directory / "train.jsonl", "test": directory / "test.jsonl"}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name, data in policy_contents(warm_start(sys.argv[1], steps=int(sys.argv[2]))).items():
        (Path(sys.argv[3]) / name).write_bytes(data)
