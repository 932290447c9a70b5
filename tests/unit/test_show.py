"""Rows of every artifact in a terminal of 80 columns; filters that the table cannot answer are refused."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from typer import BadParameter

from tests.synthetic import make_run
from tseeds.artifacts.rundir import RunDir
from tseeds.errors import UserError
from tseeds_cli.main import Commands
from tseeds_cli.show import show


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("show") / "run", iterations=1, problems=6, per_iteration=6, group_size=4)


def test_every_value_of_a_wide_table_is_readable(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line a value where the columns do not fit, one line a row where they do."""
    file = run.stage(1, "update") / "rows.parquet"
    monkeypatch.setenv("COLUMNS", "80")
    show(file, rows=1)
    lines = capsys.readouterr().out.splitlines()
    row = pl.read_parquet(file).row(0, named=True)
    assert [line.split()[0] for line in lines[: len(row)]] == list(row)
    assert lines[0].split() == ["row_id", row["row_id"]]
    assert lines[-1].startswith("1 of 24 rows")
    monkeypatch.setenv("COLUMNS", "1000")
    show(file, rows=2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 + 2 + 1 + 1
    assert all(name[:27] in lines[1] for name in row)


def test_long_lists_say_how_long_they_are(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    show(run.stage(1, "seed"), rows=1)
    ids = pl.read_parquet(run.stage(1, "seed") / "*.parquet")["ids"][0].to_list()
    assert len(ids) > 10
    assert f"[{', '.join(map(str, ids[:10]))}, … {len(ids)} in all]" in " ".join(capsys.readouterr().out.split())


def test_an_evaluation_s_rows_come_with_their_prompts(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run.evaluation(1, "held-out"), run.evaluation(1, "held-out") / "part-00000.parquet"):
        show(path, rows=1)
        lines = capsys.readouterr().out.splitlines()
        assert any(line.startswith("Ana has") for line in lines)
        assert "" not in lines[:2]


def test_filters_that_the_table_has_no_column_for_are_refused(run: RunDir, tmp_path: Path) -> None:
    for filters, said in (
        ({"seeded": True}, "no column seed_id to filter by"),
        ({"seeded": False}, "no column seed_id to filter by"),
        ({"group": "g"}, "no column group_id to filter by"),
        ({"verdict": "corect"}, "--verdict corect: choose one of correct, wrong, no_answer"),
    ):
        with pytest.raises(UserError, match=said):
            show(run.stage(1, "score"), **filters)


def test_seeded_and_unseeded_rows(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    rows = pl.read_parquet(run.stage(1, "rollout") / "*.parquet")
    for seeded in (True, False):
        show(run.root, rows=99, seeded=seeded, as_json=True)
        shown = [json.loads(line)["row_id"] for line in capsys.readouterr().out.splitlines()]
        assert shown == rows.filter(pl.col("seed_id").is_not_null() == seeded)["row_id"].to_list()
        assert shown


@pytest.mark.parametrize("arguments", [["show", "run", "-n", "-3"], ["view", "run", "--limit", "-4"]])
def test_numbers_of_rows_are_not_negative(arguments: list[str]) -> None:
    command = Commands(name="tseeds").get_command(None, arguments[0])
    with pytest.raises(BadParameter, match="greater than or equal to 0"):
        command.main(arguments[1:], standalone_mode=False)


def test_no_rows_are_no_table(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    show(run.stage(1, "score"), rows=0)
    assert capsys.readouterr().out == "0 of 24 rows (-n for more, --json for all columns)\n"
