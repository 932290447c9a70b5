"""Stage seed: earlier snapshots write the beginning of the reasoning.

Reads problems and snapshots (live source) or the unseeded rollouts of earlier iterations (replay source); writes one row
per planned seed: ids and the snapshot's behaviour logprobs, chain_length before the cut, the drawn cut, outcome (why a
planned seed is empty). Position whole keeps the chain uncut; position suffix stores the plan alone, because there the
snapshot writes after the rollout's beginning.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tseeds import cuts, selection
from tseeds.artifacts import schema
from tseeds.artifacts.parts import Parts
from tseeds.artifacts.rundir import recorded_digest
from tseeds.artifacts.store import Identity, Manifest, read_rows, recorded, require, verified, writing
from tseeds.config import Pipeline
from tseeds.context import Context
from tseeds.engines import Completion, Request, sample_each
from tseeds.engines.policies import describe
from tseeds.errors import UserError
from tseeds.schedule import draw_snapshots, groups, rng_seed, seeded_samples, uniform

STAGE = "seed"
VERSION = 1
_VALUES = [
    "share",
    "schedule",
    "schedule_end",
    "position",
    "sampler",
    "snapshots_per_iteration",
    "tau",
    "lag",
    "cut",
    "lo",
    "hi",
    "source",
    "success",
    "candidates",
    "continuations",
    "temperature",
]


@dataclass(frozen=True)
class Inputs:
    """snapshots: step -> model directory, the pool; history: (rollout, score) artifacts of earlier iterations, oldest
    first, read by source replay and cut target; curriculum: pass rates, where problems are chosen by them."""

    problems: Path
    snapshots: Mapping[int, Path]
    iteration: int
    history: Sequence[tuple[Path, Path]] = field(default_factory=tuple)
    curriculum: Path | None = None


def needs_history(config: Pipeline) -> bool:
    """Whether the stage reads the rollouts of earlier iterations."""
    return config.seed.source == "replay" or config.seed.cut == "target"


def drawn(config: Pipeline, inputs: Inputs) -> list[int]:
    """Steps of the snapshots that write in this iteration."""
    if config.seed.sampler == "current":
        return [inputs.iteration - 1]
    return draw_snapshots(config.seed, sorted(inputs.snapshots), run_seed=config.run.seed, iteration=inputs.iteration)


def identity(config: Pipeline, inputs: Inputs) -> Identity:
    """What decides the seeds: the seed table, sampling values, and digests of problems, drawn snapshots and history."""
    values: dict[str, Any] = {
        "run.seed": config.run.seed,
        "iteration": inputs.iteration,
        "policy.dtype": config.policy.dtype,
        "engine.backend": config.engine.backend,
        "rollout.problems_per_iteration": config.rollout.problems_per_iteration,
        "rollout.group_size": config.rollout.group_size,
        "rollout.max_response_tokens": config.rollout.max_response_tokens,
        **{f"seed.{name}": value for name, value in config.seed.model_dump(mode="json").items() if name in _VALUES},
    }
    if config.seed.schedule != "constant" and not config.seed.schedule_end:
        values["run.iterations"] = config.run.iterations
    digests = {"problems": require(inputs.problems, "problems").digest}
    if config.seed.source == "live":
        digests |= {f"snapshot {s}": recorded_digest(inputs.snapshots[s]) for s in drawn(config, inputs)}
    if needs_history(config):
        digests |= {f"rollout {k}": recorded(r, "rollout") for k, (r, _) in enumerate(inputs.history, 1)}
        digests |= {f"score {k}": recorded(s, "score") for k, (_, s) in enumerate(inputs.history, 1)}
    chosen, measured = selection.identity(config, inputs.curriculum)
    return Identity(STAGE, VERSION, values | chosen, digests | measured)


@dataclass(slots=True)
class _Plan:
    """One planned seed and, later, its chains."""

    seed_id: str
    group_id: str
    slot: int
    problem: int
    rng_seed: int
    draw: float
    snapshot_step: int
    chains: list[Completion]
    reward: float | None = None
    snapshot: str | None = None
    temperature: float | None = None


def _plan(config: Pipeline, inputs: Inputs, problem_ids: Sequence[str]) -> list[_Plan]:
    """Planned seeds in (snapshot, group, slot) order: a snapshot's rows lie together, so that it is loaded once."""
    steps = drawn(config, inputs)
    size, samples = config.rollout.group_size, seeded_samples(config, inputs.iteration)
    plans = []
    for group in groups(
        problem_ids,
        run_seed=config.run.seed,
        iteration=inputs.iteration,
        per_iteration=config.rollout.problems_per_iteration,
        weights=selection.weights(config, problem_ids, inputs.curriculum),
    ):
        for slot in samples[:: config.seed.continuations]:
            seed = rng_seed(config.run.seed, inputs.iteration, STAGE, group.problem_id, group.occurrence * size + slot)
            plans.append(
                _Plan(
                    seed_id=f"{group.group_id}-s{slot:03d}",
                    group_id=group.group_id,
                    slot=slot,
                    problem=group.index,
                    rng_seed=seed,
                    draw=uniform(seed, "cut"),
                    snapshot_step=steps[rng_seed(seed, "snapshot") % len(steps)],
                    chains=[],
                )
            )
    return sorted(plans, key=lambda p: (p.snapshot_step, p.group_id, p.slot))


def run(config: Pipeline, inputs: Inputs, out: Path, context: Context) -> Manifest:
    """Commit the seeds at ``out``; parts that an earlier attempt committed are kept.

    Raises:
        UserError: an input is missing or damaged. StageFailed: the engine failed. Interrupted: asked to stop.
    """
    ident = identity(config, inputs)
    problems = read_rows(inputs.problems, "problems", ["prompt_ids", "gold"])
    problem_ids: list[str] = problems["problem_id"].to_pylist()
    plans = _plan(config, inputs, problem_ids)
    policy = next(iter(inputs.snapshots.values()))
    cutter = _Cutter(config, context.tokenizer(policy), frozenset(describe(policy).eos))
    wanted = {problem_ids[p.problem] for p in plans}
    history = _History(inputs.history if needs_history(config) else (), wanted)
    sampled: dict[int, int] = {}
    outcomes: dict[int, str] = {}

    def build(start: int, stop: int) -> pa.Table:
        chosen = _choose(config, context, problems, plans[start:stop], cutter)
        rows = [_finish(config, plan, chain, problems, cutter, history) for plan, chain in chosen]
        outcomes.update(zip(range(start, stop), (row["outcome"] for row in rows), strict=True))
        return pa.Table.from_pylist(rows, schema=schema.SEED)

    def tally(start: int, stop: int) -> dict[str, float]:
        counts = Counter(f"seeds_{outcomes[k]}" for k in range(start, stop))
        return {"sampled_tokens": sum(sampled.get(k, 0) for k in range(start, stop)), **counts}

    with (
        writing(out, ident) as writer,
        Parts(
            writer,
            rows=len(plans),
            part_rows=config.engine.part_rows,
            build=build,
            tally=tally,
            stop_requested=lambda: context.stop_requested,
        ) as parts,
    ):
        todo = parts.todo
        context.progress.begin(STAGE, len(plans), len(plans) - len(todo))
        if config.seed.position == "suffix":
            for k in todo:
                plans[k].snapshot = recorded_digest(inputs.snapshots[plans[k].snapshot_step])
                parts.finish(k)
        elif config.seed.source == "replay":
            for k in todo:
                history.give(plans[k], problem_ids[plans[k].problem], config)
                parts.finish(k)
        else:
            prompts = problems["prompt_ids"].to_pylist()
            work, owners = [], []
            for step in sorted({plans[k].snapshot_step for k in todo}):
                owner = [(k, c) for k in todo if plans[k].snapshot_step == step for c in range(config.seed.candidates)]
                requests = [
                    cutter.request(prompts[plans[k].problem], plans[k], c, k // config.engine.part_rows)
                    for k, c in owner
                ]
                work.append((inputs.snapshots[step], requests))
                owners.append(owner)
            chains: dict[int, dict[int, Completion]] = {k: {} for k in todo}
            for position, r, digest, done in sample_each(context.engine(), work):
                k, c = owners[position][r]
                plan = plans[k]
                if digest != ident.inputs[f"snapshot {plan.snapshot_step}"]:
                    raise UserError(f"{work[position][0]}: damaged, it differs from its recorded digest; restore it")
                chains[k][c] = done
                sampled[k] = sampled.get(k, 0) + len(done.ids)
                if len(chains[k]) == config.seed.candidates:
                    plan.snapshot = digest
                    plan.chains = [chains[k][c] for c in range(config.seed.candidates)]
                    context.progress.advance(1, sum(len(c.ids) for c in plan.chains))
                    parts.finish(k)
        context.progress.end()
        writer.facts["snapshots"] = drawn(config, inputs) if config.seed.source == "live" else []
    assert writer.manifest is not None
    verified(writer.manifest)
    return writer.manifest


class _Cutter:
    """Applies the configured cut rule to chains."""

    def __init__(self, config: Pipeline, tokenizer: Any, eos: frozenset[int]) -> None:
        self.config, self.tokenizer, self.eos = config, tokenizer, eos
        self._pieces: dict[int, str] = {}

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self.decode([token])
        return self._pieces[token]

    def tokens(self, draw: float) -> int:
        """Drawn length for cut = "tokens": uniform over lo..hi inclusive."""
        lo, hi = int(self.config.seed.lo), int(self.config.seed.hi)
        return lo + int(draw * (hi - lo + 1))

    def request(self, prompt: list[int], plan: _Plan, candidate: int, part: int) -> Request:
        seed, budget = self.config.seed, self.config.rollout.max_response_tokens
        short = seed.cut == "tokens" and seed.position == "prefix" and seed.success == "any"
        return Request(
            ids=prompt,
            max_tokens=max(1, min(budget, self.tokens(plan.draw))) if short else budget,
            seed=plan.rng_seed if candidate == 0 else rng_seed(plan.rng_seed, candidate),
            temperature=seed.temperature,
            entropies=seed.cut == "entropy_peak",
            part=part,
        )

    def cut(self, plan: _Plan, chain: Completion, task: str, pass_rate: float | None) -> tuple[int, float]:
        """(seed length, the drawn cut) of a chain."""
        seed = self.config.seed
        fraction = seed.lo + (seed.hi - seed.lo) * plan.draw
        length = len(chain.ids)
        if seed.position == "whole":
            return length, 1.0
        if seed.cut == "tokens":
            cut, wanted = float(self.tokens(plan.draw)), self.tokens(plan.draw)
            wanted = wanted if length >= wanted else 0
        elif seed.cut == "line":
            cut, wanted = fraction, cuts.line_cut(chain.ids, fraction, self.piece)
        elif seed.cut == "entropy_peak":
            # a replayed chain has no entropies on disk; surprisal is its one-sample estimate
            wanted = cuts.entropy_peak_cut(chain.entropies or [-lp for lp in chain.logprobs])
            cut = wanted / max(1, length)
        else:
            cut = fraction
            if seed.cut == "target":
                cut = cuts.target_fraction(pass_rate, lo=seed.lo, hi=seed.hi, draw=plan.draw)
            wanted = cuts.uniform_cut(length, cut)
        limit = cuts.limit(
            chain.ids, eos=self.eos, decode=self.decode, task=task, budget=self.config.rollout.max_response_tokens
        )
        return min(wanted, limit), cut


class _History:
    """Unseeded trajectories of earlier iterations on the wanted problems: chains for replay, pass rates for target.

    Token lists stay in Arrow until a chain is drawn: a long run's history as Python lists would not fit.
    """

    def __init__(self, artifacts: Sequence[tuple[Path, Path]], wanted: Collection[str]) -> None:
        columns = ["policy", "policy_step", "response_ids", "logprobs", "finish_reason", "temperature"]
        names = pa.array(sorted(wanted), pa.string())
        self._tables: list[pa.Table] = []
        self._rows: dict[str, list[tuple[int, int, float, int]]] = {}  # problem -> (table, row, reward, tokens)
        for rollout, score in artifacts:
            rewards = read_rows(score, "scores", ["row_id", "reward"])
            reward = dict(zip(rewards["row_id"].to_pylist(), rewards["reward"].to_pylist(), strict=True))
            table = read_rows(rollout, "rollouts", ["row_id", "problem_id", "seed_id", *columns])
            table = table.filter(pc.and_(pc.is_null(table["seed_id"]), pc.is_in(table["problem_id"], names)))
            lengths = pc.list_value_length(table["response_ids"]).to_pylist()
            keys = zip(table["problem_id"].to_pylist(), table["row_id"].to_pylist(), lengths, strict=True)
            for at, (problem_id, row_id, length) in enumerate(keys):
                self._rows.setdefault(problem_id, []).append((len(self._tables), at, reward[row_id], length))
            self._tables.append(table.select(columns))

    def pass_rate(self, problem_id: str) -> float | None:
        rows = self._rows.get(problem_id)
        return sum(reward for _, _, reward, _ in rows) / len(rows) if rows else None

    def give(self, plan: _Plan, problem_id: str, config: Pipeline) -> None:
        """Draw one stored chain that passes the success filter for the plan, or none where there is none."""
        # a whole chain must fit into the budget, which may have been lowered since; a cut one does in any case
        most = config.rollout.max_response_tokens if config.seed.position == "whole" else math.inf
        known = self._rows.get(problem_id, ())
        fits = [r for r in known if _fits(config.seed.success, r[2]) and r[3] <= most]
        if fits:
            table, at, reward, _ = fits[rng_seed(plan.rng_seed, "replay") % len(fits)]
            row = self._tables[table].slice(at, 1).to_pylist()[0]
            plan.chains = [Completion(row["response_ids"], row["logprobs"], row["finish_reason"])]
            plan.reward, plan.snapshot, plan.snapshot_step = reward, row["policy"], row["policy_step"]
            plan.temperature = row["temperature"]


def _fits(success: str, reward: float) -> bool:
    return success == "any" or (reward > 0.5) == (success == "correct")


def _choose(
    config: Pipeline, context: Context, problems: pa.Table, plans: Sequence[_Plan], cutter: _Cutter
) -> list[tuple[_Plan, Completion | None]]:
    """The first chain of each plan that passes the success filter; live chains are graded only where a filter asks."""
    if config.seed.success == "any" or config.seed.source == "replay" or config.seed.position == "suffix":
        return [(p, p.chains[0] if p.chains else None) for p in plans]
    pairs = [(p, chain) for p in plans for chain in p.chains]
    grades = context.grade(
        [
            (
                str(problems["task"][p.problem]),
                str(problems["gold"][p.problem]),
                str(problems["prompt"][p.problem]),
                cutter.decode(c.ids),
            )
            for p, c in pairs
        ]
    )
    chosen: dict[str, tuple[Completion, float]] = {}
    for (plan, chain), grade in zip(pairs, grades, strict=True):
        reward = float(grade.reward)
        if plan.seed_id not in chosen and _fits(config.seed.success, reward):
            chosen[plan.seed_id] = (chain, reward)
    rows: list[tuple[_Plan, Completion | None]] = []
    for plan in plans:
        best, plan.reward = chosen.get(plan.seed_id, (None, None))
        rows.append((plan, best))
    return rows


def _finish(
    config: Pipeline,
    plan: _Plan,
    chain: Completion | None,
    problems: pa.Table,
    cutter: _Cutter,
    history: _History,
) -> dict[str, Any]:
    problem_id = str(problems["problem_id"][plan.problem])
    length, cut = 0, config.seed.lo + (config.seed.hi - config.seed.lo) * plan.draw
    if chain is not None:
        rate = history.pass_rate(problem_id) if config.seed.cut == "target" else None
        length, cut = cutter.cut(plan, chain, str(problems["task"][plan.problem]), rate)
    if config.seed.position == "suffix" or length > 0:
        outcome = "used"
    elif chain is not None:
        outcome = "too_short"
    else:
        outcome = "no_fit" if plan.chains else "no_chain"
    ids = list(chain.ids[:length]) if chain else []
    return {
        "seed_id": plan.seed_id,
        "problem_id": problem_id,
        "group_id": plan.group_id,
        "slot": plan.slot,
        "snapshot": plan.snapshot,
        "snapshot_step": plan.snapshot_step,
        "ids": ids,
        "logprobs": list(chain.logprobs[:length]) if chain else [],
        "chain_length": len(chain.ids) if chain else 0,
        "cut": cut,
        "origin": config.seed.source,
        "chain_reward": plan.reward,
        "finish_reason": chain.finish_reason if chain else None,
        "outcome": outcome,
        "temperature": config.seed.temperature if plan.temperature is None else plan.temperature,
        "rng_seed": plan.rng_seed,
        "text": cutter.decode(ids),
    }
