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
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from tseeds.artifacts import schema
from tseeds.artifacts.disk import make_parent, refusals
from tseeds.artifacts.policy import PROBE_FILE, file_digest, model_directory, policy_digest, policy_files
from tseeds.artifacts.store import Identity, Manifest, read_manifest, read_rows, writing
from tseeds.errors import UserError, first_line
from tseeds.grading.verdict import Verdict

Layout = Literal["trl", "verl"]
VERSION = 1

NAMES: dict[str, dict[str, str]] = {
    "trl": {"prompt": "prompt", "text": "completion", "reward": "reward", "response_ids": "completion_ids"},
    "verl": {"prompt": "input", "text": "output", "gold": "gts", "reward": "score"},
}
"""Our column -> the other system's; every other column keeps its own name. policy_step is ``step`` in both."""
_NEEDED = ("prompt_ids", "response_ids", "logprobs")
_OURS = tuple(n for n in schema.ROLLOUT.names if n not in ("text", "response_ids", "policy_step"))
_GRADES = ("extracted", "canonical", "verdict", "grader", "detail")
_CHOICES: dict[str, tuple[str, ...]] = {
    "position": ("none", "prefix", "suffix", "whole"),
    "finish_reason": ("stop", "length"),
    "verdict": tuple(Verdict),
}
_LARGEST = {int: 2**24, float: 3.4e38}
"""Beyond it a number does not fit the columns' 32-bit floats."""


def export_rows(
    rollouts: Path, layout: Layout, *, scores: Path | None = None, problems: Path | None = None
) -> pa.Table:
    """Rollouts as one table of a layout, with rewards and golds where their artifacts are given.

    Raises:
        UserError: an artifact is missing, damaged or holds other rows.
    """
    rows = read_rows(rollouts, "rollouts", schema.ROLLOUT.names)
    names = NAMES[layout] | {"policy_step": "step"}
    columns: dict[str, Any] = {}
    if scores is not None:
        graded = read_rows(scores, "scores", ["row_id", "reward"])
        at = {r: i for i, r in enumerate(graded["row_id"].to_pylist())}
        order = pa.array([at.get(r) for r in rows["row_id"].to_pylist()], pa.int64())
        columns |= {c: graded[c].combine_chunks().take(order) for c in ("reward", *_GRADES) if c in graded.column_names}
    if problems is not None:
        table = read_rows(problems, "problems", ["problem_id", "prompt", "gold"])
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

    make_parent(path)
    if path.suffix == ".jsonl":
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=True) for row in table.to_pylist()]
        write_atomically(path, "\n".join(lines) + "\n" if lines else "")
    else:
        assert path.suffix == ".parquet", path
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        write_atomically(path, sink.getvalue().to_pybytes())


def read_file(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL or Parquet file.

    Raises:
        UserError: missing, another ending, not readable, or without rows.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        if path.suffix == ".parquet":
            rows = pq.read_table(path, partitioning=None).to_pylist()
        elif path.suffix == ".jsonl":
            with open(path, encoding="utf-8") as handle:
                rows = list(_lines(path, handle))
        else:
            raise UserError(f"{path}: name a .jsonl or .parquet file")
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable: {first_line(error)}") from None
    if not rows:
        raise UserError(f"{path}: holds no rows")
    return rows


def _lines(path: Path, handle: Any) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(handle, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}: line {number}: not an object")
        yield row


def layout_of(columns: Collection[str], path: Path) -> Layout:
    """Which layout a file has, by its columns.

    Raises:
        UserError: neither.
    """
    for layout in NAMES:
        if {NAMES[layout]["prompt"], NAMES[layout]["text"]} <= {*columns} or (
            layout == "trl" and "completion_ids" in columns
        ):
            return layout  # type: ignore[return-value]
    raise UserError(
        f"{path}: neither TRL's columns (prompt, completion) nor verl's (input, output); it has "
        f"{', '.join([*columns][:12])}"
    )


def import_rows(path: Path, out: Path) -> tuple[Manifest, Manifest | None]:
    """Commit a file of either layout as ``out``/rollout and, where it has rewards, ``out``/score.

    Missing columns are filled where that invents nothing: row_id by position, group_id by equal prompt_ids, position
    none. Token ids and behaviour log-probs must be in the file. Nothing is written before every row was checked.

    Raises:
        UserError: a needed column is missing, a value is not what its column holds, or a row's ids and log-probs differ in
        length.
    """
    rows = read_file(path)
    layout = layout_of({c: None for row in rows for c in row}, path)
    theirs = NAMES[layout] | {"policy_step": "step"}
    back = {name: ours for ours, name in theirs.items()}
    rows = [{back.get(c, c): value for c, value in row.items()} for row in rows]
    for column in _NEEDED:
        if not any(column in row for row in rows):
            raise UserError(
                f"{path}: no column {theirs.get(column, column)}: token ids and the log-probs they were sampled with must "
                "be in the file (text encoded again gives other ids)"
            )
    graded = any(row.get("reward") is not None for row in rows)
    groups: dict[tuple[int, ...], int] = {}
    sizes: dict[str, int] = {}
    records = []
    for number, row in enumerate(rows, 1):
        problem = _mistake(row, theirs, graded=graded)
        if problem is not None:
            raise UserError(f"{path}: row {number}: {problem}")
        group = groups.setdefault(tuple(row["prompt_ids"]), len(groups))
        filled: dict[str, Any] = {
            "row_id": f"import-{number - 1:06d}",
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
            raise UserError(f"{path}: row {number}: off_start, off_stop do not lie within the response")
        records.append(record)
    if len({r["row_id"] for r in records}) != len(records):
        raise UserError(f"{path}: row_id is not unique")
    made = {"rollout": pa.Table.from_pylist(records, schema=schema.ROLLOUT)}
    if graded:
        grades = [
            {
                "row_id": record["row_id"],
                "problem_id": record["problem_id"],
                "reward": row["reward"],
                "verdict": row.get("verdict") or ("correct" if row["reward"] >= 1 else "wrong"),
                "extracted": row.get("extracted"),
                "canonical": row.get("canonical"),
                "grader": row.get("grader") or "imported",
                "wall_ms": 0.0,
                "detail": row.get("detail"),
            }
            for record, row in zip(records, rows, strict=True)
        ]
        made["score"] = pa.Table.from_pylist(grades, schema=schema.SCORE)
    identity = Identity("import", VERSION, {"layout": layout}, {"file": file_digest(path)})
    held = {name: read_manifest(out / name) for name in ("rollout", "score")}
    for name, manifest in held.items():
        if manifest is not None and manifest.identity.key != identity.key:
            raise UserError(f"{out / name}: something else is committed here; choose another --out")
    for name, table in made.items():
        if held[name] is None:
            with writing(out / name, identity) as writer:
                writer.part(0, table)
            held[name] = writer.manifest
    assert held["rollout"] is not None
    return held["rollout"], held["score"]


def _mistake(row: Mapping[str, Any], theirs: Mapping[str, str], *, graded: bool) -> str | None:
    """What is wrong with a row of our column names, in the file's; graded: whether any row of the file has a reward."""
    for column, value in row.items():
        if column in _KINDS and value is not None:
            what, holds = _KINDS[column]
            if not holds(value):
                return f"{theirs.get(column, column)} {_short(value)} is not {what}"
    for column in _NEEDED:
        if row.get(column) is None:
            return f"{theirs.get(column, column)} is missing"
    if not row["prompt_ids"]:
        return "prompt_ids is empty"
    if len(row["response_ids"]) != len(row["logprobs"]):
        return f"{len(row['response_ids'])} response ids but {len(row['logprobs'])} logprobs"
    if graded and row.get("reward") is None:
        return f"{theirs['reward']} is missing, but other rows have one; give every row a reward, or none"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)  # halves of UTF-16 pairs


def _is_whole(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value < high


def _is_real(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST[type(value)]


_Kind = tuple[str, Callable[[Any], bool]]
_OF_TYPE: dict[pa.DataType, _Kind] = {
    pa.string(): ("text", _is_text),
    pa.int32(): ("a whole number", lambda v: _is_whole(v, -(2**31), 2**31)),
    pa.int64(): ("a whole number", lambda v: _is_whole(v, -(2**63), 2**63)),
    pa.float32(): ("a finite number", _is_real),
    pa.list_(pa.int32()): (
        "a list of whole numbers from 0",
        lambda v: isinstance(v, list) and all(_is_whole(i, 0, 2**31) for i in v),
    ),
    pa.list_(pa.float32()): (
        "a list of finite log-probs, at most 0",
        lambda v: isinstance(v, list) and all(_is_real(p) and p <= 0 for p in v),
    ),
}
_KINDS: dict[str, _Kind] = {f.name: _OF_TYPE[f.type] for f in (*schema.SCORE, *schema.ROLLOUT)} | {
    column: (f"one of {', '.join(values)}", values.__contains__) for column, values in _CHOICES.items()
}
"""What a column of ours holds, in words and as a test of a value that is not null."""


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
