"""Grading on a Ray cluster: one actor on each node, which owns the killable worker processes there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tseeds import cluster
from tseeds.errors import StageFailed, first_line
from tseeds.grading.options import GradingOptions
from tseeds.grading.pool import Job, Pool

CHUNK = 256
"""Most jobs that one call to an actor carries."""
RETRIES = 3
"""Times that an actor which died is started again, and its jobs with it, by Ray."""
START_SECONDS = 120.0


class RayPool:
    """Stands in for a Pool: the same verdicts and limits, ``options.workers`` processes on every node.

    A job's time limit kills its process as it does in Pool. Files of a task in Python must lie at the same path on all nodes.
    """

    def __init__(self, options: GradingOptions, address: str | None) -> None:
        self._ray = cluster.connect(address, max(2, options.workers))
        nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        actor = self._ray.remote(num_cpus=0, max_restarts=RETRIES, max_task_retries=RETRIES, max_concurrency=4)(_Node)
        self._actors = [
            actor.options(scheduling_strategy=cluster.on(self._ray, node, soft=True)).remote(options.model_dump())
            for node in nodes
        ]
        cluster.started(self._ray, self._actors, START_SECONDS, "grading actors", "look at the cluster with ray status")

    def run(self, jobs: Sequence[Job]) -> list[tuple[Any, float]]:
        """See Pool.run.

        Raises:
            StageFailed: a node's actor died again and again.
        """
        from ray.util import ActorPool

        size = max(1, min(CHUNK, -(-len(jobs) // (2 * len(self._actors)))))
        parts = [list(jobs[k : k + size]) for k in range(0, len(jobs), size)]
        pool = ActorPool(self._actors)
        try:
            return [result for part in pool.map(lambda a, v: a.run.remote(v), parts) for result in part]
        except self._ray.exceptions.RayActorError as error:
            raise StageFailed(
                f"grading on Ray was lost ({first_line(error)}); everything committed so far is kept, run the same "
                "command again"
            ) from None
        except self._ray.exceptions.RayTaskError as error:
            raise cluster.cause(error, "grading on Ray") from None

    def pids(self) -> list[int]:
        """Process ids of the grading processes that run now, on all nodes."""
        return [pid for found in self._ray.get([a.pids.remote() for a in self._actors]) for pid in found]

    def close(self) -> None:
        """End actors and processes. Idempotent."""
        actors, self._actors = self._actors, []
        if actors:
            for actor in actors:
                self._ray.kill(actor)  # the processes end with the pipe to it
            cluster.release()


class _Node:
    """The grading processes of one node."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._pool = Pool(GradingOptions.model_validate(options))

    def run(self, jobs: list[Job]) -> list[tuple[Any, float]]:
        """See Pool.run."""
        return self._pool.run(jobs)

    def pids(self) -> list[int]:
        """See Pool.pids."""
        return self._pool.pids()

    def pid(self) -> int:
        """Process id of the actor."""
        return os.getpid()
