"""A warm parent that forks one child per job, each of which trains until it is done or dies.

Importing torch and transformers takes seconds, a kill and a resume fractions of one: so everything is imported once, no
thread is started, and every job runs in a fork. Started as a script it serves jobs, one JSON object a line on stdin:
{"config": nested pipeline, "root": run directory, "fault": TSEEDS_FAULT or "", "accept": bool, "kill_after": seconds}, or
{"argv": words} for the command line itself, to which "stop": {"signal", "when": path, "times"} sends signals as soon as the
path exists. It answers each with {"status": exit code, negative for a signal, "seconds", "cpu": seconds of it, "stopping":
seconds from the first signal to the end, "error": text}.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KILLED = -signal.SIGKILL
IMPORTED = (
    "pandas",  # pyarrow imports it on first use
    "pyarrow.compute",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_fast",
    "tseeds.engines.transformers",
    "tseeds.fork",
    "tseeds.grading",
    "tseeds.pipeline",
    "tseeds.training.trainer",
    "tseeds_cli.main",
    "tseeds_cli.panel",
)


def train(job: dict[str, Any]) -> None:
    """The child: the loop, or the command line."""
    os.environ["TSEEDS_FAULT"] = job.get("fault", "")
    if "argv" in job:
        from tseeds_cli.main import main

        sys.argv = ["tseeds", *job["argv"]]
        main()
        return
    from tseeds import config as configuration
    from tseeds import pipeline
    from tseeds.context import Context

    config = configuration.parse(job["config"])
    with Context(config) as context:
        pipeline.run_pipeline(config, Path(job["root"]), context, accept=job.get("accept", False))


def fork(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a child; kill -9 it after kill_after seconds, if it still lives."""
    begin = time.monotonic()
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                train(job)
                status = 0
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException as error:
                status = getattr(error, "exit_code", 70)
                if status == 70:
                    import traceback

                    traceback.print_exc()
                print(error, file=sys.stderr, flush=True)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        limit = job.get("kill_after") or 300.0
        handle = os.pidfd_open(pid)
        stopped = _stop(handle, pid, **job["stop"]) if "stop" in job else None
        ended, _, _ = select.select([handle], [], [], limit)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        os.close(handle)
        _, raw, used = os.wait4(pid, 0)
        said.seek(0)
        text = said.read().decode(errors="replace")
    end = time.monotonic()
    return {
        "status": os.waitstatus_to_exitcode(raw),
        "seconds": end - begin,
        "cpu": used.ru_utime + used.ru_stime,
        "stopping": end - stopped if stopped else None,
        "error": text[-6000:],
    }


def _stop(handle: int, pid: int, *, when: str, signal: int, times: int = 1) -> float | None:
    """Send a signal ``times`` times as soon as ``when`` exists; when the first was sent, None if the child ended before."""
    while not os.path.exists(when):
        if select.select([handle], [], [], 0.005)[0]:
            return None
    first = time.monotonic()
    for _ in range(times):
        os.kill(pid, signal)
        if select.select([handle], [], [], 0.3)[0]:
            break
    return first


def serve() -> None:
    """Import everything that a run imports, say so, then fork a child per line."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in IMPORTED:
        importlib.import_module(name)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    threads = len(os.listdir("/proc/self/task"))
    sys.stdout.write(json.dumps({"ready": threads}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(fork(json.loads(line))) + "\n")
        sys.stdout.flush()


class Forked:
    """The client: starts the warm parent and gives it jobs."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.threads = json.loads(self._read())["ready"]

    def _read(self) -> str:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, f"the warm parent died with status {self._server.wait()}"
        return line

    def run(self, config: dict[str, Any], root: Path, **job: Any) -> dict[str, Any]:
        """Train in ``root``; the answer of the job."""
        return self._ask({"config": config, "root": str(root), **job})

    def tseeds(self, *argv: object, **job: Any) -> dict[str, Any]:
        """The command line."""
        return self._ask({"argv": [str(a) for a in argv], **job})

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        return json.loads(self._read())

    def close(self) -> None:
        """End the warm parent."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(30)


if __name__ == "__main__":
    serve()
