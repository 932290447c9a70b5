"""Whatever a file holds, reading it gives a value or one clear error, never a traceback.

``TSEEDS_FUZZ=120000 pytest tests/faults/test_fuzz.py`` spreads that many inputs over the readers; CI takes a few hundred of
each. The figures of the last long run are in docs/durability.md.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tseeds import config as configuration
from tseeds import pipeline, problems
from tseeds.artifacts import policy, schema, store
from tseeds.artifacts.lock import owner
from tseeds.artifacts.rundir import RunDir
from tseeds.artifacts.store import Identity
from tseeds.config import Pipeline, ProblemsConfig
from tseeds.engines import policies, probe
from tseeds.errors import UserError
from tseeds.history import History
from tseeds.verify import check
from tseeds_cli.show import load as show

READERS = 10
EACH = max(1, int(os.environ.get("TSEEDS_FUZZ", "1500")) // READERS)
PLACE = Path(tempfile.mkdtemp(prefix="tseeds-fuzz-"))

fuzz = settings(
    max_examples=EACH,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        ["", "../x", "/etc/passwd", "a\0b", "x" * 5000, "\ud800", "1e999", "__import__('os')", "<script>"]
    )
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def reads(call: Callable[[], Any]) -> Any:
    """The value, or None after an error that a user can read."""
    said = ""
    try:
        return call()
    except UserError as error:
        said = str(error)
    assert said.strip()
    assert "Traceback" not in said
    return None


def edited(data: bytes, edits: list[tuple[int, int]], cut: int | None) -> bytes:
    """``data`` with some bytes changed, and cut short."""
    changed = bytearray(data)
    for place, value in edits:
        if changed:
            changed[place % len(changed)] = value
    return bytes(changed if cut is None else changed[: cut % (len(changed) + 1)])


edits = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6)
cuts = st.none() | st.integers(0, 10**6)
SECTIONS = list(Pipeline.model_fields)
KEYS = sorted({key for section in Pipeline.model_fields.values() for key in section.annotation.model_fields})  # type: ignore[union-attr]
BASE: dict[str, Any] = {"policy": {"path": "p"}, "problems": {"path": "d"}}


@fuzz
@given(
    data=st.dictionaries(
        st.sampled_from(SECTIONS) | st.text(max_size=8),
        st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), values, max_size=4) | values,
        max_size=5,
    )
)
def test_pipelines_of_any_shape(data: dict[str, Any]) -> None:
    reads(lambda: configuration.parse({**BASE, **data}))


@fuzz
@given(section=st.sampled_from(SECTIONS), data=st.data())
def test_values_of_any_kind_and_what_is_accepted_survives_the_run_directory(section: str, data: st.DataObject) -> None:
    names = list(Pipeline.model_fields[section].annotation.model_fields)  # type: ignore[union-attr]
    key, value = data.draw(st.sampled_from(names)), data.draw(values)
    config = reads(lambda: configuration.parse({**BASE, section: {**BASE.get(section, {}), key: value}}))
    if config is not None:
        file = PLACE / "pipeline.toml"
        file.write_text(configuration.dumps(config), encoding="utf-8")
        assert configuration.load(file) == config
        assert configuration.parse(json.loads(json.dumps(config.model_dump(mode="json", exclude_none=True)))) == config


@fuzz
@given(
    text=st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode(errors="surrogatepass")),
    sets=st.text(max_size=30),
)
def test_pipeline_files_and_assignments(text: bytes, sets: str) -> None:
    (PLACE / "any.toml").write_bytes(text)
    reads(lambda: configuration.load(PLACE / "any.toml"))
    (PLACE / "good.toml").write_text('[policy]\npath = "p"\n[problems]\npath = "d"\n')
    reads(lambda: configuration.load(PLACE / "good.toml", [sets]))


def an_artifact(name: str) -> Path:
    out = PLACE / name
    if not out.exists():
        with store.writing(out, Identity("rollout", 1, {"a.b": 1}, {"policy": "x"})) as writer:
            writer.part(0, pa.table({"row_id": ["1", "2"], "wall_ms": [0.1, 0.2]}))
            writer.facts["summary"] = {"reward": 0.5}
    return out


@fuzz
@given(edits=edits, cut=cuts, key=st.text(max_size=5), value=values, data=st.data())
def test_manifests(edits: list[tuple[int, int]], cut: int | None, key: str, value: Any, data: st.DataObject) -> None:
    good = an_artifact("manifests")
    whole = (good / store.MANIFEST).read_bytes() if not (PLACE / "whole").exists() else (PLACE / "whole").read_bytes()
    (PLACE / "whole").write_bytes(whole)
    kind = data.draw(st.sampled_from(["bytes", "value", "entry"]))
    record = json.loads(whole)
    if kind == "bytes":
        changed = edited(whole, edits, cut)
    else:
        record.pop("seal")  # as somebody would who writes one by hand
        if kind == "value":
            record[data.draw(st.sampled_from([*record, key]))] = value
        else:
            record["files"][0][data.draw(st.sampled_from(["path", "sha256", "bytes", "rows", "content", key]))] = value
        changed = json.dumps(record).encode()
    (good / store.MANIFEST).write_bytes(changed)
    manifest = reads(lambda: store.read_manifest(good))
    if manifest is not None:
        if kind == "bytes" and json.loads(changed).get("seal"):
            assert json.loads(changed) == record, "a damaged manifest was believed"
        reads(lambda: (manifest.digest, manifest.bytes, list(store.damages(manifest)), store.verified(manifest)))
        reads(lambda: store.read_table(manifest))
    reads(lambda: check(good))


@fuzz
@given(value=values, line=st.binary(max_size=40), edits=edits, cut=cuts)
def test_records_of_a_run(value: Any, line: bytes, edits: list[tuple[int, int]], cut: int | None) -> None:
    run = RunDir(PLACE / "run")
    run.root.mkdir(exist_ok=True)
    config = configuration.parse(BASE)
    run.pipeline.write_text(configuration.dumps(config))
    record = {
        "changes": [{"iteration": 3, "key": "update.epochs", "old": 1, "new": 2}],
        "pipeline": config.model_dump(mode="json"),
    }
    for text in (
        json.dumps(value),
        json.dumps({**record, "changes": value}),
        json.dumps({**record, "changes": [value, record["changes"][0]]}),  # type: ignore[index]
        json.dumps({**record, "changes": [{**record["changes"][0], "old": value}]}),  # type: ignore[index]
        json.dumps({**record, "pipeline": value}),
    ):
        run.record.write_bytes(edited(text.encode(errors="surrogatepass"), edits, cut) if cut else text.encode())
        history = reads(lambda: pipeline.open_history(run))
        if history is not None:
            reads(lambda h=history: [h.at(i) for i in (0, 2, 3)] and h.pool(4))  # type: ignore[misc]
    run.metrics.write_bytes(line + b"\n" + json.dumps(value).encode() + b"\n")
    reads(lambda: store.read_lines(run.metrics))
    run.lock.write_bytes(json.dumps(value).encode())
    owner(run.lock)
    run.lock.write_bytes(
        json.dumps({"pid": value, "host": os.uname().nodename, "started": value, "since": value}).encode()
    )
    owner(run.lock)
    (PLACE / store.PRUNED).write_text(json.dumps({"removed": value}))
    for name in reads(lambda: store.pruned(PLACE)) or ():
        assert (PLACE / name).resolve().is_relative_to(PLACE)


@fuzz
@given(edits=edits, cut=cuts, value=values)
def test_interrupted_artifacts(edits: list[tuple[int, int]], cut: int | None, value: Any) -> None:
    out = PLACE / "interrupted"
    with contextlib.suppress(ZeroDivisionError), store.writing(out, Identity("score", 1, {}, {})) as writer:
        if 0 not in writer.parts:
            writer.part(0, pa.table({"a": [1]}))
        raise ZeroDivisionError
    partial = out.with_name("interrupted.partial")
    for name, text in ((store.KEY, json.dumps(value)), (store.PARTS, json.dumps(value) + "\n")):
        whole = (partial / name).read_bytes() if (partial / name).exists() else b"{}"
        for changed in (edited(whole, edits, cut), text.encode()):
            (partial / name).write_bytes(changed)
            with contextlib.suppress(ZeroDivisionError), store.writing(out, Identity("score", 1, {}, {})) as writer:
                assert writer.parts <= {0}
                raise ZeroDivisionError
    assert not out.exists()


@fuzz
@given(edits=edits, cut=cuts, value=values)
def test_parquet_files(edits: list[tuple[int, int]], cut: int | None, value: Any) -> None:
    sink = io.BytesIO()
    row = {f.name: None for f in schema.ROLLOUT}
    pq.write_table(
        pa.Table.from_pylist(
            [{**row, "row_id": str(value)[:50].encode(errors="replace").decode()}], schema=schema.ROLLOUT
        ),
        sink,
    )
    file = PLACE / "part-00000.parquet"
    file.write_bytes(edited(sink.getvalue(), edits, cut))
    reads(lambda: show(file))
    reads(lambda: problems_of(file))


def problems_of(file: Path, **settings: Any) -> Any:
    config = ProblemsConfig(path=str(file), **settings)
    return problems._load(config, problems.Findings(config.findings))


rows = st.dictionaries(
    st.sampled_from(["id", "problem", "question", "gold", "answer", "messages", "prompt", "solution", "level"])
    | st.text(max_size=5),
    values
    | st.sampled_from(["2+2", "\\boxed{4}", "#### 4"])
    | st.lists(st.fixed_dictionaries({"role": values, "content": values})),
    max_size=5,
)


@fuzz
@given(
    data=st.lists(rows.map(lambda r: json.dumps(r).encode()) | st.binary(max_size=30), max_size=4),
    suffix=st.sampled_from(["jsonl", "json", "csv", "jsonl.gz", "parquet"]),
)
def test_data_sets(data: list[bytes], suffix: str) -> None:
    file = PLACE / f"data.{suffix}"
    file.write_bytes(b"\n".join(data))
    reads(lambda: problems_of(file))


@fuzz
@given(header=values, name=st.text(max_size=5), tensor=values, edits=edits, cut=cuts)
def test_model_directories(header: Any, name: str, tensor: Any, edits: list[tuple[int, int]], cut: int | None) -> None:
    model = PLACE / "model"
    model.mkdir(exist_ok=True)
    good = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    for shapes in (
        header,
        {**good, name: tensor},
        {"w": {**good["w"], "shape": tensor}},
        {"w": {**good["w"], "dtype": tensor}},
    ):
        text = json.dumps(shapes).encode()
        (model / "model.safetensors").write_bytes(edited(struct.pack("<Q", len(text)) + text + b"\0\0\0\0", edits, cut))
        (model / "config.json").write_text(json.dumps({"vocab_size": 8, "eos_token_id": tensor}))
        reads(lambda: (policies.describe(model).parameters, policies.describe(model).vocab_size))
    for file in (
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "probe.json",
        "tokenizer.json",
    ):
        kept = (model / file).read_bytes() if (model / file).exists() else None
        (model / file).write_text(json.dumps({"weight_map": header} if "index" in file else header))
        reads(lambda: policy.policy_files(model))
        reads(lambda: policies.describe(model))
        reads(lambda: probe.stored(model))
        (model / file).unlink() if kept is None else (model / file).write_bytes(kept)


def test_histories_of_any_changes_name_their_file() -> None:
    with pytest.raises(UserError, match=r"run\.json"):
        History(configuration.parse(BASE), [{"iteration": "x"}])
