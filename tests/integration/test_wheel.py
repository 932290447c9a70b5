"""The wheel holds what a user needs and nothing else, and works away from this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, because setuptools leaves build/ behind and takes up what lies there."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("tseeds", "cli"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (built,) = out.glob("tseeds-*-py3-none-any.whl")
    return built


def test_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(n.split("/")[0] for n in names if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert {n.split("/")[0] for n in names} == {"tseeds", "tseeds_cli", info}  # above all nothing called cli
    shipped = {n for n in names if not n.startswith(info)}
    expected = {
        f"{package}/{file.relative_to(ROOT / folder).as_posix()}"
        for package, folder in (("tseeds", "tseeds"), ("tseeds_cli", "cli"))
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert shipped == expected
    assert {"tseeds/data/toy/model.safetensors", "tseeds/py.typed"} <= shipped
    assert "tseeds = tseeds_cli.main:main" in entry_points
    assert f"{info}/licenses/LICENSE" in names
    assert metadata["License-Expression"] == "Apache-2.0"
    required = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert not [r for r in required if r.startswith(("vllm", "ray", "peft", "wandb"))]  # the core installs without


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_installed_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(pip, check=True, timeout=120)
    shutil.copy(ROOT / "pipelines/toy.toml", work)
    env = {**os.environ, "PYTHONPATH": str(site)}

    def run(*words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, cwd=work, env=env, timeout=600, check=False)
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    where = run(sys.executable, "-c", "import tseeds, tseeds_cli; print(tseeds.__file__, tseeds_cli.__file__)")
    assert all(path.startswith(str(site)) for path in where.split())
    tseeds = str(site / "bin" / "tseeds")
    assert "Thinking Seeds" in run(tseeds, "--help")
    assert "torch" in run(tseeds, "env")
    run(tseeds, "toy", "toy")
    sets = [
        "run.iterations=1", "engine.backend=transformers", "rollout.problems_per_iteration=8", "rollout.group_size=4",
        "update.minibatches=2", "problems.limit=32", "evaluate.every=0",
    ]  # fmt: skip
    run(tseeds, "run", "toy.toml", "--run", "run", *[word for s in sets for word in ("--set", s)])
    assert "1 of 1 iterations finished" in run(tseeds, "status", "run")
