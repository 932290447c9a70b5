"""``tseeds engine serve``: the same results as in process, a key that only the owner reads, death noticed and said."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tseeds import config as configuration
from tseeds.config import EngineConfig
from tseeds.engines import Completion, open_engine, sample_each
from tseeds.engines.client import ServedEngine, find
from tseeds.engines.policies import describe
from tseeds.engines.serve import Record, read_record
from tseeds.errors import Locked, StageFailed, UserError
from tseeds.exchange import export_policy

OPTIONS = {"dtype": "float32", "max_model_len": 128}


@pytest.fixture(scope="module")
def served(
    tied_policies: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, subprocess.Popen]]:
    run = tmp_path_factory.mktemp("run")
    export_policy(tied_policies[0], run / "exported")  # vLLM's own server loads what tseeds export writes
    pipeline = configuration.parse(
        {
            "policy": {"path": str(run / "exported"), "dtype": "float32"},
            "problems": {"path": "none.jsonl", "max_prompt_tokens": 64},
            "rollout": {"max_response_tokens": 64, "problems_per_iteration": 2, "group_size": 2},
            "engine": {"kv_cache_gb": 0.25, "workers": 2},
        }
    )
    (run / "pipeline.toml").write_text(configuration.dumps(pipeline))
    process = subprocess.Popen(
        [sys.executable, "-m", "tseeds_cli.main", "engine", "serve", str(run)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("serving"):
            break
    assert lines[-1].startswith(f"serving {run} at http://127.0.0.1:"), "".join(lines)
    yield run, process
    if process.poll() is None:
        process.terminate()
        process.wait(60)


def status(url: str, *, key: str | None = None) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        return urllib.request.urlopen(request, timeout=20).status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.timeout(600)
def test_served_adapters_share_batches(tied_policies, adapters, vllm_engine, sample_requests, tmp_path) -> None:
    """Several adapters and their base in one batch of the server: as each alone, and as the engine in process, which merges."""
    run = tmp_path / "run"
    run.mkdir()
    pipeline = configuration.parse(
        {
            "policy": {"path": str(tied_policies[0]), "dtype": "float32"},
            "problems": {"path": "none.jsonl", "max_prompt_tokens": 64},
            "rollout": {"max_response_tokens": 64, "problems_per_iteration": 2, "group_size": 2},
            "update": {"lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}},
            "engine": {"kv_cache_gb": 0.25},
        }
    )
    (run / "pipeline.toml").write_text(configuration.dumps(pipeline))
    command = [sys.executable, "-m", "tseeds_cli.main", "engine", "serve", str(run)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any(line.startswith("serving") for line in process.stderr)
        engine = open_engine(EngineConfig(), **OPTIONS, run=run)
        assert isinstance(engine, ServedEngine)
        assert engine.shares_batches
        wanted = [replace(r, temperature=0.0) for r in sample_requests]
        policies = [adapters[1], tied_policies[0], adapters[0]]
        together: dict[int, dict[int, Completion]] = {0: {}, 1: {}, 2: {}}
        for position, index, digest, done in sample_each(engine, [(policy, wanted) for policy in policies]):
            together[position][index] = done
            assert digest == describe(policies[position]).digest
        for position, policy in enumerate(policies):
            engine.load(policy)
            assert dict(engine.sample(wanted)) == together[position]
            vllm_engine.load(policy)
            for index, done in vllm_engine.sample(wanted):
                assert together[position][index].ids == done.ids
                assert together[position][index].logprobs == pytest.approx(done.logprobs, abs=1e-4)
        assert together[0] != together[1] != together[2]
        assert not engine.merges
        moved = tmp_path / "moved"  # the same adapter elsewhere: the server reads it there from now on
        shutil.copytree(adapters[0], moved)
        engine.load(adapters[1])
        engine.load(moved)
        models = engine._wait(engine._get(engine.record.urls[0], "/v1/models"))["data"]
        assert {m["root"] for m in models} >= {str(moved), str(adapters[1])}
        assert str(adapters[0]) not in {m["root"] for m in models}
        engine.close()
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.timeout(1200)
def test_a_served_engine(served, tied_policies, vllm_engine, sample_requests, caplog) -> None:
    run, process = served
    assert (run / "engine.key").stat().st_mode & 0o777 == 0o600
    key = (run / "engine.key").read_text()
    record = read_record(run)
    assert record is not None
    assert len(record.urls) == 2
    for url in record.urls:
        assert status(f"{url}/health") == 200
        for path in ("/metrics", "/v1/models", "/collective_rpc", "/server_info"):
            assert status(url + path) == 401
            assert status(url + path, key="0" * 64) == 401
        assert status(f"{url}/v1/models", key=key) == 200

    engine = open_engine(EngineConfig(), **OPTIONS, run=run)
    assert isinstance(engine, ServedEngine)
    wanted = [replace(r, entropies=True) for r in sample_requests]
    for policy in (tied_policies[0], tied_policies[1], tied_policies[0]):
        assert engine.load(policy) == vllm_engine.load(policy)
        before = [engine._wait(engine._made(url)) for url in record.urls]
        assert dict(engine.sample(wanted)) == dict(vllm_engine.sample(wanted))
        assert all(engine._wait(engine._made(url)) > b for url, b in zip(record.urls, before, strict=True))
    assert len(engine.swaps) == 2
    with pytest.raises(Locked, match="another command uses the served engine"):
        open_engine(EngineConfig(), **OPTIONS, run=run)
    engine.close()

    second = open_engine(EngineConfig(), **OPTIONS, run=run)
    second.load(tied_policies[0])
    assert second.swaps == []  # held since the command before
    second.close()
    with pytest.raises(UserError, match="restart tseeds engine serve"):
        open_engine(EngineConfig(), dtype="bfloat16", max_model_len=128, run=run)

    third = open_engine(EngineConfig(), **OPTIONS, run=run)
    third.load(tied_policies[0])
    rows = third.sample([replace(r, max_tokens=80) for r in sample_requests * 20])
    next(rows)
    process.send_signal(signal.SIGKILL)
    with pytest.raises(StageFailed, match="is dead"):
        list(rows)
    third.close()
    process.wait(30)
    assert (run / "engine.json").is_file()
    with caplog.at_level(logging.WARNING):
        assert find(run, EngineConfig(), **OPTIONS) is None
    assert "dead engine server" in caplog.text
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2)
        except OSError:
            break
        time.sleep(0.5)
    else:
        pytest.fail("the server outlived the process that served it")


def test_a_served_engine_is_not_another_machines(tmp_path: Path, caplog) -> None:
    record = Record(os.getpid(), 0.0, "elsewhere", [], "p", "float32", 1, True)
    (tmp_path / "engine.json").write_text(json.dumps(asdict(record)))
    with caplog.at_level(logging.WARNING):
        assert find(tmp_path, EngineConfig(), **OPTIONS) is None
    assert "on elsewhere" in caplog.text
    (tmp_path / "engine.json").write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        find(tmp_path, EngineConfig(), **OPTIONS)
