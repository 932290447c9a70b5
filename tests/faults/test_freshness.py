"""A changed value is named with what it makes stale and what a redo costs; accepted changes leave the past as it was."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from equal import Reference
from forked import Forked
from toy_loop import loop_config

from tseeds import config as configuration
from tseeds import pipeline, problems
from tseeds.artifacts import store
from tseeds.artifacts.rundir import RunDir
from tseeds.context import Context
from tseeds.errors import Stale
from tseeds.history import History

NEUTRAL = {
    "run.iterations": 5,
    "policy.path": "elsewhere",
    "policy.trust_remote_code": True,
    "snapshot.keep_last": 7,
    "snapshot.keep_every": 7,
    "snapshot.disk_budget_gb": 7.0,
    "snapshot.keep_states": 7,
    "snapshot.keep_states_every": 7,
    "seed.candidates": 1,
    "score.workers": 7,
    "update.processes": 7,
    "update.threads": 7,
    "evaluate.every": 1,
    "engine.workers": 7,
    "engine.ray_address": "x",
    "engine.tensor_parallel": 7,
    "engine.threads": 7,
    "engine.kv_cache_gb": 7.0,
    "engine.gpu_memory_utilization": 0.7,
    "engine.sleep_during_update": False,
    "engine.part_rows": 7,
    "engine.stall_seconds": 7.0,
    "log.to": ["wandb"],
    "log.project": "x",
}
"""Values that decide no bytes of what is committed: where things lie, how fast they go, what is kept."""

OTHER: dict[str, Any] = {
    "run.seed": 5,
    "policy.dtype": "bfloat16",
    "problems.task": "math",
    "problems.prompt": "chat",
    "problems.template": "x {problem}",
    "problems.prefill": "x",
    "problems.max_prompt_tokens": 17,
    "problems.limit": 7,
    "seed.share": 0.25,
    "seed.schedule": "linear",
    "seed.schedule_end": 7,
    "seed.position": "whole",
    "seed.sampler": "recent",
    "seed.snapshots_per_iteration": 2,
    "seed.cut": "line",
    "seed.hi": 0.6,
    "seed.source": "replay",
    "seed.success": "correct",
    "seed.temperature": 0.9,
    "rollout.problems_per_iteration": 3,
    "rollout.group_size": 6,
    "rollout.max_response_tokens": 21,
    "rollout.temperature": 0.9,
    "score.time_limit": 3.0,
    "score.memory_limit_mb": 3000,
    "update.learning_rate": 2e-3,
    "update.minibatches": 1,
    "update.tokens_per_microbatch": 999,
    "update.prefix_weight": "mask",
    "update.kl_coef": 0.02,
    "update.kl_reference": "base",
    "update.save_tokens": True,
    "evaluate.benchmarks": [],
    "evaluate.samples": 3,
    "evaluate.temperature": 0.9,
    "evaluate.top_p": 0.9,
    "evaluate.greedy": True,
    "evaluate.max_response_tokens": 9,
    "engine.backend": "vllm",
}


def changed(toy: Path, key: str, value: Any) -> configuration.Pipeline:
    section, name = key.split(".")
    return configuration.parse(loop_config(toy, **{section: {name: value}}))


@pytest.mark.parametrize("key", OTHER)
def test_every_value_that_matters_is_named_when_it_changes(key: str, toy: Path, uninterrupted: Path) -> None:
    run = RunDir(uninterrupted)
    config = changed(toy, key, OTHER[key])
    reports = list(pipeline.survey(History(config), run))
    stale = [r for r in reports if r.state == "stale"]
    assert stale
    text = pipeline.explain(reports)
    if key not in ("update.kl_reference", "evaluate.benchmarks"):  # they choose other inputs, which are named
        assert f"{key} " in text
    with pytest.raises(Stale):
        pipeline.adopt(config, run, accept=False)


@pytest.mark.parametrize("key", NEUTRAL)
def test_no_other_value_makes_anything_stale(key: str, toy: Path, uninterrupted: Path) -> None:
    reports = list(pipeline.survey(History(changed(toy, key, NEUTRAL[key])), RunDir(uninterrupted)))
    if key == "policy.path":
        reports = [r for r in reports if r.step.out.name != "step-000000"]
    assert not [r for r in reports if r.state == "stale"]


def test_no_value_is_forgotten(toy: Path, uninterrupted: Path) -> None:
    """A new field must be in some stage's key, or be named here as one that decides no bytes."""
    manifests = [store.require(p.parent, "x") for p in uninterrupted.rglob("manifest.json")]
    in_keys = {key for m in manifests for key in m.identity.config}
    # which inputs; their digests are in the keys
    chooses = {"snapshot.every", "evaluate.benchmarks", "problems.path", "problems.benchmarks", "update.kl_sampler"}
    refused = {"rollout.top_p", "rollout.top_k"}
    estimates = {"policy.architecture"}  # read by validate --estimate alone
    for key in configuration.flatten(configuration.parse(loop_config(toy))):
        section = key.split(".")[0]
        unused = section == "curriculum"  # a stage of its own, where a pipeline asks for it
        assert key in {*in_keys, *NEUTRAL, *chooses, *refused, *estimates} or unused, key


def test_the_cost_of_a_redo_counts_what_follows(toy: Path, uninterrupted: Path) -> None:
    reports = list(pipeline.survey(History(changed(toy, "update.learning_rate", 2e-3)), RunDir(uninterrupted)))
    stale = [r.step.out.relative_to(uninterrupted).as_posix() for r in reports if r.state == "stale"]
    assert stale == ["iterations/000001/update", "iterations/000002/update"]
    follow = [r.step.out.relative_to(uninterrupted).as_posix() for r in reports if r.follows]
    assert follow == [
        "snapshots/step-000001", "iterations/000002/seed", "iterations/000002/rollout", "iterations/000002/score",
        "snapshots/step-000002", "evaluations/000002/countdown",
    ]  # fmt: skip
    seconds = sum(r.seconds for r in reports if r.state == "stale" or r.follows)
    assert pipeline.explain(reports).endswith(f"about {seconds:.0f} s")
    leaf = list(pipeline.survey(History(changed(toy, "evaluate.samples", 3)), RunDir(uninterrupted)))
    assert not [r for r in leaf if r.follows]  # nothing is built on an evaluation


def test_a_change_is_refused_named_accepted_and_recorded(
    toy: Path, forked: Forked, begun: Callable[[str], Path], reference: Reference
) -> None:
    run = begun("iterations/000002/update")
    change = ["--set", "update.learning_rate=0.002", "--iterations", "3"]
    looked = forked.tseeds("run", run, *change, "--dry-run")
    assert looked["status"] == 0
    assert "stale because update.learning_rate 0.001 -> 0.002: 1 stages (update)" in looked["error"]
    assert "a redo would cost about" in looked["error"]
    refused = forked.tseeds("run", run, *change)
    assert refused["status"] == 4
    assert "update.learning_rate 0.001 -> 0.002" in refused["error"]
    assert "--accept applies the change from iteration 2 on" in refused["error"]
    assert "--accept applies the change from iteration 2 on" in looked["error"]
    shown = forked.tseeds("run", run, *change, "--dry-run", "--accept")["error"]
    assert "stale" not in shown
    assert "would change from iteration 2 on: update.learning_rate 0.001 -> 0.002" in shown
    accepted = forked.tseeds("run", run, *change, "--accept")
    assert accepted["status"] == 0, accepted["error"]
    for told in ("run.iterations 2 -> 3", "update.learning_rate 0.001 -> 0.002"):
        assert f"\nchanged from iteration 2 on: {told}\n" in f"\n{accepted['error']}"
    rates = {
        i: store.require(run / f"iterations/{i:06d}/update", "update").identity.config["update.learning_rate"]
        for i in (1, 2, 3)
    }
    assert rates == {1: 0.001, 2: 0.002, 3: 0.002}  # iteration 2 had no update yet
    record = json.loads((run / "run.json").read_text())
    assert [(c["iteration"], c["key"], c["old"], c["new"]) for c in record["changes"]] == [
        (2, "run.iterations", 2, 3),
        (2, "update.learning_rate", 0.001, 0.002),
    ]
    for name in ("iterations/000002/rollout", "iterations/000001/update"):
        assert reference.differences(run, finished=False, only=[name]) == []
    status = forked.tseeds("status", run)
    assert "stale" not in status["error"]
    assert "changed from iteration 2 on: update.learning_rate 0.001 -> 0.002" in status["error"]
    assert forked.tseeds("run", run)["status"] == 0  # the run goes on with what it has adopted


def test_a_value_that_every_iteration_builds_on_cannot_be_accepted(toy: Path, uninterrupted: Path) -> None:
    with pytest.raises(Stale, match=r"Cannot be accepted, for committed stages build on it: problems.limit\. Ways on"):
        pipeline.adopt(changed(toy, "problems.limit", 7), RunDir(uninterrupted), accept=True)


@pytest.mark.parametrize("command", [["--dry-run"], ["--dry-run", "--accept"], [], ["--accept"]])
def test_each_changed_value_is_said_to_be_acceptable_or_not(
    command: list[str], forked: Forked, uninterrupted: Path
) -> None:
    sets = ["--set", "problems.limit=7", "--set", "update.kl_reference=base", "--set", "run.iterations=4"]
    done = forked.tseeds("run", uninterrupted, *sets, *command)
    assert done["status"] == (0 if "--dry-run" in command else 4)
    assert (
        "Cannot be accepted, for committed stages build on it: problems.limit; can be: update.kl_reference. Ways on: set it "
        "back (--accept then takes the rest); start another run (--run NEW)"
    ) in done["error"]


def test_files_that_changed_are_called_by_the_key_that_names_them(toy: Path, forked: Forked, tmp_path: Path) -> None:
    data, policy, run = (tmp_path / name for name in ("data.jsonl", "policy", "run"))
    shutil.copy(toy / "train.jsonl", data)
    shutil.copytree(toy / "policy", policy)
    (policy / "generation_config.json").write_text('{"eos_token_id": 1}')
    places = {"problems": {"path": str(data)}, "run": {"iterations": 0}, "evaluate": {"every": 0}}
    assert forked.run(loop_config(toy, **places), run)["status"] == 0
    moved = forked.tseeds("run", run, "--set", f"policy.path={policy}", "--dry-run")["error"]
    assert 'stale because policy.path "/' in moved
    data.write_text("".join(data.read_text().splitlines(keepends=True)[1:]))
    same = forked.tseeds("run", run)
    assert same["status"] == 4
    assert (
        f"build on it: files of problems.path changed. Ways on: set it back; nothing is trained yet, so delete {run}"
        in (same["error"])
    )


def test_another_verifier_under_the_same_name_is_refused(toy: Path, forked: Forked, tmp_path: Path) -> None:
    verifier, run = tmp_path / "verifier.py", tmp_path / "run"
    verifier.write_text("def verify(gold, response):\n    return len(response) > 9\n")
    task = {"task": f"python:{verifier}:verify"}
    config = loop_config(toy, run={"iterations": 1}, problems=task, evaluate={"every": 0})
    done = forked.run(config, run)
    assert done["status"] == 0, done["error"]
    verifier.write_text("def verify(gold, response):\n    return len(response) > 5\n")
    for command in ([], ["--accept"]):
        done = forked.tseeds("run", run, *command)
        assert done["status"] == 4
        assert (
            "files of the verifier changed: makes 1 committed stage stale (score; from iteration 1 on)" in done["error"]
        )
        assert "Cannot be accepted, for committed stages build on it: files of the verifier changed. " in done["error"]


def test_fewer_iterations_than_are_finished_are_no_change(toy: Path, forked: Forked, uninterrupted: Path) -> None:
    before = (uninterrupted / "run.json").read_bytes()
    for more in (["--iterations", "1"], []):
        done = forked.tseeds("run", uninterrupted, *more)
        assert done["status"] == 0, done["error"]
        assert (
            f"{uninterrupted}: all 2 iterations are finished, nothing left to do (--iterations N goes on)"
            in done["error"]
        )
        assert "changed" not in done["error"]
        assert "going on" not in done["error"].replace("goes on", "")
    assert (uninterrupted / "run.json").read_bytes() == before


def test_run_and_status_name_one_disk_use(forked: Forked, uninterrupted: Path) -> None:
    found = [
        re.findall(r"^  disk[ :]+([\d.]+ MB)", forked.tseeds(command, uninterrupted)["error"], re.MULTILINE)
        for command in ("run", "status")
    ]
    assert found[0] == found[1] != []


def test_gradients_are_compared_at_a_snapshot_where_retention_took_the_policy(
    toy: Path, forked: Forked, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    kept = {"every": 2, "keep_states": 1}
    assert forked.run(loop_config(toy, run={"iterations": 4}, snapshot=kept, evaluate={"every": 0}), run)["status"] == 0
    look = ["--dry-run-gradient", "--modes", "clip,mask"]
    done = forked.tseeds("update", run, "--iteration", "3", *look, "--at", str(run / "iterations/000004/update/policy"))
    assert done["status"] == 0, done["error"]
    assert "one optimizer step over all rows" in done["error"]
    gone = forked.tseeds("update", run, "--iteration", "2", *look)
    assert gone["status"] == 2
    assert (
        "removed the policy that sampled iteration 2; it is kept for iterations 1, 3 (snapshot.every" in gone["error"]
    )


def test_a_schedule_that_ends_with_the_run_says_how_it_stays(toy: Path, forked: Forked, tmp_path: Path) -> None:
    config = loop_config(toy, run={"iterations": 2}, seed={"schedule": "linear", "share": 1.0}, evaluate={"every": 0})
    run = tmp_path / "run"
    assert forked.run(config, run)["status"] == 0
    more = ["--iterations", "3"]
    refused = forked.tseeds("run", run, *more)
    assert refused["status"] == 4
    assert "run.iterations 2 -> 3" in refused["error"]
    assert "with --set seed.schedule_end=2 too the schedule of seed.share stays as it was" in refused["error"]
    done = forked.tseeds("run", run, *more, "--accept", "--set", "seed.schedule_end=2")
    assert done["status"] == 0, done["error"]
    assert not (run / "iterations/000003/seed").exists()  # the share has fallen to 0
    assert forked.tseeds("run", run, "--iterations", "4")["status"] == 0


def test_a_mistake_before_the_first_iteration_is_simply_corrected(toy: Path, forked: Forked, tmp_path: Path) -> None:
    wrong = loop_config(toy, problems={"path": str(tmp_path / "nowhere.jsonl")})
    assert forked.run(wrong, tmp_path / "run")["status"] == 2
    assert forked.run(loop_config(toy, run={"iterations": 0}), tmp_path / "run")["status"] == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["changes"] == []


def test_a_kill_while_a_change_is_recorded_leaves_the_old_or_the_new(
    toy: Path, forked: Forked, begun: Callable[[str], Path], reference: Reference
) -> None:
    run = begun("iterations/000002/seed")
    config = loop_config(toy, update={"learning_rate": 2e-3})
    assert forked.run(config, run, accept=True, fault="run:record:1")["status"] == -9
    assert pipeline.open_history(RunDir(run)).config.update.learning_rate == 1e-3
    assert "learning_rate = 0.002" in (run / "pipeline.toml").read_text()
    assert forked.run(loop_config(toy), run)["status"] == 0  # nothing was recorded: the old values go on
    assert reference.differences(run, finished=True) == []


def test_an_upgraded_stage_is_named_and_can_be_accepted(
    toy: Path, begun: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tseeds import rollout

    run = RunDir(begun("iterations/000002/rollout"))
    monkeypatch.setattr(rollout, "VERSION", rollout.VERSION + 1)
    config = configuration.parse(loop_config(toy))
    with pytest.raises(Stale, match="version of stage rollout"):
        pipeline.adopt(config, run, accept=False)
    history = pipeline.adopt(config, run, accept=True)
    assert [(c["iteration"], c["key"]) for c in history.changes] == [(2, "version.rollout")]
    assert not [r for r in pipeline.survey(history, run) if r.state == "stale"]


def test_what_retention_would_have_kept_is_named_where_it_changes_the_seeds(
    toy: Path, forked: Forked, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = loop_config(toy, run={"iterations": 4})
    done = forked.run(config, run)
    assert done["status"] == 0, done["error"]
    config["snapshot"]["keep_last"] = 1
    refused = forked.run(config, run)
    assert refused["status"] == 4
    assert "snapshot.keep_last 0 -> 1" in refused["error"]


def test_conventions_that_compare_golds_belong_to_the_problems(toy: Path, uninterrupted: Path) -> None:
    run = RunDir(uninterrupted)

    def key(**score: Any) -> str:
        config = configuration.parse(loop_config(toy, score=score))
        return (
            next(s for s in pipeline.setup_steps(config, run) if s.module is problems)
            .module.identity(config, problems.Inputs(run.snapshot(0)))
            .key
        )

    assert key() == key(workers=3) != key(percent_as_number=False)


def test_a_verifier_that_is_edited_while_a_run_trains_grades_anew(toy: Path, tmp_path: Path) -> None:
    file = tmp_path / "v.py"
    config = configuration.parse(loop_config(toy))
    with Context(config) as context:
        rewards = []
        for value in (1.0, 0.0):
            file.write_text(f"def f(gold, text):\n    return {value}\n")
            rewards.append(context.grade([(f"python:{file}:f", "1", "", "1")])[0].reward)
    assert rewards == [1.0, 0.0]
