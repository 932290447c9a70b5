"""A small loop for killing: the toy task, transformers sampling, seconds per run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from equal import Reference
from forked import Forked
from toy_loop import loop_config

COPIED = ("metrics.jsonl", "run.json", "pipeline.toml")


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy policy and problems."""
    from tseeds.toy import make

    folder = tmp_path_factory.mktemp("toy")
    make(folder)
    return folder


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """The warm parent of all processes that are killed."""
    client = Forked()
    yield client
    client.close()


@pytest.fixture(scope="session")
def uninterrupted(toy: Path, forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of loop_config(toy) that nobody disturbed."""
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    done = forked.run(loop_config(toy), run)
    assert done["status"] == 0, done["error"]
    return run


@pytest.fixture(scope="session")
def reference(uninterrupted: Path) -> Reference:
    """What other runs are compared with."""
    return Reference(uninterrupted)


@pytest.fixture
def begun(uninterrupted: Path, tmp_path: Path) -> Callable[[str], Path]:
    """begun("iterations/000002/score"): a copy of the uninterrupted run as it was before that artifact existed."""

    def make(before: str) -> Path:
        order = sorted(
            (p.parent for p in uninterrupted.rglob("manifest.json")),
            key=lambda p: (p / "manifest.json").stat().st_mtime_ns,
        )
        names = [p.relative_to(uninterrupted).as_posix() for p in order]
        run = tmp_path / "run"
        run.mkdir()
        for name in names[: names.index(before)]:
            shutil.copytree(uninterrupted / name, run / name, copy_function=os.link)
        for name in COPIED:
            shutil.copy(uninterrupted / name, run / name)
        number = int(before.split("/")[1]) if before.startswith("iterations") else 0
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(lines[: max(0, number - 1)]))
        return run

    return make
