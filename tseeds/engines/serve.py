"""``tseeds engine serve``: vLLM's own API servers, kept warm beside a run for stage commands that follow one another.

One server per engine worker. They listen on 127.0.0.1 only and answer nothing but /health without the key, which lies in
``<run>/engine.key``, readable by its owner alone. ``<run>/engine.json`` says where they are; it is written when the first
policy is loaded and proven, and removed at the end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tseeds.children import end_with_parent
from tseeds.config import Pipeline
from tseeds.engines import policies, threads
from tseeds.errors import Interrupted, Locked, StageFailed, UserError

logger = logging.getLogger(__name__)

RECORD = "engine.json"
KEY = "engine.key"
START_SECONDS = 900.0
"""Longest wait for a server to answer."""


@dataclass(frozen=True)
class Record:
    """engine.json. pid and started name the serving process; urls: one server each; policy: the one they started with;
    adapters: whether they serve LoRA adapters."""

    pid: int
    started: float
    host: str
    urls: list[str]
    policy: str
    dtype: str
    max_model_len: int
    exact_entropies: bool
    adapters: bool = False


def read_record(run: Path) -> Record | None:
    """The record of a serving process, dead or alive; None where there is none."""
    try:
        return Record(**json.loads((run / RECORD).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise UserError(f"{run / RECORD}: damaged; remove it and serve again") from None


def alive(record: Record) -> bool:
    """Whether the process that wrote the record still runs on this machine."""
    import psutil

    if record.host != socket.gethostname():
        return False
    try:
        return abs(psutil.Process(record.pid).create_time() - record.started) < 1.0
    except psutil.NoSuchProcess:
        return False


class Guard:
    """ASGI middleware for vLLM's server: every path but /health needs the key, which vLLM itself asks for on some only."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self.expected):
                await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
                await send({"type": "http.response.body", "body": b""})
                return
        await self.app(scope, receive, send)


def serve(
    run: Path, config: Pipeline, policy: Path, *, max_model_len: int, ready: Callable[[Record], None] | None = None
) -> None:
    """Serve until SIGINT or SIGTERM; ``ready`` is called once the policy is loaded and proven.

    Raises:
        Locked: another process serves this run. UserError: no vllm backend, unusable policy. StageFailed: a server died.
    """
    from tseeds.engines.client import ServedEngine

    engine = config.engine
    if engine.backend != "vllm":
        raise UserError(f'engine.backend = "{engine.backend}" cannot be served; set engine.backend = "vllm"')
    old = read_record(run)
    if old is not None and alive(old):
        raise Locked(f"{run}: process {old.pid} serves this run already; stop it first")
    described = policies.describe(policy)
    first = described.base or described
    (run / RECORD).unlink(missing_ok=True)
    (run / KEY).unlink(missing_ok=True)
    key = secrets.token_hex(32)
    with os.fdopen(os.open(run / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as handle:
        handle.write(key)
    stop = _Stop()
    servers: list[_Server] = []
    try:
        number = _threads(described, config)
        logger.info("serving %s: %d engine(s), %d thread(s) each", policy, engine.workers, number)
        lora = _lora(described, config)
        while not servers:
            options = _arguments(config, max_model_len) | lora
            servers = [_Server(run, k, first, options, key, number) for k in range(engine.workers)]
            try:
                for server in servers:
                    server.wait(stop)
                if stop.asked:
                    raise Interrupted("stopped at your request while the engine was starting")
            except StageFailed as error:
                if not lora:
                    raise
                logger.warning(
                    "%s: vllm serves no adapters of this model (%s): they are merged and swapped", first.path, error
                )
                for server in servers:
                    server.stop()
                lora, servers = {}, []
        import psutil

        record = Record(
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            host=socket.gethostname(),
            urls=[server.url for server in servers],
            policy=str(first.path),
            dtype=config.policy.dtype,
            max_model_len=max_model_len,
            exact_entropies=False,
            adapters=bool(lora),
        )
        served = ServedEngine(run, engine, dtype=record.dtype, max_model_len=max_model_len, record=record)
        record = Record(**asdict(record) | {"exact_entropies": served.hook()})
        served.load(policy)
        served.close()
        temporary = run / f"{RECORD}.tmp"
        temporary.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
        temporary.replace(run / RECORD)
        if ready is not None:
            ready(record)
        while not stop.asked:
            for server in servers:
                server.check()
            time.sleep(0.2)
    finally:
        (run / RECORD).unlink(missing_ok=True)
        (run / KEY).unlink(missing_ok=True)
        for server in servers:
            server.stop()
        stop.restore()


def _lora(policy: policies.Policy, config: Pipeline) -> dict[str, Any]:
    """vLLM's arguments for the adapters that the run trains, or that it starts with; none where it has none."""
    from tseeds.engines.vllm import for_adapters

    lora = config.update.lora
    rank, targets = max(policy.rank, lora.rank if lora else 0), {*policy.targets, *(lora.targets if lora else ())}
    try:
        return for_adapters(rank, sorted(targets)) if rank else {}
    except ValueError as error:
        logger.warning("%s: %s: they are merged and swapped", policy.path, error)
        return {}


def _threads(policy: policies.Policy, config: Pipeline) -> int:
    number = threads.choose(policy.parameters, config.engine.threads)
    if config.engine.threads == 0:
        number = max(1, min(number, threads.cores() // config.engine.workers))
    return number


class _Stop:
    """SIGINT and SIGTERM ask to stop."""

    def __init__(self) -> None:
        self.asked = False
        self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _Server:
    """One vLLM API server in a child process that ends with this one."""

    def __init__(
        self,
        run: Path,
        number: int,
        policy: policies.Policy,
        options: dict[str, Any],
        key: str,
        cores: int,
    ) -> None:
        self.number = number
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = run / "logs" / f"engine-{number}.log"
        self.log.parent.mkdir(exist_ok=True)
        environment = os.environ | {
            "VLLM_API_KEY": key,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CONFIGURE_LOGGING": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": str(cores),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(policy.path)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--tokens-only", "--disable-uvicorn-access-log"]
        command += ["--disable-fastapi-docs", "--uvicorn-log-level", "warning"]
        command += ["--middleware", "tseeds.engines.serve.Guard"]
        command += _flags(options)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def wait(self, stop: _Stop) -> None:
        """Until /health answers."""
        import urllib.request

        deadline = time.monotonic() + START_SECONDS
        while not stop.asked:
            self.check()
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                if time.monotonic() > deadline:
                    raise StageFailed(
                        f"the engine server did not answer in {START_SECONDS:g} s; see {self.log}"
                    ) from None
                time.sleep(0.2)

    def check(self) -> None:
        """Raises StageFailed if the server died."""
        code = self.process.poll()
        if code is not None:
            raise StageFailed(f"the engine server ended by itself (exit code {code}); its log is {self.log}")

    def stop(self) -> None:
        """End the server and its children."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _arguments(config: Pipeline, max_model_len: int) -> dict[str, Any]:
    """vLLM's engine arguments."""
    from tseeds.engines.vllm import arguments, on_cpu

    options = arguments(
        config.engine,
        dtype=config.policy.dtype,
        max_model_len=max_model_len,
        trust_remote_code=config.policy.trust_remote_code,
    )
    if not _gpu():
        options |= on_cpu(config.engine)
    return options


def _flags(options: dict[str, Any]) -> list[str]:
    """vLLM's engine arguments as command-line flags."""
    flags: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}", *map(str, value)]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()
