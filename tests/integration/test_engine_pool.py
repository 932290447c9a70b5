"""Two engines on a local Ray: the same results as one engine, whatever happens to a worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tseeds.config import EngineConfig
from tseeds.engines import Request, open_engine
from tseeds.engines.pool import PoolEngine
from tseeds.errors import StageFailed, UserError


@pytest.fixture(scope="module")
def pool() -> Iterator[PoolEngine]:
    pytest.importorskip("ray", reason="engine.workers above 1 needs the optional ray")
    engine = open_engine(EngineConfig(workers=2, kv_cache_gb=0.25), dtype="float32", max_model_len=128)
    assert isinstance(engine, PoolEngine)
    yield engine
    engine.close()


def pids(pool: PoolEngine) -> list[int]:
    import ray

    return ray.get([actor.pid.remote() for actor in pool._actors])


def test_results_equal_one_engine_bit_for_bit(pool, vllm_engine, tied_policies, sample_requests) -> None:
    for policy in tied_policies[:2]:
        assert vllm_engine.load(policy) == pool.load(policy)
        assert dict(pool.sample(sample_requests)) == dict(vllm_engine.sample(sample_requests))


def test_mistakes_are_as_clear_as_in_process(pool, tied_policies, copy_policy) -> None:
    pool.load(tied_policies[0])
    with pytest.raises(UserError, match="token id 500 is outside"):
        pool.sample([Request(ids=[500], max_tokens=1, seed=0)])
    copied = copy_policy(tied_policies[1])
    (copied / "probe.json").write_text("{}")
    with pytest.raises(UserError, match="damaged probe"):
        pool.load(copied)
    pool.load(tied_policies[0])
    assert len(dict(pool.sample([Request(ids=[7], max_tokens=1, seed=0)]))) == 1


def test_a_killed_worker_loses_and_doubles_nothing(pool, tied_policies, sample_requests, capfd) -> None:
    """Then the last one dies too: one clear error; a load starts new ones and the same rows come out."""
    pool.load(tied_policies[0])
    many = sample_requests * 8
    expected = list(pool.sample(many))
    assert sorted(i for i, _ in expected) == list(range(len(many)))
    rows = pool.sample(many)
    found = [next(rows)]
    os.kill(pids(pool)[0], signal.SIGKILL)
    found += rows
    assert sorted(i for i, _ in found) == list(range(len(many)))
    assert dict(found) == dict(expected)
    assert len(pool._actors) == 1
    os.kill(pids(pool)[0], signal.SIGKILL)
    with pytest.raises(StageFailed, match="all 2 engine workers were lost") as caught:
        list(pool.sample(many))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().out == ""
    pool.load(tied_policies[0])
    assert dict(pool.sample(many)) == dict(expected)
