"""Stage rollout: the current policy completes seeded and unseeded rows on-policy.

Reads problems, a policy, (where the group has a seeded share) seeds and (with a curriculum) pass rates; writes one row per trajectory: prompt_ids,
response_ids (seed and continuation), behaviour logprobs of every response token, the span [off_start, off_stop) that a
snapshot wrote, finish_reason, rng_seed, text. Token ids go in and come out; text is decoded for reading only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tseeds import cuts, selection
from tseeds.artifacts import schema
from tseeds.artifacts.parts import Parts
from tseeds.artifacts.rundir import recorded_digest
from tseeds.artifacts.store import Identity, Manifest, read_rows, require, writing
from tseeds.config import Pipeline
from tseeds.context import Context
from tseeds.engines.base import Completion, Request
from tseeds.engines.policies import describe
from tseeds.errors import UserError
from tseeds.schedule import groups, rng_seed, row_id

STAGE = "rollout"
VERSION = 1


@dataclass(frozen=True)
class Inputs:
    """policy: model directory of step policy_step; problems, seeds, curriculum: artifacts; snapshots: step -> model directory
    (suffix)."""

    policy: Path
    policy_step: int
    problems: Path
    seeds: Path | None
    iteration: int
    snapshots: Mapping[int, Path] = field(default_factory=dict)
    curriculum: Path | None = None


def identity(config: Pipeline, inputs: Inputs) -> Identity:
    """What decides the rows: sampling values, run seed, iteration, and the digests of policy, problems and seeds."""
    values: dict[str, Any] = {
        "run.seed": config.run.seed,
        "iteration": inputs.iteration,
        "policy.dtype": config.policy.dtype,
        "engine.backend": config.engine.backend,
        "rollout.problems_per_iteration": config.rollout.problems_per_iteration,
        "rollout.group_size": config.rollout.group_size,
        "rollout.max_response_tokens": config.rollout.max_response_tokens,
        "rollout.temperature": config.rollout.temperature,
    }
    digests = {
        "policy": recorded_digest(inputs.policy),
        "problems": require(inputs.problems, "problems").digest,
    }
    if inputs.seeds is not None:
        values["seed.position"] = config.seed.position
        if config.seed.position == "suffix":
            values["seed.temperature"] = config.seed.temperature
        digests["seeds"] = require(inputs.seeds, "seeds").digest
    chosen, measured = selection.identity(config, inputs.curriculum)
    return Identity(STAGE, VERSION, values | chosen, digests | measured)


@dataclass(slots=True)
class _Row:
    """A trajectory on its way: ids and logprobs grow from seed to full response."""

    row_id: str
    group_id: str
    sample: int
    problem: int
    rng_seed: int
    seed: dict[str, Any] | None
    position: str
    ids: list[int]
    logprobs: list[float]
    off: tuple[int, int]
    finish_reason: str | None = None
    sampled: int = 0


def _plan(config: Pipeline, inputs: Inputs, problems: pa.Table, seeds: pa.Table | None) -> list[_Row]:
    by_slot: dict[tuple[str, int], dict[str, Any]] = {}
    for seed in seeds.to_pylist() if seeds is not None else ():
        if seed["outcome"] == "used":
            for k in range(config.seed.continuations):
                by_slot[seed["group_id"], seed["slot"] + k] = seed
    size, position = config.rollout.group_size, config.seed.position
    rows = []
    problem_ids = problems["problem_id"].to_pylist()
    for group in groups(
        problem_ids,
        run_seed=config.run.seed,
        iteration=inputs.iteration,
        per_iteration=config.rollout.problems_per_iteration,
        weights=selection.weights(config, problem_ids, inputs.curriculum),
    ):
        for sample in range(size):
            seed_row = by_slot.get((group.group_id, sample))
            seeded = seed_row is not None and position != "suffix"
            ids = list(seed_row["ids"]) if seed_row is not None and seeded else []
            rows.append(
                _Row(
                    row_id=row_id(group.group_id, sample),
                    group_id=group.group_id,
                    sample=sample,
                    problem=group.index,
                    rng_seed=rng_seed(
                        config.run.seed, inputs.iteration, STAGE, group.problem_id, group.occurrence * size + sample
                    ),
                    seed=seed_row,
                    position=position if seed_row is not None else "none",
                    ids=ids,
                    logprobs=list(seed_row["logprobs"]) if seed_row is not None and seeded else [],
                    off=(0, len(ids)),
                    finish_reason=seed_row["finish_reason"] if seed_row is not None and position == "whole" else None,
                )
            )
    return rows


def run(config: Pipeline, inputs: Inputs, out: Path, context: Context) -> Manifest:
    """Commit the rollouts at ``out``; parts that an earlier attempt committed are kept.

    Raises:
        UserError: an input is missing or damaged. StageFailed: the engine failed. Interrupted: asked to stop.
    """
    ident = identity(config, inputs)
    problems = read_rows(inputs.problems, "problems", ["problem_id", "prompt_ids"])
    seeds = read_rows(inputs.seeds, "seeds", ["seed_id", "outcome"]) if inputs.seeds is not None else None
    tokenizer = context.tokenizer(inputs.policy)
    rows = _plan(config, inputs, problems, seeds)
    prompts = problems["prompt_ids"].to_pylist()
    problem_ids = problems["problem_id"].to_pylist()
    step = inputs.policy_step

    def build(start: int, stop: int) -> pa.Table:
        part = rows[start:stop]
        for row in part:
            assert len(row.ids) == len(row.logprobs) <= config.rollout.max_response_tokens
        seed_of = [row.seed or {} for row in part]
        columns: dict[str, list[Any]] = {
            "row_id": [r.row_id for r in part],
            "problem_id": [problem_ids[r.problem] for r in part],
            "group_id": [r.group_id for r in part],
            "sample": [r.sample for r in part],
            "policy": [ident.inputs["policy"]] * len(part),
            "policy_step": [step] * len(part),
            "seed_id": [s.get("seed_id") for s in seed_of],
            "snapshot_step": [s.get("snapshot_step") for s in seed_of],
            "position": [r.position for r in part],
            "prompt_ids": [prompts[r.problem] for r in part],
            "response_ids": [r.ids for r in part],
            "logprobs": [r.logprobs for r in part],
            "off_start": [r.off[0] for r in part],
            "off_stop": [r.off[1] for r in part],
            "finish_reason": [r.finish_reason for r in part],
            "temperature": [config.rollout.temperature] * len(part),
            "rng_seed": [r.rng_seed for r in part],
            "text": tokenizer.batch_decode([r.ids for r in part], skip_special_tokens=True),
        }
        return pa.table(columns, schema=schema.ROLLOUT)

    with (
        writing(out, ident) as writer,
        Parts(
            writer,
            rows=len(rows),
            part_rows=config.engine.part_rows,
            build=build,
            tally=lambda start, stop: {"sampled_tokens": sum(r.sampled for r in rows[start:stop])},
            stop_requested=lambda: context.stop_requested,
        ) as parts,
    ):
        todo = parts.todo
        context.progress.begin(STAGE, len(rows), len(rows) - len(todo))
        whole = [r for r in todo if rows[r].finish_reason is not None]
        live = [r for r in todo if rows[r].finish_reason is None]
        suffix = [r for r in live if rows[r].position == "suffix"]
        for r in whole:
            parts.finish(r)
        if live:
            _load(context, inputs.policy, ident.inputs["policy"])
        handed = set(suffix)

        def sample(numbers: Sequence[int], purpose: str) -> None:
            requests = [
                Request(
                    ids=prompts[rows[r].problem] + rows[r].ids,
                    max_tokens=config.rollout.max_response_tokens - len(rows[r].ids),
                    seed=rows[r].rng_seed if purpose == "continue" else rng_seed(rows[r].rng_seed, purpose),
                    temperature=config.rollout.temperature if purpose == "continue" else config.seed.temperature,
                    part=r // config.engine.part_rows,
                )
                for r in numbers
            ]
            for k, done in context.engine().sample(requests):
                row = rows[numbers[k]]
                _extend(row, done)
                if purpose == "suffix":
                    row.off = (row.off[0], len(row.ids))
                row.sampled += len(done.ids)
                context.progress.advance(1, len(done.ids))
                if numbers[k] not in handed or purpose == "suffix":
                    parts.finish(numbers[k])

        if live:  # after a crash between the last part and the commit nothing is left to sample
            sample(live, "continue")
        eos = frozenset(describe(inputs.policy).eos)
        for snapshot_step in sorted({rows[r].seed["snapshot_step"] for r in suffix}):  # type: ignore[index]
            numbers = [r for r in suffix if rows[r].seed["snapshot_step"] == snapshot_step]  # type: ignore[index]
            for r in numbers:
                _cut_beginning(rows[r], config, eos, tokenizer, str(problems["task"][rows[r].problem]))
            current = inputs.policy if snapshot_step == step else None  # sampler "current"
            snapshot = inputs.snapshots.get(snapshot_step, current)
            if snapshot is None:
                raise UserError(f"position suffix needs the snapshot of step {snapshot_step}; pass its directory")
            _load(context, snapshot, recorded_digest(snapshot))
            sample(numbers, "suffix")
        context.progress.end()
    assert writer.manifest is not None
    return writer.manifest


def _load(context: Context, policy: Path, digest: str) -> None:
    held = context.engine().load(policy)
    if held != digest:
        raise UserError(f"{policy}: damaged, it differs from the digest recorded when it was written; restore it")


def _extend(row: _Row, done: Completion) -> None:
    row.ids += done.ids
    row.logprobs += done.logprobs
    row.finish_reason = done.finish_reason


def _cut_beginning(row: _Row, config: Pipeline, eos: frozenset[int], tokenizer: Any, task: str) -> None:
    """Keep the beginning that the current policy wrote, at the cut that the seed stage drew; the snapshot goes on."""
    assert row.seed is not None

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    length = cuts.uniform_cut(len(row.ids), row.seed["cut"])
    limit = cuts.limit(row.ids, eos=eos, decode=decode, task=task, budget=config.rollout.max_response_tokens)
    row.ids, row.logprobs = row.ids[: min(length, limit)], row.logprobs[: min(length, limit)]
    row.off = (len(row.ids), len(row.ids))
