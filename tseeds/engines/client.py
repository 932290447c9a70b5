"""The engine that ``tseeds engine serve`` keeps warm, seen from a stage command."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import logging
import queue
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tseeds.config import EngineConfig
from tseeds.engines import policies, probe, requests
from tseeds.engines.base import Completion, Request
from tseeds.engines.serve import KEY, Record, alive, read_record
from tseeds.errors import Locked, StageFailed, UserError, first_line

logger = logging.getLogger(__name__)

IN_FLIGHT = 384
"""Requests that one server holds at once: its batch and half as many behind it."""

ATTEMPTS = 3
"""Times that a request is sent before a server that drops it counts as dead."""

T = TypeVar("T")


def find(run: Path, config: EngineConfig, *, dtype: str, max_model_len: int) -> ServedEngine | None:
    """The engine served for ``run``; None where none is, or where its process is dead (which is said).

    Raises:
        UserError: one is served, but with another dtype or for shorter sequences.
    """
    record = read_record(run)
    if record is None:
        return None
    if not alive(record):
        logger.warning(
            "%s names a dead engine server (process %d on %s): starting an engine for this command alone",
            run / "engine.json",
            record.pid,
            record.host,
        )
        return None
    if record.dtype != dtype or record.max_model_len < max_model_len:
        raise UserError(
            f"{run}: the served engine runs {record.dtype} for {record.max_model_len} tokens, this stage needs {dtype} for "
            f"{max_model_len}: restart tseeds engine serve"
        )
    return ServedEngine(run, config, dtype=dtype, max_model_len=max_model_len, record=record)


class ServedEngine:
    """An engine (see Engine) behind vLLM servers on this machine. One stage command uses them at a time."""

    def __init__(self, run: Path, config: EngineConfig, *, dtype: str, max_model_len: int, record: Record) -> None:
        self.config, self.dtype, self.max_model_len = config, dtype, max_model_len
        self.run, self.record = run, record
        self.merges = False
        """Whether an adapter was merged because the servers serve none."""
        self.swaps: list[float] = []
        """Seconds of each swap, check included: a measurement."""
        self._lock: Any = None
        self._take()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tseeds-engine-client", daemon=True)
        self._thread.start()
        self._session: Any = self._wait(self._connect())
        self._held: policies.Policy | None = None
        self._probe: probe.Probe | None = None
        self._names = itertools.count()

    def _take(self) -> None:
        """Lock the key file: another stage command would swap the policy under this one.

        Raises:
            Locked: another one has it.
        """
        try:
            self._lock = open(self.run / KEY, encoding="ascii")  # noqa: SIM115 held until close
        except OSError as error:
            raise UserError(f"{self.run / KEY}: not readable ({error.strerror}); restart tseeds engine serve") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise Locked(f"{self.run}: another command uses the served engine; wait for it") from None

    async def _connect(self) -> Any:
        import aiohttp

        headers = {"Authorization": f"Bearer {self._lock.read().strip()}"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        return aiohttp.ClientSession(headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def hook(self) -> bool:
        """Ask the workers for exact entropies; True where all give them."""
        return all(answer == "True" for answer in self._rpc("tseeds_hook"))

    def load(self, policy: Path) -> str:
        """Make ``policy`` the one that is sampled from; see Engine.load."""
        wanted = policies.describe(policy)
        if self._held is not None and self._held.digest == wanted.digest:
            return wanted.digest
        if not Path(self.record.policy).is_dir():
            raise UserError(
                f"the served engine began with {self.record.policy}, which is gone; restart tseeds engine serve"
            )
        if why := policies.difference(policies.describe(self.record.policy), wanted):
            raise UserError(f"{policy}: cannot follow {self.record.policy} in the served engine: {why}")
        adapter = wanted if wanted.base is not None and self.record.adapters else None
        full = wanted.base if adapter is not None and wanted.base is not None else wanted
        there = all(answer["digest"] == full.digest for answer in self._rpc("tseeds_held"))
        if there and adapter is None:
            self._held = wanted
            return wanted.digest
        expected = probe.of_policy(wanted.path, wanted.vocab_size, self.dtype)
        begin = time.perf_counter()
        self._held = None
        if not there:
            self._swap(full)
        if adapter is not None:
            self._offer(adapter)
        for url in self.record.urls:
            found = self._wait(self._score(url, expected.ids, wanted))
            probe.check(wanted.path, expected, found, self.dtype, self._probe)
        if not there:
            self._rpc("tseeds_confirm", full.digest)
        self.swaps.append(time.perf_counter() - begin)
        self._held, self._probe = wanted, expected
        return wanted.digest

    @property
    def shares_batches(self) -> bool:
        """Whether rows of several policies decode together: the servers were started for LoRA adapters."""
        return self.record.adapters

    def _swap(self, full: policies.Policy) -> None:
        """Load the weights of a policy into every server; an adapter is merged into its base."""
        from tseeds.engines.vllm import merged, say_merged

        say_merged(full, self)
        with merged(full, trust_remote_code=False) as path:
            self._rpc("tseeds_swap", str(path))
        self._wait(self._everywhere("/reset_prefix_cache"))

    def _offer(self, adapter: policies.Policy) -> None:
        """Name an adapter by its digest to every server, at its newest path: vllm reads one again that it dropped."""
        body = {"lora_name": adapter.digest, "lora_path": str(adapter.path)}
        for url in self.record.urls:
            known = {m["id"]: m.get("root") for m in self._wait(self._get(url, "/v1/models"))["data"]}
            if known.get(adapter.digest) != str(adapter.path):
                load = body | {"load_inplace": adapter.digest in known}
                self._wait(self._ask("POST", url, "/v1/load_lora_adapter", load))

    def _model(self, policy: policies.Policy) -> dict[str, str]:
        """What a request for this policy says beside its tokens."""
        return {"model": policy.digest} if self.record.adapters and policy.base is not None else {}

    def sample(self, requests_: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """Yield (index, completion) as completions finish; see Engine.sample."""
        if self._held is None:
            raise StageFailed("the engine holds no verified policy: load one before sampling")
        requests.check(requests_, vocab_size=self._held.vocab_size, max_model_len=self.max_model_len)
        return self._run(requests_, self._held)

    def _run(self, requests_: Sequence[Request], policy: policies.Policy) -> Iterator[tuple[int, Completion]]:
        done: queue.SimpleQueue[tuple[int, Completion] | Exception] = queue.SimpleQueue()
        work = asyncio.run_coroutine_threadsafe(self._feed(requests_, policy, done), self._loop)
        try:
            tokens, last = -1.0, time.monotonic()
            left = len(requests_)
            while left:
                try:
                    item = done.get(timeout=min(10.0, self.config.stall_seconds / 4))
                except queue.Empty:
                    if (count := self._wait(self._tokens())) != tokens:
                        tokens, last = count, time.monotonic()
                    elif time.monotonic() - last > self.config.stall_seconds:
                        raise StageFailed(
                            f"the served engine made no token for {self.config.stall_seconds:g} seconds; everything "
                            "committed so far is kept: restart tseeds engine serve and run the same command again"
                        ) from None
                    continue
                if isinstance(item, Exception):
                    self._held = None
                    raise item
                left -= 1
                last = time.monotonic()
                yield item
        finally:
            work.cancel()

    async def _feed(self, requests_: Sequence[Request], policy: policies.Policy, done: Any) -> None:
        """Keep every server full; whichever has room takes the next request."""
        waiting = iter(enumerate(requests_))

        async def lane(url: str) -> None:
            for index, request in waiting:
                done.put((index, await self._complete(url, request, policy)))

        lanes = [lane(url) for _ in range(min(IN_FLIGHT, len(requests_))) for url in self.record.urls]
        tasks = [asyncio.ensure_future(work) for work in lanes]
        try:
            await asyncio.gather(*tasks)
        except StageFailed as error:
            done.put(error)
        except Exception as error:
            done.put(StageFailed(f"the served engine gave an answer that cannot be read: {first_line(error)}"))
        finally:
            for task in tasks:
                task.cancel()

    async def _complete(self, url: str, request: Request, policy: policies.Policy) -> Completion:
        from tseeds.engines.vllm import sampling

        exact = self.record.exact_entropies
        fields = sampling(request, policy.eos, exact) | {"flat_logprobs": False}
        if request.entropies and exact:
            fields["logprobs"] = 2  # the server cuts its answer to this many: the token itself and the entropy
        body = {"token_ids": list(request.ids), "sampling_params": fields, **self._model(policy)}
        answer = await self._post(url, "/inference/v1/generate", body)
        choice = answer["choices"][0]
        content = choice["logprobs"]["content"]
        entropies = None
        if request.entropies and exact:
            entropies = [{t["token_id"]: t["logprob"] for t in c["top_logprobs"]}[-1] for c in content]
        elif request.entropies:
            entropies = [requests.entropy([t["logprob"] for t in c["top_logprobs"]]) for c in content]
        return Completion(
            ids=choice["token_ids"],
            logprobs=[c["logprob"] for c in content],
            finish_reason="stop" if choice["finish_reason"] == "stop" else "length",
            entropies=entropies,
        )

    async def _score(self, url: str, sequences: Sequence[Sequence[int]], policy: policies.Policy) -> list[list[float]]:
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        rows = []
        for ids in sequences:
            body = {"token_ids": list(ids), "sampling_params": params, **self._model(policy)}
            answer = await self._post(url, "/inference/v1/generate", body)
            found = answer["prompt_logprobs"][1:]
            rows.append([p[str(token)]["logprob"] for p, token in zip(found, ids[1:], strict=True)])
        return rows

    def _rpc(self, method: str, *arguments: str) -> list[Any]:
        """Call a method of PolicyWorker on every worker of every server."""
        answers = self._wait(self._everywhere("/collective_rpc", {"method": method, "args": list(arguments)}))
        return [result for answer in answers for result in answer["results"]]

    async def _everywhere(self, path: str, body: dict[str, Any] | None = None) -> list[Any]:
        return await asyncio.gather(*(self._post(url, path, body) for url in self.record.urls))

    async def _tokens(self) -> float:
        """Tokens that all servers have made so far."""
        return sum([await self._made(url) for url in self.record.urls])

    async def _made(self, url: str) -> float:
        """Tokens that one server has made so far."""
        text = await self._ask("GET", url, "/metrics", None)
        lines = (line for line in text.decode().splitlines() if line.startswith("vllm:generation_tokens_total"))
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    async def _get(self, url: str, path: str) -> Any:
        return json.loads(await self._ask("GET", url, path, None))

    async def _post(self, url: str, path: str, body: dict[str, Any] | None) -> Any:
        return json.loads(await self._ask("POST", url, path, body))

    async def _ask(self, method: str, url: str, path: str, body: dict[str, Any] | None) -> bytes:
        """The body of an answer.

        Raises:
            StageFailed: the server is dead or answers with an error.
        """
        import aiohttp

        for attempt in itertools.count(1):
            try:
                async with self._session.request(method, url + path, json=body) as response:
                    content = await response.read()
                    if response.status == 200:
                        return content
                    said = content.decode(errors="replace").strip().splitlines()
                    why = f"{response.status} {said[0][:300] if said else ''}"
                    if response.status >= 500:
                        raise _dead(url, why)
                    raise StageFailed(f"the served engine refused {path}: {why}")
            except aiohttp.ClientError as error:
                # a kept-alive connection may have been closed meanwhile; asking again gives the same answer
                if attempt == ATTEMPTS or isinstance(error, aiohttp.ClientConnectorError):
                    raise _dead(url, first_line(error)) from None
        raise AssertionError

    def sleep(self) -> None:
        """Nothing: the server's memory is its own."""

    def close(self) -> None:
        """Let go of the server, which keeps running. Idempotent."""
        if self._lock is None:
            return
        self._wait(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._lock.close()
        self._lock = None


def _dead(url: str, why: str) -> StageFailed:
    return StageFailed(
        f"the served engine at {url} is dead ({why}); everything committed so far is kept: restart tseeds engine serve, "
        "or run the same command again without it"
    )
