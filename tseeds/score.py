"""Stage score: a verdict and a reward for every trajectory.

Reads rollouts and problems; writes verdict, reward, extracted answer, canonical solution and the grader's wall time per
row_id. Only the response text is graded: seed and continuation together, as the policy wrote them, behind a thinking that the
prompt may have opened.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tseeds.artifacts import schema
from tseeds.artifacts.policy import file_digest
from tseeds.artifacts.store import Identity, Manifest, read_rows, require, writing
from tseeds.config import Pipeline
from tseeds.context import Context
from tseeds.errors import StageFailed, UserError

log = logging.getLogger(__name__)

STAGE = "score"
VERSION = 1


@dataclass(frozen=True)
class Inputs:
    """rollouts, problems: artifacts."""

    rollouts: Path
    problems: Path


def grading(config: Pipeline, task: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(values, digests) of all that decides a verdict beside gold and text: limits, conventions, the user's verifier.

    Raises:
        UserError: the verifier's file cannot be read.
    """
    values = {f"score.{k}": v for k, v in config.score.model_dump(mode="json").items() if k != "workers"}
    if not task.startswith("python:"):
        return values, {}
    path = task.removeprefix("python:").rpartition(":")[0]
    try:
        return values, {"verifier": file_digest(Path(path))}
    except OSError as error:
        raise UserError(f"{path}: the verifier cannot be read: {error.strerror or error}") from error


def identity(config: Pipeline, inputs: Inputs) -> Identity:
    """What decides the grades: rollouts, golds, and how they are graded."""
    problems = require(inputs.problems, "problems")
    values, digests = grading(config, str(problems.identity.config.get("problems.task", config.problems.task)))
    digests |= {"rollouts": require(inputs.rollouts, "rollouts").digest, "problems": problems.digest}
    return Identity(STAGE, VERSION, values, digests)


def run(config: Pipeline, inputs: Inputs, out: Path, context: Context) -> Manifest:
    """Commit the grades at ``out``, in the rollouts' row order; parts that an earlier attempt committed are kept.

    Raises:
        UserError: an input is missing or damaged, or a rollout's problem is not among the problems. StageFailed: a user's
        verifier fails on every row of a part. Interrupted: asked to stop.
    """
    ident = identity(config, inputs)
    rollouts = read_rows(inputs.rollouts, "rollouts", ["row_id", "text"]).select(["row_id", "problem_id", "text"])
    problems = read_rows(inputs.problems, "problems", ["gold"])
    asked = {
        row["problem_id"]: (row["task"], row["gold"], row["prompt"])
        for row in problems.select(["problem_id", "task", "gold", "prompt"]).to_pylist()
    }
    strange = sorted(set(rollouts["problem_id"].to_pylist()) - asked.keys())
    if strange:
        raise UserError(
            f"{inputs.rollouts}: {len(strange)} problems that {inputs.problems} does not hold, such as {strange[0]}; name the "
            "problems that these rollouts were sampled for"
        )
    size, rows = config.engine.part_rows, rollouts.num_rows
    with writing(out, ident) as writer:
        writer.keep_parts(rows, size)
        context.progress.begin(STAGE, rows, sum(min(size, rows - k * size) for k in writer.parts))
        for part in range(-(-rows // size)):
            if part in writer.parts:
                continue
            context.check_stop()
            chunk = rollouts.slice(part * size, size).to_pylist()
            grades = context.grade([(*asked[r["problem_id"]], r["text"]) for r in chunk])
            failed = [g for g in grades if g.verdict == "error"]
            if len(failed) == len(grades) and all(asked[r["problem_id"]][0].startswith("python:") for r in chunk):
                raise StageFailed(
                    f"score: the verifier fails on every row, first with {failed[0].detail}; mend it and run again"
                )
            columns: dict[str, list[Any]] = {
                "row_id": [r["row_id"] for r in chunk],
                "problem_id": [r["problem_id"] for r in chunk],
                "extracted": [g.extracted for g in grades],
                "canonical": [g.canonical for g in grades],
                "verdict": [str(g.verdict) for g in grades],
                "reward": [g.reward for g in grades],
                "grader": [asked[r["problem_id"]][0] for r in chunk],
                "wall_ms": [g.wall_ms for g in grades],
                "detail": [g.detail for g in grades],
            }
            verdicts = Counter(columns["verdict"])
            for kind in ("error", "timeout"):  # the reward of 0 is the grader's doing, not the answer's
                if verdicts[kind]:
                    why = columns["detail"][columns["verdict"].index(kind)]
                    log.warning("score: verdict %s for %d of %d rows, first: %s", kind, verdicts[kind], len(chunk), why)
            writer.part(part, pa.table(columns, schema=schema.SCORE), {f"verdict_{k}": n for k, n in verdicts.items()})
            context.progress.advance(len(chunk))
        context.progress.end()
    assert writer.manifest is not None
    return writer.manifest
