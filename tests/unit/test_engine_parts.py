"""Pieces of the engines that need neither vllm nor a model."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tseeds.engines import Request, policies, pool, requests, threads, transformers, watch
from tseeds.engines.probe import TOLERANCE, Probe, check
from tseeds.errors import StageFailed, UserError


def test_opening_an_engine_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tseeds.config import EngineConfig; from tseeds.engines import open_engine;"
        "[open_engine(EngineConfig(backend=b, workers=w), dtype='float32', max_model_len=8).close()"
        " for b, w in (('vllm', 1), ('transformers', 1), ('vllm', 3))];"
        "print(sorted({'torch', 'vllm', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_threads_follow_model_size_unless_asked() -> None:
    assert threads.choose(99_999_999) == 1
    assert threads.choose(100_000_000) == threads.cores()
    assert threads.choose(7_000_000_000, asked=3) == 3
    assert threads.choose(1000, asked=2) == 2


def test_entropy_from_top_logprobs() -> None:
    quarter = [math.log(0.25)] * 4
    assert requests.entropy(quarter) == pytest.approx(math.log(4))
    assert requests.entropy([0.0]) == 0
    assert requests.entropy([math.log(0.5), -math.inf]) == pytest.approx(math.log(2))
    # half of the mass known, the other half spread over 4 tokens: the lump is a lower bound
    assert requests.entropy([math.log(0.5)]) <= 0.5 * math.log(2) + 0.5 * math.log(8)


def probe_of(*values: float, dtype: str = "float32") -> Probe:
    return Probe(ids=[[0] * (len(values) + 1)], logprobs=[list(values)], dtype=dtype)


def test_probe_check_takes_rounding_and_refuses_more() -> None:
    wanted = probe_of(-1.0, -2.0)
    assert check(Path("p"), wanted, [[-1.0002, -2.0]], "float32") == pytest.approx(1e-4)
    for found in ([[-1.0, -2.0 - 2 * TOLERANCE["float32"][1]]], [[-1.002, -2.002]], [[math.nan, -2.0]]):
        with pytest.raises(StageFailed, match="does not hold this policy"):
            check(Path("p"), wanted, found, "float32")
    assert check(Path("p"), wanted, [[-1.1, -2.1]], "bfloat16") == pytest.approx(0.1)
    assert check(Path("p"), probe_of(-1.0, -2.0, dtype="bfloat16"), [[-1.1, -2.1]], "float32") == pytest.approx(0.1)


def test_probe_check_tells_the_previous_policy_from_a_coarse_new_one() -> None:
    new, old = probe_of(-1.0, -2.0, dtype="bfloat16"), probe_of(-1.1, -2.1, dtype="bfloat16")
    check(Path("p"), new, [[-1.02, -2.02]], "bfloat16", old)
    check(Path("p"), new, [[-1.05, -2.05]], "bfloat16", old)
    with pytest.raises(StageFailed, match="still holds the previous policy"):
        check(Path("p"), new, [[-1.099, -2.101]], "bfloat16", old)
    check(Path("p"), new, [[-1.01, -2.01]], "bfloat16", new)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    size = {"F32": 4, "BF16": 2, "I8": 1}
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + size[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def tiny(path: Path, **config: object) -> Path:
    path.mkdir()
    values = {"architectures": ["A"], "vocab_size": 4, "eos_token_id": 3, "tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(values | config))
    write_safetensors(path / "model.safetensors", {"embed": ("BF16", [4, 2]), "w": ("F32", [2, 3])})
    return path


def test_a_policy_is_described_from_its_headers(tmp_path: Path) -> None:
    policy = tiny(tmp_path / "p")
    (policy / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    found = policies.describe(policy)
    assert found.parameters == 4 * 2 + 2 * 3
    assert found.vocab_size == 4
    assert found.eos == (1, 2, 3)
    assert policies.describe(policy) is found
    for words in ({"added_tokens": [{"content": "</s>", "id": 0}]}, {"model": {"vocab": {"</s>": 0}}}):
        (policy / "tokenizer.json").write_text(json.dumps(words))
        for token in ("</s>", {"content": "</s>"}):
            (policy / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
            assert policies.describe(policy).eos == (0, 1, 2, 3)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (policy / name).unlink()
    write_safetensors(policy / "model.safetensors", {"embed": ("F32", [4, 2])})
    assert policies.describe(policy).digest != found.digest


def test_differences_that_matter_and_those_that_do_not(tmp_path: Path) -> None:
    first = policies.describe(tiny(tmp_path / "a", hidden_size=8))
    same = tiny(tmp_path / "b", hidden_size=8, transformers_version="9", use_cache=False, eos_token_id=1, extra=None)
    assert policies.difference(first, policies.describe(same)) is None
    other = policies.describe(tiny(tmp_path / "c", hidden_size=16))
    assert policies.difference(first, other) == "config.json: hidden_size = 16, the engine runs 8"
    untied = policies.describe(tiny(tmp_path / "d", hidden_size=8, tie_word_embeddings=False))
    assert policies.difference(first, untied) == "separate output head, the engine's is tied"
    head = tiny(tmp_path / "e", hidden_size=8)
    write_safetensors(
        head / "model.safetensors", {"embed": ("F32", [4, 2]), "w": ("F32", [2, 3]), "lm_head.weight": ("F32", [4, 2])}
    )
    assert policies.difference(first, policies.describe(head)) is None


@pytest.mark.parametrize("content", [b"", b"short", struct.pack("<Q", 10**9) + b"{}", struct.pack("<Q", 2) + b"[]"])
def test_damaged_weights_are_named(tmp_path: Path, content: bytes) -> None:
    policy = tiny(tmp_path / "p")
    (policy / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors: damaged"):
        policies.describe(policy)


def test_chunks_cover_every_row_once() -> None:
    for rows in (0, 1, 15, 16, 17, 255, 256, 5000):
        for workers in (1, 2, 7):
            cut = pool.chunks(rows, workers)
            assert [i for chunk in cut for i in chunk] == list(range(rows))
            assert all(len(chunk) <= 128 for chunk in cut)


def test_batches_hold_every_row_once_within_their_room() -> None:
    made = [Request(ids=[1] * (1 + i % 17), max_tokens=1 + i % 5, seed=i) for i in range(300)]
    batches = list(transformers.batches(made, 400, 64))
    assert sorted(i for batch in batches for i in batch) == list(range(300))
    for batch in batches:
        assert max(len(made[i].ids) + made[i].max_tokens for i in batch) * len(batch) <= 400
    with pytest.raises(UserError, match=r"raise engine\.kv_cache_gb"):
        list(transformers.batches(made, 20, 64))


def test_a_step_that_never_returns_is_interrupted() -> None:
    guard = watch.Watch(0.2, grace=5.0, end=lambda code: pytest.fail("ended the process"))
    guard.begin()
    begin = time.monotonic()
    with pytest.raises(StageFailed, match=r"made no token for 0\.2 seconds"), guard.step():
        while True:
            time.sleep(0.01)
    assert time.monotonic() - begin < 3
    guard.close()


def test_a_step_stuck_in_native_code_ends_the_process_with_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []
    released = threading.Event()

    def end(code: int) -> None:
        ended.append(code)
        released.set()

    guard = watch.Watch(0.2, grace=0.3, end=end)
    guard.begin()
    with pytest.raises(StageFailed), guard.step():
        released.wait(10)  # one uninterruptible call
        time.sleep(0.01)
    guard.close()
    assert ended == [1]
    assert "made no token for 0.2 seconds" in capsys.readouterr().err


def test_progress_keeps_a_slow_engine_alive() -> None:
    guard = watch.Watch(1.0, end=lambda code: pytest.fail("ended the process"))
    guard.begin()
    for _ in range(6):  # longer than the limit in all
        with guard.step():
            time.sleep(0.25)
            guard.progress()
    guard.close()
