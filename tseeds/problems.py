"""Stage problems: data sets become problems with prompt token ids (first minimal version; readers, findings follow)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tseeds.artifacts import schema
from tseeds.artifacts.policy import file_digest
from tseeds.artifacts.rundir import recorded_digest
from tseeds.artifacts.store import Identity, Manifest, writing
from tseeds.config import Pipeline, ProblemsConfig
from tseeds.context import Context

STAGE = "problems"
VERSION = 1


@dataclass(frozen=True)
class Inputs:
    """policy: model directory whose tokenizer and chat template make the prompts."""

    policy: Path


def identity(config: Pipeline, inputs: Inputs) -> Identity:
    """What decides the problems: prompt settings, the data's bytes and the policy's tokenizer."""
    values = {f"problems.{k}": v for k, v in config.problems.model_dump(mode="json").items() if k != "path"}
    return Identity(
        STAGE,
        VERSION,
        values,
        {"policy": recorded_digest(inputs.policy), "data": file_digest(Path(str(config.problems.path)))},
    )


def ingest(config: ProblemsConfig, tokenizer: Any) -> tuple[pa.Table, pa.Table, dict[str, Any]]:
    """(problems, quarantine, report)."""
    rows = [json.loads(line) for line in Path(str(config.path)).read_text().splitlines()]
    records = []
    for k, row in enumerate(rows[: config.limit or None]):
        problem = row.get("problem")
        text = config.template.format(problem=problem)
        if config.prompt == "chat":
            ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        else:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        gold = row.get("gold", row.get("answer"))
        records.append(
            {
                "problem_id": row.get("id", str(k)),
                "prompt": tokenizer.decode(ids),
                "prompt_ids": ids,
                "problem": problem,
                "gold": gold,
                "task": config.task,
                "source": "x",
                "difficulty": None,
            }
        )
    return pa.Table.from_pylist(records, schema=schema.PROBLEMS), schema.QUARANTINE.empty_table(), {}


def run(config: Pipeline, inputs: Inputs, out: Path, context: Context) -> Manifest:
    """Commit the problems at ``out``."""
    with writing(out, identity(config, inputs)) as writer:
        table, _, _ = ingest(config.problems, context.tokenizer(inputs.policy))
        writer.part(0, table)
    assert writer.manifest is not None
    return writer.manifest
