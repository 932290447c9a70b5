"""What two runs must agree in, down to the bit: data columns, weights, counts; not in times."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tseeds.artifacts import store
from tseeds.artifacts.schema import MEASUREMENTS

_TIMES = ("seconds", "tokens_per_second")


def artifacts(run: Path) -> dict[str, Path]:
    """Committed artifacts of a run by relative name."""
    return {
        file.parent.relative_to(run).as_posix(): file.parent
        for file in sorted(run.rglob(store.MANIFEST))
        if not any(p.endswith(".partial") or p.startswith(".") for p in file.relative_to(run).parts)
    }


def data(artifact: Path) -> dict[str, Any]:
    """Everything in an artifact that is data: digests of columns and files, key, counts, facts."""
    manifest = store.read_manifest(artifact)
    assert manifest is not None
    found: dict[str, Any] = {
        "key": manifest.identity.key,
        "digest": manifest.digest,
        "rows": manifest.rows,
        "facts": timeless(manifest.facts),
        "pruned": store.pruned(artifact),
    }
    for entry in manifest.files:
        file = artifact / entry.path
        if not file.is_file():
            found[entry.path] = "gone"
        elif file.suffix == ".parquet":
            found[entry.path] = table_digest(pq.read_table(file, partitioning=None))
        else:
            found[entry.path] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def table_digest(table: pa.Table) -> str:
    """sha256 of a table's schema and data, measured times apart."""
    table = table.drop_columns([c for c in table.column_names if c in MEASUREMENTS]).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return hashlib.sha256(sink.getvalue()).hexdigest()


def timeless(value: Any) -> Any:
    """A JSON value without measured times."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in _TIMES and not k.endswith("_seconds")}
    return value


def metrics(run: Path) -> list[Any]:
    """The lines of metrics.jsonl without times."""
    return [timeless(line) for line in store.read_lines(run / "metrics.jsonl")]


class Reference:
    """An uninterrupted run, read once, that others are compared with."""

    def __init__(self, run: Path) -> None:
        self.data = {name: data(path) for name, path in artifacts(run).items()}
        self.metrics = metrics(run)

    def differences(self, run: Path, *, finished: bool, only: Collection[str] | None = None) -> list[str]:
        """One line for everything in ``run`` that is lost, doubled or different; unfinished runs may lack the rest.

        What retention has pruned in one of two unfinished states is not compared. only: artifacts to look at, nothing else.
        """
        found = artifacts(run) if run.is_dir() else {}
        looked = set(found) if only is None else set(only)
        wrong = [f"{name}: doubled, not in the uninterrupted run" for name in found if name in looked - set(self.data)]
        for name, wanted in self.data.items():
            if only is not None and name not in only:
                continue
            if name not in found:
                if finished:
                    wrong.append(f"{name}: lost")
                continue
            got = data(found[name])
            for key in {*got, *wanted}:
                if not finished and (key == "pruned" or "gone" in (got.get(key), wanted.get(key))):
                    continue
                if got.get(key) != wanted.get(key):
                    wrong.append(
                        f"{name}: {key} is {json.dumps(got.get(key))[:200]}, not {json.dumps(wanted.get(key))[:200]}"
                    )
        if only is not None:
            return wrong
        lines = metrics(run)
        numbers = [line["iteration"] for line in lines]
        if len(set(numbers)) < len(numbers):
            wrong.append(f"metrics.jsonl: doubled lines of iterations {numbers}")
        if lines != (self.metrics if finished else self.metrics[: len(lines)]):
            wrong.append(f"metrics.jsonl: {len(lines)} lines differ from those of the uninterrupted run")
        if finished:
            wrong += [f"{p.relative_to(run)}: left over" for p in run.rglob("*") if _left_over(p.name)]
        return wrong


def _left_over(name: str) -> bool:
    return name.endswith((".partial", ".lock")) or ".tmp" in name or name in (store.KEY, store.PARTS)
