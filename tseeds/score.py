"""Stage score: a verdict and a reward for every trajectory.

Reads rollouts and problems; writes verdict, reward, extracted answer, canonical solution and the grader's wall time per
row_id. Only the response text is graded: seed and continuation together, as the policy wrote them, behind a thinking that the
prompt may have opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tseeds.artifacts import schema
from tseeds.artifacts.store import Identity, Manifest, read_table, require, writing
from tseeds.config import Pipeline
from tseeds.context import Context

STAGE = "score"
VERSION = 1


@dataclass(frozen=True)
class Inputs:
    """rollouts, problems: artifacts."""

    rollouts: Path
    problems: Path


def identity(config: Pipeline, inputs: Inputs) -> Identity:
    """What decides the grades: rollouts, golds, and the grader's own limits and conventions."""
    neutral = {"workers"}
    values = {f"score.{k}": v for k, v in config.score.model_dump(mode="json").items() if k not in neutral}
    digests = {
        "rollouts": require(inputs.rollouts, "rollouts").digest,
        "problems": require(inputs.problems, "problems").digest,
    }
    return Identity(STAGE, VERSION, values, digests)


def run(config: Pipeline, inputs: Inputs, out: Path, context: Context) -> Manifest:
    """Commit the grades at ``out``, in the rollouts' row order; parts that an earlier attempt committed are kept.

    Raises:
        UserError: an input is missing or damaged. Interrupted: asked to stop.
    """
    ident = identity(config, inputs)
    rollouts = read_table(require(inputs.rollouts, "rollouts")).select(["row_id", "problem_id", "text"])
    problems = read_table(require(inputs.problems, "problems"))
    asked = {
        row["problem_id"]: (row["task"], row["gold"], row["prompt"])
        for row in problems.select(["problem_id", "task", "gold", "prompt"]).to_pylist()
    }
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
            columns: dict[str, list[Any]] = {
                "row_id": [r["row_id"] for r in chunk],
                "problem_id": [r["problem_id"] for r in chunk],
                "extracted": [g.extracted for g in grades],
                "canonical": [g.canonical for g in grades],
                "verdict": [str(g.verdict) for g in grades],
                "reward": [g.reward for g in grades],
                "grader": [asked[r["problem_id"]][0] for r in chunk],
                "wall_ms": [g.wall_ms for g in grades],
            }
            writer.part(part, pa.table(columns, schema=schema.SCORE))
            context.progress.advance(len(chunk))
        context.progress.end()
    assert writer.manifest is not None
    return writer.manifest
