"""How near the stages come to vLLM itself, in one run: raw ``llm.generate`` against rollout and seed stage with Parquet.

    python benchmarks/rollout.py [--policy DIR --problems FILE] [--rows 256] [--tokens 24] [--repeats 5] [--workers 2]

Without arguments: the toy policy. Raw and stage take turns on the same engine and the same requests, with the prefix cache
emptied before each; the best of the repeats counts. CPU seconds of the process are given beside wall seconds because they
mean something on a busy machine too. --workers N adds a pool of N single-thread engines against one of them. --adapters RANK
adds the seed stage with LoRA adapters as snapshots: in one batch, one after the other, merged and swapped (swaps included).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tseeds import config as configuration
from tseeds import rollout, seed
from tseeds.artifacts.rundir import RunDir
from tseeds.artifacts.store import read_table, require
from tseeds.config import EngineConfig, Pipeline
from tseeds.context import Context
from tseeds.engines import Request
from tseeds.pipeline import execute, setup_steps


def main() -> None:
    """Print a table and write it as JSON."""
    parser = argparse.ArgumentParser(description="Stages against raw vLLM.")
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--problems", type=Path)
    parser.add_argument("--task", default="math")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--snapshots", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--adapters", type=int, default=0, metavar="RANK")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tseeds-bench-") as place:
        result = measure(arguments, Path(place))
    for name, value in result.items():
        print(f"{name:44} {value:12.3f}" if isinstance(value, float) else f"{name:44} {value:>12}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))


def pipeline(arguments: argparse.Namespace, place: Path) -> Pipeline:
    """The toy pipeline, or the one of the given policy and problems."""
    toy = arguments.policy is None
    made = Path("toy") if toy and Path("toy/policy/config.json").is_file() else place / "toy"  # just loop leaves one
    if toy and made == place / "toy":
        from tseeds.toy import make

        make(made)
    return configuration.parse(
        {
            "policy": {
                "path": str(made / "policy" if toy else arguments.policy),
                "dtype": arguments.dtype,
            },
            "problems": {
                "path": str(made / "train.jsonl" if toy else arguments.problems),
                "task": "countdown" if toy else arguments.task,
                "prompt": "plain" if toy else "chat",
                "max_prompt_tokens": 16 if toy else arguments.prompt_tokens,
                "limit": max(1, arguments.rows // 8),
            },
            "rollout": {
                "problems_per_iteration": max(1, arguments.rows // 8),
                "group_size": 8,
                "max_response_tokens": arguments.tokens,
            },
            "seed": {"share": 0.5, "lo": 0.0, "hi": 0.5, "snapshots_per_iteration": arguments.snapshots},
            "update": {"minibatches": 1},
        }
    )


def measure(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    """All numbers by name."""
    config = pipeline(arguments, place)
    seeded = config
    config = config.model_copy(update={"seed": config.seed.model_copy(update={"share": 0.0})})
    run = RunDir(place / "run")
    result: dict[str, Any] = {}
    with Context(config) as context:
        for step in setup_steps(config, run):
            execute(config, step, context)
        policy = run.policy(0)
        begin = time.perf_counter()
        engine: Any = context.engine()
        engine.load(policy)
        result["engine start, first policy proven [s]"] = time.perf_counter() - begin
        requests = planned(config, run, context, place)
        result["rows"] = len(requests)
        one = Request(ids=requests[0].ids, max_tokens=1, seed=0)
        list(engine.sample([one]))
        begin = time.perf_counter()
        list(engine.sample([one]))
        result["first token [s]"] = time.perf_counter() - begin
        tokens = sum(len(done.ids) for _, done in engine.sample(requests))
        result["tokens"] = tokens

        def fresh() -> Path:
            engine._llm.reset_prefix_cache()
            shutil.rmtree(place / "out", ignore_errors=True)
            return place / "out"

        inputs = rollout.Inputs(policy, 0, run.problems, None, 1)
        times = best(
            {
                "raw": (fresh, lambda out: raw(engine, requests)),
                "stage": (fresh, lambda out: rollout.run(config, inputs, out, context)),
                "engine": (fresh, lambda out: list(engine.sample(requests))),
            },
            arguments.repeats,
        )
        report(result, "rollout", times, tokens)

        snapshots = {k: variant(policy, place / f"snapshot-{k}", k) for k in range(arguments.snapshots)}
        chains: list[tuple[Path, list[Request]]] = []
        load, sample = engine.load, engine.sample

        def noted(wanted: Sequence[Request]) -> Any:
            chains.append((chains_at[0], list(wanted)))
            return sample(wanted)

        chains_at = [policy]

        def noted_load(path: Path) -> str:
            chains_at[0] = path
            return load(path)

        engine.load, engine.sample = noted_load, noted
        context.use(seeded)
        first = seed.Inputs(run.problems, snapshots, 1)
        seed.run(seeded, first, fresh(), context)
        engine.load, engine.sample = load, sample
        swaps = len(engine.swaps)

        def raw_chains(out: Path) -> int:
            made = 0
            for path, wanted in chains:
                engine.load(path)
                made += raw(engine, wanted)
            return made

        tokens = raw_chains(place)
        times = best(
            {
                "raw": (fresh, raw_chains),
                "stage": (fresh, lambda out: seed.run(seeded, first, out, context)),
            },
            arguments.repeats,
            swaps=engine.swaps,
        )
        result["seed: snapshots"] = len(chains)
        report(result, "seed", times, tokens)
        each = sorted(engine.swaps[swaps:])
        result["swap with its proof, median [s]"] = each[len(each) // 2]
    if arguments.adapters:
        adapted(result, seeded, run, place, arguments)
    if arguments.workers > 1:
        pooled(result, config, policy, requests, arguments)
    return result


def planned(config: Pipeline, run: RunDir, context: Context, place: Path) -> list[Request]:
    """The requests that the rollout stage makes."""
    engine: Any = context.engine()
    seen: list[Request] = []
    sample = engine.sample

    def noted(wanted: Sequence[Request]) -> Any:
        seen.extend(wanted)
        return sample(wanted)

    engine.sample = noted
    rollout.run(config, rollout.Inputs(run.policy(0), 0, run.problems, None, 1), place / "planned", context)
    engine.sample = sample
    return seen


def raw(engine: Any, requests: Sequence[Request]) -> int:
    """vLLM as its users call it: one generate with a seed and the sampled token's log-prob per row; returns tokens.

    With the engine's number of threads: with as many as there are cores a small model runs many times slower.
    """
    from vllm import SamplingParams

    from tseeds.engines import threads

    eos = list(engine._held.eos)
    params = [
        SamplingParams(
            max_tokens=r.max_tokens,
            temperature=r.temperature,
            seed=r.seed,
            logprobs=0,
            stop_token_ids=eos,
            ignore_eos=True,
            detokenize=False,
        )
        for r in requests
    ]
    prompts = [{"prompt_token_ids": list(r.ids)} for r in requests]
    with threads.limited(engine._threads):
        outputs = engine._llm.generate(prompts, params, use_tqdm=False)
    return sum(len(o.outputs[0].token_ids) for o in outputs)


def best(
    work: dict[str, tuple[Callable[[], Path], Callable[[Path], object]]], repeats: int, swaps: list[float] | None = None
) -> dict[str, tuple[float, float]]:
    """(wall, CPU) seconds by name, the smallest of ``repeats`` turns; time that ``swaps`` records is left out of wall."""
    found: dict[str, tuple[float, float]] = {}
    for _ in range(repeats):
        for name, (prepare, do) in work.items():
            out = prepare()
            known = len(swaps or ())
            wall, cpu = time.perf_counter(), time.process_time()
            do(out)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            swapped = sum((swaps or [])[known:])
            before = found.get(name, (float("inf"), float("inf")))
            found[name] = (min(before[0], wall - swapped), min(before[1], cpu))
    return found


def report(result: dict[str, Any], stage: str, times: dict[str, tuple[float, float]], tokens: int) -> None:
    """Rates and ratios of a stage."""
    for name, (wall, cpu) in times.items():
        result[f"{stage}: {name} [tokens/s]"] = tokens / wall
        result[f"{stage}: {name} [CPU s]"] = cpu
        if name != "raw":
            result[f"{stage}: {name} / raw, tokens/s"] = times["raw"][0] / wall
            result[f"{stage}: {name} / raw, CPU"] = times["raw"][1] / cpu


def variant(policy: Path, out: Path, number: int) -> Path:
    """A copy of the policy with slightly other weights and its probe, as the update stage leaves it."""
    import torch
    from safetensors.torch import load_file, save_file

    from tseeds.artifacts.policy import policy_files, write_probe
    from tseeds.engines import probe

    out.mkdir()
    generator = torch.Generator().manual_seed(number)
    for file in policy_files(policy):
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            for name, tensor in tensors.items():
                noise = torch.randn(tensor.shape, generator=generator)
                tensors[name] = tensor + (0.01 * tensor.std() * noise).to(tensor.dtype) if tensor.ndim == 2 else tensor
            save_file(tensors, out / file.name, metadata={"format": "pt"})
        else:
            shutil.copy(file, out / file.name)
    vocabulary = json.loads((out / "config.json").read_text())["vocab_size"]
    made = probe.compute(out, vocabulary, "float32")
    write_probe(out, made.logprobs, made.ids, made.dtype)
    return out


def adapter(base: Path, out: Path, rank: int, number: int) -> Path:
    """A LoRA adapter of small random weights on all linear layers, with its probe."""
    import torch
    from safetensors.torch import save_file

    from tseeds.artifacts.policy import ADAPTER_WEIGHTS, write_adapter_config
    from tseeds.config import LoraConfig
    from tseeds.engines import policies
    from tseeds.training.weights import write_probe_for

    lora = LoraConfig(rank=rank)
    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for name, shape in policies.describe(base).tensors.items():
        stem = name.removesuffix(".weight")
        if stem.rpartition(".")[2] in lora.targets:
            for side, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                random = torch.randn(size, generator=generator) * 0.02
                tensors[f"base_model.model.{stem}.lora_{side}.weight"] = random
    out.mkdir()
    save_file(tensors, out / ADAPTER_WEIGHTS)
    values = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": lora.alpha,
        "target_modules": lora.targets,
        "task_type": "CAUSAL_LM",
    }
    write_adapter_config(out, values, base)
    write_probe_for(out, "float32")
    return out


class OneByOne:
    """An engine that hides that it could serve several policies in one batch."""

    def __init__(self, engine: Any) -> None:
        self.load, self.sample, self.close = engine.load, engine.sample, lambda: None


def adapted(result: dict[str, Any], config: Pipeline, run: RunDir, place: Path, arguments: argparse.Namespace) -> None:
    """The seed stage with adapters as snapshots, tokens/s with all loading."""
    policy, rank = run.policy(0), arguments.adapters
    adapters = {k: adapter(policy, place / f"adapter-{k}", rank, k) for k in range(arguments.snapshots)}
    inputs = seed.Inputs(run.problems, adapters, 1)
    lora = configuration.parse(config.model_dump(exclude_none=True) | {"update": {"lora": {"rank": rank}}})
    rates: dict[str, float] = {}
    for ways in (("in one batch", "one after the other"), ("merged and swapped",)):
        chosen = lora if len(ways) == 2 else config
        with Context(chosen) as context:
            engine: Any = context.engine()
            begin = time.perf_counter()
            engine.load(policy)
            result[f"adapters: engine start{' for adapters' * (len(ways) == 2)} [s]"] = time.perf_counter() - begin

            def stage(out: Path, which: Any, context: Context = context, config: Pipeline = chosen) -> None:
                context._engine = which
                seed.run(config, inputs, out, context)

            def fresh(engine: Any = engine) -> Path:
                engine._llm.reset_prefix_cache()
                shutil.rmtree(place / "out", ignore_errors=True)
                return place / "out"

            stage(fresh(), engine)
            tokens = sum(read_table(require(place / "out", "seeds"))["chain_length"].to_pylist())
            engines = {way: OneByOne(engine) if way == "one after the other" else engine for way in ways}
            times = best(
                {way: (fresh, lambda out, which=which: stage(out, which)) for way, which in engines.items()},  # type: ignore[misc]
                arguments.repeats,
            )
            context._engine = engine
        for way, (wall, _) in times.items():
            rates[way] = tokens / wall
            result[f"adapters: {way} [tokens/s]"] = rates[way]
    for way in ("one after the other", "merged and swapped"):
        result[f"adapters: in one batch / {way}"] = rates["in one batch"] / rates[way]


def pooled(
    result: dict[str, Any], config: Pipeline, policy: Path, requests: list[Request], arguments: argparse.Namespace
) -> None:
    """N single-thread Ray workers against one."""
    rates = {}
    for workers in (1, arguments.workers):
        from tseeds.engines.pool import PoolEngine

        options = EngineConfig(workers=workers, threads=1)
        longest = config.problems.max_prompt_tokens + config.rollout.max_response_tokens
        engine = PoolEngine(options, dtype=arguments.dtype, max_model_len=longest)
        begin = time.perf_counter()
        engine.load(policy)
        result[f"pool of {workers}: start [s]"] = time.perf_counter() - begin
        many = requests * 4
        seconds = []
        for _ in range(arguments.repeats):
            begin = time.perf_counter()
            tokens = sum(len(done.ids) for _, done in engine.sample(many))
            seconds.append(time.perf_counter() - begin)
        rates[workers] = tokens / min(seconds)
        result[f"pool of {workers} [tokens/s]"] = rates[workers]
        engine.close()
    result[f"pool of {arguments.workers} / pool of 1"] = rates[arguments.workers] / rates[1]


if __name__ == "__main__":
    main()
