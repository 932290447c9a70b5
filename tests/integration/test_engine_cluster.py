"""A Ray cluster that runs already: engines, grading and update workers join it, with the results of one process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from training_toys import make_policy, make_rows

from tseeds import cluster
from tseeds.config import EngineConfig, UpdateConfig
from tseeds.engines import open_engine
from tseeds.engines.pool import PoolEngine
from tseeds.errors import StageFailed, UserError
from tseeds.grading import Grader, GradingOptions
from tseeds.grading.remote import RayPool
from tseeds.training import distributed

OPTIONS = {"dtype": "float32", "max_model_len": 128}


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of one node with two CPUs on loopback."""
    ray = pytest.importorskip("ray", reason="clusters need the optional ray")
    port = free_port()
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--node-ip-address=127.0.0.1",
        f"--port={port}", "--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats",
        "--object-store-memory=100000000", "--ray-client-server-port=" + str(free_port()),
    ]  # fmt: skip
    with open(tmp_path_factory.mktemp("ray") / "log", "wb") as log:
        head = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    found = f"127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                cluster.connect(found, 2)  # one connection for the whole file
                break
            except StageFailed:
                assert time.monotonic() < deadline
                assert head.poll() is None
        yield found
        cluster.release()
        assert not ray.is_initialized()
    finally:
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        head.wait()


def test_transformers_workers_keep_the_batches_of_one_engine(
    address, transformers_engine, tied_policies, sample_requests
) -> None:
    """Neighbours change last bits there: rows of one part made again alone, and rows of one engine, are the same bits."""
    options = EngineConfig(backend="transformers", workers=2, kv_cache_gb=0.25, ray_address=address)
    engine = open_engine(options, **OPTIONS)
    assert isinstance(engine, PoolEngine)
    for each in (engine, transformers_engine):
        each.load(tied_policies[0])
    wanted = [replace(r, part=i // 20) for i, r in enumerate(sample_requests)]
    found = dict(engine.sample(wanted))
    assert found == dict(transformers_engine.sample(wanted))
    assert dict(engine.sample(wanted[20:40])) == {i - 20: found[i] for i in range(20, 40)}

    more = open_engine(options.model_copy(update={"stall_seconds": 3.0, "workers": 1}), **OPTIONS)
    with pytest.raises(StageFailed, match="started 0 of 1 engine workers within 3 s; it has 0 CPUs") as caught:
        more.load(tied_policies[0])
    assert "lower engine.workers" in str(caught.value)
    engine.close()


def test_a_cluster_that_is_not_there_is_one_line() -> None:
    begin = time.monotonic()
    code = "from tseeds import cluster; cluster.connect('127.0.0.1:9', 1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1].startswith(
        "tseeds.errors.StageFailed: engine.ray_address 127.0.0.1:9: no Ray cluster that takes this machine answers there"
    )
    assert time.monotonic() - begin < 20


ANSWERS = [
    ("1/2", r"so \boxed{0.5}"), ("4", "four, I think"), ("x^2-1", r"\boxed{(x-1)(x+1)}"), ("7", r"\boxed{8}"),
    ("3", r"\boxed{2^{2^{2^{2^{2^{2}}}}}}"), ("2", r"\boxed{\sqrt{4}}"),
]  # fmt: skip


def test_grading_on_the_cluster_gives_the_same_verdicts_and_kills_at_the_limit(address, tmp_path) -> None:
    options = GradingOptions(workers=2)
    with Grader(options) as here, Grader(options, RayPool(options, address)) as there:
        expected = here.grade(ANSWERS * 20)
        found = there.grade(ANSWERS * 20)
        assert [(g.verdict, g.reward, g.extracted) for g in found] == [
            (g.verdict, g.reward, g.extracted) for g in expected
        ]
        pids = there.worker_pids()
        assert pids
        assert not set(pids) & set(here.worker_pids())
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import time\n\ndef verify(gold, text):\n    if text == 'hang':\n        time.sleep(60)\n    return text == gold\n"
    )
    options = GradingOptions(task=f"python:{slow}:verify", time_limit=0.5, workers=1)
    with Grader(options, RayPool(options, address)) as grader:
        verdicts = [str(g.verdict) for g in grader.grade([("a", "a"), ("a", "hang"), ("a", "b")])]
        assert verdicts == ["correct", "timeout", "wrong"]
        (actor,) = grader._pool._actors
        import ray

        os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)  # Ray starts it again
        assert [str(g.verdict) for g in grader.grade([("c", "c"), ("c", "d")])] == ["correct", "wrong"]


def test_ranks_on_the_cluster_make_the_update_of_torchrun(address, tmp_path) -> None:
    """Bit for bit; a mistake and a dead rank are one line each."""
    policy = make_policy(tmp_path / "policy", tie_word_embeddings=True)
    config = UpdateConfig(learning_rate=1e-3, minibatches=2, tokens_per_microbatch=100, processes=2, save_tokens=True)
    rows = make_rows(groups=5)
    made = {}
    for name, ray_address in (("torchrun", None), ("ray", address)):
        made[name] = distributed.update(
            config, policy, rows, out_policy=tmp_path / name, out_state=tmp_path / f"{name}-state", dtype="float32",
            run_seed=0, iteration=1, timeout=200, ray_address=ray_address,
        )  # fmt: skip
    for table in ("rows", "tokens"):
        assert getattr(made["torchrun"], table).equals(getattr(made["ray"], table))
    for file in ("torchrun/model.safetensors", "torchrun-state/optimizer.safetensors"):
        assert (tmp_path / file).read_bytes() == (tmp_path / file.replace("torchrun", "ray")).read_bytes()

    options = {"dtype": "float32", "run_seed": 0, "iteration": 1, "ray_address": address, "timeout": 200}
    options |= {"out_policy": tmp_path / "p", "out_state": tmp_path / "s"}
    with pytest.raises(UserError, match="needs a reference policy"):
        distributed.update(config.model_copy(update={"kl_coef": 0.1}), policy, rows, **options)


def test_a_dead_rank_is_one_line(address, tmp_path, monkeypatch) -> None:
    policy = make_policy(tmp_path / "policy", tie_word_embeddings=True)
    put = distributed.cluster.started

    def started(ray, actors, *rest) -> None:
        put(ray, actors, *rest)
        os.kill(ray.get(actors[1].pid.remote()), signal.SIGKILL)

    monkeypatch.setattr(distributed.cluster, "started", started)
    with pytest.raises(StageFailed, match="a trainer process on Ray died") as caught:
        distributed.update(
            UpdateConfig(processes=2, minibatches=1), policy, make_rows(groups=2), out_policy=tmp_path / "p",
            out_state=tmp_path / "s", dtype="float32", run_seed=0, iteration=1, timeout=200, ray_address=address,
        )  # fmt: skip
    assert "\n" not in str(caught.value)
