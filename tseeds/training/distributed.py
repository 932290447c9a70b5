"""The update in several processes: the same ``Trainer`` in each, its weights in FSDP2 shards.

``update`` is what the stage calls. On one machine it hands files to ``python -m torch.distributed.run … -m
tseeds.training.distributed`` and reads files back; on a Ray cluster (``engine.ray_address``) each process is an actor. On GPUs
the ranks talk through NCCL, on CPU through gloo.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tseeds import cluster
from tseeds.children import end_with_parent
from tseeds.config import UpdateConfig
from tseeds.errors import StageFailed, UserError, first_line
from tseeds.training.results import StepResult
from tseeds.training.rows import Rows

log = logging.getLogger(__name__)

_TABLES = ("rows", "steps", "tokens")
START_SECONDS = 120.0
SETTLE_SECONDS = 5.0


def update(
    config: UpdateConfig,
    policy: Path,
    rows: Rows,
    *,
    out_policy: Path,
    out_state: Path,
    dtype: str,
    run_seed: int,
    iteration: int,
    max_response_tokens: int | None = None,
    state: Path | None = None,
    reference: Path | None = None,
    trust_remote_code: bool = False,
    timeout: float | None = None,
    ray_address: str | None = None,
) -> StepResult:
    """One ``Trainer.step`` and ``Trainer.save`` in ``config.processes`` processes; arguments as there.

    timeout: seconds until the processes are killed; None waits for ever. ray_address: start them as actors on that Ray
    cluster, where policy and output lie at the same paths on all nodes; None starts them on this machine by torchrun.

    Raises:
        UserError: what the trainer refuses. StageFailed: a process died or hung; its last lines are in the message.
    """
    spec = {
        "config": config.model_dump(mode="json"),
        "trainer": {
            "policy": str(policy), "dtype": dtype, "run_seed": run_seed, "max_response_tokens": max_response_tokens,
            "state": state and str(state), "trust_remote_code": trust_remote_code,
        },
        "iteration": iteration, "reference": reference and str(reference),
        "out_policy": str(out_policy), "out_state": str(out_state),
    }  # fmt: skip
    if ray_address is not None:
        return _on_ray(spec, _table(rows), config.processes, timeout, ray_address)
    with tempfile.TemporaryDirectory(prefix="tseeds-update-") as folder:
        work = Path(folder)
        pq.write_table(_table(rows), work / "rows_in.parquet")
        (work / "spec.json").write_text(json.dumps(spec))
        _launch(work, config.processes, timeout)
        tables = {n: pq.read_table(f) if (f := work / f"{n}.parquet").is_file() else None for n in _TABLES}
        summary = json.loads((work / "summary.json").read_text())
    assert tables["rows"] is not None
    assert tables["steps"] is not None
    return StepResult(rows=tables["rows"], steps=tables["steps"], tokens=tables["tokens"], summary=summary)


def _launch(work: Path, processes: int, timeout: float | None) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        "-m", "tseeds.training.distributed", str(work),
    ]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    try:
        # a session of its own: Ctrl-C is for this process, which lets the step finish; kill -9 of it ends the ranks
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=environment, check=False,
            start_new_session=True, preexec_fn=end_with_parent,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise _late(processes, timeout) from None
    for line in (work / "warnings.txt").read_text().splitlines() if (work / "warnings.txt").is_file() else ():
        log.warning("%s", line)
    if (work / "mistake.txt").is_file():
        kind, _, text = (work / "mistake.txt").read_text().partition("\n")
        raise (StageFailed if kind == StageFailed.__name__ else UserError)(text)
    if done.returncode != 0:
        lines = [x for x in done.stderr.strip().splitlines() if "Error" in x] or done.stderr.strip().splitlines()
        log.debug("update: %s", done.stderr)
        raise StageFailed(f"update: a trainer process died: {lines[0] if lines else f'exit code {done.returncode}'}")


def _late(processes: int, timeout: float | None) -> StageFailed:
    return StageFailed(f"update: {processes} processes did not finish within {timeout:g} s and were killed")


def _on_ray(spec: dict[str, Any], rows: pa.Table, processes: int, timeout: float | None, address: str) -> StepResult:
    """One actor a rank; the first one's result."""
    ray = cluster.connect(address, processes)
    actors: list[Any] = []
    try:
        places = cluster.places(ray, processes)
        rank = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)(_Rank)
        actors = [rank.options(scheduling_strategy=cluster.on(ray, node)).remote() for node, _ in places]
        cluster.started(ray, actors, START_SECONDS, "trainer processes", "look at the cluster with ray status")
        host, port = ray.get(actors[0].address.remote())
        together = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
        together["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        table = ray.put(rows)
        calls = [
            actor.train.remote(spec, table, together | {"RANK": str(k), "LOCAL_RANK": str(local)})
            for k, (actor, (_, local)) in enumerate(zip(actors, places, strict=True))
        ]
        return _gather(ray, calls, timeout)
    finally:
        for actor in actors:
            ray.kill(actor)
        cluster.release()


def _gather(ray: Any, calls: list[Any], timeout: float | None) -> StepResult:
    """The first rank's result, once all are done.

    Raises:
        UserError: what the trainer refused. StageFailed: a rank died, or all took too long.
    """
    waiting = list(calls)
    found: dict[Any, Any] = {}
    errors: list[Any] = []
    deadline = None if timeout is None else time.monotonic() + timeout
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=left)
        if not ready and not errors:
            raise _late(len(calls), timeout)
        for call in ready:
            try:
                found[call] = ray.get(call)
            except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
                errors.append(error)
        if errors and (deadline is None or len(errors) == 1):
            deadline = time.monotonic() + SETTLE_SECONDS  # the rank that died may be reported after those that miss it
        if not ready:
            break
    dead = [e for e in errors if isinstance(e, ray.exceptions.RayActorError)]
    if dead:
        raise StageFailed(
            f"update: a trainer process on Ray died ({first_line(dead[0])}); everything committed so far is kept, run the "
            "same command again"
        )
    if errors:
        raise cluster.cause(errors[0], "update: a trainer process")
    return found[calls[0]]


class _Rank:
    """One rank in a Ray actor."""

    def pid(self) -> int:
        """Process id of the actor."""
        return os.getpid()

    def address(self) -> tuple[str, int]:
        """Where the ranks meet: this node's address and a free port."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as place:
            place.bind((host, 0))
            return host, place.getsockname()[1]

    def train(self, spec: dict[str, Any], rows: pa.Table, environment: dict[str, str]) -> StepResult | None:
        """See _train. Ray hides all GPUs from an actor that asked for none; the engines ask for them."""
        os.environ.update(environment)
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            del os.environ["CUDA_VISIBLE_DEVICES"]
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        return _train(spec, rows)


def _table(rows: Rows) -> pa.Table:
    return pa.table({f.name: pa.array(getattr(rows, f.name), from_pandas=False) for f in fields(Rows)})


def _rows(table: pa.Table) -> Rows:
    return Rows.from_tables(table.drop_columns(["reward"]), table.select(["row_id", "reward"]))


def _train(spec: dict[str, Any], rows: pa.Table) -> StepResult | None:
    """One rank: the same calls as in a single process; the first rank has the result."""
    import torch
    import torch.distributed as dist

    from tseeds.training.trainer import Trainer

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        options = dict(spec["trainer"])
        options["state"] = options["state"] and Path(options["state"])
        trainer = Trainer(UpdateConfig.model_validate(spec["config"]), Path(options.pop("policy")), **options)
        reference = spec["reference"] and Path(spec["reference"])
        result = trainer.step(_rows(rows), iteration=spec["iteration"], reference=reference)
        trainer.save(Path(spec["out_policy"]), Path(spec["out_state"]))
        return result if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _worker(work: Path) -> None:
    """One rank under torchrun."""
    end_with_parent()
    if os.environ["RANK"] == "0":
        logging.getLogger("tseeds").addHandler(logging.FileHandler(work / "warnings.txt", delay=True))
    try:
        result = _train(json.loads((work / "spec.json").read_text()), pq.read_table(work / "rows_in.parquet"))
    except UserError as error:
        (work / "mistake.txt").write_text(f"{type(error).__name__}\n{error}")
        raise SystemExit(UserError.exit_code) from None
    if result is not None:
        for name in _TABLES:
            table = getattr(result, name)
            if table is not None:
                pq.write_table(table, work / f"{name}.parquet")
        (work / "summary.json").write_text(json.dumps(result.summary))


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
