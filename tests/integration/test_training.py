"""The trainer on real (small, random) models: exact log-probs and gradients, splits, resume, edge cases, precision."""

from __future__ import annotations

import filecmp
import logging
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_toys import make_policy, make_rows
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tseeds.artifacts.policy import read_probe
from tseeds.config import UpdateConfig
from tseeds.errors import StageFailed, UserError
from tseeds.training import logprobs
from tseeds.training.advantages import advantages
from tseeds.training.batches import micro_batches, pack
from tseeds.training.logprobs import load_policy, plain_logprobs
from tseeds.training.rows import Rows
from tseeds.training.trainer import Trainer, write_probe_for


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"), tie_word_embeddings=True)


def trainer(policy: Path, dtype: str = "float32", **values) -> Trainer:
    extra = {k: values.pop(k) for k in ("state", "base") if k in values}
    return Trainer(UpdateConfig(**values), policy, dtype=dtype, run_seed=0, max_response_tokens=16, **extra)


def masters(t: Trainer) -> dict[str, torch.Tensor]:
    return {n: m.detach().clone() for n, m in t.weights.masters.items()}


def gradient(t: Trainer, rows: Rows, minibatches: int = 1) -> torch.Tensor:
    """The gradient of one optimizer step over all rows, without taking it."""
    flat, adv, keep = t.prepare(rows)
    (micros,) = t.plan(rows, flat, adv, keep, 1, minibatches=minibatches)
    if t._decides_ahead():
        t.fill_old(flat, micros)
    flat.used = t.mask(flat, keep)
    scale = t.scale(flat, torch.ones_like(flat.used))
    t.accumulate(flat, [m for m in micros if m.carries], scale, t.config)
    out = t.weights.gradient()
    t.weights.clear()
    return out


# log-probs


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 1}),
        ("qwen3", {"head_dim": 16}),
        ("mistral", {"sliding_window": 6}),
        ("gemma", {"head_dim": 8}),
        ("gpt_neox", {"num_key_value_heads": 4}),
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_log_probs_are_the_models_own(tmp_path, kind, values, temperature):
    held = load_policy(make_policy(tmp_path, kind, **values), dtype="float32")
    assert held.packable
    rows = make_rows(temperature=temperature)
    offsets = np.cumsum([0, *map(len, rows.response_ids)])
    got, entropy = torch.zeros(offsets[-1]), torch.zeros(offsets[-1])
    groups = [[i for i in range(len(rows)) if rows.group_id[i] == g] for g in dict.fromkeys(rows.group_id)]
    for batch in micro_batches(groups, rows.prompt_ids, rows.response_ids, 100):
        packed = pack(batch, rows.prompt_ids, rows.response_ids, rows.temperature, offsets)
        with torch.no_grad():
            lp, h, _ = held(packed)
        got[packed.tokens], entropy[packed.tokens] = lp[packed.token_pair], h[packed.token_pair]
    held.model.set_attn_implementation("sdpa")
    for i in range(len(rows)):
        ids = torch.tensor([*rows.prompt_ids[i], *rows.response_ids[i]])
        with torch.no_grad():
            logits = held.model(ids[None]).logits[0, len(rows.prompt_ids[i]) - 1 : -1].double() / temperature
        logp = logits.log_softmax(-1)
        mine = slice(offsets[i], offsets[i + 1])
        expected = logp.gather(1, torch.tensor(rows.response_ids[i])[:, None])[:, 0]
        assert got[mine].numpy() == pytest.approx(expected.numpy(), abs=2e-5)
        assert entropy[mine].numpy() == pytest.approx(-(logp.exp() * logp).sum(-1).numpy(), abs=2e-5)


def test_shared_beginnings_are_calculated_once():
    rows = make_rows(groups=1, size=3)
    rows.prompt_ids = [np.arange(10)] * 3
    rows.response_ids = [np.array([11, 12, 13]), np.array([11, 12, 14, 15]), np.array([11, 12, 13])]
    packed = pack([[0, 1, 2]], rows.prompt_ids, rows.response_ids, [1.0] * 3, [0, 3, 7])
    # 10 prompt tokens, 11 and 12 once, then 14 (13 and 15 come last and are only predicted)
    assert sorted(packed.ids.tolist()) == [*range(10), 11, 12, 14]
    assert len(packed.pair_node) == 5
    assert packed.row_tokens == 12 + 13 + 12
    tokens = dict(zip(packed.tokens.tolist(), packed.pair_target[packed.token_pair].tolist(), strict=True))
    assert [tokens[i] for i in range(10)] == [11, 12, 13, 11, 12, 14, 15, 11, 12, 13]


def test_ragged_rows_have_no_padding():
    rows = make_rows(groups=16, size=8, longest=60)
    offsets = np.cumsum([0, *map(len, rows.response_ids)])
    groups = [[i for i in range(len(rows)) if rows.group_id[i] == g] for g in dict.fromkeys(rows.group_id)]
    batches = micro_batches(groups, rows.prompt_ids, rows.response_ids, 512)
    assert sorted(r for b in batches for g in b for r in g) == list(range(len(rows)))
    packed = [pack(b, rows.prompt_ids, rows.response_ids, rows.temperature, offsets) for b in batches]
    assert all(len(p.ids) <= 512 for p in packed)
    processed, real = sum(len(p.ids) for p in packed), sum(p.row_tokens for p in packed)
    assert processed < real  # less than no padding: what rows share is processed once


def test_a_model_that_ignores_packing_trains_on_padded_batches(policy, caplog):
    rows = make_rows()
    expected = gradient(trainer(policy), rows)
    try:
        ALL_ATTENTION_FUNCTIONS.register(logprobs.ATTENTION, sdpa_attention_forward)
        with caplog.at_level(logging.WARNING):
            t = trainer(policy, tokens_per_microbatch=200)
    finally:
        ALL_ATTENTION_FUNCTIONS.register(logprobs.ATTENTION, logprobs.packed_attention)
    assert not t.policy.packable
    assert "does not take packed batches" in caplog.text
    assert float((gradient(t, rows) - expected).abs().max()) < 1e-6


def test_a_model_that_caps_its_logits_is_refused(tmp_path):
    path = make_policy(tmp_path, "gemma2", head_dim=8, final_logit_softcapping=2.0)
    with pytest.raises(UserError, match="scale or cap their logits"):
        load_policy(path, dtype="float32")


# gradients


def test_gradient_is_that_of_the_plain_formula(policy):
    """Packing, shared beginnings, the chunked head, masks and denominators against one autograd graph over full logits."""
    rows = make_rows()
    config = UpdateConfig(kl_coef=0.3, entropy_coef=0.05)
    t = Trainer(config, policy, dtype="float32", run_seed=0)
    flat, adv, keep = t.prepare(rows)
    (micros,) = t.plan(rows, flat, adv, keep, 1, minibatches=1)
    t.fill_old(flat, micros)
    flat.used = t.mask(flat, keep)
    reference = t._load_reference(make_policy(policy / "other", seed=1, tie_word_embeddings=True))
    t._fill_reference(flat, micros, reference)
    t.accumulate(flat, micros, t.scale(flat, torch.ones_like(flat.used)), config, reference)
    got = t.weights.gradient()

    model = load_policy(policy, dtype="float32").model.double()
    model.set_attn_implementation("sdpa")
    a = advantages(rows.reward, rows.group_id, [None] * len(rows)).advantage
    total, count = torch.zeros((), dtype=torch.float64), 0
    for i in range(len(rows)):
        ids = torch.tensor([*rows.prompt_ids[i], *rows.response_ids[i]])
        start = len(rows.prompt_ids[i])
        logp = model(ids[None]).logits[0, start - 1 : -1].log_softmax(-1)
        lp = logp.gather(1, ids[start:, None])[:, 0]
        other = plain_logprobs(reference.model, ids.tolist())[start - 1 :].double()
        mu, old = torch.tensor(rows.logprobs[i]).double(), lp.detach()
        for k in range(len(lp)):
            seed = k < rows.off_stop[i]
            r = (lp[k] - (mu if seed else old)[k]).exp()
            weight = 1.0 if seed else min(math.exp(old[k] - mu[k]), 2.0)
            value = torch.minimum(r * a[i], r.clamp(0.8, 1.28) * a[i])
            if a[i] < 0:
                value = torch.maximum(value, torch.tensor(3.0 * a[i]))
            x = other[k] - lp[k]
            total = total - weight * value + 0.3 * (x.exp() - x - 1) + 0.05 * (logp[k].exp() * logp[k]).sum()
            count += 1
    (total / count).backward()
    named = dict(model.named_parameters())
    expected = torch.cat([named[n].grad.reshape(-1) for n in t.weights.masters])
    assert got.norm() > 0.1
    assert float((got - expected).norm() / expected.norm()) < 1e-5


def test_exact_kl_to_a_snapshot_has_the_gradient_of_full_distributions(policy):
    t = trainer(policy, kl_coef=1.0, kl_reference="snapshot")
    rows = make_rows(share=0)
    rows.reward = [0.0] * len(rows)  # only the KL term is left
    flat, adv, keep = t.prepare(rows)
    (micros,) = t.plan(rows, flat, adv, keep, 1, minibatches=1)
    flat.used = t.mask(flat, keep)
    reference = t._load_reference(make_policy(policy / "other", seed=1, tie_word_embeddings=True))
    value = t.accumulate(flat, micros, t.scale(flat, torch.ones_like(flat.used)), t.config, reference)
    got = t.weights.gradient()
    model = load_policy(policy, dtype="float32").model
    for m in (model, reference.model):
        m.set_attn_implementation("sdpa")
    total, count = torch.zeros(()), 0
    for i in range(len(rows)):
        ids, start = torch.tensor([[*rows.prompt_ids[i], *rows.response_ids[i]]]), len(rows.prompt_ids[i])
        logp = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        logr = reference.model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        total, count = total + (logr.exp() * (logr - logp)).sum(), count + len(logp)
    (total / count).backward()
    named = dict(model.named_parameters())
    expected = torch.cat([named[n].grad.reshape(-1) for n in t.weights.masters])
    assert value == pytest.approx((total / count).item(), rel=1e-5)
    assert float((got - expected).norm() / expected.norm()) < 1e-5


def test_chunks_of_the_head_only_split_a_sum(policy, monkeypatch):
    rows = make_rows(temperature=0.7)
    options = {"entropy_coef": 0.1}
    whole = gradient(trainer(policy, **options), rows)
    monkeypatch.setitem(logprobs._CHUNK_ELEMENTS, "cpu", 97 * 7)
    assert float((gradient(trainer(policy, **options), rows) - whole).abs().max()) < 1e-6


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("mode", ["clip", "mask", "decoupled"])
def test_micro_batches_only_split_a_sum(policy, aggregation, mode):
    rows = make_rows()
    whole = gradient(trainer(policy, aggregation=aggregation, prefix_weight=mode, overlong="mask"), rows)
    assert whole.norm() > 0
    for budget in (120, 60, 1):
        t = trainer(policy, aggregation=aggregation, prefix_weight=mode, overlong="mask", tokens_per_microbatch=budget)
        assert float((gradient(t, rows) - whole).abs().max()) < 1e-6


def test_one_row_per_micro_batch_really_is_one(policy):
    t = trainer(policy, tokens_per_microbatch=1)
    rows = make_rows()
    flat, adv, keep = t.prepare(rows)
    assert {m.rows for m in t.plan(rows, flat, adv, keep, 1, minibatches=1)[0]} == {1}


def test_rows_without_advantage_run_forward_only_and_change_nothing(policy):
    rows = make_rows()
    rows.reward[:4] = [1.0] * 4
    t = trainer(policy)
    flat, adv, keep = t.prepare(rows)
    (micros,) = t.plan(rows, flat, adv, keep, 1, minibatches=1)
    idle = [m for m in micros if not m.carries]
    assert sum(m.rows for m in idle) == 4
    flat.used = t.mask(flat, keep)
    scale = t.scale(flat, torch.ones_like(flat.used))
    t.fill_old(flat, micros)
    t.accumulate(flat, idle, scale, t.config)
    assert float(t.weights.gradient().abs().max()) == 0.0


def test_mask_mode_leaves_exactly_no_gradient_on_seed_tokens(policy):
    """Seeds of a loss with only seed tokens: the whole gradient is zero, with `clip` it is not."""
    rows = make_rows(share=1)
    rows.off_stop = [len(r) for r in rows.response_ids]
    assert float(gradient(trainer(policy, prefix_weight="clip"), rows).norm()) > 0
    result = trainer(policy, prefix_weight="mask", minibatches=1).step(rows, iteration=1)
    assert result.summary["skipped_steps"] == 1
    assert result.summary["tokens_all"] == 0


# one iteration


def test_the_first_step_is_exactly_on_policy(policy):
    """lp_old is bit for bit the first lp, and costs no pass of its own with one minibatch."""
    calls = []
    t = trainer(policy, minibatches=1, save_tokens=True)
    t.policy.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    tokens = t.step(make_rows(), iteration=1).tokens.to_pandas()
    assert calls == [True]
    mine = tokens[tokens.region == "continuation"]
    assert (mine.logprob == mine.logprob_old).all()
    assert (mine.ratio == 1).all()
    assert not mine.clipped.any()


def test_with_two_minibatches_each_row_runs_forward_at_most_once_more(policy):
    calls = []
    t = trainer(policy, minibatches=2)
    t.policy.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    t.step(make_rows(), iteration=1)
    assert calls == [False, True, True]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_warm_and_reloaded_trainers_go_on_bit_for_bit(tmp_path, dtype):
    source = make_policy(tmp_path / "source", dtype=getattr(torch, dtype), tie_word_embeddings=True)
    options = {"learning_rate": 1e-3, "minibatches": 2, "warmup_steps": 3}
    warm = trainer(source, dtype, **options)
    warm.step(make_rows(), iteration=1)
    warm.save(tmp_path / "a", tmp_path / "a_state")
    assert (tmp_path / "a_state" / "master.safetensors").is_file() == (dtype == "bfloat16")
    cold = trainer(tmp_path / "a", dtype, state=tmp_path / "a_state", **options)
    one, two = (t.step(make_rows(seed=1), iteration=2) for t in (warm, cold))
    assert one.steps.equals(two.steps)
    assert one.rows.equals(two.rows)
    warm.save(tmp_path / "b", tmp_path / "b_state")
    cold.save(tmp_path / "c", tmp_path / "c_state")
    for x, y in (("b", "c"), ("b_state", "c_state")):
        names = sorted(p.name for p in (tmp_path / x).iterdir())
        assert filecmp.cmpfiles(tmp_path / x, tmp_path / y, names, shallow=False)[0] == names
    assert "optimizer.safetensors" in [p.name for p in (tmp_path / "b_state").iterdir()]


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")],
)
def test_the_probe_is_what_a_fresh_load_gives(tmp_path, stored, dtype):
    source = make_policy(tmp_path / "source", dtype=getattr(torch, stored), tie_word_embeddings=True)
    t = trainer(source, dtype, learning_rate=1e-2)
    t.step(make_rows(), iteration=1)
    t.save(tmp_path / "out", tmp_path / "state")
    told = read_probe(tmp_path / "out")
    write_probe_for(tmp_path / "out", dtype)
    assert told == read_probe(tmp_path / "out")
    before, after = (load_file(d / "model.safetensors") for d in (source, tmp_path / "out"))
    assert {n: x.dtype for n, x in before.items()} == {n: x.dtype for n, x in after.items()}
    assert (source / "config.json").read_bytes() == (tmp_path / "out" / "config.json").read_bytes()


def test_minibatches_do_not_depend_on_row_order(policy):
    rows = make_rows(groups=8)
    backwards = rows.select(range(len(rows) - 1, -1, -1))

    def members(r: Rows, iteration: int = 1) -> list[set[str]]:
        t = trainer(policy)
        flat, adv, keep = t.prepare(r)
        return [{r.row_id[i] for m in part for i in m.packed.rows} for part in t.plan(r, flat, adv, keep, iteration, 4)]

    parts = members(rows)
    assert parts == members(backwards)
    assert parts != members(rows, 2)
    assert set().union(*parts) == set(rows.row_id)
    assert all(len(p) == 8 for p in parts)  # two whole groups of four


def test_without_seeds_every_mode_is_the_same_bits(policy):
    """Share 0 is plain on-policy training whatever the seed options say."""
    rows = make_rows(share=0)
    results = []
    for values in ({"prefix_weight": "clip"}, {"prefix_weight": "shape_policy", "prefix_coef": 0.3, "prefix_top_entropy": 0.2},
                   {"prefix_weight": "band", "continuation_correction": "min_ratio"}, {"advantage": "split"}):  # fmt: skip
        t = trainer(policy, learning_rate=1e-3, **values)
        t.step(rows, iteration=1)
        results.append(masters(t))
    for other in results[1:]:
        assert all(torch.equal(other[n], results[0][n]) for n in other)


def test_golden_loss(policy):
    """Fixed seed, six digits: a change without numerical intent must not move these."""
    t = trainer(policy, learning_rate=1e-3, minibatches=2, epochs=2)
    steps = t.step(make_rows(), iteration=1).steps
    assert steps["loss"].to_numpy() == pytest.approx([0.135698, -0.002729, -0.035312, 0.090879], abs=2e-6)
    assert steps["grad_norm"].to_numpy() == pytest.approx([0.577507, 0.723626, 0.632707, 0.331783], abs=5e-6)


# edges


def test_lengths_zero_and_one_and_seeds_up_to_the_last_token(policy):
    rows = make_rows(groups=4, size=4)
    for i, (length, seed) in enumerate([(0, 0), (1, 0), (1, 1), (5, 4), (5, 0), (5, 5), (7, 6), (7, 1)]):
        rows.response_ids[i], rows.logprobs[i] = (
            rows.response_ids[i][:1].repeat(length),
            np.full(length, -4.0, np.float32),
        )
        rows.off_start[i], rows.off_stop[i] = 0, seed
        rows.seed_id[i] = f"s{i}" if seed else None
    result = trainer(policy, minibatches=1, learning_rate=1e-3).step(rows, iteration=1)
    table = result.rows.to_pandas()
    assert table.seed_tokens.tolist()[:8] == [0, 0, 1, 4, 0, 5, 6, 1]
    assert table.continuation_tokens.tolist()[:8] == [0, 1, 0, 1, 5, 0, 1, 6]
    assert math.isfinite(result.summary["grad_norm"])
    assert result.summary["skipped_steps"] == 0


@pytest.mark.parametrize("bad", [-math.inf, math.nan, math.inf])
def test_bad_log_probs_are_masked_counted_and_said(policy, caplog, bad):
    rows = make_rows()
    clean = rows.select(range(len(rows)))
    rows.logprobs = [x.copy() for x in rows.logprobs]
    rows.logprobs[0][0] = rows.logprobs[9][1] = bad
    with caplog.at_level(logging.WARNING):
        result = trainer(policy, minibatches=1).step(rows, iteration=1)
    assert result.summary["invalid_tokens"] == 2
    assert "2 tokens without a finite log-prob" in caplog.text
    assert result.summary["tokens_all"] == result.summary["tokens"] - 2
    assert math.isfinite(result.summary["grad_norm"])
    assert result.summary["grad_norm"] != trainer(policy, minibatches=1).step(clean, iteration=1).summary["grad_norm"]


@pytest.mark.parametrize(
    ("values", "change"),
    [
        ({"overlong": "mask"}, {"finish_reason": "length"}),
        ({"drop_degenerate": True}, {"reward": 1.0}),
        ({}, {"reward": 0.0}),
        ({"continuation_correction": "reject", "reject_lo": 1e6, "reject_hi": 1e7}, {}),
    ],
)
def test_nothing_to_learn_skips_the_step_and_says_so(policy, caplog, values, change):
    rows = make_rows()
    for name, value in change.items():
        setattr(rows, name, [value] * len(rows))
    t = trainer(policy, minibatches=2, weight_decay=0.1, **values)
    before = masters(t)
    with caplog.at_level(logging.WARNING):
        result = t.step(rows, iteration=1)
    assert result.summary["skipped_steps"] == 2
    assert result.steps["skipped"].to_pylist() == [True, True]
    assert "no token carries a gradient" in caplog.text
    assert result.summary["loss"] == 0
    assert all(torch.equal(before[n], m) for n, m in masters(t).items())
    assert t.weights.facts["steps"] == 0


def test_groups_of_one(policy):
    rows = make_rows(groups=5, size=1)
    result = trainer(policy).step(rows, iteration=1)
    assert result.summary["singleton_groups"] == 5
    assert result.summary["zero_variance_share"] == 1
    assert result.rows["advantage"].to_pylist() == [0.0] * 5


def test_truncation_and_zero_variance_are_warned_about(policy, caplog):
    rows = make_rows()
    rows.finish_reason, rows.reward = ["length"] * len(rows), [0.0] * len(rows)
    with caplog.at_level(logging.WARNING):
        trainer(policy).step(rows, iteration=1)
    assert "100 % of trajectories hit the length budget" in caplog.text
    assert "100 % of groups have equal rewards" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": np.zeros(2, np.float32)}, r"row r1.0 has \d+ response tokens but 2 log-probs"),
        ({"off_stop": 99}, r"row r1.0: span \[0, 99\)"),
        ({"prompt_ids": np.zeros(0, np.int64)}, "row r1.0 has an empty prompt"),
        ({"temperature": 0.0}, "row r1.0 has temperature 0.0"),
    ],
)
def test_rows_that_do_not_fit_are_named(change, message):
    rows = make_rows()
    for name, value in change.items():
        getattr(rows, name)[4] = value
    with pytest.raises(UserError, match=message):
        rows.check()


def test_a_state_of_another_policy_is_refused(tmp_path, policy):
    t = trainer(policy, minibatches=1)
    t.step(make_rows(), iteration=1)
    t.save(tmp_path / "p", tmp_path / "s")
    other = make_policy(tmp_path / "other", hidden_size=64, tie_word_embeddings=True)
    with pytest.raises(UserError, match="belongs to another policy"):
        trainer(other, state=tmp_path / "s")
    with pytest.raises(UserError, match="no trainer state"):
        trainer(policy, state=tmp_path)


# options end to end


@pytest.mark.parametrize(
    "values",
    [
        {"ratio": "sequence"}, {"ratio": "unclipped"}, {"ratio": "m2po", "m2po_threshold": 1e-6}, {"token_filter": "clip_cov", "token_filter_share": 0.1},
        {"token_filter": "kl_cov", "token_filter_share": 0.1}, {"continuation_correction": "geometric"},
        {"continuation_correction": "reject", "reject_lo": 0.9, "reject_hi": 1.1}, {"prefix_top_entropy": 0.2},
        {"overlong": "penalty", "overlong_buffer": 8}, {"entropy_coef": 0.01}, {"advantage": "leave_one_out"},
        {"aggregation": "sequence"}, {"aggregation": "constant"},
    ],
)  # fmt: skip
def test_every_option_changes_the_update_and_survives_micro_batching(policy, values):
    options = {"learning_rate": 1e-3, "minibatches": 2}
    if values.get("ratio") == "unclipped":
        options |= {"eps_low": 1e-3, "eps_high": 1e-3}  # so that the plain update does clip
    rows = make_rows()
    plain, whole, parts = (
        trainer(policy, **options),
        trainer(policy, **options, **values),
        trainer(policy, **options, **values, tokens_per_microbatch=60),
    )
    a, b, c = (t.step(rows, iteration=1) for t in (plain, whole, parts))
    assert any(not torch.equal(x, y) for x, y in zip(masters(plain).values(), masters(whole).values(), strict=True))
    for name in ("loss", "grad_norm", "clipped_mass_all", "loss_tokens"):
        assert b.steps[name].to_numpy() == pytest.approx(c.steps[name].to_numpy(), abs=2e-5, rel=2e-5)
    del a


def test_probe_measures_what_clipping_takes(policy):
    free = trainer(policy, probe_every=2, minibatches=1, eps_low=1.0, eps_high=1e9, dual_clip=0.0)
    assert "probe_cosine" not in free.step(make_rows(), iteration=1).summary
    summary = free.step(make_rows(), iteration=2).summary
    assert summary["probe_cosine"] == pytest.approx(1, abs=1e-6)
    assert summary["probe_norm_ratio"] == pytest.approx(1, abs=1e-6)
    tight = trainer(policy, probe_every=1, minibatches=1, eps_low=0.01, eps_high=0.01).step(make_rows(), iteration=1)
    assert tight.summary["clipped_mass_seed"] > 0
    assert tight.summary["probe_cosine"] < 0.9999
    assert tight.steps["probe_cosine"].to_pylist() == [pytest.approx(tight.summary["probe_cosine"])]


def test_tokens_tell_the_same_story_as_the_summary(policy):
    result = trainer(policy, save_tokens=True, minibatches=2, learning_rate=1e-2).step(make_rows(), iteration=1)
    tokens, s = result.tokens.to_pandas(), result.summary
    assert len(tokens) == s["tokens"]
    live = tokens[tokens.used & (tokens.advantage != 0)]
    mass = (live.weight * live.advantage).abs()
    assert s["clip_fraction_all"] == pytest.approx(live.clipped.mean())
    assert s["clipped_mass_all"] == pytest.approx(mass[live.clipped].sum() / mass.sum(), rel=1e-5)
    assert s["effective_entropy"] == pytest.approx(live[~live.clipped].entropy.mean(), rel=1e-5)
    assert s["retained_entropy"] == pytest.approx(live[~live.clipped].entropy.sum() / tokens.entropy.sum(), rel=1e-5)
    seed = tokens[tokens.region == "seed"]
    w = np.exp(seed.logprob.astype(float) - seed.logprob_behaviour)
    assert s["ess_seed"] == pytest.approx(w.sum() ** 2 / (w**2).sum(), rel=1e-5)
    assert s["kl_k1_seed"] == pytest.approx((seed.logprob_behaviour - seed.logprob).mean(), abs=1e-5)
    rows = result.rows.to_pandas()
    unseeded = set(rows[rows.seed_tokens == 0].row_id)
    assert s["entropy"] == pytest.approx(tokens[tokens.row_id.isin(unseeded)].entropy.mean(), rel=1e-5)
    gap = (tokens.logprob_old - tokens.logprob_behaviour)[tokens.region == "continuation"].abs()
    assert s["mismatch"] == pytest.approx(gap.max())
    assert s["mismatch_mean"] == pytest.approx(gap.mean(), rel=1e-5)


# precision


def test_a_hundred_steps_at_1e_6_move_bf16_policies_as_fp32_ones(tmp_path):
    """bf16 parameters alone swallow such updates: 0.1 and 0.1 + 1e-6 are one bf16 number."""
    source = make_policy(tmp_path / "source", dtype=torch.bfloat16, tie_word_embeddings=True)
    rows = make_rows(groups=2, size=2)
    moved = {}
    for dtype in ("float32", "bfloat16"):
        t = trainer(source, dtype, learning_rate=1e-6, minibatches=1)
        before = masters(t)
        for i in range(100):
            t.step(rows, iteration=i)
        moved[dtype] = torch.cat([(m - before[n]).reshape(-1) for n, m in masters(t).items()])
        # the model that computes is the masters, rounded
        model = dict(t.policy.model.named_parameters())
        assert all(torch.equal(model[n].float(), m.to(getattr(torch, dtype)).float()) for n, m in masters(t).items())
        assert dtype == "float32" or any(not torch.equal(model[n].float(), m) for n, m in masters(t).items())
    a, b = moved["float32"], moved["bfloat16"]
    assert float(a.abs().mean()) > 3e-5
    assert float(torch.cosine_similarity(a, b, dim=0)) > 0.95
    assert float(b.norm() / a.norm()) == pytest.approx(1, abs=0.05)


def test_head_memory_does_not_grow_with_the_vocabulary():
    """150,000 words, 8,000 tokens: forward and backward stay below 1 GB beyond the tensors themselves."""
    code = """
import torch
from tseeds.memory import peak
from tseeds.training.logprobs import _Head
torch.set_num_threads(1)
V, N, d = 150_000, 8_000, 16
h, w = torch.randn(N, d, requires_grad=True), torch.randn(V, d, requires_grad=True)
w.grad, h.grad = torch.zeros_like(w), torch.zeros_like(h)
before = peak()
lp, H, _ = _Head.apply(h, w, None, torch.arange(N), torch.randint(0, V, (N,)), None, None)
lp.sum().backward()
print((peak() - before) / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < float(done.stdout) < 1000  # [N, V] alone would be 4,800 MB


def test_weights_that_are_no_longer_finite_are_not_saved(tmp_path, policy):
    t = trainer(policy)
    t.step(make_rows(), iteration=1)
    with torch.no_grad():
        next(iter(t.weights.masters.values())).view(-1)[3] = math.nan
    with pytest.raises(StageFailed, match=r"1 of \d+ tensors are no longer finite.*lower update.learning_rate"):
        t.save(tmp_path / "policy", tmp_path / "state")
    assert not (tmp_path / "policy").exists()


def test_a_policy_cut_short_is_one_line(tmp_path, policy):
    cut = tmp_path / "cut"
    shutil.copytree(policy, cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"/cut: not a causal language model that transformers can load"):
        load_policy(cut, dtype="float32")
