"""The update in several processes: the same ``Trainer`` under torchrun, its weights in FSDP2 shards.

``update`` is what the stage calls; it hands files to ``python -m torch.distributed.run … -m tseeds.training.distributed`` and
reads files back. On GPUs the ranks talk through NCCL, on CPU through gloo.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tseeds.config import UpdateConfig
from tseeds.errors import StageFailed, UserError
from tseeds.training.results import StepResult
from tseeds.training.rows import Rows

log = logging.getLogger(__name__)

_TABLES = ("rows", "steps", "tokens")


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
    base: Path | None = None,
    reference: Path | None = None,
    trust_remote_code: bool = False,
    timeout: float | None = None,
) -> StepResult:
    """One ``Trainer.step`` and ``Trainer.save`` in ``config.processes`` processes; arguments as there.

    timeout: seconds until the processes are killed; None waits for ever.

    Raises:
        UserError: what the trainer refuses. StageFailed: a process died or hung; its last lines are in the message.
    """
    with tempfile.TemporaryDirectory(prefix="tseeds-update-") as folder:
        work = Path(folder)
        pq.write_table(_table(rows), work / "rows_in.parquet")
        spec = {
            "config": config.model_dump(mode="json"),
            "trainer": {
                "policy": str(policy), "dtype": dtype, "run_seed": run_seed, "max_response_tokens": max_response_tokens,
                "state": state and str(state), "base": base and str(base), "trust_remote_code": trust_remote_code,
            },
            "iteration": iteration, "reference": reference and str(reference),
            "out_policy": str(out_policy), "out_state": str(out_state),
        }  # fmt: skip
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    except subprocess.TimeoutExpired:
        raise StageFailed(
            f"update: {processes} processes did not finish within {timeout:g} s and were killed"
        ) from None
    if (work / "mistake.txt").is_file():
        raise UserError((work / "mistake.txt").read_text())
    if done.returncode != 0:
        lines = [x for x in done.stderr.strip().splitlines() if "Error" in x] or done.stderr.strip().splitlines()
        log.debug("update: %s", done.stderr)
        raise StageFailed(f"update: a trainer process died: {lines[0] if lines else f'exit code {done.returncode}'}")


def _table(rows: Rows) -> pa.Table:
    return pa.table({f.name: pa.array(getattr(rows, f.name), from_pandas=False) for f in fields(Rows)})


def _rows(table: pa.Table) -> Rows:
    return Rows.from_tables(table.drop_columns(["reward"]), table.select(["row_id", "reward"]))


def _worker(work: Path) -> None:
    """One rank: the same calls as in a single process; the first rank writes."""
    import torch
    import torch.distributed as dist

    from tseeds.training.trainer import Trainer

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        spec: dict[str, Any] = json.loads((work / "spec.json").read_text())
        options = spec["trainer"]
        for name in ("state", "base"):
            options[name] = options[name] and Path(options[name])
        trainer = Trainer(UpdateConfig.model_validate(spec["config"]), Path(options.pop("policy")), **options)
        reference = spec["reference"] and Path(spec["reference"])
        result = trainer.step(
            _rows(pq.read_table(work / "rows_in.parquet")), iteration=spec["iteration"], reference=reference
        )
        trainer.save(Path(spec["out_policy"]), Path(spec["out_state"]))
        if dist.get_rank() == 0:
            for name in _TABLES:
                table = getattr(result, name)
                if table is not None:
                    pq.write_table(table, work / f"{name}.parquet")
            (work / "summary.json").write_text(json.dumps(result.summary))
    except UserError as error:
        (work / "mistake.txt").write_text(str(error))
        raise SystemExit(UserError.exit_code) from None
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
