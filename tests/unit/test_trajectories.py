"""What the viewer reads: pieces of tokens, filters, groups, pages; 100,000 rows without their tokens in memory."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.synthetic import make_run, tokenizer
from tseeds.artifacts import schema
from tseeds.artifacts.rundir import RunDir
from tseeds.errors import UserError
from tseeds.report import viewer
from tseeds.report.trajectories import Trajectories, pieces


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(
        tmp_path_factory.mktemp("view") / "run", iterations=4, problems=6, per_iteration=6, group_size=4, part_rows=7
    )


@pytest.fixture(scope="module")
def source(run: RunDir) -> Trajectories:
    return Trajectories(run.root)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("bpe"), ["so the sum is 5 ✓ naïve café"])


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("ab 5✓é😀ñ\n"), max_size=30))
def test_pieces_add_up_to_the_text(bpe: Tokenizer, text: str) -> None:
    ids = bpe.encode(text).ids
    made = pieces(ids, bpe)
    assert len(made) == len(ids)
    assert "".join(made) == text


def test_pieces_without_a_tokenizer_are_ids() -> None:
    assert pieces([5, 7], None) == ["⟨5⟩", "⟨7⟩"]


def test_a_row_is_that_of_its_files(run: RunDir, source: Trajectories) -> None:
    """Row 30 lies in the fifth part of the second iteration: ids, grades and per-token values must be its own."""
    raw = pl.read_parquet(run.root / "iterations/*/rollout/*.parquet")
    for number in (0, 30, raw.height - 1):
        want, got = raw.row(number, named=True), source.row({"n": str(number)})
        assert got["row_id"] == want["row_id"]
        assert got["tokens"]["id"] == want["response_ids"]
        assert got["tokens"]["behaviour"] == pytest.approx(want["logprobs"], abs=1e-6)
        assert "".join(got["tokens"]["text"]).removesuffix("<eos>") == want["text"]
        tokens = pl.read_parquet(run.root / "iterations/*/update/tokens.parquet").filter(
            pl.col("row_id") == want["row_id"]
        )
        assert got["tokens"]["ratio"] == pytest.approx(tokens["ratio"].to_list(), abs=1e-6)
        assert got["tokens"]["clipped"] == tokens["clipped"].to_list()
        score = pl.read_parquet(run.root / "iterations/*/score/*.parquet").filter(pl.col("row_id") == want["row_id"])
        assert [got[c] for c in ("verdict", "reward", "extracted")] == list(
            score.select("verdict", "reward", "extracted").row(0)
        )
        assert got["step"] == want["policy_step"] + 1
        assert [m["sample"] for m in got["members"]] == [0, 1, 2, 3]
        assert [e["step"] for e in got["elsewhere"]] == [1, 2, 3, 4]


def test_filters_agree_with_polars(run: RunDir, source: Trajectories) -> None:
    rows = pl.read_parquet(run.root / "iterations/*/rollout/*.parquet").join(
        pl.read_parquet(run.root / "iterations/*/score/*.parquet"), on="row_id"
    )
    length = pl.col("off_stop") - pl.col("off_start")
    for query, wanted in (
        ({"verdict": "wrong"}, pl.col("verdict") == "wrong"),
        ({"seeded": "yes", "step": "3"}, (length > 0) & (pl.col("policy_step") == 2)),
        ({"snapshot": "2"}, pl.col("snapshot_step") == 2),
        ({"seed_lo": "4", "seed_hi": "8", "reward_lo": "1"}, length.is_between(4, 8) & (pl.col("reward") == 1)),
        ({"problem": "p0003"}, pl.col("problem_id") == "p0003"),
        ({"q": "STARTS? over"}, pl.lit(False)),
        ({"q": "start Over"}, pl.col("text").str.to_lowercase().str.contains("start over")),
        ({"q": "MARBLES"}, pl.col("problem_id").is_in(["p0002", "p0003"])),  # of the problem's text alone
    ):
        got = source.rows({**query, "limit": "500"})
        assert sorted(r["row_id"] for r in got["rows"]) == sorted(rows.filter(wanted)["row_id"]), query
    page = source.rows({"sort": "-length", "offset": "3", "limit": "2"})
    assert (page["total"], len(page["rows"])) == (rows.height, 2)
    longest = rows["response_ids"].list.len().sort(descending=True)
    assert [r["length"] for r in page["rows"]] == longest[3:5].to_list()


@pytest.mark.parametrize(
    "query", [{"reward_lo": "much"}, {"set": "../../etc"}, {"sort": "text"}, {"n": "-4"}, {"n": "99999"}]
)
def test_a_wrong_question_is_one_line(source: Trajectories, query: dict[str, str]) -> None:
    with pytest.raises(UserError):
        source.row(query) if "n" in query else source.rows(query)


def test_artifacts_alone_and_what_is_none(run: RunDir) -> None:
    alone = Trajectories(run.stage(2, "rollout"))
    assert alone.about()["sets"][0]["rows"] == 24
    assert alone.row({"n": "0"})["tokens"].keys() >= {"ratio", "entropy"}
    evaluation = Trajectories(run.evaluation(0, "held-out"))
    assert evaluation.row({"n": "0"})["problem"].startswith("Ana has")
    with pytest.raises(UserError, match="not trajectories"):
        Trajectories(run.stage(2, "score"))
    with pytest.raises(UserError, match="no such run"):
        Trajectories(run.root / "nowhere")


@pytest.fixture
def address(run: RunDir) -> Iterator[str]:
    with viewer.server(run.root) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()


def test_the_server_answers_this_machine_alone(run: RunDir, address: str) -> None:
    with urllib.request.urlopen(f"{address}/api/rows?verdict=correct&limit=3") as answer:
        assert len(json.load(answer)["rows"]) == 3
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    for path, host, code in (
        ("/api/about", "evil.example", 403),
        ("/../pipeline.toml", "", 404),
        ("/api/row?n=x", "", 400),
    ):
        request = urllib.request.Request(address + path, headers={"Host": host} if host else {})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        assert refused.value.code == code
    with pytest.raises(UserError, match="choose another --port"):
        viewer.server(run.root, port=int(address.rsplit(":", 1)[1]))


def test_a_static_file_refuses_what_is_too_large(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewer, "INLINE_ROWS", 50)
    with pytest.raises(UserError, match="name a directory, or --limit"):
        viewer.write(run.root, tmp_path / "all.html")
    assert viewer.write(run.root, tmp_path / "some.html", limit=20).is_file()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="holds other files"):
        viewer.write(run.root, tmp_path / "full")


def test_what_cannot_be_written_is_one_line(run: RunDir, tmp_path: Path) -> None:
    file, folder = tmp_path / "README.md", tmp_path / "folder.html"
    file.write_text("precious")
    folder.mkdir()
    for out, said in (
        (file, "a file, no .html; name FILE.html or a new directory"),
        (file / "view", "cannot write here"),
        (file / "view.html", "cannot write here"),
        (folder, "cannot write here"),
        (Path("/proc/view"), "cannot write here"),
    ):
        with pytest.raises(UserError, match=said):
            viewer.write(run.root, out, limit=3)
    assert file.read_text() == "precious"


def test_a_damaged_file_is_one_line(run: RunDir, tmp_path: Path) -> None:
    """Cut at its end (no footer) it is named; with bytes changed in the middle its data does not decode."""
    for place, said in (
        ("iterations/000002/rollout/part-00000.parquet", "part-00000.parquet: not readable as Parquet"),
        ("iterations/000002/score/part-00000.parquet", "not readable as Parquet .*tseeds verify names damaged files"),
        ("iterations/000002/update/rows.parquet", "not readable as Parquet"),
        ("iterations/000002/update/tokens.parquet", "not readable as Parquet"),
    ):
        copy = tmp_path / place.replace("/", "-")
        shutil.copytree(run.root, copy)
        os.truncate(copy / place, (copy / place).stat().st_size - 200)
        with pytest.raises(UserError, match=said):
            viewer.write(copy, tmp_path / "out.html")
    rotten = tmp_path / "rotten"
    shutil.copytree(run.root, rotten)
    file = rotten / "iterations/000002/rollout/part-00000.parquet"
    data = bytearray(file.read_bytes())
    for k in range(100, len(data) // 2):
        data[k] ^= 0x5A
    file.write_bytes(data)
    with pytest.raises(UserError, match="rotten: not readable as Parquet"):
        viewer.write(rotten, tmp_path / "out.html")


def test_a_hundred_thousand_rows(tmp_path: Path) -> None:
    """A page, a filter and a row of 100,000 trajectories; only the row groups that are looked at are read."""
    rows, parts, tokens = 100_000, 50, 40
    per = rows // parts
    folder = tmp_path / "rollout"
    folder.mkdir()
    offsets = pa.array(range(0, per * tokens + 1, tokens), pa.int32())
    ids = pa.ListArray.from_arrays(offsets, pa.array([7] * (per * tokens), pa.int32()))
    logprobs = pa.ListArray.from_arrays(offsets, pa.array([-0.5] * (per * tokens), pa.float32()))
    for k in range(parts):
        numbers = range(k * per, (k + 1) * per)
        columns = {
            "row_id": [f"r{n:06d}" for n in numbers],
            "problem_id": [f"p{n // 8 % 997}" for n in numbers],
            "group_id": [f"g{n // 8:06d}" for n in numbers],
            "sample": [n % 8 for n in numbers],
            "policy": ["d"] * per, "policy_step": [k] * per, "seed_id": [None] * per,
            "snapshot_step": [n % 5 if n % 2 else None for n in numbers],
            "position": ["prefix" if n % 2 else "none" for n in numbers],
            "prompt_ids": [[1]] * per, "response_ids": ids, "logprobs": logprobs,
            "off_start": [0] * per, "off_stop": [n % 2 * 10 for n in numbers],
            "finish_reason": ["stop"] * per, "temperature": [1.0] * per, "rng_seed": [0] * per,
            "text": [f"text {n}" for n in numbers],
        }  # fmt: skip
        pq.write_table(pa.table(columns, schema=schema.ROLLOUT), folder / f"part-{k:05d}.parquet", row_group_size=256)
    source = Trajectories(folder)
    begin = time.process_time()
    assert source.about()["sets"][0]["rows"] == rows
    assert source.sets["rollout"].index.estimated_size("mb") < 25
    assert source.rows({"seeded": "yes", "snapshot": "3", "offset": "9000"})["total"] == 10_000
    row = source.row({"n": "99999"})
    assert row["row_id"] == "r099999"
    assert len(row["members"]) == 8
    assert sum(t.num_rows for t in source._groups.values()) <= 256
    assert time.process_time() - begin < 20
