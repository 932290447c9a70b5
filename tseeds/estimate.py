"""What a pipeline will need: memory of trainer and engine, bytes on disk, time per iteration.

Reads config.json and the headers of the safetensors files of the policy (or ``policy.architecture``), never weights, and
imports no torch. Parameters, optimizer state and files follow from shapes exactly; activations and buffers are a model of
the trainer in ``training`` (docs/estimate.md says how it compares with measured peaks); speeds are assumptions that the
caller can replace.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tseeds import schedule
from tseeds.config import ArchitectureConfig, Pipeline
from tseeds.errors import UserError

Device = Literal["cpu", "gpu"]
Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""{tensor name: (safetensors dtype, shape)}"""

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "I8": 1, "BOOL": 1}
LIBRARIES_MB: dict[Device, float] = {"cpu": 470, "gpu": 700}
"""A process that has calculated something with torch and transformers (CPU: measured, torch 2.13; GPU: assumed)."""
VLLM_MB: dict[Device, float] = {"cpu": 1300, "gpu": 3000}
"""What vLLM adds to it beside weights and cache (CPU: measured with a 0.4 M model; GPU: assumed)."""
CHUNK: dict[Device, int] = {"cpu": 1 << 24, "gpu": 1 << 27}
"""Logits of one head chunk, as in training.logprobs."""
ALLOCATOR = 6
"""Bytes a parameter that reading fp32 masters of a bf16 policy leaves with the C library's allocator (CPU; measured)."""
QUERIES = 256
"""Queries of one attention run, as in training.batches."""
PADDING = 1.15
"""Attention rectangles may be this much larger than their contents, as in training.batches."""
DECODED = 256
"""Sequences that decode together, as in engines.vllm."""
FLOPS: dict[tuple[Device, str], float] = {
    ("cpu", "float32"): 45e9, ("cpu", "bfloat16"): 90e9, ("gpu", "float32"): 30e12, ("gpu", "bfloat16"): 400e12,
}  # fmt: skip
"""FLOP/s of one core or GPU in the update. CPU: measured; GPU: assumed, 40 % of an H100's peak."""
DECODE: dict[Device, float] = {"cpu": 30e9, "gpu": 2e12}
"""Sampling: FLOP/s of one core (measured), bytes/s of memory of one GPU (assumed, 60 % of an H100's peak)."""

SMALL_DECODE = 6000.0
"""tokens/s of one engine on one core with a model so small that the engine's own work decides (measured)."""


@dataclass(frozen=True)
class Model:
    """A policy's size. files: the tensors of each safetensors file, empty where the policy is not on this machine."""

    shape: ArchitectureConfig
    files: dict[str, Tensors]
    other_bytes: int = 0

    @property
    def head_dim(self) -> int:
        return self.shape.head_dim or self.shape.hidden_size // self.shape.num_attention_heads

    @property
    def trained(self) -> Tensors:
        """The parameters as the trainer names them: a tied head is one with the embedding."""
        tensors = {name: t for file in self.files.values() for name, t in file.items()} or architecture_tensors(
            self.shape
        )
        if self.shape.tie_word_embeddings:
            tensors = {name: t for name, t in tensors.items() if name != "lm_head.weight"}
        return tensors

    @property
    def parameters(self) -> int:
        """Distinct parameters."""
        return sum(math.prod(shape) for _, shape in self.trained.values())

    def stored_bytes(self, dtype: str) -> int:
        """Bytes of the model directory; of tensors in ``dtype`` where the files are not here."""
        if self.files:
            return sum(file_bytes(t) for t in self.files.values()) + self.other_bytes
        kind = "F32" if dtype == "float32" else "BF16"
        return file_bytes({name: (kind, shape) for name, (_, shape) in self.trained.items()})


def architecture_tensors(shape: ArchitectureConfig) -> Tensors:
    """The tensors of a Llama-like model of this architecture, in bf16."""
    d, i, v = shape.hidden_size, shape.intermediate_size, shape.vocab_size
    dim = shape.head_dim or d // shape.num_attention_heads
    q, kv = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    for n in range(shape.num_hidden_layers):
        layer = {
            "self_attn.q_proj.weight": (q, d), "self_attn.k_proj.weight": (kv, d), "self_attn.v_proj.weight": (kv, d),
            "self_attn.o_proj.weight": (d, q), "mlp.gate_proj.weight": (i, d), "mlp.up_proj.weight": (i, d),
            "mlp.down_proj.weight": (d, i), "input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,),
        }  # fmt: skip
        if shape.attention_bias:
            layer |= {f"self_attn.{p}_proj.bias": (size,) for p, size in (("q", q), ("k", kv), ("v", kv))}
        if shape.qk_norm:
            layer |= {f"self_attn.{p}_norm.weight": (dim,) for p in "qk"}
        sizes |= {f"model.layers.{n}.{name}": size for name, size in layer.items()}
    if not shape.tie_word_embeddings:
        sizes["lm_head.weight"] = (v, d)
    return {name: ("BF16", size) for name, size in sizes.items()}


def file_bytes(tensors: Tensors, *, metadata: dict[str, str] | None = None) -> int:
    """Bytes of the safetensors file that holds these tensors: length, JSON header padded to 8, data.

    metadata: None is {"format": "pt"}; an empty one leaves it out.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} if metadata is None else metadata}
    if metadata == {}:
        del header["__metadata__"]
    offset = 0
    # the file's order: wider types first, then names
    for name, (kind, shape) in sorted(tensors.items(), key=lambda t: (-BYTES[t[1][0]], t[0])):
        size = BYTES[kind] * math.prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + -(-length // 8) * 8 + offset


def read_tensors(file: Path) -> Tensors:
    """Names, types and shapes from the header of a safetensors file.

    Raises:
        UserError: it is not one.
    """
    try:
        with open(file, "rb") as handle:
            size = int.from_bytes(handle.read(8), "little")
            if not 0 < size < 100_000_000:
                raise ValueError("its header is too long")
            header = json.loads(handle.read(size))
        return {n: (t["dtype"], tuple(t["shape"])) for n, t in header.items() if n != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: not a readable safetensors file ({error})") from None


def read_model(config: Pipeline) -> Model:
    """The pipeline's policy: its directory where it is on this machine, else ``policy.architecture``.

    Raises:
        UserError: neither is there, or the directory is unusable.
    """
    from tseeds.artifacts.policy import model_directory, policy_files

    path = Path(config.policy.path)
    if not path.is_dir():
        if config.policy.architecture is None:
            raise UserError(
                f"policy.path {path}: not on this machine; give its numbers in [policy.architecture] (hidden_size, "
                "intermediate_size, ... as in its config.json) for an estimate"
            )
        return Model(config.policy.architecture, {})
    path = model_directory(path)
    files = policy_files(path)
    data = json.loads((path / "config.json").read_text(encoding="utf-8"))
    data = data.get("text_config", data)
    names = set(ArchitectureConfig.model_fields)
    try:
        numbers = {k: v for k, v in data.items() if k in names and v is not None}
        numbers.setdefault("num_key_value_heads", numbers["num_attention_heads"])
        shape = ArchitectureConfig.model_validate(numbers)
    except (KeyError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path / 'config.json'}: not a Llama-like architecture ({reason}); no estimate") from None
    weights = [f for f in files if f.suffix == ".safetensors"]
    other = sum(f.stat().st_size for f in files if f.suffix != ".safetensors")
    return Model(shape, {f.name: read_tensors(f) for f in weights}, other)


@dataclass(frozen=True)
class Part:
    """One line of an estimate. value in bytes, seconds or tokens/s; note: how it comes about."""

    name: str
    value: float
    note: str = ""


@dataclass(frozen=True)
class Estimate:
    """What a pipeline needs. memory and disk in bytes, time in seconds; per process (trainer, engine) or per run (disk)."""

    device: Device
    parameters: int
    trained: int
    trainer: list[Part] = field(default_factory=list)
    trainer_peak: float = 0.0
    engine: list[Part] = field(default_factory=list)
    engine_peak: float = 0.0
    disk: list[Part] = field(default_factory=list)
    disk_end: float = 0.0
    disk_peak: float = 0.0
    time: list[Part] = field(default_factory=list)
    iteration_seconds: float = 0.0


def lora_tensors(config: Pipeline, model: Model) -> Tensors:
    """The adapter's tensors: A [rank, in] and B [out, rank] of every target."""
    assert config.update.lora is not None
    rank = config.update.lora.rank
    out: Tensors = {}
    for name, (_, shape) in model.trained.items():
        stem = name.removesuffix(".weight")
        if len(shape) == 2 and stem.rpartition(".")[2] in config.update.lora.targets:
            stem = f"base_model.model.{stem}"
            out[f"{stem}.lora_A.default.weight"] = ("F32", (rank, shape[1]))
            out[f"{stem}.lora_B.default.weight"] = ("F32", (shape[0], rank))
    return out


def masters(config: Pipeline, model: Model) -> Tensors:
    """What is trained, in fp32."""
    found = lora_tensors(config, model) if config.update.lora is not None else model.trained
    return {name: ("F32", shape) for name, (_, shape) in found.items()}


def state_bytes(config: Pipeline, model: Model) -> dict[str, int]:
    """Bytes of the safetensors files of a trainer state: moments, and masters where the policy is not fp32."""
    trained = masters(config, model)
    moments = {f"{kind}.{n}": t for kind in ("exp_avg", "exp_avg_sq") for n, t in trained.items()}
    files = {"optimizer.safetensors": file_bytes(moments, metadata={})}
    kinds = {kind for file in model.files.values() for kind, _ in file.values()}
    if not kinds:
        kinds = {"F32" if config.policy.dtype == "float32" else "BF16"}
    if config.update.lora is None and kinds != {"F32"}:
        files["master.safetensors"] = file_bytes(trained, metadata={})
    return files


def policy_bytes(config: Pipeline, model: Model) -> int:
    """Bytes of the safetensors files of a policy that the trainer writes: a whole model, or an adapter."""
    if config.update.lora is None:
        return model.stored_bytes(config.policy.dtype)
    plain = {n.replace(".default.", "."): t for n, t in masters(config, model).items()}
    return file_bytes(plain, metadata={"base": 64 * "0"})


def nodes(config: Pipeline) -> tuple[int, int]:
    """(nodes of the largest micro-batch, nodes of a minibatch) when every prompt and response has its full length.

    A node is one token position; the rows of a group share their prompt's.
    """
    groups = -(-config.rollout.problems_per_iteration // config.update.minibatches)
    prompt, response = config.problems.max_prompt_tokens, config.rollout.max_response_tokens
    whole = groups * (prompt + config.rollout.group_size * response)
    longest = prompt + response
    budget = max(config.update.tokens_per_microbatch, longest)
    return min(budget, whole), whole


def activation_bytes(model: Model, config: Pipeline, count: int) -> float:
    """What one forward pass over ``count`` nodes keeps for the backward pass.

    Per layer and node, in units of the compute type's width: two norms (input, normalised, scaled: the input in fp32 where
    the compute type is narrower), the rotated and gathered queries, keys (gathered once per run of 256 queries) and values,
    attention's output before and after it is put in order, and four MLP vectors (gate, its SiLU, up, their product).
    """
    s, b = model.shape, 4 if config.policy.dtype == "float32" else 2
    q, kv = s.num_attention_heads * model.head_dim, s.num_key_value_heads * model.head_dim
    longest = config.problems.max_prompt_tokens + config.rollout.max_response_tokens
    gathered = PADDING * max(1.0, (longest / QUERIES + 1) / 2)
    norm = 3 * b * s.hidden_size if b == 4 else (4 + 2 + 2) * s.hidden_size
    per_head = 3 * b * (q + kv) if b == 4 else 8 * (q + kv)
    layer = 2 * norm + b * ((PADDING + 2) * q + 2 * gathered * kv + 4 * s.intermediate_size)
    layer += per_head if s.qk_norm else 0
    masks = b * PADDING * min(longest, QUERIES + longest / 2)
    return count * (s.num_hidden_layers * layer + norm + b * s.hidden_size + masks)


def head_bytes(model: Model, config: Pipeline, count: int, device: Device) -> float:
    """Buffers of the chunked output head: two chunks of fp32 logits with their narrow copy, and the head's gradient."""
    s, b = model.shape, 4 if config.policy.dtype == "float32" else 2
    chunk = min(count, max(1, CHUNK[device] // s.vocab_size))
    wide = 4 if chunk < count else b
    gradient = 0 if config.update.lora is not None else s.vocab_size * s.hidden_size * (wide + (b if b != wide else 0))
    return chunk * s.vocab_size * (2 * 4 + (b if b == 2 else 0)) + gradient


def estimate(
    config: Pipeline,
    model: Model,
    *,
    device: Device,
    response_tokens: float | None = None,
    sampling_rate: float | None = None,
    update_rate: float | None = None,
    cores: int | None = None,
    gpu_memory_gb: float = 80.0,
) -> Estimate:
    """Memory, disk and time of a pipeline.

    response_tokens: mean response length for time and trajectories (default: half the budget; memory always takes the full
    budget). sampling_rate, update_rate: tokens/s of all engines and of the trainer together, over the assumed ones.
    cores: CPU cores (default: those of this machine). gpu_memory_gb: memory of one GPU.
    """
    trained = sum(math.prod(shape) for _, shape in masters(config, model).values())
    result = Estimate(device, model.parameters, trained)
    _trainer(result, config, model)
    _engine(result, config, model, gpu_memory_gb)
    mean = response_tokens if response_tokens is not None else config.rollout.max_response_tokens / 2
    _disk(result, config, model, mean)
    _time(result, config, model, mean, sampling_rate, update_rate, cores or len(os.sched_getaffinity(0)))
    return result


def _set(result: Estimate, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(result, name, value)


def _trainer(result: Estimate, config: Pipeline, model: Model) -> None:
    world, trained, device = config.update.processes, result.trained, result.device
    narrow, lora = config.policy.dtype == "bfloat16", config.update.lora is not None
    width = 2 if narrow else 4
    largest, whole = nodes(config)
    activations = activation_bytes(model, config, largest)
    head = head_bytes(model, config, largest, device)
    copy: float = width * result.parameters if lora else 2 * result.parameters if narrow else 0
    if world > 1 and not lora:
        # root group (embedding, head, norm) and two layers are gathered at a time
        s = model.shape
        root = s.vocab_size * s.hidden_size * (1 if s.tie_word_embeddings else 2)
        layers = (result.parameters - root) / s.num_hidden_layers
        copy = width * (root + 2 * layers)
    gradients = 4 * trained / world
    fixed = [
        Part("libraries", LIBRARIES_MB[device] * 1e6),
        Part("fp32 master weights", 4 * trained / world, f"4 B x {trained:,} / {world}"),
        Part("Adam moments", 8 * trained / world, "8 B each"),
        Part("compute copy", copy, "frozen base" if lora else "rounded copy" if copy else "the masters themselves"),
    ]
    if device == "cpu" and narrow and not lora:
        fixed.append(Part("allocator", ALLOCATOR * result.parameters, "freed while loading, not given back (measured)"))
    moving = [
        Part("gradients", gradients, "fp32"),
        Part("activations", activations, f"{largest:,} nodes in the largest micro-batch"),
        Part("head chunk", head, "logits of one chunk and the head's gradient"),
    ]
    # With several micro-batches earlier gradients are there when activations are at their largest; a single one gathers
    # gradients while it gives activations back.
    busy = gradients + activations + head if largest < whole else max(gradients, activations + head) + head / 2
    if config.update.kl_coef:
        fixed.append(Part("reference policy", width * result.parameters / world, "update.kl_coef > 0"))
    saved = max((file_bytes(t) for t in model.files.values()), default=model.stored_bytes(config.policy.dtype))
    saved = policy_bytes(config, model) if lora else saved
    base = sum(p.value for p in fixed)
    peak = base + max(busy, saved if device == "cpu" else 0)
    _set(result, trainer=[*fixed, *moving], trainer_peak=peak)


def _engine(result: Estimate, config: Pipeline, model: Model, gpu_memory_gb: float) -> None:
    s, device = model.shape, result.device
    width = 2 if config.policy.dtype == "bfloat16" else 4
    token = 2 * s.num_hidden_layers * s.num_key_value_heads * model.head_dim * width
    response = max(config.rollout.max_response_tokens, config.evaluate.max_response_tokens)
    length = config.problems.max_prompt_tokens + response
    rows = config.rollout.problems_per_iteration * config.rollout.group_size / config.engine.workers
    together = min(DECODED, max(1, rows))
    split = config.engine.tensor_parallel
    parts = [
        Part("libraries", LIBRARIES_MB[device] * 1e6),
        Part("engine", VLLM_MB[device] * 1e6 if config.engine.backend == "vllm" else 0, config.engine.backend),
        Part(
            "weights", width * result.parameters / split, f"{config.policy.dtype}, / {split} GPUs" if split > 1 else ""
        ),
    ]
    room = math.inf
    if config.engine.backend == "vllm":
        share = config.engine.gpu_memory_utilization * gpu_memory_gb * 1e9 - sum(p.value for p in parts)
        room = max(0.0, share) * split if device == "gpu" else config.engine.kv_cache_gb * 2**30
    # on a CPU the pages of the cache count when they are touched
    cache = min(together * length * token, room)
    note = f"{token:,} B a token; {cache / (length * token):.0f} of {together:.0f} sequences at full length"
    parts.append(Part("KV cache", cache / split, note))
    _set(result, engine=parts, engine_peak=sum(p.value for p in parts))


def _disk(result: Estimate, config: Pipeline, model: Model, mean: float) -> None:
    whole, policy = model.stored_bytes(config.policy.dtype), policy_bytes(config, model)
    state = sum(state_bytes(config, model).values())
    last, keep = config.run.iterations, config.snapshot
    taken = schedule.pool_steps(keep, last, snapshot_bytes=policy)
    kept = [i for i in range(1, last + 1) if i > last - keep.keep_states or _multiple(i, keep.keep_states_every)]
    linked = [i for i in kept if i in taken]  # their policy is the snapshot's files under another name
    snapshots, policies = whole + policy * (len(taken) - 1), policy * (len(kept) - len(linked))
    rows = last * config.rollout.problems_per_iteration * config.rollout.group_size
    trajectories = rows * (8 * mean + 100)
    update = policy + state
    parts = [
        Part("one policy", policy),
        Part("one trainer state", state, ", ".join(state_bytes(config, model))),
        Part("snapshots", snapshots, f"{len(taken)} in the pool after {last} iterations"),
        Part("newest policies", policies, f"of {len(kept)} kept iterations, {len(linked)} of them also snapshots"),
        Part("trainer states", state * len(kept), f"of {len(kept)} iterations"),
        Part("trajectories", trajectories, f"{rows:,} rows, about 8 B a token and 100 B a row (assumed)"),
    ]
    end = sum(p.value for p in parts[2:])
    _set(result, disk=parts, disk_end=end, disk_peak=end + (update if last > keep.keep_states else 0))


def _multiple(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _time(
    result: Estimate,
    config: Pipeline,
    model: Model,
    mean: float,
    sampling_rate: float | None,
    update_rate: float | None,
    cores: int,
) -> None:
    device, r, u = result.device, config.rollout, config.update
    rows = r.problems_per_iteration * r.group_size
    seeded = rows * schedule.seeded_share(config, 1) if config.seed.source == "live" else 0
    cut = min(1.0, (config.seed.lo + config.seed.hi) / 2 / (mean if config.seed.cut == "tokens" else 1))
    seeds = seeded * config.seed.candidates / config.seed.continuations * mean
    whole = config.seed.position == "whole"
    completed = rows * mean - (seeded * mean if whole else seeded * cut * mean)
    prompts = r.problems_per_iteration * min(config.problems.max_prompt_tokens, 200)
    count = rows * mean + prompts
    ahead = 1.0 if u.epochs > 1 else (u.minibatches - 1) / u.minibatches
    work = u.epochs * 6 + 2 * ahead
    units = (u.processes if device == "gpu" else cores) if device == "gpu" else min(cores, u.threads or cores)
    if device == "cpu" and result.parameters <= 20_000_000:
        units = 1  # the trainer's own choice for small models
    rate = update_rate or FLOPS[device, config.policy.dtype] * units / (work * result.parameters)
    if device == "gpu":
        width = 2 if config.policy.dtype == "bfloat16" else 4
        token = 2 * model.shape.num_hidden_layers * model.shape.num_key_value_heads * model.head_dim * width
        together = min(DECODED, rows / config.engine.workers)
        moved = width * result.parameters + together * mean / 2 * token
        speed = together * config.engine.workers * DECODE["gpu"] * config.engine.tensor_parallel / moved
    else:
        speed = min(cores, config.engine.workers) * min(SMALL_DECODE, DECODE["cpu"] / (2 * result.parameters))
    sampling = sampling_rate or speed
    told = "given" if sampling_rate else "assumed"
    told_update = "given" if update_rate else "assumed"
    parts = [
        Part("seeds", seeds / sampling, f"{seeds:,.0f} tokens at {sampling:,.0f} tokens/s ({told})"),
        Part("rollout", completed / sampling, f"{completed:,.0f} tokens at {sampling:,.0f} tokens/s ({told})"),
        Part("update", count / rate, f"{count:,.0f} nodes at {rate:,.0f} nodes/s ({told_update})"),
    ]
    _set(result, time=parts, iteration_seconds=sum(p.value for p in parts))
