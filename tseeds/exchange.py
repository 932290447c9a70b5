"""Trajectories to and from the files that other trainers write; policies as plain model directories.

Two layouts, each JSONL or Parquet by the file's name. The first columns are what the other system reads and writes; the
rest are ours, so that a file comes back without loss.

* ``trl``: prompt, completion, reward, step, prompt_ids, completion_ids, logprobs (TRL's completion logs, with ids);
* ``verl``: input, output, gts, score, step (verl's rollout dumps).

Text is never encoded again: a file without token ids and behaviour log-probs cannot become rollouts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from tseeds.artifacts import schema
from tseeds.artifacts.disk import make_directories, refusals
from tseeds.artifacts.policy import PROBE_FILE, file_digest, model_directory, policy_digest, policy_files
from tseeds.artifacts.store import Identity, Manifest, read_manifest, read_table, require, writing
from tseeds.errors import UserError

Layout = Literal["trl", "verl"]
VERSION = 1

NAMES: dict[str, dict[str, str]] = {
    "trl": {"prompt": "prompt", "text": "completion", "reward": "reward", "response_ids": "completion_ids"},
    "verl": {"prompt": "input", "text": "output", "gold": "gts", "reward": "score"},
}
"""Our column -> the other system's; every other column keeps its own name. policy_step is ``step`` in both."""
_NEEDED = ("prompt_ids", "response_ids", "logprobs")
_OURS = tuple(n for n in schema.ROLLOUT.names if n not in ("text", "response_ids", "policy_step"))
_GRADES = ("extracted", "canonical", "verdict", "grader")


def export_rows(
    rollouts: Path, layout: Layout, *, scores: Path | None = None, problems: Path | None = None
) -> pa.Table:
    """Rollouts as one table of a layout, with rewards and golds where their artifacts are given.

    Raises:
        UserError: an artifact is missing, damaged or of another stage.
    """
    rows = read_table(require(rollouts, "rollouts", stage="rollout"))
    names = NAMES[layout] | {"policy_step": "step"}
    columns: dict[str, Any] = {}
    if scores is not None:
        graded = read_table(require(scores, "scores", stage="score"))
        at = {r: i for i, r in enumerate(graded["row_id"].to_pylist())}
        order = pa.array([at.get(r) for r in rows["row_id"].to_pylist()], pa.int64())
        columns |= {c: graded[c].combine_chunks().take(order) for c in ("reward", *_GRADES)}
    if problems is not None:
        table = read_table(require(problems, "problems", stage="problems"))
        golds = dict(zip(table["problem_id"].to_pylist(), table["gold"].to_pylist(), strict=True))
        prompts = dict(zip(table["problem_id"].to_pylist(), table["prompt"].to_pylist(), strict=True))
        ids = rows["problem_id"].to_pylist()
        columns["prompt"] = pa.array([prompts.get(p) for p in ids], pa.string())
        columns["gold"] = pa.array([golds.get(p) for p in ids], pa.string())
    columns |= {c: rows[c] for c in (*_OURS, "text", "response_ids", "policy_step")}
    first = [c for c in ("prompt", "text", "gold", "reward", "policy_step", *_NEEDED) if c in columns]
    order_ = [*first, *(c for c in columns if c not in first)]
    return pa.table({names.get(c, c): columns[c] for c in order_})


def write_file(table: pa.Table, path: Path) -> None:
    """Write a table as JSONL or Parquet, by the file's name, whole or not at all; its folder is made where it is missing.

    Raises:
        UserError: nothing can be written there.
    """
    from tseeds.artifacts.store import write_file as write_atomically

    with refusals(path):
        make_directories(path.parent)
    if path.suffix == ".jsonl":
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=True) for row in table.to_pylist()]
        write_atomically(path, "\n".join(lines) + "\n" if lines else "")
    else:
        assert path.suffix == ".parquet", path
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        write_atomically(path, sink.getvalue().to_pybytes())


def read_file(path: Path) -> pa.Table:
    """A JSONL or Parquet file as a table.

    Raises:
        UserError: missing, another ending, or not readable.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        if path.suffix == ".parquet":
            return pq.read_table(path, partitioning=None)
        if path.suffix == ".jsonl":
            with open(path, encoding="utf-8") as handle:
                return pa.Table.from_pylist(list(_lines(path, handle)))
    except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable: {str(error).splitlines()[0]}") from None
    raise UserError(f"{path}: name a .jsonl or .parquet file")


def _lines(path: Path, handle: Any) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(handle, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}: line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}: line {number}: not an object")
        yield row


def layout_of(table: pa.Table, path: Path) -> Layout:
    """Which layout a file has, by its columns.

    Raises:
        UserError: neither.
    """
    for layout in NAMES:
        if {NAMES[layout]["prompt"], NAMES[layout]["text"]} <= {*table.column_names} or (
            layout == "trl" and "completion_ids" in table.column_names
        ):
            return layout  # type: ignore[return-value]
    raise UserError(
        f"{path}: neither TRL's columns (prompt, completion) nor verl's (input, output); it has "
        f"{', '.join(table.column_names[:12])}"
    )


def import_rows(path: Path, out: Path) -> tuple[Manifest, Manifest | None]:
    """Commit a file of either layout as ``out``/rollout and, where it has rewards, ``out``/score.

    Missing columns are filled where that invents nothing: row_id by position, group_id by equal prompt_ids, position
    none. Token ids and behaviour log-probs must be in the file.

    Raises:
        UserError: a needed column is missing, or a row's ids and log-probs differ in length.
    """
    table = read_file(path)
    layout = layout_of(table, path)
    back = {theirs: ours for ours, theirs in (NAMES[layout] | {"policy_step": "step"}).items()}
    table = table.rename_columns([back.get(c, c) for c in table.column_names])
    missing = [c for c in _NEEDED if c not in table.column_names]
    if missing:
        theirs = NAMES[layout].get(missing[0], missing[0])
        raise UserError(
            f"{path}: no column {theirs}: token ids and the log-probs they were sampled with must be in the file "
            "(text encoded again gives other ids)"
        )
    rows = table.to_pylist()
    groups: dict[tuple[int, ...], int] = {}
    sizes: dict[str, int] = {}
    records = []
    for number, row in enumerate(rows):
        if not row["prompt_ids"] or row["response_ids"] is None or row["logprobs"] is None:
            raise UserError(f"{path}: row {number + 1}: prompt_ids, response ids or logprobs are empty")
        if len(row["response_ids"]) != len(row["logprobs"]):
            raise UserError(
                f"{path}: row {number + 1}: {len(row['response_ids'])} response ids but {len(row['logprobs'])} logprobs"
            )
        group = groups.setdefault(tuple(row["prompt_ids"]), len(groups))
        filled: dict[str, Any] = {
            "row_id": f"import-{number:06d}",
            "problem_id": f"prompt-{group:05d}",
            "group_id": f"prompt-{group:05d}",
            "policy": "unknown",
            "policy_step": 0,
            "position": "none",
            "off_start": 0,
            "off_stop": 0,
            "finish_reason": "stop",
            "temperature": 1.0,
            "rng_seed": 0,
            "text": "",
        }
        record: dict[str, Any] = {
            c: row.get(c) if row.get(c) is not None else filled.get(c) for c in schema.ROLLOUT.names
        }
        if record["sample"] is None:
            record["sample"] = sizes.get(record["group_id"], 0)
        sizes[record["group_id"]] = sizes.get(record["group_id"], 0) + 1
        if not 0 <= record["off_start"] <= record["off_stop"] <= len(record["response_ids"]):
            raise UserError(f"{path}: row {number + 1}: off_start, off_stop do not lie within the response")
        records.append(record)
    if len({r["row_id"] for r in records}) != len(records):
        raise UserError(f"{path}: row_id is not unique")
    identity = Identity("import", VERSION, {"layout": layout}, {"file": file_digest(path)})
    rollouts = _commit(out / "rollout", identity, records, schema.ROLLOUT)
    if "reward" not in table.column_names:
        return rollouts, None
    grades = [
        {
            "row_id": record["row_id"],
            "problem_id": record["problem_id"],
            "reward": float(row["reward"] or 0.0),
            "verdict": row.get("verdict") or ("correct" if (row["reward"] or 0) >= 1 else "wrong"),
            "extracted": row.get("extracted"),
            "canonical": row.get("canonical"),
            "grader": row.get("grader") or "imported",
            "wall_ms": 0.0,
        }
        for record, row in zip(records, rows, strict=True)
    ]
    return rollouts, _commit(out / "score", identity, grades, schema.SCORE)


def _commit(out: Path, identity: Identity, records: list[dict[str, Any]], columns: pa.Schema) -> Manifest:
    held = read_manifest(out)
    if held is not None:
        if held.identity.key == identity.key:
            return held
        raise UserError(f"{out}: something else is committed here; choose another --out")
    try:
        table = pa.Table.from_pylist(records, schema=columns)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UserError(f"a column has the wrong type: {str(error).splitlines()[0]}") from None
    with writing(out, identity) as writer:
        writer.part(0, table)
    assert writer.manifest is not None
    return writer.manifest


def export_policy(policy: Path, out: Path, *, base: Path | None = None) -> str:
    """Copy a policy as a model directory that transformers and ``vllm serve`` load as it is; returns its digest.

    Only what makes a policy is copied (config, safetensors, tokenizer), never trainer state. A LoRA adapter is merged into
    ``base``; by default that is the policy that its adapter_config.json names.

    Raises:
        UserError: not a policy, an adapter whose base is not there, a base for a policy that is whole, ``out`` exists or
        cannot be written.
    """
    files = policy_files(policy)
    if (policy / "config.json").is_file():
        if base is not None:
            raise UserError(f"{policy}: a whole model, no LoRA adapter; leave --base out")
    else:
        try:
            base = base or model_directory(policy)
        except UserError as error:
            raise UserError(f"{error}, or name it with --base") from None
    aside = out.with_name(f".{out.name}.tmp")
    with refusals(out):
        if out.exists():
            raise UserError(f"{out}: exists already; name a new directory")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        if base is not None:
            from tseeds.training.weights import merge_adapter

            merge_adapter(base, policy, aside)
            (aside / PROBE_FILE).unlink()
        else:
            for file in files:
                shutil.copyfile(file, aside / file.name)
        assert not (aside / PROBE_FILE).exists()
        digest = policy_digest(aside)
        aside.rename(out)
    return digest
