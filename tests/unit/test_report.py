"""Figures against numbers worked out from the runs they are made of; groups; the page's own safety."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
from pathlib import Path

import polars as pl
import pytest

from tests.synthetic import make_run
from tseeds.artifacts import store
from tseeds.errors import UserError
from tseeds.report import figures, html, paper, read
from tseeds.report.page import as_json


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one arm and one run of another."""
    root = tmp_path_factory.mktemp("runs")
    small = {"iterations": 4, "problems": 8, "per_iteration": 4, "group_size": 4, "tokens": False}
    for seed in (0, 1):
        make_run(root / f"seeds-{seed}", seed=seed, **small)  # type: ignore[arg-type]
    make_run(root / "on-policy", seeded_share=0.0, **small)  # type: ignore[arg-type]
    return root


@pytest.fixture(scope="module")
def groups(runs: Path) -> list[read.Group]:
    return read.groups([str(runs / n) for n in ("seeds-0", "on-policy", "seeds-1")])


def _figure(groups: list[read.Group], ident: str) -> figures.Figure:
    return next(f for f in figures.all_figures(groups) if f.id == ident)


def test_runs_that_differ_in_seed_alone_are_one_group(groups: list[read.Group], runs: Path) -> None:
    assert [(g.name, len(g.runs)) for g in groups] == [("seeds", 2), ("on-policy", 1)]
    named = read.groups([f"ours={runs / 'seeds-0'}", f"theirs={runs / 'seeds-1'}"])
    assert [g.name for g in named] == ["ours", "theirs"]
    with pytest.raises(UserError, match="not a run directory"):
        read.groups([str(runs / "nothing")])


def test_mean_and_band_are_mean_and_deviation_over_runs(groups: list[read.Group], runs: Path) -> None:
    first = [store.read_lines(runs / f"seeds-{s}" / "metrics.jsonl")[2]["reward"] for s in (0, 1)]
    series = _figure(groups, "reward").series[0]
    assert series.x == [1, 2, 3, 4]
    assert series.y[2] == pytest.approx(statistics.mean(first))
    assert series.hi[2] == pytest.approx(statistics.mean(first) + statistics.stdev(first))  # type: ignore[operator]
    assert not _figure(groups, "reward").series[1].lo  # one run has no spread


def test_spread() -> None:
    assert figures.spread([1.0, 3.0]) == (2.0, pytest.approx(2 - 2**0.5), pytest.approx(2 + 2**0.5))
    assert figures.spread([1.0, None]) == (1.0, None, None)
    assert figures.spread([None]) == (None, None, None)


def test_advantage_by_age_is_that_of_the_rows(groups: list[read.Group], runs: Path) -> None:
    rows = pl.read_parquet(runs / "seeds-0" / "iterations/*/update/rows.parquet").filter(pl.col("snapshot_age") == 1)
    assert next(a for a in groups[0].runs[0].ages if a["age"] == 1) == {
        "age": 1,
        "advantage": pytest.approx(rows["advantage"].mean(), abs=1e-6),
        "reward": pytest.approx(rows["reward"].mean()),
        "rows": rows.height,
    }
    assert groups[1].runs[0].ages == []


def test_pass_curves_are_those_of_the_evaluations(groups: list[read.Group], runs: Path) -> None:
    figure = _figure(groups, "pass-at-k-held-out")
    rows = pl.read_parquet(runs / "on-policy" / "evaluations/000004/held-out/part-*.parquet")
    after = next(s for s in figure.series if s.name == "on-policy: after")
    assert after.x == list(range(1, 9))
    assert after.y[0] == pytest.approx((rows["verdict"] == "correct").mean())
    assert after.lo[0] <= after.y[0] <= after.hi[0]  # type: ignore[operator]


def test_bins_are_means_over_steps(groups: list[read.Group]) -> None:
    found = groups[0].runs[0].bins["clipped_mass_seed"]
    assert found == [pytest.approx(0.06 * (1 + 0.1 * b)) for b in range(10)]


def test_every_figure_says_what_its_axes_are(groups: list[read.Group]) -> None:
    made = figures.all_figures(groups)
    assert len({f.id for f in made}) == len(made) >= 20
    assert {
        "reward-seeded", "entropy", "effective-entropy", "clipped-mass", "clipped-mass-position", "ratio", "ess", "length",
        "pass-at-k-held-out", "advantage-by-age", "speed", "time",
    } <= {f.id for f in made}  # fmt: skip
    for figure in made:
        assert figure.y
        assert figure.x or figure.kind == "bars"


def test_the_page_is_one_file_that_needs_nothing_else(groups: list[read.Group]) -> None:
    page = html.render(groups, title="</script><b>& seeds")
    assert "</script><b>" not in page
    assert "<title>&lt;/script&gt;&lt;b&gt;&amp; seeds</title>" in page
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", page[:20000] + page[-400000:])
    rule = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert rule is not None
    assert "default-src 'none'" in rule[1]
    assert "unsafe-inline" not in rule[1].split("script-src")[1].split(";")[0]
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert data["overview"]["rows"][0][0] == "seeds"


def test_names_cannot_leave_the_data(tmp_path: Path) -> None:
    nasty = "</script><script>alert(1)</script>\u2028"
    assert "<" not in as_json({"name": nasty})
    assert json.loads(as_json({"name": nasty})) == {"name": nasty}


def test_a_run_without_an_iteration_is_said(tmp_path: Path, runs: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "pipeline.toml").write_text((runs / "on-policy" / "pipeline.toml").read_text())
    with pytest.raises(UserError, match="no finished iteration yet"):
        read.groups([str(tmp_path / "new")])


def test_paper_figures(groups: list[read.Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PNG and SVG of a line, a bar and a heat figure; the SVG holds its words as text and is the same twice."""
    heat = figures.Figure(
        "mixed", "Evaluation", "Mixed", "L", "who", [figures.Series("pass@4", 0, ["L = 2", "alone"], [])],
        kind="heat", rows=["snapshot 0", "all"], cells=[[0.1, 0.9], [None, 0.4]],
    )  # fmt: skip
    chosen = [_figure(groups, "clipped-mass"), _figure(groups, "time"), heat]
    monkeypatch.setattr(paper, "all_figures", lambda _: chosen)
    files = paper.write(groups, tmp_path / "one")
    assert sorted(f.name for f in files) == [
        f"{n}.{k}" for n in ("clipped-mass", "mixed", "time") for k in ("png", "svg")
    ]
    assert all(f.read_bytes()[:4] == b"\x89PNG" for f in files if f.suffix == ".png")
    text = (tmp_path / "one" / "clipped-mass.svg").read_text()
    assert "iteration" in text
    assert "seeds: seed" in text
    paper.write(groups, tmp_path / "two")
    assert (tmp_path / "two" / "clipped-mass.svg").read_text() == text


@pytest.mark.parametrize(
    "place",
    [
        "iterations/000002/update/rows.parquet",
        "iterations/000002/update/steps.parquet",
        "evaluations/000004/held-out/tables/metrics.parquet",
    ],
)
def test_a_damaged_file_is_one_line(runs: Path, tmp_path: Path, place: str) -> None:
    shutil.copytree(runs / "seeds-0", tmp_path / "run")
    file = tmp_path / "run" / place
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(UserError, match=r"not readable as Parquet .*tseeds verify names damaged files"):
        html.write(read.groups([str(tmp_path / "run")]), tmp_path / "report.html")


def test_where_nothing_can_be_written_is_one_line(groups: list[read.Group], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write here"):
        html.write(groups, tmp_path / "file" / "report.html")
    with pytest.raises(UserError, match="cannot write here"):
        paper.write(groups, tmp_path / "file")
