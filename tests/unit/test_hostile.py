"""Files from elsewhere are data: nothing in them is executed, and no name leads out of the directory that was named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pytest

from tseeds import config as configuration
from tseeds.artifacts import schema, store
from tseeds.artifacts.policy import policy_files
from tseeds.artifacts.store import Identity
from tseeds.errors import UserError
from tseeds.schedule import groups, rng_seed, row_id

ROOT = Path(__file__).parents[2]
SOURCES = [*sorted((ROOT / "tseeds").rglob("*.py")), *sorted((ROOT / "cli").glob("*.py"))]


@pytest.mark.parametrize(
    "pattern",
    [
        r"\bimport (c?pickle|dill|shelve|marshal)\b|\bfrom (c?pickle|dill|cloudpickle|joblib|shelve|marshal)\b",
        r"\btorch\.load\(",
        r"\bnp\.load\(|\bnumpy\.load\(|allow_pickle",
        r"(?<![\w.])(eval|exec)\(",
        r"\bos\.system\(|shell=True",
        r"\byaml\.load\(",
        r"trust_remote_code=True",
        r"0\.0\.0\.0|host=\"\"",
    ],
)
def test_nothing_in_the_source_runs_what_a_file_says(pattern: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in SOURCES
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line) and not line.lstrip().startswith("#")
    ]
    assert found == []


def test_the_grep_finds_what_it_looks_for() -> None:
    assert re.search(r"(?<![\w.])(eval|exec)\(", "x = eval(text)")
    assert not re.search(r"(?<![\w.])(eval|exec)\(", "model.eval()")


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc", "", ".", "..", "a\0b", ".hidden", "x" * 300, "a\nb"])
def test_a_benchmark_cannot_be_named_out_of_the_run(name: str) -> None:
    benchmarks = [{"name": name, "path": "d"}]
    data = {"policy": {"path": "p"}, "problems": {"path": "d"}, "evaluate": {"benchmarks": benchmarks}}
    with pytest.raises(UserError, match=r"evaluate\.benchmarks\.0\.name"):
        configuration.parse(data)


def test_benchmarks_of_one_name_would_overwrite_each_other() -> None:
    benchmarks = [{"name": "a", "path": "d"}, {"name": "a", "path": "e"}]
    data = {"policy": {"path": "p"}, "problems": {"path": "d"}, "evaluate": {"benchmarks": benchmarks}}
    with pytest.raises(UserError, match="two benchmarks are called a"):
        configuration.parse(data)


def test_ids_of_problems_are_no_paths(tmp_path: Path) -> None:
    ids = ["../../x", "a/b", "/etc/passwd", "..", "\x00", "é" * 300, "<script>alert(1)</script>"]
    chosen = groups(ids, run_seed=0, iteration=1, per_iteration=len(ids))
    assert sorted(g.problem_id for g in chosen) == sorted(ids)
    assert all(re.fullmatch(r"[\d-]+", row_id(g.group_id, 0)) for g in chosen)
    assert len({rng_seed(0, 1, "rollout", i, 0) for i in ids}) == len(ids)
    out = tmp_path / "run" / "problems"
    with store.writing(out, Identity("problems", 1, {}, {})) as writer:
        writer.part(0, pa.Table.from_pylist([{"problem_id": i} for i in ids], schema=schema.PROBLEMS))
    assert store.read_table(store.require(out, "problems"))["problem_id"].to_pylist() == ids
    assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()} == {
        "run/problems/manifest.json",
        "run/problems/part-00000.parquet",
    }


@pytest.mark.parametrize("path", ["../../secret", "/etc/passwd", "a/../../secret"])
def test_a_manifest_cannot_name_files_outside_its_artifact(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_text("x")
    with store.writing(tmp_path / "run" / "a", Identity("rollout", 1, {}, {})) as writer:
        writer.part(0, pa.table({"a": [1]}))
    file = tmp_path / "run" / "a" / store.MANIFEST
    record = json.loads(file.read_text())
    record.pop("seal")
    record["files"][0]["path"] = path
    file.write_text(json.dumps(record))
    with pytest.raises(UserError, match="damaged manifest"):
        store.read_manifest(file.parent)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch /tmp/x'\ntR.")
    with pytest.raises(UserError, match=f"only pickled weights \\({re.escape(name)}\\), which are refused"):
        policy_files(tmp_path)


def test_code_in_a_model_directory_is_no_part_of_the_policy(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "modeling_evil.py", "training_args.bin"):
        (tmp_path / name).write_text("{}")
    assert [p.name for p in policy_files(tmp_path)] == ["config.json", "model.safetensors"]
