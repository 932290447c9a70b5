"""The update against its peers on the same rows, in one run: tokens/s, model FLOP utilisation, peak memory.

    python benchmarks/update.py [--policy DIR] [--dtype float32] [--groups 1] [--size 8] [--prompt 60] [--longest 140]
                                [--contenders ours,rows,padded,trl] [--repeats 3] [--threads 1] [--json FILE]

Without --policy: a random model of 3.4 M parameters. Contenders, each in a process of its own, each calculating gradients of
the same PPO loss at the same weights (no optimizer step):

    ours     packed micro-batches, shared beginnings once, chunked head
    rows     transformers, one unpadded row after the other, full logits
    padded   transformers, all rows of a group in one padded batch, full logits
    trl      TRL's GRPOTrainer.compute_loss and backward, in the environment of benchmarks/peers

A token is a real token of a row, prompt included, shared or not; utilisation counts 6 FLOP per parameter and token against
a matrix product measured in the same process. Seconds are CPU seconds of one thread (wall seconds on a GPU), best of the
repeats: on a busy machine only they mean something. Memory is the peak beyond the loaded model, gradients included. Equal gradient norms show that all do the same work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # the peer's environment has no tseeds
from tseeds import memory  # noqa: E402

CONTENDERS = ("ours", "rows", "padded", "trl")


def main() -> None:
    """Run the contenders and print one table."""
    parser = argparse.ArgumentParser(description="The update against its peers.")
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=60)
    parser.add_argument("--longest", type=int, default=140)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        print(json.dumps(contend(arguments)))
        return
    with tempfile.TemporaryDirectory(prefix="tseeds-bench-") as folder:
        work = Path(folder)
        arguments.policy = arguments.policy or random_policy(work / "policy")
        facts = rows_file(arguments, work / "rows.json")
        print(", ".join(f"{k} {v}" for k, v in facts.items()), flush=True)
        results = [child(name, arguments, work) for name in arguments.contenders.split(",")]
    report(results, facts)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"rows": facts, "results": results}, indent=1))


def random_policy(out: Path) -> Path:
    """A Qwen2-style model of 3.4 M parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096, hidden_size=256, intermediate_size=640, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(out)
    return out


def rows_file(arguments: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Write ragged grouped rows (token ids, advantages) and return their sizes."""
    vocabulary = json.loads((arguments.policy / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    rows = []
    for g in range(arguments.groups):
        prompt = rng.integers(5, vocabulary, arguments.prompt).tolist()
        lengths = np.linspace(arguments.longest / 4, arguments.longest, arguments.size).astype(int)
        for k, n in enumerate(lengths):
            rows.append(
                {"group": g, "prompt": prompt, "response": rng.integers(5, vocabulary, n).tolist(),
                 "advantage": 0.5 if k % 2 else -0.5}
            )  # fmt: skip
    out.write_text(json.dumps(rows))
    real = sum(len(r["prompt"]) + len(r["response"]) for r in rows)
    return {
        "model": arguments.policy.name,
        "dtype": arguments.dtype,
        "rows": len(rows),
        "tokens": real,
        "padded": len(rows) * (arguments.prompt + arguments.longest),
    }


def child(name: str, arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """One contender in its own process."""
    python = sys.executable
    if name == "trl":
        python = str(HERE / "peers" / "trl" / "bin" / "python")
        if not Path(python).is_file():
            return {"contender": name, "error": "no environment; make it with: python benchmarks/peers/make.py trl"}
    command = [
        python, str(HERE / "update.py"), "--work", str(work), "--policy", str(arguments.policy), "--contenders", name,
        "--dtype", arguments.dtype, "--repeats", str(arguments.repeats), "--threads", str(arguments.threads),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return {"contender": name, "error": done.stderr.strip().splitlines()[-1]}
    result = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"  {name}: {result['seconds']:.2f} s", file=sys.stderr, flush=True)
    return result


def contend(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one contender in this process."""
    import torch

    torch.set_num_threads(arguments.threads)
    rows = json.loads((arguments.work / "rows.json").read_text())
    name = arguments.contenders
    prepare = {"ours": ours, "rows": plain, "padded": plain, "trl": trl}[name]
    within: Any = contextlib.nullcontext
    if name == "ours":
        within = memory.kept  # as Trainer.step does
    step, norm_of, parameters = prepare(arguments, rows, name)
    ceiling = gemm(arguments.dtype)
    before = peak()
    seconds, norm = [], 0.0
    with within():
        for _ in range(arguments.repeats):
            start = clock()
            step()
            seconds.append(clock() - start)
            norm = norm_of()
    ceiling = max(ceiling, gemm(arguments.dtype))
    real = sum(len(r["prompt"]) + len(r["response"]) for r in rows)
    return {
        "contender": name,
        "seconds": min(seconds),
        "tokens_per_second": real / min(seconds),
        "gflops": 6 * parameters * real / min(seconds) / 1e9,
        "ceiling_gflops": ceiling / 1e9,
        "utilisation": 6 * parameters * real / min(seconds) / ceiling,
        "peak_mb": peak() - before,
        "grad_norm": norm,
    }


def clock() -> float:
    """CPU seconds of this process; wall seconds where a GPU works."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def peak() -> float:
    """Largest memory so far, in MB."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return memory.peak() / 2**20


def gemm(dtype: str) -> float:
    """FLOP/s of a plain matrix product in ``dtype``: the best of several sizes and repeats."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    best = 0.0
    for n in (768, 1024) if device == "cpu" else (8192,):
        a, b = (torch.randn(n, n, device=device).to(getattr(torch, dtype)) for _ in range(2))
        for _ in range(24):
            start = clock()
            a @ b
            best = max(best, 2 * n**3 / (clock() - start))
    return best


Step = tuple[Callable[[], None], Callable[[], float], int]
"""Add up the gradient; its norm, after which it is forgotten; number of parameters."""


def norm_and_forget(model: Any) -> float:
    """Norm of all gradients of a model, which are then dropped."""
    norm = float(sum(p.grad.float().square().sum() for p in model.parameters() if p.grad is not None)) ** 0.5
    model.zero_grad()
    return norm


def ours(arguments: argparse.Namespace, rows: list[dict[str, Any]], _: str) -> Step:
    """``Trainer.accumulate`` on the rows as one optimizer step."""
    import torch

    from tseeds.config import UpdateConfig
    from tseeds.training.rows import Rows
    from tseeds.training.trainer import Trainer

    n = len(rows)
    table = Rows(
        row_id=[str(i) for i in range(n)], problem_id=[str(r["group"]) for r in rows],
        group_id=[str(r["group"]) for r in rows], seed_id=[None] * n, snapshot_step=[None] * n, policy_step=[0] * n,
        prompt_ids=[np.array(r["prompt"]) for r in rows], response_ids=[np.array(r["response"]) for r in rows],
        logprobs=[np.full(len(r["response"]), -1.0, np.float32) for r in rows], off_start=[0] * n, off_stop=[0] * n,
        finish_reason=["stop"] * n, temperature=[1.0] * n, reward=[r["advantage"] + 0.5 for r in rows],
    )  # fmt: skip
    trainer = Trainer(UpdateConfig(threads=arguments.threads), arguments.policy, dtype=arguments.dtype, run_seed=0)

    def step() -> None:
        flat, adv, keep = trainer.prepare(table)
        (micros,) = trainer.plan(table, flat, adv, keep, 0, minibatches=1)
        flat.valid[:] = False  # no engine sampled these: the mismatch weight is 1
        flat.used = torch.ones_like(flat.used)
        trainer.accumulate(flat, micros, trainer.scale(flat, flat.used), trainer.config)

    def norm() -> float:
        value = float(trainer.weights.gradient().square().sum().sqrt())
        trainer.weights.clear()
        return value

    return step, norm, sum(p.numel() for p in trainer.policy.parameters())


def plain(arguments: argparse.Namespace, rows: list[dict[str, Any]], name: str) -> Step:
    """The same loss with transformers alone, full logits; one row or one group at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(arguments.policy, dtype=getattr(torch, arguments.dtype))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    total = sum(len(r["response"]) for r in rows)
    size = 1 if name == "rows" else sum(r["group"] == 0 for r in rows)

    def step() -> None:
        for a in range(0, len(rows), size):
            part = rows[a : a + size]
            ids = [torch.tensor(r["prompt"] + r["response"]) for r in part]
            batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(model.device)
            seen = torch.nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True).to(model.device)
            start = len(part[0]["prompt"]) - 1
            logits = model(batch, attention_mask=seen if size > 1 else None, use_cache=False).logits
            logp = logits[:, start:-1].float().log_softmax(-1)
            with torch.no_grad():
                -(logp.exp() * logp).sum(-1)
            lp = logp.gather(2, batch[:, start + 1 :, None])[..., 0]
            advantage = torch.tensor([r["advantage"] for r in part], device=model.device)[:, None]
            r = torch.exp(lp - lp.detach())
            value = torch.minimum(r * advantage, r.clamp(0.8, 1.28) * advantage)
            (-(value * seen[:, start + 1 :]).sum() / total).backward()

    return step, lambda: norm_and_forget(model), sum(p.numel() for p in model.parameters())


def trl(arguments: argparse.Namespace, rows: list[dict[str, Any]], _: str) -> Step:
    """TRL's own loss on a batch as its generation would hand it over: left-padded prompts, right-padded completions."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    if (arguments.policy / "tokenizer.json").is_file():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.policy)
    else:
        from tokenizers import Tokenizer, models

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        )
        tokenizer.eos_token = "b"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(arguments.policy, dtype=getattr(torch, arguments.dtype))
    size = sum(r["group"] == 0 for r in rows)
    options = GRPOConfig(
        output_dir=str(arguments.work / "trl"), per_device_train_batch_size=size, num_generations=size,
        gradient_accumulation_steps=max(len(rows) // size, 1), loss_type="dapo", epsilon_high=0.28, report_to=[],
        use_cpu=not torch.cuda.is_available(), bf16=arguments.dtype == "bfloat16", gradient_checkpointing=False,
        max_completion_length=max(len(r["response"]) for r in rows),
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=options, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * size),
    )  # fmt: skip
    model = trainer.model
    model.train()
    trainer.current_gradient_accumulation_steps = options.gradient_accumulation_steps

    def step() -> None:
        for a in range(0, len(rows), size):
            part = rows[a : a + size]
            done = [torch.tensor(r["response"]) for r in part]
            pad = torch.nn.utils.rnn.pad_sequence
            inputs = {
                "prompt_ids": torch.tensor([r["prompt"] for r in part]),
                "prompt_mask": torch.ones(len(part), len(part[0]["prompt"]), dtype=torch.long),
                "completion_ids": pad(done, batch_first=True),
                "completion_mask": pad([torch.ones_like(d) for d in done], batch_first=True),
                "advantages": torch.tensor([r["advantage"] for r in part]),
                "num_items_in_batch": torch.tensor(sum(len(r["response"]) for r in rows)),
            }
            inputs = {k: v.to(model.device) for k, v in inputs.items()}
            trainer.compute_loss(model, inputs).backward()

    return step, lambda: norm_and_forget(model), sum(p.numel() for p in model.parameters())


def report(results: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """One line per contender, ratios to the first."""
    print(
        f"{'contender':10}{'seconds':>9}{'tok/s':>9}{'GFLOP/s':>9}{'of GEMM':>9}{'peak MB':>9}{'|grad|':>10}{'ours is':>9}"
    )
    first = next((r for r in results if r["contender"] == "ours" and "error" not in r), None)
    for r in results:
        if "error" in r:
            print(f"{r['contender']:10}  {r['error']}")
            continue
        times = f"{first['tokens_per_second'] / r['tokens_per_second']:.2f}x" if first else ""
        print(
            f"{r['contender']:10}{r['seconds']:9.3f}{r['tokens_per_second']:9.0f}{r['gflops']:9.1f}{r['utilisation']:9.2f}"
            f"{r['peak_mb']:9.0f}{r['grad_norm']:10.5f}{times:>9}"
        )


if __name__ == "__main__":
    main()
