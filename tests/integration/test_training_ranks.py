"""Several processes, adapters, and the comparison of modes on real (small, random) models."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from training_toys import make_policy, make_rows

from tseeds.artifacts import schema
from tseeds.artifacts.policy import policy_digest, policy_files, write_adapter_config
from tseeds.artifacts.rundir import digest_of
from tseeds.config import LoraConfig, UpdateConfig
from tseeds.engines import policies
from tseeds.errors import StageFailed, UserError
from tseeds.exchange import export_policy
from tseeds.training import distributed
from tseeds.training.compare import compare_modes
from tseeds.training.logprobs import load_policy
from tseeds.training.loss import PREFIX_MODES
from tseeds.training.rows import Rows
from tseeds.training.trainer import Trainer
from tseeds.training.weights import merge_adapter


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"), tie_word_embeddings=True)


def largest_difference(a: Path, b: Path) -> float:
    x, y = load_file(a), load_file(b)
    assert x.keys() == y.keys()
    return max(float((x[n].float() - y[n].float()).abs().max()) for n in x)


def test_two_ranks_make_the_update_of_one(tmp_path, policy):
    """FSDP2 under torchrun: same gradient norms, losses, metrics and weights to 1e-6, standard files, state that resumes in
    one process. Three micro-batches, so that one rank idles once; sequence aggregation and reject cross the ranks."""
    config = UpdateConfig(
        learning_rate=1e-3, minibatches=2, aggregation="sequence", continuation_correction="reject", save_tokens=True,
        reject_lo=0.1, reject_hi=10, tokens_per_microbatch=100,
    )  # fmt: skip
    rows = make_rows(groups=7)
    one = Trainer(config, policy, dtype="float32", run_seed=0)
    a = one.step(rows, iteration=1)
    one.save(tmp_path / "one", tmp_path / "one_state")
    b = distributed.update(
        config.model_copy(update={"processes": 2}), policy, rows, out_policy=tmp_path / "two",
        out_state=tmp_path / "two_state", dtype="float32", run_seed=0, iteration=1, timeout=250,
    )  # fmt: skip
    assert a.steps["skipped"].to_pylist() == [False, False]
    for name in ("loss", "grad_norm", "clipped_mass_all", "ratio_mean_seed", "loss_tokens"):
        assert b.steps[name].to_numpy() == pytest.approx(a.steps[name].to_numpy(), abs=1e-6)
    for name in ("logprob", "logprob_old", "entropy", "ratio"):
        assert b.tokens[name].to_numpy() == pytest.approx(a.tokens[name].to_numpy(), abs=1e-5)
    assert b.summary["mismatch"] == pytest.approx(a.summary["mismatch"], abs=1e-5)
    assert largest_difference(tmp_path / "one" / "model.safetensors", tmp_path / "two" / "model.safetensors") < 2e-6
    moments = "optimizer.safetensors"
    assert largest_difference(tmp_path / "one_state" / moments, tmp_path / "two_state" / moments) < 1e-6
    again = Trainer(config, tmp_path / "two", dtype="float32", run_seed=0, state=tmp_path / "two_state")
    assert again.step(rows, iteration=2).summary["optimizer_steps"] == 4


def test_a_mistake_in_a_rank_is_one_line_and_a_hang_is_killed(tmp_path, policy):
    rows, config = make_rows(groups=2), UpdateConfig(processes=2, kl_coef=0.1)
    options = {
        "out_policy": tmp_path / "p",
        "out_state": tmp_path / "s",
        "dtype": "float32",
        "run_seed": 0,
        "iteration": 1,
    }
    with pytest.raises(StageFailed, match=r"did not finish within 0\.2 s"):
        distributed.update(config, policy, rows, **options, timeout=0.2)
    with pytest.raises(UserError, match="needs a reference policy"):
        distributed.update(config, policy, rows, **options, timeout=250)
    assert not (tmp_path / "p").exists()


def test_what_ranks_say_is_said_here_too(tmp_path, policy, caplog, monkeypatch):
    """Warnings of the first rank, and failures as what they are: one process and two behave alike."""
    options = {"out_policy": tmp_path / "p", "out_state": tmp_path / "s", "dtype": "float32", "run_seed": 0}
    same = make_rows(groups=2)
    same.reward[:] = [1.0] * len(same)
    distributed.update(UpdateConfig(processes=2, minibatches=1), policy, same, **options, iteration=1, timeout=250)
    assert "of groups have equal rewards" in caplog.text
    options |= {"out_policy": tmp_path / "q", "out_state": tmp_path / "t"}

    def fail(*_: object) -> None:
        raise StageFailed("training diverged")

    def launch(command: list[str], **_: object) -> SimpleNamespace:
        with pytest.raises(SystemExit):
            distributed._worker(Path(command[-1]))
        return SimpleNamespace(returncode=1, stderr="")

    monkeypatch.setattr(distributed, "_train", fail)
    monkeypatch.setattr(distributed, "end_with_parent", lambda: None)
    monkeypatch.setattr(distributed.subprocess, "run", launch)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(StageFailed, match="training diverged"):
        distributed.update(UpdateConfig(processes=2), policy, make_rows(), **options, iteration=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_train_merge_and_resume(tmp_path, dtype):
    base = make_policy(tmp_path / "base", dtype=getattr(torch, dtype), tie_word_embeddings=True)
    config = UpdateConfig(learning_rate=1e-2, minibatches=2, lora=LoraConfig(rank=4))
    warm = Trainer(config, base, dtype=dtype, run_seed=0)
    trained = {n for n in warm.weights.masters}
    assert trained
    assert all(".lora_" in n for n in trained)
    warm.step(make_rows(), iteration=1)
    warm.save(tmp_path / "a", tmp_path / "a_state")
    # the policy is the adapter alone, and computes bit for bit what the trainer's model does
    assert {f.name for f in policy_files(tmp_path / "a")} == {"adapter_config.json", "adapter_model.safetensors"}
    assert (tmp_path / "a/adapter_model.safetensors").stat().st_size < (base / "model.safetensors").stat().st_size
    flat, adv, keep = warm.prepare(make_rows())
    (micros,) = warm.plan(make_rows(), flat, adv, keep, 1, minibatches=1)
    merge_adapter(base, tmp_path / "a", tmp_path / "merged", dtype=dtype)
    with torch.no_grad():
        alone, merged = (load_policy(tmp_path / p, dtype=dtype)(micros[0].packed)[0] for p in ("a", "merged"))
        mine = warm.policy(micros[0].packed)[0]
    assert torch.equal(alone, mine)
    assert 0 < float((merged - mine).abs().max()) < (1e-4 if dtype == "float32" else 0.5)
    cold = Trainer(config, tmp_path / "a", dtype=dtype, run_seed=0, state=tmp_path / "a_state")
    one, two = (t.step(make_rows(seed=1), iteration=2, reference=tmp_path / "a") for t in (warm, cold))
    assert one.steps.equals(two.steps)


def test_adapters_of_other_values_or_bases_are_refused(tmp_path):
    base, other = (make_policy(tmp_path / n, seed=k) for k, n in enumerate(("base", "other")))
    config = UpdateConfig(lora=LoraConfig(rank=4))
    trainer = Trainer(config, base, dtype="float32", run_seed=0)
    trainer.save(tmp_path / "a", tmp_path / "state")
    adapter = tmp_path / "a"
    for key, value in (("rank", 8), ("alpha", 2.0), ("targets", ["q_proj"])):
        changed = UpdateConfig(lora=LoraConfig(**{"rank": 4, key: value}))
        with pytest.raises(UserError, match=rf"update.lora.{key}: .* was made with"):
            Trainer(changed, adapter, dtype="float32", run_seed=0)
    with pytest.raises(UserError, match=r"a LoRA adapter; set update.lora to train it on, or merge it first"):
        Trainer(UpdateConfig(), adapter, dtype="float32", run_seed=0)
    with pytest.raises(UserError, match=r"goes on with the adapter beside it, and .*base is a whole model"):
        Trainer(config, base, dtype="float32", run_seed=0, state=tmp_path / "state")
    before = policy_digest(adapter), digest_of(adapter)
    write_adapter_config(adapter, json.loads((adapter / "adapter_config.json").read_text()), other)
    assert (policy_digest(adapter), digest_of(adapter)) == before  # where the base lies is not what the adapter is
    with pytest.raises(UserError, match=r"an adapter of another policy than .*other"):
        Trainer(config, adapter, dtype="float32", run_seed=0)
    with pytest.raises(UserError, match=r"an adapter of another policy than .*other"):
        policies.describe(adapter)


def test_a_reference_that_is_the_adapter_itself_has_no_kl(tmp_path):
    base = make_policy(tmp_path / "base")
    config = UpdateConfig(
        learning_rate=1e-2, minibatches=1, lora=LoraConfig(rank=4), kl_coef=0.1, kl_reference="snapshot"
    )
    trainer = Trainer(config, base, dtype="float32", run_seed=0)
    trainer.step(make_rows(), iteration=1, reference=base)
    trainer.save(tmp_path / "a", tmp_path / "a_state")
    free = Trainer(
        config.model_copy(update={"kl_coef": 0.0}),
        tmp_path / "a",
        dtype="float32",
        run_seed=0,
        state=tmp_path / "a_state",
    )
    held = trainer.step(make_rows(seed=1), iteration=2, reference=tmp_path / "a")
    plain = free.step(make_rows(seed=1), iteration=2)
    assert held.summary["loss"] == pytest.approx(plain.summary["loss"], abs=1e-7)
    assert held.summary["grad_norm"] == pytest.approx(plain.summary["grad_norm"], rel=1e-5)


def test_two_ranks_train_the_adapter_of_one(tmp_path):
    base = make_policy(tmp_path / "base", tie_word_embeddings=True)
    config = UpdateConfig(
        learning_rate=1e-3, minibatches=2, lora=LoraConfig(rank=4), kl_coef=0.1, kl_reference="snapshot"
    )
    one = Trainer(config, base, dtype="float32", run_seed=0)
    one.step(make_rows(groups=7), iteration=1, reference=base)
    one.save(tmp_path / "one", tmp_path / "one_state")
    two = config.model_copy(update={"processes": 2})
    options = {"dtype": "float32", "run_seed": 0, "timeout": 250}
    distributed.update(
        two, base, make_rows(groups=7), out_policy=tmp_path / "two", out_state=tmp_path / "two_state", iteration=1,
        reference=base, **options,
    )  # fmt: skip
    weights = "adapter_model.safetensors"
    assert largest_difference(tmp_path / "one" / weights, tmp_path / "two" / weights) < 2e-6
    found = distributed.update(
        two, tmp_path / "two", make_rows(groups=7), out_policy=tmp_path / "a", out_state=tmp_path / "b", iteration=2,
        state=tmp_path / "two_state", reference=tmp_path / "one", **options,
    )  # fmt: skip
    expected = one.step(make_rows(groups=7), iteration=2, reference=tmp_path / "one")
    assert found.summary["grad_norm"] == pytest.approx(expected.summary["grad_norm"], rel=1e-5)
    assert found.summary["optimizer_steps"] == expected.summary["optimizer_steps"] == 4


def test_adapter_targets_that_do_not_exist_are_named(policy):
    with pytest.raises(UserError, match=r"update.lora.targets: .*nothing_proj"):
        Trainer(UpdateConfig(lora=LoraConfig(targets=["nothing_proj"])), policy, dtype="float32", run_seed=0)


def test_modes_compared_on_the_same_rows(tmp_path, policy):
    rows = make_rows()
    result = compare_modes(UpdateConfig(), policy, rows, list(PREFIX_MODES), dtype="float32")
    n = len(PREFIX_MODES)
    cosine = np.array(result.cosine)
    assert cosine.shape == (n, n)
    assert np.diag(cosine) == pytest.approx(1)
    assert cosine == pytest.approx(cosine.T)
    at = result.modes.index
    # pi_old is the policy itself: band and on_policy clip nothing, mask differs from all that train the seed
    assert result.values["band"]["clipped_mass_seed"] == result.values["on_policy"]["clipped_mass_seed"] == 0
    assert result.values["clip"]["clipped_mass_seed"] > 0
    assert cosine[at("mask"), at("on_policy")] < 0.99
    plain = Trainer(UpdateConfig(minibatches=1), policy, dtype="float32", run_seed=0).step(rows, iteration=1)
    assert result.values["clip"]["grad_norm"] == pytest.approx(plain.summary["grad_norm"], rel=1e-5)
    assert result.values["clip"]["effective_entropy"] == pytest.approx(plain.summary["effective_entropy"], rel=1e-6)
    # a policy that moved on clips the continuation too
    later = make_policy(tmp_path, seed=3, tie_word_embeddings=True)
    moved = compare_modes(UpdateConfig(), later, rows, ["clip", "mask"], dtype="float32", old=policy)
    assert moved.values["mask"]["clipped_mass_continuation"] > 0
    with pytest.raises(UserError, match="unknown mode clib; known are clip, mask"):
        compare_modes(UpdateConfig(), policy, rows, ["clib"], dtype="float32")


def test_modes_without_gradient_have_no_cosine(policy):
    rows = make_rows()
    rows.reward = [1.0] * len(rows)
    result = compare_modes(UpdateConfig(), policy, rows, ["clip", "mask"], dtype="float32")
    assert result.values["clip"]["grad_norm"] == 0
    assert all(math.isnan(x) for line in result.cosine for x in line)


def test_rows_from_tables_join_on_row_id():
    columns = {f.name: [None] * 2 for f in schema.ROLLOUT}
    columns |= {
        "row_id": ["a", "b"], "problem_id": ["p", "p"], "group_id": ["g", "g"], "seed_id": ["s", None],
        "snapshot_step": [3, None], "policy_step": [5, 5], "prompt_ids": [[1], [1]], "response_ids": [[2, 3], [4]],
        "logprobs": [[-1.0, None], [-2.0]], "off_start": [0, 0], "off_stop": [1, 0], "finish_reason": ["stop", "length"],
        "temperature": [1.0, 1.0],
    }  # fmt: skip
    rollout = pa.table(columns, schema=schema.ROLLOUT)
    score = pa.table({"row_id": ["b", "a"], "reward": pa.array([0.0, 1.0], pa.float32())})
    rows = Rows.from_tables([rollout.slice(0, 1), rollout.slice(1)], score)
    assert rows.reward == [1.0, 0.0]
    assert rows.response_ids[0].tolist() == [2, 3]
    assert math.isnan(rows.logprobs[0][1])
    assert rows.logprobs[1].tolist() == [-2.0]
    assert rows.seed_id == ["s", None]
    with pytest.raises(UserError, match="row b has no reward"):
        Rows.from_tables(rollout, score.slice(1))
    with pytest.raises(UserError, match="scores: a row_id appears twice"):
        Rows.from_tables(rollout, pa.concat_tables([score, score]))
    with pytest.raises(UserError, match="rollouts: a row_id appears twice"):
        Rows.from_tables([rollout, rollout], score)


def test_exported_adapters_are_merged_models(tmp_path):
    """From a run, and from the adapter alone: plain model directories of the same weights, nothing of peft in them."""
    from transformers import AutoModelForCausalLM

    run = tmp_path / "run"
    base = make_policy(run / "snapshots/step-000000", tie_word_embeddings=True)
    update = run / "iterations/000001/update"
    trainer = Trainer(UpdateConfig(learning_rate=1e-2, lora=LoraConfig(rank=4)), base, dtype="float32", run_seed=0)
    trainer.step(make_rows(), iteration=1)
    trainer.save(update / "policy", update / "state")
    moved = tmp_path / "moved"
    shutil.copytree(update / "policy", moved)
    with pytest.raises(UserError, match="name it with --base"):
        export_policy(moved, tmp_path / "refused")
    export_policy(update / "policy", tmp_path / "found")
    export_policy(moved, tmp_path / "named", base=base)
    weights = load_file(update / "policy/adapter_model.safetensors")
    whole = load_file(base / "model.safetensors")
    for name in ("found", "named"):
        out = tmp_path / name
        assert not [f.name for f in out.iterdir() if "adapter" in f.name or f.name == "probe.json"]
        merged = load_file(out / "model.safetensors")
        key = "model.layers.0.self_attn.q_proj"
        a, b = (weights[f"base_model.model.{key}.lora_{side}.weight"] for side in "AB")
        # W + (alpha / rank) B A
        assert torch.allclose(merged[f"{key}.weight"], whole[f"{key}.weight"] + 32 / 4 * (b @ a), atol=1e-6)
        assert torch.equal(merged["model.embed_tokens.weight"], whole["model.embed_tokens.weight"])
    ids = torch.arange(12)[None]
    found, before = (AutoModelForCausalLM.from_pretrained(p)(ids).logits.detach() for p in (tmp_path / "found", base))
    assert float((found - before).abs().max()) > 1e-3
