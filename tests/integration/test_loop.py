"""The loop on the toy task as a user runs it: real vLLM, real updates, a real kill."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from tseeds import verify
from tseeds.artifacts import store

ROOT = Path(__file__).parents[2]
SMALL = [
    "run.iterations=3",
    "rollout.problems_per_iteration=8",
    "rollout.group_size=4",
    "snapshot.every=1",
    "snapshot.keep_states=9",
    "update.minibatches=2",
    "engine.part_rows=8",
    "evaluate.every=3",
    "evaluate.samples=4",
    "problems.limit=64",
]


def tseeds(*args: object, env: dict[str, str] | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    """The installed command in a process of its own."""
    command = [sys.executable, "-m", "tseeds_cli.main", *map(str, args)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, **(env or {})}, cwd=ROOT, check=False
    )
    assert done.returncode == code, f"{args}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    tseeds("toy", folder)
    return folder


def run_args(toy: Path, run: Path) -> list[str]:
    sets = [
        *SMALL,
        f"policy.path={toy}/policy",
        f"problems.path={toy}/train.jsonl",
        f'evaluate.benchmarks=[{{name="countdown", path="{toy}/test.jsonl", limit=16}}]',
    ]
    return ["run", "pipelines/toy.toml", "--run", str(run), *[word for s in sets for word in ("--set", s)]]


@pytest.fixture(scope="module")
def run(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "toy"
    done = tseeds(*run_args(toy, path))
    assert "3 iterations" in done.stdout
    for word in ("reward", "entropy", "clip fraction", "pass@1", "trajectories"):
        assert word in done.stdout
    return path


def data(run: Path) -> dict[str, object]:
    """Everything in a run that is data: Parquet columns (measured times apart), digests of weights, losses."""
    found: dict[str, object] = {}
    for file in sorted(run.rglob("*.parquet")):
        name = file.relative_to(run).as_posix()
        found[name] = pl.read_parquet(file).drop("wall_ms", strict=False).to_dict(as_series=False)
    for file in sorted(run.rglob("*.safetensors")):
        found[file.relative_to(run).as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def test_trajectories_are_plain_polars(run: Path) -> None:
    rows = pl.read_parquet(f"{run}/iterations/*/rollout/*.parquet")
    scores = pl.read_parquet(f"{run}/iterations/*/score/*.parquet")
    seeds = pl.read_parquet(f"{run}/iterations/*/seed/*.parquet")
    assert rows.height == 3 * 8 * 4
    assert rows.join(scores, on="row_id").height == rows.height
    assert rows.group_by("group_id").len()["len"].unique().to_list() == [4]
    assert rows["row_id"].n_unique() == rows.height
    assert rows["rng_seed"].n_unique() == rows.height
    seeded = rows.filter(pl.col("seed_id").is_not_null())
    joined = seeded.join(seeds, on="seed_id", suffix="_seed")
    assert joined.height == seeded.height > 0
    for row in joined.iter_rows(named=True):
        length = row["off_stop"]
        assert row["off_start"] == 0 < length == len(row["ids"])
        assert row["response_ids"][:length] == row["ids"]
        assert row["logprobs"][:length] == row["logprobs_seed"]
    for row in rows.iter_rows(named=True):
        assert len(row["response_ids"]) == len(row["logprobs"]) <= 24
        assert all(p <= 0 for p in row["logprobs"])


def test_rows_name_the_policy_that_sampled_them(run: Path) -> None:
    rows = pl.read_parquet(f"{run}/iterations/*/rollout/*.parquet")
    assert rows.group_by("policy_step").agg(pl.col("policy").n_unique())["policy"].to_list() == [1, 1, 1]
    assert rows["policy"].n_unique() == 3
    for step in (1, 2):
        manifest = json.loads((run / f"iterations/{step:06d}/update/manifest.json").read_text())
        assert rows.filter(pl.col("policy_step") == step)["policy"].unique().to_list() == [manifest["facts"]["policy"]]


def test_trainer_and_engine_agree(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["mismatch"] < 1e-4  # largest |lp_old - lp_mu| of any continuation token


def test_the_policy_moves(run: Path) -> None:
    weights = [(run / f"iterations/{i:06d}/update/policy/model.safetensors").read_bytes() for i in (1, 2, 3)]
    assert len({*weights, (run / "snapshots/step-000000/model.safetensors").read_bytes()}) == 4


def test_a_second_run_does_nothing(toy: Path, run: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*.parquet")}
    done = tseeds(*run_args(toy, run))
    assert "all 3 iterations are finished, nothing left to do" in done.stderr
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*.parquet")} == before


@pytest.mark.parametrize("stage", ["problems", "seed", "rollout", "score", "update"])
def test_a_stage_that_is_fresh_says_so_and_does_nothing(run: Path, stage: str) -> None:
    iteration = [] if stage == "problems" else ["--iteration", 2]
    done = tseeds(stage, run, *iteration)
    assert "nothing to do" in done.stdout


def test_stages_run_alone_on_explicit_files_and_make_the_same(run: Path, tmp_path: Path) -> None:
    at = run / "iterations/000002"
    config = ["--config", run / "pipeline.toml"]
    tseeds("score", *config, "--rollouts", at / "rollout", "--problems", run / "problems", "--out", tmp_path / "score")
    tseeds(
        "update", *config, "--iteration", 2, "--policy", run / "iterations/000001/update/policy",
        "--state", run / "iterations/000001/update/state", "--rollouts", at / "rollout", "--scores", tmp_path / "score",
        "--out", tmp_path / "update",
    )  # fmt: skip
    for name in ("policy/model.safetensors", "rows.parquet"):
        assert (tmp_path / "update" / name).read_bytes() == (at / "update" / name).read_bytes()
    tseeds(
        "seed", *config, "--iteration", 2, "--problems", run / "problems",
        "--snapshot", run / "snapshots/step-000000", "--snapshot", run / "snapshots/step-000001", "--out", tmp_path / "seed",
    )  # fmt: skip
    tseeds(
        "rollout", *config, "--iteration", 2, "--policy", run / "iterations/000001/update/policy",
        "--problems", run / "problems", "--seeds", tmp_path / "seed", "--out", tmp_path / "rollout",
    )  # fmt: skip
    for stage in ("seed", "rollout"):
        mine = pl.read_parquet(tmp_path / stage / "*.parquet")
        assert mine.equals(pl.read_parquet(at / stage / "*.parquet"))


def test_gradients_of_all_modes_are_compared_without_training(run: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    later = run / "iterations/000003/update/policy"
    done = tseeds("update", run, "--iteration", 2, "--dry-run-gradient", "--json", "--at", later)
    found = json.loads(done.stdout)
    assert len(found["modes"]) == len(found["values"]) == len(found["cosine"]) == 9
    assert found["values"]["clip"]["clipped_mass_continuation"] > 0  # the later policy has moved away
    two = tseeds("update", run, "--dry-run-gradient", "--modes", "clip,mask").stdout
    assert "one optimizer step over all rows, nothing trained" in two
    assert "decoupled" not in two
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before
    assert "--modes and --at go with --dry-run-gradient" in tseeds("update", run, "--modes", "clip", code=2).stderr


def test_recorded_log_probs_are_those_of_the_policies_kept(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = tseeds("verify", run, "--logprobs", 5, "--json")
    found = json.loads(done.stdout)["logprobs"]
    assert found["tokens"] > 100
    assert found["most"] < 1e-4
    assert "log-probs recomputed: off by" in tseeds("verify", run, "--logprobs", 1).stdout

    one = tseeds("verify", run / "iterations/000002/rollout", "--logprobs", 1, code=2)
    assert "not a run directory" in one.stderr

    def shifted(manifest: store.Manifest) -> pa.Table:
        table = read(manifest)
        if "000002" not in str(manifest.path):
            return table
        wrong = [[None if x is None else x - 0.1 for x in row] for row in table["logprobs"].to_pylist()]
        where = table.schema.get_field_index("logprobs")
        return table.set_column(where, "logprobs", pa.array(wrong, pa.list_(pa.float32())))

    read = store.read_table
    monkeypatch.setattr(store, "read_table", shifted)
    damages = verify.check_logprobs(run, 2).damages
    assert damages
    assert all("000002/rollout: recorded log-probs differ from those of" in line for line in damages)


def test_status_and_show_read_the_run(run: Path) -> None:
    reports = json.loads(tseeds("status", run, "--json").stdout)
    assert reports["finished"] == 3
    assert {r["state"] for r in reports["stages"]} == {"fresh"}
    shown = tseeds("show", run, "--seeded", "-n", 2).stdout
    assert "⟦" in shown
    assert "by the snapshot of step" in shown
    record = json.loads(tseeds("show", run / "iterations/000001/score", "-n", 1, "--json").stdout.splitlines()[0])
    assert record["verdict"] in {"correct", "wrong", "no_answer"}


def test_killed_in_the_middle_of_the_rollout_only_missing_parts_are_made(toy: Path, run: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    tseeds(*run_args(toy, again), env={"TSEEDS_FAULT": "rollout:after-part:6"}, code=-9)
    partial = again / "iterations/000002/rollout.partial"
    kept = {p.name: p.stat().st_mtime_ns for p in partial.glob("part-*.parquet")}
    assert 0 < len(kept) < 4
    tseeds(*run_args(toy, again))
    made = again / "iterations/000002/rollout"
    assert {p.name: p.stat().st_mtime_ns for p in made.glob("part-*.parquet") if p.name in kept} == kept
    assert data(again) == data(run)


def test_mixed_evaluation_of_a_run(run: Path) -> None:
    sets = ["--set", "engine.backend=transformers", "--set", "evaluate.samples=2"]
    done = tseeds("evaluate", run, "--mixed", "--lengths", "2,5", "--snapshots", "0,2", *sets, "--json")
    record = json.loads(done.stdout)
    assert record["path"] == str(run / "mixed/000003/countdown")
    cells = {(c["snapshot_step"], c["seed_length"]) for c in record["cells"]}
    assert cells == {(None, 0), *((s, n) for s in (0, 2, None) for n in (-1, 2, 5))}
    rows = pl.read_parquet(f"{record['path']}/*.parquet")
    assert rows.height == 16 * 2 * (1 + 2 * 3)
    assert (rows["off_stop"] <= rows["seed_length"].replace(-1, 24)).all()
    refused = tseeds("evaluate", run, "--mixed", "--snapshots", "7", code=2)
    assert "--snapshots 7: not there; the run has 0, 1, 2" in refused.stderr


def test_pages_of_a_run(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    record = json.loads(tseeds("report", f"seeds={run}", "-o", page, "--json").stdout)
    assert record == {"files": [str(page)], "groups": {"seeds": [str(run)]}}
    assert "clipped mass" in page.read_text().lower()
    place = Path(tseeds("view", run / "iterations/000002/rollout", "-o", tmp_path / "view.html").stdout.strip())
    row = pl.read_parquet(run / "iterations/000002/rollout/*.parquet")["row_id"][0]
    assert row in place.read_text()
    assert "no such" in tseeds("view", run / "nothing", "-o", tmp_path / "no.html", code=2).stderr


def test_view_serves_on_this_machine_until_it_is_stopped(run: Path) -> None:
    command = [sys.executable, "-m", "tseeds_cli.main", "view", str(run), "--port", "0", "--no-open"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        assert b"<html" in urllib.request.urlopen(url, timeout=20).read()
    finally:
        server.send_signal(signal.SIGINT)
        _, said = server.communicate(timeout=20)
    assert "Traceback" not in said


@pytest.mark.parametrize("layout", ["trl", "verl"])
def test_exported_trajectories_come_back_as_they_were(run: Path, tmp_path: Path, layout: str) -> None:
    file, back = tmp_path / f"{layout}.jsonl", tmp_path / "back"
    tseeds("export", run, "-o", file, "--layout", layout, "--iteration", 2)
    record = json.loads(tseeds("import", file, "-o", back, "--json").stdout)
    assert record["rows"] == 32
    for stage in ("rollout", "score"):
        mine, theirs = (pl.read_parquet(folder / stage / "*.parquet") for folder in (back, run / "iterations/000002"))
        assert mine.drop("wall_ms", strict=False).equals(theirs.drop("wall_ms", strict=False))
    assert "no column prompt_ids" in tseeds("import", _text_only(tmp_path), "-o", tmp_path / "no", code=2).stderr


def _text_only(folder: Path) -> Path:
    """A file of another trainer that kept no token ids."""
    file = folder / "text.jsonl"
    file.write_text('{"prompt": "1 + 1", "completion": "2", "reward": 1.0}\n')
    return file
