"""Does a long run stay as light as a short one? Memory, time, file handles per iteration; then the time of ``status``.

    python benchmarks/longrun.py [300] [--out longrun] [--backend transformers|vllm]

Trains the toy loop (one layer of random weights, so that the bookkeeping shows) for N iterations in this process and prints the slopes over all iterations after the first 30: a leak of
one snapshot, tokenizer or manifest an iteration shows at once. Writes OUT/iterations.jsonl and prints one JSON line at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "faults"))

from toy_loop import loop_config, tiny_policy

from tseeds import config as configuration
from tseeds import pipeline
from tseeds.artifacts import store
from tseeds.artifacts.rundir import RunDir
from tseeds.context import Context
from tseeds.toy import make

WARM = 30
"""Iterations that are left out of the slopes: caches fill, allocators settle."""


class Measure(pipeline.Listener):
    """Notes what the process holds after every iteration."""

    def __init__(self, out: Path) -> None:
        self.out, self.process, self.last = out, psutil.Process(), time.monotonic()
        self.cpu = self._cpu()

    def _cpu(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def iteration(self, number: int, metrics: dict) -> None:
        gc.collect()
        now, cpu = time.monotonic(), self._cpu()
        line = {
            "iteration": number,
            "rss_mb": self.process.memory_info().rss / 1e6,
            "seconds": now - self.last,
            "cpu_seconds": cpu - self.cpu,
            "handles": self.process.num_fds(),
            "threads": self.process.num_threads(),
        }
        store.append_line(self.out, line)
        if number % 10 == 0:
            print(json.dumps(line), flush=True)
        self.last, self.cpu = time.monotonic(), self._cpu()


def slope(lines: list[dict], key: str) -> float:
    """Least-squares slope per iteration after the first WARM."""
    late = [line for line in lines if line["iteration"] > WARM]
    return float(np.polyfit([line["iteration"] for line in late], [line[key] for line in late], 1)[0])


def main() -> int:
    """Run, measure, print."""
    parser = argparse.ArgumentParser(description="Measure a long run.")
    parser.add_argument("iterations", type=int, nargs="?", default=300)
    parser.add_argument("--out", type=Path, default=Path("longrun"))
    parser.add_argument("--backend", choices=["transformers", "vllm"], default="transformers")
    arguments = parser.parse_args()
    out: Path = arguments.out
    make(out / "toy")
    config = configuration.parse(
        loop_config(
            out / "toy",
            run={"iterations": arguments.iterations},
            policy={"path": str(tiny_policy(out / "toy"))},
            rollout={"max_response_tokens": 10},
            update={"entropy_coef": 0.01, "kl_coef": 0.0},  # random weights solve nothing; this moves them
            problems={"limit": 64},
            snapshot={"every": 5, "keep_last": 5, "keep_states": 2},
            evaluate={"every": 50},
            engine={"backend": arguments.backend, "part_rows": 256},
        )
    )
    run = RunDir(out / "run")
    with Context(config) as context:
        pipeline.run_pipeline(config, run.root, context, listener=Measure(out / "iterations.jsonl"))
    lines = store.read_lines(out / "iterations.jsonl")
    late = [line for line in lines if line["iteration"] > WARM]
    command = [sys.executable, "-m", "tseeds_cli.main", "status", str(run.root)]
    status = []
    for _ in range(5):
        begin = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        status.append(time.monotonic() - begin)
    result = {
        "iterations": len(lines),
        "backend": arguments.backend,
        "rss_mb_at_30": round(next(line["rss_mb"] for line in lines if line["iteration"] >= WARM), 1),
        "rss_mb_at_end": round(lines[-1]["rss_mb"], 1),
        "rss_kb_per_iteration": round(1000 * slope(lines, "rss_mb"), 2),
        "cpu_seconds_per_iteration": round(float(np.median([line["cpu_seconds"] for line in late])), 3),
        "cpu_ms_growth_per_100_iterations": round(1e5 * slope(lines, "cpu_seconds"), 2),
        "handles": [late[0]["handles"], late[-1]["handles"]],
        "threads": [late[0]["threads"], late[-1]["threads"]],
        "status_seconds_best_of_5": round(min(status), 3),
        "disk_mb": round(sum(f.stat().st_size for f in run.root.rglob("*") if f.is_file()) / 1e6, 1),
        "cores": os.cpu_count(),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
