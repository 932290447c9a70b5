"""The tour of docs/trajectories.md: every block runs, and the answers that can be checked otherwise are right."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.synthetic import make_run

PAGE = Path(__file__).parents[2] / "docs" / "trajectories.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


def _value(code: str, names: dict[str, Any]) -> Any:
    """Run a block; the value of its last expression, as a notebook shows it."""
    body = ast.parse(code).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), str(PAGE), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(PAGE), "eval"), names) if last else None


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, Any]]:
    root = tmp_path_factory.mktemp("tour")
    make_run(root / "runs" / "toy", iterations=6, problems=8, per_iteration=4, group_size=8)
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        values = [_value(block, names) for block in BLOCKS]
        names["tokens"] = names["tokens"].collect()
    return values, names


def test_there_are_ten_questions_and_every_block_gives_something(answers: tuple[list[Any], dict[str, Any]]) -> None:
    assert len(re.findall(r"^## \d+\. ", PAGE.read_text(), re.M)) == 10
    values, _ = answers
    assert len(values) == 14
    assert values[0] is None  # the set-up
    for number, value in enumerate(values[1:], 1):
        assert value is not None
        assert len(value) > 0 or number == 6, number  # nothing need be forgotten


def test_seeds_that_turned_a_group(answers: tuple[list[Any], dict[str, Any]]) -> None:
    values, names = answers
    counts: dict[int, set[str]] = {}
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in names["rows"].to_dicts():
        groups.setdefault(row["group_id"], []).append(row)
    for group, members in groups.items():
        if any(m["reward"] == 1 for m in members if m["seed_id"] is None):
            continue
        for m in members:
            if m["seed_id"] is not None and m["reward"] == 1:
                counts.setdefault(m["snapshot_step"], set()).add(group)
    assert dict(values[2].iter_rows()) == {step: len(found) for step, found in counts.items()}


def test_forgotten_problems(answers: tuple[list[Any], dict[str, Any]]) -> None:
    values, names = answers
    rates: dict[str, dict[int, list[float]]] = {}
    for row in names["rows"].to_dicts():
        if row["seed_id"] is None:
            rates.setdefault(row["problem_id"], {}).setdefault(row["iteration"], []).append(row["reward"])
    forgotten = {p for p, r in rates.items() if any(map(any, r.values())) and not any(r[max(r)])}
    assert set(values[6]["problem_id"]) == forgotten


def test_clipping_by_place(answers: tuple[list[Any], dict[str, Any]]) -> None:
    values, names = answers
    live = names["tokens"].filter(pl.col("used") & (pl.col("advantage") != 0))
    found = values[7]
    assert found["tokens"].sum() == live.height
    assert (found["tokens"] * found["clipped"]).sum() == pytest.approx(live["clipped"].sum())
    assert found["tenth"].max() <= 9


def test_three_tools_agree(answers: tuple[list[Any], dict[str, Any]]) -> None:
    values, names = answers
    by_polars = names["rows"].group_by("iteration").agg(pl.col("reward").mean(), rows=pl.len()).sort("iteration")
    assert [(i, pytest.approx(r), n) for i, r, n in by_polars.iter_rows()] == values[11]
    assert values[12].sum() == names["rows"].height
    seed, rest = values[13]
    row = names["rollouts"].row(0, named=True)
    assert (seed + rest).replace("<eos>", "") == row["text"]
