"""The loss against numbers worked out by hand and against plain formulas written a second time, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tseeds.config import UpdateConfig
from tseeds.training import loss as L
from tseeds.training.advantages import advantages, centred, overlong_penalty

D = torch.float64


def config(**values) -> UpdateConfig:
    return UpdateConfig(**values)


def tokens(lp, lp_old, lp_mu, advantage, seed, row=None, **extra) -> L.Tokens:
    lp, lp_old, lp_mu, advantage = (torch.as_tensor(x, dtype=D) for x in (lp, lp_old, lp_mu, advantage))
    row = torch.zeros(len(lp), dtype=torch.int64) if row is None else torch.as_tensor(row)
    return L.Tokens(lp, lp_old, lp_mu, advantage, torch.as_tensor(seed), row, int(row.max()) + 1, **extra)


# numbers calculated by hand, line by line


def test_advantages_of_two_right_and_two_wrong():
    rewards = np.array([1.0, 0, 0, 1])
    assert centred(rewards, "group").tolist() == [0.5, -0.5, -0.5, 0.5]
    assert centred(rewards, "group_std") == pytest.approx([0.86588, -0.86588, -0.86588, 0.86588], abs=5e-6)
    assert centred(rewards, "leave_one_out") == pytest.approx([0.66667, -0.66667, -0.66667, 0.66667], abs=5e-6)


@pytest.mark.parametrize("kind", ["group", "group_std", "leave_one_out", "split", "per_seed"])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(kind):
    third = np.float32(0.95)
    for rewards in ([1, 1, 1, 1], [0], [third] * 7):
        a = advantages(rewards, ["g"] * len(rewards), [None] * len(rewards), kind)
        assert a.advantage.tolist() == [0.0] * len(rewards)
        assert a.degenerate.all()
        assert a.degenerate_groups == 1
    assert advantages([0], ["g"], [None], kind).singletons == 1


def test_a_group_teaches_nothing_when_all_of_its_advantages_are_zero():
    seeds = [None, None, "a", "a"]
    assert advantages([0, 0, 1, 1], ["g"] * 4, seeds, "group").degenerate_groups == 0
    for kind in ("split", "per_seed"):  # rewards differ between the parts only, which are not compared
        a = advantages([0, 0, 1, 1], ["g"] * 4, seeds, kind)
        assert a.advantage.tolist() == [0.0] * 4
        assert a.degenerate.all()
        assert a.degenerate_groups == 1
    a = advantages([0, 1, 1], ["g"] * 3, [None, None, "a"], "split")
    assert a.advantage.tolist() == [-0.5, 0.5, 0.0]
    assert (a.degenerate_groups, a.singletons) == (0, 1)


def test_ratio_k3_and_truncation():
    lp, mu = torch.tensor(-1.0, dtype=D), torch.tensor(-1.5, dtype=D)
    assert L.ratio(lp, mu).item() == pytest.approx(1.64872, abs=5e-6)
    assert L.k3(lp, mu).item() == pytest.approx(0.14872, abs=5e-6)
    assert L.k1(lp, mu).item() == -0.5
    t = tokens([-1.0], [-1.0], [-1.5], [1.0], [True])
    assert L.truncate(t, config(prefix_cap=1.2)).weight.item() == 1.2
    assert L.continuation(t, config(mismatch_cap=1.2)).weight.item() == 1.2


@pytest.mark.parametrize(("aggregation", "value"), [("token", 0.5), ("sequence", 0.0), ("constant", 0.25)])
def test_aggregation_of_lengths_two_and_six(aggregation, value):
    row = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1])
    a = torch.where(row == 0, 1.0, -1.0)
    lp = torch.zeros(8)
    t = tokens(lp, lp, lp, a, [False] * 8, row)
    scale = L.token_scale(torch.ones(8, dtype=torch.bool), row, 2, config(aggregation=aggregation), 8)
    assert (scale * L.mixed(t, config()).loss).sum().item() == pytest.approx(value, abs=1e-7)


def test_shaping_and_its_largest_gradient():
    f = [L.shaped(torch.tensor(r, dtype=D), 0.1).item() for r in (1.0, 0.1)]
    assert f == pytest.approx([0.909091, 0.5], abs=5e-7)
    r = np.linspace(0.001, 2, 20000)
    t = tokens(np.log(r), np.zeros_like(r), np.zeros_like(r), np.ones_like(r), [True] * len(r))
    factor = L.shape(t, config(shape_gamma=0.1)).weight.numpy()
    assert r[factor.argmax()] == pytest.approx(0.1, abs=2e-3)
    assert factor.max() == pytest.approx(0.25, abs=1e-5)


def test_a_seed_that_a_group_shares_has_no_gradient():
    lp = torch.full((4,), -1.0, dtype=D, requires_grad=True)
    t = tokens(lp, lp.detach(), lp.detach() - 0.1, [0.5, -0.5, -0.5, 0.5], [True] * 4, [0, 1, 2, 3])
    scale = L.token_scale(torch.ones(4, dtype=torch.bool), t.row, 4, config())
    (scale * L.mixed(t, config()).loss).sum().backward()
    # one shared token: its gradient is the sum over the rows
    assert lp.grad.abs().min() > 0
    assert lp.grad.sum().item() == 0.0


def test_modes_that_agree_when_the_snapshot_is_the_old_policy():
    g = torch.Generator().manual_seed(0)
    lp, old = torch.randn(50, generator=g, dtype=D) * 0.5 - 1, torch.randn(50, generator=g, dtype=D) * 0.5 - 1
    t = tokens(lp, old, old, torch.randn(50, generator=g, dtype=D), [True] * 50)
    expected = L.on_policy(t, config()).loss
    for mode in ("clip", "decoupled"):
        assert torch.equal(L.PREFIX_MODES[mode](t, config()).loss, expected)


@given(st.floats(-8, 0), st.floats(-8, 0), st.sampled_from([-1.0, 1.0]))
@settings(max_examples=200, deadline=None)
def test_band_never_clips_before_the_first_step(lp, mu, advantage):
    assert L.band(tokens([lp], [lp], [mu], [advantage], [True]), config()).kept.all()


# gradients of every mode against a plain formula


def plain(mode: str, lp: float, old: float, mu: float, a: float, c: UpdateConfig) -> tuple[float, float]:
    """(loss, d loss / d lp) of one seed token, from docs/loss.md, by cases instead of min and max."""

    def ppo(r: float, low: float, high: float, dual: float) -> tuple[float, float]:
        if a > 0:
            return (r * a, r * a) if r <= high else (high * a, 0.0)
        if a < 0 and r < low:
            return low * a, 0.0
        if a < 0 and dual and r > dual:
            return dual * a, 0.0
        return r * a, r * a

    e = math.exp
    low, high = 1 - c.eps_low, 1 + c.eps_high
    if mode == "clip":
        value, slope = ppo(e(lp - mu), low, high, c.dual_clip)
    elif mode == "on_policy":
        value, slope = ppo(e(lp - old), low, high, c.dual_clip)
    elif mode == "decoupled":
        w = min(e(old - mu), c.prefix_cap)
        value, slope = (w * x for x in ppo(e(lp - old), low, high, c.dual_clip))
    elif mode == "band":
        b = e(old - mu)
        value, slope = ppo(e(lp - mu), b - c.eps_low, b + c.eps_high, c.dual_clip * max(b, 1))
    elif mode == "truncate":
        w = min(e(lp - mu), c.prefix_cap)
        value, slope = w * a * lp, w * a
    elif mode == "topr":
        w = 1.0 if a >= 0 else min(e(lp - mu), 1.0)
        value, slope = w * a * lp, w * a
    elif mode in ("shape", "shape_policy"):
        r = e(lp - mu) if mode == "shape" else e(lp)
        value, slope = r / (r + c.shape_gamma) * a, r * c.shape_gamma / (r + c.shape_gamma) ** 2 * a
    else:
        value = slope = 0.0
    return -value, -slope


@pytest.mark.parametrize("mode", sorted(L.PREFIX_MODES))
@pytest.mark.parametrize("dual", [0.0, 3.0])
def test_loss_and_gradient_of_a_mode(mode, dual):
    c = config(prefix_weight=mode, dual_clip=dual, prefix_coef=0.7)
    rng = np.random.default_rng(1)
    n = 4000
    old, mu = -rng.exponential(1.5, n), -rng.exponential(1.5, n)
    value, a = old + rng.normal(0, 0.5, n), rng.choice([-1.3, -0.5, 0.0, 0.4, 2.0], n)
    lp = torch.tensor(value, dtype=D, requires_grad=True)
    terms = L.mixed(tokens(lp, old, mu, a, [True] * n), c)
    terms.loss.sum().backward()
    expected = np.array([plain(mode, *x, c) for x in zip(value, old, mu, a, strict=True)]) * 0.7
    assert terms.loss.detach().numpy() == pytest.approx(expected[:, 0], abs=1e-12)
    assert lp.grad.numpy() == pytest.approx(expected[:, 1], abs=1e-12)
    # kept and weight say what the gradient does
    if mode != "mask":
        told = (terms.weight * terms.kept).numpy() * -a
        assert told == pytest.approx(lp.grad.numpy(), abs=1e-12)
        assert (~terms.kept).any() == (mode in {"clip", "on_policy", "decoupled", "band"})


def test_continuation_is_weighted_ppo():
    c = config(mismatch_cap=2.0)
    rng = np.random.default_rng(2)
    old, mu, a = -rng.exponential(1, 500), -rng.exponential(1, 500), rng.choice([-1.0, 1.0], 500)
    value = old + rng.normal(0, 0.4, 500)
    lp = torch.tensor(value, dtype=D, requires_grad=True)
    L.mixed(tokens(lp, old, mu, a, [False] * 500), c).loss.sum().backward()
    expected = [
        min(math.exp(o - m), 2.0) * plain("on_policy", p, o, m, x, c)[1]
        for p, o, m, x in zip(value, old, mu, a, strict=True)
    ]
    assert lp.grad.numpy() == pytest.approx(expected, abs=1e-12)


def test_unclipped_continuation_is_the_importance_weighted_policy_gradient():
    lp = torch.tensor([math.log(0.9), math.log(0.1), math.log(0.9)], dtype=D, requires_grad=True)
    old = [math.log(0.3)] * 3  # ratios 3, 1/3, 3: beyond every clip range; the third is a seed token
    t = tokens(lp, old, old, [1.0, -1.0, 1.0], [False, False, True])
    terms = L.mixed(t, config(ratio="unclipped"))
    terms.loss.sum().backward()
    assert lp.grad.tolist() == pytest.approx([-3, 1 / 3, 0])  # -r A; the seed token is clipped as ever
    assert terms.kept.tolist() == [True, True, False]


def test_clip_before_any_update_is_what_the_method_says():
    """The four cases of a seed token at lp = lp_old."""
    log = math.log
    t = tokens([log(0.1), log(0.9), log(0.1), log(0.9)], [0.0] * 4, [log(0.5)] * 4, [1.0, 1.0, -1.0, -1.0], [True] * 4)
    terms = L.clip(t, config())
    assert terms.kept.tolist() == [True, False, False, True]
    assert terms.weight.tolist() == pytest.approx([0.2, 1.8, 0.2, 1.8])


def test_dual_clip_bounds_the_loss_of_a_grown_wrong_token():
    t = tokens([0.0], [0.0], [-5.0], [-1.0], [True])
    assert L.clip(t, config(dual_clip=3.0)).loss.item() == 3.0
    assert L.clip(t, config(dual_clip=0.0)).loss.item() == pytest.approx(math.exp(5))


def test_band_clips_around_its_own_centre_and_says_which_clip_it_was():
    """lp_mu -log 3 .. : b = exp(lp_old - lp_mu) = 3, so the range is [2.8, 3.2] and the dual clip sits at 9."""
    log = math.log
    t = tokens([log(1.5), log(9.5), log(3.0)], [log(3.0)] * 3, [0.0] * 3, [-1.0] * 3, [True] * 3)
    terms = L.mixed(t, config(prefix_weight="band", dual_clip=3.0))
    assert terms.ratio.tolist() == pytest.approx([1.5, 9.5, 3.0])
    assert terms.kept.tolist() == [False, False, True]
    assert terms.dual.tolist() == [False, True, False]
    free = L.mixed(t, L.unclipped(config(prefix_weight="band", dual_clip=3.0)))
    assert free.kept.tolist() == [True] * 3
    assert free.loss.tolist() == pytest.approx([1.5, 9.5, 3.0])


# options


def test_sequence_ratio_is_the_same_for_all_tokens_of_a_row():
    lp = torch.tensor([-1.0, -2.0, -1.0], dtype=D, requires_grad=True)
    t = tokens(lp, [-1.1, -1.8, -1.0], [-1.0] * 3, [1.0] * 3, [False] * 3, [0, 0, 1])
    r = L.sequence_ratio(t)
    assert r.tolist() == pytest.approx([math.exp(-0.05)] * 2 + [1.0])
    r.sum().backward()
    assert lp.grad.tolist() == pytest.approx(r.tolist())


def test_continuation_corrections_by_hand():
    old = torch.log(torch.tensor([0.2, 0.4, 0.3, 0.5, 0.5], dtype=D))
    mu = torch.log(torch.tensor([0.4, 0.4, 0.1, 0.5, 0.25], dtype=D))
    seed, row = torch.tensor([True, True, False, False, True]), torch.tensor([0, 0, 0, 1, 2])
    args = (old, mu, seed, row, 3)
    weight = L.continuation_weight(*args, config(continuation_correction="geometric"))[0]
    assert weight.tolist() == pytest.approx([math.sqrt(0.5), 1.0, 2.0])
    weight = L.continuation_weight(*args, config(continuation_correction="min_ratio"))[0]
    assert weight.tolist() == pytest.approx([0.5, 1.0, 2.0])
    weight, keep = L.continuation_weight(*args, config(continuation_correction="reject", reject_lo=0.6, reject_hi=1.5))
    assert weight is None
    assert keep.tolist() == [True, True, False]


def test_top_entropy_keeps_the_uncertain_seed_tokens_only():
    seed = torch.tensor([True, True, True, True, False, False])
    entropy = torch.tensor([0.1, 0.9, 0.5, 0.5, 0.0, 0.0])
    args = {"valid": torch.ones(6, dtype=torch.bool), "seed": seed, "row": torch.zeros(6, dtype=torch.int64), "rows": 1}
    args |= {"row_keep": torch.ones(1, dtype=torch.bool), "entropy": entropy}
    for share, expected in ((0.25, [1]), (0.5, [1, 2]), (0.2, [1]), (1.0, [0, 1, 2, 3])):
        mask = L.loss_mask(**args, config=config(prefix_top_entropy=share))
        assert torch.nonzero(mask).squeeze(1).tolist() == [*expected, 4, 5]


def test_mask_mode_leaves_no_seed_token_in_any_denominator():
    row, seed = torch.tensor([0, 0, 0, 1]), torch.tensor([True, True, False, False])
    mask = L.loss_mask(
        valid=torch.ones(4, dtype=torch.bool), seed=seed, row=row, rows=2, row_keep=torch.ones(2, dtype=torch.bool),
        entropy=None, config=config(prefix_weight="mask"),
    )  # fmt: skip
    assert L.token_scale(mask, row, 2, config()).tolist() == [0, 0, 0.5, 0.5]
    assert L.token_scale(mask, row, 2, config(aggregation="sequence")).tolist() == [0, 0, 0.5, 0.5]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_an_empty_mask_gives_zero_and_finite_gradients(aggregation):
    lp = torch.zeros(3, requires_grad=True)
    scale = L.token_scale(
        torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64), 1, config(aggregation=aggregation), 8
    )
    loss = (scale * L.mixed(tokens(lp, lp.detach(), lp.detach(), [1.0] * 3, [False] * 3), config()).loss).sum()
    loss.backward()
    assert loss.item() == 0.0
    assert lp.grad.tolist() == [0.0] * 3


def test_covariance_filter_takes_the_highest_products():
    lp, a = torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    # covariances about the means -2.5 and 0: 1.5, 0.5, 0.5, 1.5
    mask = torch.tensor([True, True, True, True])
    assert L.covariance_filter(lp, a, mask, 0.5).tolist() == [True, False, False, True]
    assert L.covariance_filter(lp, a, mask, 0.001).tolist() == [True, False, False, False]
    assert not L.covariance_filter(lp, a, ~mask, 0.5).any()


def test_clip_cov_detaches_and_kl_cov_adds_a_penalty():
    filtered = torch.tensor([True, False])

    def gradient(**values):
        lp = torch.tensor([-0.9, -0.9], dtype=D, requires_grad=True)
        t = tokens(lp, [-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], [False, False], filtered=filtered)
        L.mixed(t, config(**values)).loss.sum().backward()
        return lp.grad.tolist()

    r = math.exp(0.1)
    assert gradient(token_filter="clip_cov") == pytest.approx([0.0, -r])
    assert gradient(token_filter="kl_cov", token_filter_coef=2.0) == pytest.approx([-r + 2 * (r - 1), -r])


def test_m2po_masks_until_the_second_moment_fits():
    old = torch.zeros(4)
    lp, a = torch.tensor([1.0, 0.5, -1.0, 0.1]), torch.tensor([1.0, 1.0, 1.0, 1.0])
    mask = torch.ones(4, dtype=torch.bool)
    # squares 1, .25, 1, .01, mean .565; the third moves back and is never masked; without the first: 1.26 / 3 = .42
    assert L.m2po_filter(lp, old, a, mask, 0.5).tolist() == [True, False, False, False]
    assert L.m2po_filter(lp, old, a, mask, 0.6).tolist() == [False] * 4
    assert L.m2po_filter(lp, old, a, mask, 0.001).tolist() == [True, True, False, True]
    t = tokens(lp, old, old, a, [False] * 4, filtered=torch.tensor([True, False, False, False]))
    terms = L.continuation(t, config(ratio="m2po"))
    assert terms.kept.tolist() == [False, True, True, True]


@pytest.mark.parametrize(("length", "penalty"), [(80, 0.0), (90, -0.5), (100, -1.0), (120, -1.0)])
def test_overlong_penalty(length, penalty):
    assert overlong_penalty(length, 100, 20) == penalty


def test_split_and_per_seed_baselines():
    rewards, groups = [1, 0, 1, 0, 0, 0], ["g"] * 6
    a = advantages(rewards, groups, ["s", "s", "t", "t", None, None], "per_seed").advantage
    assert a.tolist() == [0.5, -0.5, 0.5, -0.5, 0, 0]
    a = advantages(rewards, groups, ["s", "s", "t", None, None, None], "split").advantage
    assert a.tolist() == pytest.approx([1 / 3, -2 / 3, 1 / 3, 0, 0, 0])


@given(
    st.lists(
        st.tuples(st.floats(-40, 0), st.floats(-40, 0), st.floats(-40, 0), st.floats(-3, 3), st.booleans()),
        min_size=1,
        max_size=30,
    ),
    st.sampled_from(sorted(L.PREFIX_MODES)),
    st.sampled_from(["token", "sequence", "m2po"]),
)
@settings(max_examples=150, deadline=None)
def test_any_log_probs_give_finite_losses_and_gradients(rows, mode, ratio):
    columns = list(zip(*rows, strict=True))
    lp = torch.tensor(columns[0], dtype=torch.float32, requires_grad=True)
    other = [torch.tensor(c, dtype=torch.float32) for c in columns[1:4]]
    row = torch.zeros(len(rows), dtype=torch.int64)
    t = L.Tokens(lp, *other, torch.tensor(columns[4]), row, 1)
    terms = L.mixed(t, config(prefix_weight=mode, ratio=ratio))
    terms.loss.sum().backward()
    assert torch.isfinite(terms.loss).all()
    assert torch.isfinite(lp.grad).all()
    assert torch.isfinite(terms.weight).all()
