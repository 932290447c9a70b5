"""Curriculum: pass rates choose problems and how often each comes; the order stays a pure function of the iteration."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tseeds import config, schedule, selection
from tseeds.errors import UserError

IDS = [f"p{k}" for k in range(20)]


def curriculum(**values: object) -> config.CurriculumConfig:
    data = {"policy": {"path": "p"}, "problems": {"path": "x"}, "curriculum": {"samples": 4, **values}}
    return config.parse(data, "file.toml").curriculum


def visited(iterations: range, weights: list[float] | None, window: int, ids: list[str] = IDS) -> list[str]:
    return [
        g.problem_id
        for i in iterations
        for g in schedule.groups(ids, run_seed=0, iteration=i, per_iteration=window, weights=weights)
    ]


def test_the_filter_keeps_pass_rates_within_its_bounds_inclusive() -> None:
    rewards = {"never": [0, 0, 0, 0], "quarter": [0, 1, 0, 0], "half": [1, 1, 0, 0], "always": [1, 1, 1, 1]}
    kept = selection.problem_weights(curriculum(lo=0.25, hi=0.5), list(rewards), rewards)
    assert kept == [0.0, 1.0, 1.0, 0.0]


def test_weights_are_posterior_means_that_a_hand_can_check() -> None:
    rewards = {"a": [0, 0, 0, 0], "b": [1, 0, 0, 0], "c": [1, 0, 1, 0], "d": [1, 1, 1, 1]}
    # (c + 1)(n - c + 1) / ((n + 2)(n + 3)) with n = 4: 5/42, 8/42, 9/42, 5/42
    variance = selection.problem_weights(curriculum(weight="variance"), list(rewards), rewards)
    assert variance == pytest.approx([5 / 42, 8 / 42, 9 / 42, 5 / 42], abs=1e-12)
    # (n - c + 1) / (n + 2): 5/6, 4/6, 3/6, 1/6
    hard = selection.problem_weights(curriculum(weight="hard"), list(rewards), rewards)
    assert hard == pytest.approx([5 / 6, 4 / 6, 3 / 6, 1 / 6], abs=1e-12)


def test_mistakes_are_one_line() -> None:
    with pytest.raises(UserError, match=r"none of 1 problems has a pass rate within \[0.5, 1\]"):
        selection.problem_weights(curriculum(lo=0.5), ["a"], {"a": [0, 0]})
    with pytest.raises(UserError, match="problem b has no measured pass rate"):
        selection.problem_weights(curriculum(), ["a", "b"], {"a": [0, 1]})
    for values, names in (({"lo": 0.6, "hi": 0.4}, "lo 0.6 is above hi 0.4"), ({"samples": 0, "hi": 0.5}, "samples")):
        with pytest.raises(UserError, match=names):
            curriculum(**values)


def test_equal_weights_change_nothing() -> None:
    assert visited(range(1, 9), [0.3] * 20, 7) == visited(range(1, 9), None, 7)


def test_the_order_without_a_curriculum_is_what_it_was() -> None:
    """Frozen: runs that were begun before curricula existed go on with the same problems."""
    order = "p1 p18 p0 p11 p14 p5 p2 p13 p2 p9 p8 p12"
    assert " ".join(visited(range(3, 5), None, 6)) == order


def test_an_epoch_of_filtered_problems_has_each_of_them_once() -> None:
    weights = [1.0 if k % 4 == 0 else 0.0 for k in range(20)]
    five = {"p0", "p4", "p8", "p12", "p16"}
    order = visited(range(1, 7), weights, 5)
    for epoch in range(6):
        assert set(order[5 * epoch : 5 * epoch + 5]) == five
    assert len({tuple(order[5 * e : 5 * e + 5]) for e in range(6)}) > 1


def test_weights_give_expected_visits_rounded_up_or_down_in_every_epoch() -> None:
    weights = [3.0, 1.0, 0.5, 0.0, 1.5]  # of 4 visits: 2, 2/3, 1/3, 0, 1
    ids = IDS[:5]
    total: Counter[str] = Counter()
    for epoch in range(300):
        seen = Counter(visited(range(epoch + 1, epoch + 2), weights, 4, ids))
        assert seen["p0"] == 2
        assert seen["p1"] in (0, 1)
        assert seen["p2"] in (0, 1)
        assert seen["p3"] == 0
        assert seen["p4"] == 1
        total += seen
    # a share of 2/3 over 300 epochs: standard deviation 8
    assert abs(total["p1"] - 200) < 41
    assert abs(total["p2"] - 100) < 41


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 1.0, 7.0]), min_size=1, max_size=20).filter(any),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_any_window_cuts_the_same_endless_sequence(weights: list[float], window: int, other: int) -> None:
    """The cursor is the iteration: no history is needed to go on, so a resumed run continues the same order."""
    ids = IDS[: len(weights)]
    assert visited(range(1, other + 1), weights, window, ids) == visited(range(1, window + 1), weights, other, ids)
    size = sum(w > 0 for w in weights)
    epochs = visited(range(1, 3), weights, size, ids)
    mean = sum(weights) / size
    for epoch in (epochs[:size], epochs[size:]):
        counts = Counter(epoch)
        for k, weight in enumerate(weights):
            assert abs(counts[ids[k]] - weight / mean) < 1


def test_groups_of_one_iteration_have_names_of_their_own_when_a_problem_comes_twice() -> None:
    weights = [9.0, *[0.5] * 19]
    groups = schedule.groups(IDS, run_seed=1, iteration=1, per_iteration=20, weights=weights)
    assert max(g.occurrence for g in groups) >= 5
    assert len({(g.problem_id, g.occurrence) for g in groups}) == len({g.group_id for g in groups}) == 20
