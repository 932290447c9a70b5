"""A run directory made of numbers instead of a model: real store, real schemas, known trends, any size.

For tests of everything that reads runs (report, view, watch, tours) and for the 100,000-row ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tseeds import config as configuration
from tseeds import evaluate, pipeline
from tseeds.artifacts import schema
from tseeds.artifacts.rundir import RunDir
from tseeds.artifacts.store import Identity, write_file, writing

NAMES = ("Ana", "Böðvar", "Chen", "Дарья", "Emeka", "Fatima")
THINGS = ("apples", "marbles", "stamps", "coins", "books", "café tickets")


def _problem(number: int) -> tuple[str, str, int, int]:
    a, b, c = 3 + number * 7 % 17, 2 + number * 5 % 11, 2 + number % 6
    name, thing = NAMES[number % len(NAMES)], THINGS[number // 2 % len(THINGS)]
    text = f"{name} has {a} {thing} and buys {b} more. Then the number grows to {c} times as many. How many {thing}?"
    return text, str((a + b) * c), a + b, c


def _chain(number: int, variant: int) -> tuple[str, str]:
    """A response and its answer: variants 0 to 2 are right, 3 is wrong, 4 never answers."""
    _, gold, total, times = _problem(number)
    name = NAMES[number % len(NAMES)]
    begin = (
        f"First add what {name} has: the sum is {total}.\n",
        f"Let x be the total. Then x = {total} ✓, and we need {times}x.\n",
        f"We count step by step:\n- together {total}\n- times {times}\n",
        f"{name} has {total} in all, and {times} times means adding {times}.\n",
        f"Let me think about {name} again and again …\n" * 2,
    )[variant]
    if variant == 4:
        return begin + "So the number is hard to find, let us start over", "none"
    answer = gold if variant < 3 else str(total + times)
    end = (
        f"Multiply: {total} * {times} = {answer}.\nThe answer is \\boxed{{{answer}}}"
        if variant % 2 == 0
        else f"So {times} · {total} gives {answer}, which is \\boxed{{{answer}}}"
    )
    return begin + end, answer


def tokenizer(folder: Path, chains: list[str]) -> Tokenizer:
    """A small byte-level BPE tokenizer: pieces may be half of a UTF-8 character, as in real ones."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(chains, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    return tok


def _commit(out: Path, stage: str, tables: dict[str, pa.Table], facts: dict[str, Any], part_rows: int = 256) -> None:
    with writing(out, Identity(stage, 1, {}, {})) as writer:
        writer.facts.update(facts)
        for name, table in tables.items():
            if name == "part":
                for k in range(-(-table.num_rows // part_rows)):
                    writer.part(k, table.slice(k * part_rows, part_rows))
            else:
                writer.table(name, table)


def make_run(
    root: Path,
    *,
    iterations: int = 12,
    problems: int = 24,
    per_iteration: int = 8,
    group_size: int = 8,
    seed: int = 0,
    seeded_share: float = 0.5,
    gain: float = 0.4,
    entropy_floor: float = 0.35,
    tokens: bool = True,
    part_rows: int = 256,
    sets: tuple[str, ...] = (),
) -> RunDir:
    """Write a whole run at ``root``. gain: rise of the reward over the run; entropy_floor: where the entropy falls to."""
    rng = np.random.default_rng(seed)
    run = RunDir(root)
    root.mkdir(parents=True)
    data: dict[str, Any] = {
        "run": {"seed": seed, "iterations": iterations},
        "policy": {"path": "synthetic"},
        "problems": {"path": "synthetic.jsonl"},
        "snapshot": {"every": 2},
        "seed": {"share": seeded_share},
        "rollout": {"problems_per_iteration": per_iteration, "group_size": group_size, "max_response_tokens": 96},
        "update": {"save_tokens": tokens},
        "evaluate": {"every": iterations, "samples": 8, "benchmarks": [{"name": "held-out", "path": "held-out.jsonl"}]},
    }
    for assignment in sets:
        configuration.set_value(data, assignment)
    config = configuration.parse(data)
    write_file(run.pipeline, configuration.dumps(config))
    write_file(run.record, json.dumps({"changes": []}))
    bank = [[_chain(p, v) for v in range(5)] for p in range(problems)]
    tok = tokenizer(
        run.snapshot(0), [text for chains in bank for text, _ in chains] + [_problem(p)[0] for p in range(problems)]
    )
    ids = [[tok.encode(text).ids + ([0] if v < 4 else []) for v, (text, _) in enumerate(chains)] for chains in bank]
    prompts = [tok.encode(_problem(p)[0] + "\n").ids for p in range(problems)]
    table = pa.table(
        {
            "problem_id": [f"p{p:04d}" for p in range(problems)],
            "prompt": [_problem(p)[0] + "\n" for p in range(problems)],
            "prompt_ids": prompts,
            "problem": [_problem(p)[0] for p in range(problems)],
            "gold": [_problem(p)[1] for p in range(problems)],
            "task": ["math"] * problems,
            "source": ["synthetic"] * problems,
            "difficulty": [("easy", "hard")[p % 2] for p in range(problems)],
        },
        schema=schema.PROBLEMS,
    )
    _commit(run.problems, "problems", {"part": table}, {})
    for i in range(1, iterations + 1):
        progress = (i - 1) / max(1, iterations - 1)
        _iteration(run, i, progress, rng, config, bank, ids, prompts, gain, entropy_floor, tokens, part_rows)
    for step, progress in ((0, 0.0), (iterations, 1.0)):
        _evaluation(run, step, 0.25 + gain * progress, table, bank, ids, rng)
    pipeline.sync_metrics(run)
    return run


def _draw(rng: np.random.Generator, rate: float) -> int:
    if rng.random() < rate:
        return int(rng.integers(0, 3))
    return 3 if rng.random() < 0.7 else 4


def _iteration(
    run: RunDir,
    i: int,
    progress: float,
    rng: np.random.Generator,
    config: configuration.Pipeline,
    bank: list[list[tuple[str, str]]],
    ids: list[list[list[int]]],
    prompts: list[list[int]],
    gain: float,
    entropy_floor: float,
    tokens: bool,
    part_rows: int,
) -> None:
    size, groups = config.rollout.group_size, config.rollout.problems_per_iteration
    seeded = round(config.seed.share * size)
    rollout: dict[str, list[Any]] = {name: [] for name in schema.ROLLOUT.names}
    score: dict[str, list[Any]] = {name: [] for name in schema.SCORE.names}
    rows: dict[str, list[Any]] = {name: [] for name in schema.UPDATE_ROWS.names}
    seeds: dict[str, list[Any]] = {name: [] for name in schema.SEED.names}
    per_token: dict[str, list[np.ndarray]] = {name: [] for name in schema.UPDATE_TOKENS.names}
    pool = list(range(0, i, config.snapshot.every))
    for g in range(groups):
        problem = ((i - 1) * groups + g) % len(bank)
        group, rate = f"{i:06d}-{g:05d}", 0.25 + gain * progress + 0.1 * np.sin(problem)
        rewards, advantage_at = [], len(rows["advantage"])
        for sample in range(size):
            variant = _draw(rng, float(np.clip(rate, 0.02, 0.98)))
            response = ids[problem][variant]
            length = len(response)
            is_seeded = sample >= size - seeded
            stop = int(rng.integers(2, max(3, length // 2))) if is_seeded else 0
            snapshot = int(rng.choice(pool)) if is_seeded else None
            name, text = f"{group}-{sample:03d}", bank[problem][variant][0]
            noise = rng.gamma(1.2, 0.25 + entropy_floor * (1 - progress), length)
            verdict = "correct" if variant < 3 else "wrong" if variant == 3 else "no_answer"
            reward = float(variant < 3)
            rewards.append(reward)
            seed_id = f"{group}-s{sample:03d}" if is_seeded else None
            values = (
                name, f"p{problem:04d}", group, sample, f"digest{i - 1}", i - 1, seed_id, snapshot,
                "prefix" if is_seeded else "none", prompts[problem], response, -noise, 0, stop,
                "length" if variant == 4 else "stop", 1.0, int(rng.integers(2**40)), text,
            )  # fmt: skip
            for column, value in zip(schema.ROLLOUT.names, values, strict=True):
                rollout[column].append(value)
            answer = None if variant == 4 else bank[problem][variant][1]
            graded = (name, f"p{problem:04d}", answer, answer, verdict, reward, "math", 0.4, None)
            for column, value in zip(schema.SCORE.names, graded, strict=True):
                score[column].append(value)
            if is_seeded:
                origin = (
                    seed_id, f"p{problem:04d}", group, sample, f"digest{snapshot}", snapshot, response[:stop], -noise[:stop],
                    length, stop / length, "live", None, "stop", "used", 1.0, int(rng.integers(2**40)), text[:10],
                )  # fmt: skip
                for column, value in zip(schema.SEED.names, origin, strict=True):
                    seeds[column].append(value)
            old = i - 1 - snapshot if snapshot is not None else 0
            region = np.arange(length) < stop
            drift = np.where(region, 0.08 * np.sqrt(old + 1), 0.03)
            log_ratio = rng.normal(0, 1, length) * drift
            entropy = np.maximum(0.01, noise + rng.normal(0, 0.1, length))
            ratio = np.exp(log_ratio)
            rows_values = (
                name, f"p{problem:04d}", group, reward, 0.0, True, old if is_seeded else None, stop, length - stop,
                float(ratio[region].mean()) if stop else None, 0.1 if stop else None,
                float(entropy[region].mean()) if stop else None, float(log_ratio[region].mean()) if stop else None,
                float(ratio[~region].mean()), 0.02, float(entropy[~region].mean()), float(log_ratio[~region].mean()),
            )  # fmt: skip
            for column, value in zip(schema.UPDATE_ROWS.names, rows_values, strict=True):
                rows[column].append(value)
            if tokens:
                for column, values_ in {
                    "row_id": np.repeat(name, length),
                    "position": np.arange(length),
                    "region": np.where(region, "seed", "continuation"),
                    "logprob": -noise + log_ratio,
                    "logprob_old": -noise,
                    "logprob_behaviour": -noise,
                    "entropy": entropy,
                    "ratio": ratio,
                    "weight": ratio,
                    "used": np.ones(length, dtype=bool),
                }.items():
                    per_token[column].append(values_)
        mean = float(np.mean(rewards))
        for k, reward in enumerate(rewards):
            rows["advantage"][advantage_at + k] = reward - mean
            if tokens:
                at = advantage_at + k
                ratio = per_token["ratio"][at]
                a = reward - mean
                per_token["advantage"].append(np.full(len(ratio), a))
                per_token["clipped"].append((ratio > 1.28) & (a > 0) | (ratio < 0.8) & (a < 0))
    summary, steps = _metrics(rollout, score, rows, i, progress, rng, entropy_floor)
    if seeded:
        _commit(run.stage(i, "seed"), "seed", {"part": pa.table(seeds, schema=schema.SEED)}, {}, part_rows)
    _commit(run.stage(i, "rollout"), "rollout", {"part": pa.table(rollout, schema=schema.ROLLOUT)}, {}, part_rows)
    _commit(run.stage(i, "score"), "score", {"part": pa.table(score, schema=schema.SCORE)}, {}, part_rows)
    tables = {"rows.parquet": pa.table(rows, schema=schema.UPDATE_ROWS), "steps.parquet": steps}
    if tokens:
        joined = {name: np.concatenate(values) for name, values in per_token.items()}
        tables["tokens.parquet"] = pa.table(joined, schema=schema.UPDATE_TOKENS)
    _commit(run.stage(i, "update"), "update", tables, {"policy": f"digest{i}", "step": i, "summary": summary})


def _metrics(
    rollout: dict[str, list[Any]],
    score: dict[str, list[Any]],
    rows: dict[str, list[Any]],
    i: int,
    progress: float,
    rng: np.random.Generator,
    floor: float,
) -> tuple[dict[str, Any], pa.Table]:
    reward = np.array(score["reward"])
    seeded = np.array([s is not None for s in rollout["seed_id"]])
    entropy = floor + 0.6 * np.exp(-3 * progress) + rng.normal(0, 0.02)
    lengths = np.array([len(r) for r in rollout["response_ids"]])
    regions: dict[str, float] = {}
    for name, mass in (("all", 0.05), ("seed", 0.12), ("continuation", 0.02)):
        mass *= 0.5 + progress
        regions |= {
            f"{m}_{name}": float(mass * abs(1 + rng.normal(0, 0.15))) for m in ("clipped_mass", "clip_fraction")
        }
        for m in ("clip_fraction_positive_high", "clip_fraction_negative_low", "clip_fraction_negative_dual"):
            regions[f"{m}_{name}"] = mass / 3
        regions |= {
            f"tokens_{name}": float(lengths.sum()),
            f"entropy_{name}": float(entropy),
            f"effective_entropy_{name}": float(entropy * 1.1),
            f"retained_entropy_{name}": 1 - mass,
            f"ratio_mean_{name}": 1 + float(rng.normal(0, 0.01)),
            f"ratio_max_{name}": 2.0 + 4 * mass,
            f"ess_{name}": 900.0,
            f"ess_share_{name}": 1 - 2 * mass,
            f"kl_k1_{name}": mass / 5,
            f"kl_k3_{name}": mass / 5,
        }
    bins = {
        f"{m}_{r}_bins": [
            float({"entropy": 0.8, "ratio_mean": 1.0, "ess_share": 0.9, "clip_fraction": 0.05, "clipped_mass": 0.06}[m])
            * (1 + 0.1 * b if r == "seed" else 1.4 - 0.05 * b)
            for b in range(10)
        ]
        for m in ("entropy", "ratio_mean", "ess_share", "clip_fraction", "clipped_mass")
        for r in ("seed", "continuation")
    }
    step = {
        "iteration": i, "epoch": 0, "minibatch": 0, "step": i, "skipped": False, "rows": len(reward),
        "loss_tokens": int(lengths.sum()), "loss": 0.0, "grad_norm": 1.0, "learning_rate": 1e-6, **regions, **bins,
    }  # fmt: skip
    groups = np.array(rollout["group_id"])
    dead = np.mean([len(set(reward[groups == g])) == 1 for g in np.unique(groups)])
    summary = {
        "reward": float(reward.mean()),
        "reward_seeded": float(reward[seeded].mean()) if seeded.any() else None,
        "reward_unseeded": float(reward[~seeded].mean()),
        "advantage_seeded": float(np.array(rows["advantage"])[seeded].mean()) if seeded.any() else None,
        "rows": float(len(reward)),
        "seeded_share": float(seeded.mean()),
        "entropy": float(entropy),
        **regions,
        "effective_entropy": float(entropy * 1.1),
        "retained_entropy": regions["retained_entropy_all"],
        "mismatch": 1e-6,
        "mismatch_mean": 1e-7,
        "mismatch_kl": 1e-9,
        "zero_variance_share": float(dead),
        "truncated_share": float(np.mean([f == "length" for f in rollout["finish_reason"]])),
        "response_length": float(lengths.mean()),
        "seed_length": float(np.mean(rollout["off_stop"])),
        "loss": 0.0,
        "grad_norm": 1.0 + float(rng.normal(0, 0.1)),
        "grad_norm_max": 1.4,
        "learning_rate": 1e-6,
        "skipped_steps": 0.0,
        "tokens": float(lengths.sum()),
        "tokens_per_second": 5000.0 + float(rng.normal(0, 300)),
        "optimizer_steps": float(i),
    }
    return summary, pa.Table.from_pylist([step], schema=schema.UPDATE_STEPS)


def _evaluation(
    run: RunDir,
    step: int,
    rate: float,
    problems: pa.Table,
    bank: list[list[tuple[str, str]]],
    ids: list[list[list[int]]],
    rng: np.random.Generator,
    samples: int = 8,
) -> None:
    columns: dict[str, list[Any]] = {name: [] for name in schema.EVALUATION.names}
    for p in range(len(bank)):
        for s in range(samples):
            variant = _draw(rng, float(np.clip(rate + 0.25 * np.sin(3 * p), 0.02, 0.98)))
            answer = None if variant == 4 else bank[p][variant][1]
            verdict = "correct" if variant < 3 else "wrong" if variant == 3 else "no_answer"
            values = (
                f"{step:06d}-held-out-{p:05d}-{s:03d}", f"p{p:04d}", "held-out", ("easy", "hard")[p % 2], s,
                f"digest{step}", step, ids[p][variant], -rng.gamma(1.0, 0.4, len(ids[p][variant])),
                "length" if variant == 4 else "stop", 0.6, answer, answer, verdict, float(variant < 3),
                int(rng.integers(2**40)), bank[p][variant][0], 0.3,
            )  # fmt: skip
            for column, value in zip(schema.EVALUATION.names, values, strict=True):
                columns[column].append(value)
    rows = pa.table(columns, schema=schema.EVALUATION)
    with writing(run.evaluation(step, "held-out"), Identity("evaluate", 1, {}, {})) as writer:
        writer.part(0, rows)
        report = {"rows": problems.num_rows, "kept": problems.num_rows, "quarantined": {}}
        evaluate._Benchmark(problems, schema.QUARANTINE.empty_table(), report).write(writer)
        evaluate._write_metrics(writer, schema.EVALUATION, 0)
