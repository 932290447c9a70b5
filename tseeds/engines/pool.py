"""Several engines as Ray actors: chunks go to whoever is free, a lost actor's chunk runs again elsewhere.

What a row gets depends on its own seed alone (with transformers, to the last bit, on its batch, and chunks are the batches of one
engine), so the pool's results are those of one engine, bit for bit on CPU.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from tseeds import cluster
from tseeds.config import EngineConfig, LoraConfig
from tseeds.engines import policies, requests, threads, transformers
from tseeds.engines.base import Completion, Engine, Request
from tseeds.engines.transformers import TransformersEngine
from tseeds.errors import StageFailed, first_line

logger = logging.getLogger(__name__)

CHUNKS_AT_ONCE = 2
"""Chunks that an actor works on together: the second keeps its batch full while the first runs out."""


class PoolEngine:
    """An engine (see Engine) made of ``config.workers`` Ray actors, each holding one engine of ``config.backend``.

    A local Ray starts by itself; ``config.ray_address`` joins a cluster, where policy directories must lie at the same path
    on every node.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        dtype: str,
        max_model_len: int,
        trust_remote_code: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self._options = {
            "dtype": dtype,
            "max_model_len": max_model_len,
            "trust_remote_code": trust_remote_code,
            "lora": lora,
        }
        self._actors: list[Any] = []
        self._ray: Any = None
        self._held: policies.Policy | None = None

    def load(self, policy: Path) -> str:
        """Make every actor hold ``policy``; see Engine.load. Actors lost earlier are replaced here."""
        wanted = policies.describe(policy)
        if self._held is not None and self._held.digest == wanted.digest and len(self._actors) == self.config.workers:
            return wanted.digest
        self._start(wanted)
        self._held = None
        digests = self._everywhere("load", str(wanted.path))
        if set(digests) != {wanted.digest}:
            raise StageFailed(f"{policy}: changed while the engines loaded it; policies are never written in place")
        self._held = wanted
        return wanted.digest

    def sample(self, requests_: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """Yield (index, completion) as chunks finish; see Engine.sample."""
        if self._held is None:
            raise StageFailed("the engine holds no verified policy: load one before sampling")
        requests.check(requests_, vocab_size=self._held.vocab_size, max_model_len=self.max_model_len)
        return self._run(requests_)

    def _run(self, requests_: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        import ray

        waiting = deque(self._chunks(requests_))
        running: dict[Any, tuple[Any, Sequence[int]]] = {}
        try:
            while waiting or running:
                for _ in range(CHUNKS_AT_ONCE):
                    for actor in self._actors:
                        busy = sum(1 for a, _ in running.values() if a is actor)
                        if waiting and busy < CHUNKS_AT_ONCE:
                            chunk = waiting.popleft()
                            running[actor.sample.remote([requests_[i] for i in chunk])] = (actor, chunk)
                ready, _ = ray.wait(list(running), num_returns=1)
                for future in ready:
                    actor, chunk = running.pop(future)
                    try:
                        completions = ray.get(future)
                    except ray.exceptions.RayActorError as error:
                        waiting.appendleft(chunk)
                        self._drop(actor, error)
                        continue
                    except ray.exceptions.RayTaskError as error:
                        raise cluster.cause(error, "an engine worker") from None
                    yield from zip(chunk, completions, strict=True)
        finally:
            for future in running:
                ray.cancel(future, force=False)

    def _chunks(self, requests_: Sequence[Request]) -> Sequence[Sequence[int]]:
        """Row numbers by chunk. With transformers a row's neighbours change its last bits: a chunk is a batch of one engine."""
        if self.config.backend == "transformers":
            return list(transformers.batches(requests_, min(self._everywhere("room")), self.max_model_len))
        return chunks(len(requests_), len(self._actors))

    def _drop(self, actor: Any, error: Exception) -> None:
        """Forget a dead actor.

        Raises:
            StageFailed: it was the last one.
        """
        if actor in self._actors:
            self._actors.remove(actor)
            logger.warning("an engine worker was lost (%s); %d left", first_line(error), len(self._actors))
        if not self._actors:
            self._held = None
            raise StageFailed(
                f"all {self.config.workers} engine workers were lost (the last: {first_line(error)}); everything committed so "
                "far is kept, run the same command again (fewer engine.workers if memory ran out)"
            )

    def _everywhere(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all actors at once; results of those that live."""
        import ray

        calls = [(actor, getattr(actor, method).remote(*arguments)) for actor in self._actors]
        results = []
        for actor, future in calls:
            try:
                results.append(ray.get(future))
            except ray.exceptions.RayActorError as error:
                self._drop(actor, error)
            except ray.exceptions.RayTaskError as error:
                raise cluster.cause(error, "an engine worker") from None
        return results

    def _start(self, policy: policies.Policy) -> None:
        """Start Ray and the actors that are missing."""
        missing = self.config.workers - len(self._actors)
        if missing == 0:
            return
        number = threads.choose(policy.parameters, self.config.threads)
        if self.config.threads == 0:
            number = max(1, min(number, threads.cores() // self.config.workers))
        ray = self._ray or cluster.connect(self.config.ray_address, max(threads.cores(), self.config.workers * number))
        self._ray = ray
        split = self.config.tensor_parallel if self.config.backend == "vllm" else 1
        gpus = split if ray.cluster_resources().get("GPU") else 0
        config = self.config.model_copy(update={"workers": 1, "threads": number, "ray_address": None})
        worker = ray.remote(num_cpus=number, num_gpus=gpus, max_restarts=0, max_concurrency=CHUNKS_AT_ONCE + 1)(Worker)
        self._actors += [worker.remote(config.model_dump(), self._options) for _ in range(missing)]
        try:
            mend = f"lower engine.workers or engine.threads (each wants {number} CPUs and {gpus} GPUs), or add nodes"
            cluster.started(ray, self._actors, self.config.stall_seconds, "engine workers", mend)
        except StageFailed:
            self.close()
            raise
        logger.info("%d engine workers on ray, %d threads each", len(self._actors), number)

    def sleep(self) -> None:
        """Free device memory of all actors until the next load or sample."""
        if self._actors:
            self._everywhere("sleep")

    def close(self) -> None:
        """Stop the actors, and Ray where this engine was its last user. Idempotent."""
        if self._ray is None:
            return
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors, self._held, self._ray = [], None, None
        cluster.release()


class Worker:
    """One engine in a Ray actor."""

    def __init__(self, config: dict[str, Any], options: dict[str, Any]) -> None:
        from tseeds.engines import open_engine

        self._engine: Engine = open_engine(EngineConfig(**config), **options)
        self._one = threading.Lock() if config["backend"] == "transformers" else None

    def load(self, policy: str) -> str:
        """See Engine.load."""
        return self._engine.load(Path(policy))

    def sample(self, requests_: list[Request]) -> list[Completion]:
        """All completions of a chunk, in order. Chunks of several calls decode together."""
        if self._one is None:
            found = dict(self._engine.sample(requests_))
        else:
            with self._one:
                found = dict(self._engine.sample(requests_))
        return [found[i] for i in range(len(requests_))]

    def room(self) -> int:
        """See TransformersEngine.room."""
        return cast(TransformersEngine, self._engine).room()

    def sleep(self) -> None:
        """See Engine.sleep."""
        self._engine.sleep()

    def pid(self) -> int:
        """Process id of the actor."""
        return os.getpid()


def chunks(rows: int, workers: int) -> list[range]:
    """Row numbers cut into chunks: about eight per worker, so that the last one keeps nobody waiting, of 16 to 128 rows.

    >>> chunks(40, 2)
    [range(0, 16), range(16, 32), range(32, 40)]
    """
    size = max(16, min(128, -(-rows // (8 * max(1, workers)))))
    return [range(i, min(i + size, rows)) for i in range(0, rows, size)]
