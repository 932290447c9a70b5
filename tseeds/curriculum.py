"""Stage curriculum: the base policy's own pass rate on every problem, measured once before training.

Reads problems and the policy of step 0; samples ``curriculum.samples`` responses per problem with the rollout's budget and
temperature and grades them as stage score does. Writes one row per problem: rewards, verdicts and lengths of the responses
and their mean reward. Response texts are not kept: their random seeds are hashes, so a rollout can write them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tseeds.artifacts import schema
from tseeds.artifacts.parts import Parts
from tseeds.artifacts.rundir import recorded_digest
from tseeds.artifacts.store import Identity, Manifest, read_rows, require, writing
from tseeds.config import Pipeline
from tseeds.context import Context
from tseeds.engines.base import Completion, Request
from tseeds.errors import UserError
from tseeds.schedule import rng_seed
from tseeds.score import grading

STAGE = "curriculum"
VERSION = 1


@dataclass(frozen=True)
class Inputs:
    """policy: model directory of step 0; problems: artifact."""

    policy: Path
    problems: Path


def identity(config: Pipeline, inputs: Inputs) -> Identity:
    """What decides the pass rates: sampling and grading values, run seed, digests of policy and problems."""
    values: dict[str, Any] = {
        "run.seed": config.run.seed,
        "policy.dtype": config.policy.dtype,
        "engine.backend": config.engine.backend,
        "curriculum.samples": config.curriculum.samples,
        "rollout.max_response_tokens": config.rollout.max_response_tokens,
        "rollout.temperature": config.rollout.temperature,
    }
    problems = require(inputs.problems, "problems")
    conventions, verifier = grading(config, str(problems.identity.config.get("problems.task", config.problems.task)))
    digests = {"policy": recorded_digest(inputs.policy), "problems": problems.digest}
    return Identity(STAGE, VERSION, values | conventions, digests | verifier)


def run(config: Pipeline, inputs: Inputs, out: Path, context: Context) -> Manifest:
    """Commit the pass rates at ``out``; parts that an earlier attempt committed are kept.

    Raises:
        UserError: an input is missing or damaged, or curriculum.samples is 0. StageFailed: the engine failed. Interrupted:
        asked to stop.
    """
    n = config.curriculum.samples
    if not n:
        raise UserError("curriculum.samples is 0: set how many responses measure a problem's pass rate, such as 8")
    ident = identity(config, inputs)
    problems = read_rows(inputs.problems, "problems", ["prompt_ids", "gold"])
    problem_ids, prompts = problems["problem_id"].to_pylist(), problems["prompt_ids"].to_pylist()
    asked = list(zip(*(problems[name].to_pylist() for name in ("task", "gold", "prompt")), strict=True))
    tokenizer = context.tokenizer(inputs.policy)
    done: dict[int, dict[int, Completion]] = {}

    def build(start: int, stop: int) -> pa.Table:
        rows = [(k, done[k][s]) for k in range(start, stop) for s in range(n)]
        texts = tokenizer.batch_decode([c.ids for _, c in rows], skip_special_tokens=True)
        grades = context.grade([(*asked[k], text) for (k, _), text in zip(rows, texts, strict=True)])
        columns: dict[str, list[Any]] = {name: [] for name in schema.CURRICULUM.names}
        for at, k in enumerate(range(start, stop)):
            mine, completions = grades[at * n : (at + 1) * n], [done[k][s] for s in range(n)]
            rewards = [float(g.reward) for g in mine]
            columns["problem_id"].append(problem_ids[k])
            columns["pass_rate"].append(sum(rewards) / n)
            columns["rewards"].append(rewards)
            columns["verdicts"].append([str(g.verdict) for g in mine])
            columns["lengths"].append([len(c.ids) for c in completions])
            columns["truncated"].append(sum(c.finish_reason == "length" for c in completions))
        return pa.table(columns, schema=schema.CURRICULUM)

    with (
        writing(out, ident) as writer,
        Parts(
            writer,
            rows=len(problem_ids),
            part_rows=max(1, config.engine.part_rows // n),
            build=build,
            tally=lambda start, stop: {
                "sampled_tokens": sum(len(c.ids) for k in range(start, stop) for c in done[k].values())
            },
            stop_requested=lambda: context.stop_requested,
        ) as parts,
    ):
        todo = parts.todo
        context.progress.begin(STAGE, len(problem_ids), len(problem_ids) - len(todo))
        if todo and context.engine().load(inputs.policy) != ident.inputs["policy"]:
            raise UserError(
                f"{inputs.policy}: damaged, it differs from the digest recorded when it was written; restore it"
            )
        requests = [
            Request(
                ids=prompts[k],
                max_tokens=config.rollout.max_response_tokens,
                seed=rng_seed(config.run.seed, STAGE, problem_ids[k], s),
                temperature=config.rollout.temperature,
                part=k // max(1, config.engine.part_rows // n),
            )
            for k in todo
            for s in range(n)
        ]
        for r, completion in context.engine().sample(requests) if todo else ():
            k = todo[r // n]
            done.setdefault(k, {})[r % n] = completion
            if len(done[k]) == n:
                context.progress.advance(1, sum(len(c.ids) for c in done[k].values()))
                parts.finish(k)
        context.progress.end()
    assert writer.manifest is not None
    return writer.manifest
