"""The loop with adapters, as a user runs it: snapshots are adapters, and past policies sample in one batch of a real vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import polars as pl
import pytest
from test_loop import data, run_args, toy, tseeds

from tseeds import verify
from tseeds.artifacts.policy import policy_files

__all__ = ["toy"]

pytest.importorskip("peft", reason="adapters need the optional peft")

ADAPTERS = [
    "update.lora.rank=4",
    "update.kl_coef=0.01",
    "update.kl_reference=snapshot",
    "seed.snapshots_per_iteration=3",
]


def arguments(toy: Path, run: Path) -> list[str]:
    return [*run_args(toy, run), *[word for s in ADAPTERS for word in ("--set", s)]]


@pytest.fixture(scope="module")
def run(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "lora"
    tseeds(*arguments(toy, path))
    return path


def test_every_policy_but_the_first_is_an_adapter(run: Path) -> None:
    names = ["adapter_config.json", "adapter_model.safetensors"]
    whole = (run / "snapshots/step-000000/model.safetensors").stat().st_size
    for step in (1, 2, 3):
        policy, snapshot = run / f"iterations/{step:06d}/update/policy", run / f"snapshots/step-{step:06d}"
        assert [f.name for f in policy_files(policy)] == [f.name for f in policy_files(snapshot)] == names
        assert (policy / names[1]).samefile(snapshot / names[1])  # linked, not copied
        assert json.loads((snapshot / names[0]).read_text())["base_model_name_or_path"] == "../step-000000"
        assert (snapshot / names[1]).stat().st_size < whole / 4
        manifests = [json.loads((p / "manifest.json").read_text()) for p in (policy.parent, snapshot)]
        assert manifests[0]["facts"]["policy"] == manifests[1]["facts"]["policy"]


def test_past_policies_write_seeds_in_one_batch_and_log_probs_are_theirs(run: Path) -> None:
    seeds = pl.read_parquet(run / "iterations/000003/seed/*.parquet")
    assert seeds["snapshot_step"].unique().sort().to_list() == [0, 1, 2]
    said = (run / "logs/attempt-0001.log").read_text()
    assert said.count("vllm started") == 1
    assert "merged into its base" not in said
    assert verify.check(run) == (len(list(run.rglob("manifest.json"))), [])
    found = verify.check_logprobs(run, 50)
    assert (found.damages, found.skipped) == ([], 0)
    assert found.tokens > 1000
    assert found.most < 1e-4
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["mismatch"] < 1e-4 for line in lines)
    assert len({line["policy"] for line in lines}) == 3


def test_a_killed_seed_stage_and_a_fork_go_on_bit_for_bit(toy: Path, run: Path, tmp_path: Path) -> None:
    again, fork, moved = (tmp_path / n for n in ("again", "fork", "moved"))
    tseeds(*arguments(toy, again), env={"TSEEDS_FAULT": "seed:after-part:3"}, code=-9)
    assert len(list((again / "iterations/000002/seed.partial").glob("part-*.parquet"))) == 1
    tseeds(*arguments(toy, again))
    assert data(again) == data(run)
    shutil.copytree(run, moved)  # adapters name their base inside the run
    tseeds("fork", moved, "--at", 2, "--run", fork)
    shutil.rmtree(moved)
    tseeds("run", fork)
    assert data(fork) == data(run)


def test_an_adapter_evaluates_exports_and_follows_in_transformers(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    tseeds("export", run, "--policy", "-o", out)
    assert (out / "model.safetensors").stat().st_size > 1e6
    sets = ["--set", "engine.backend=transformers", "--set", "evaluate.samples=2"]
    cells = json.loads(tseeds("evaluate", run, "--mixed", "--lengths", "5", *sets, "--json").stdout)["cells"]
    assert {c["snapshot_step"] for c in cells} == {None, 0, 1, 2}
    found = json.loads(tseeds("update", run, "--dry-run-gradient", "--modes", "clip,mask", "--json").stdout)
    assert found["values"]["clip"]["grad_norm"] > 0
