"""Schedules are pure functions of configuration and iteration."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tseeds import config, schedule

BASE = {"policy": {"path": "p"}, "problems": {"path": "x"}}


def pipeline(**sections: dict) -> config.Pipeline:
    return config.parse({**BASE, **sections})


def test_random_seeds_differ_in_every_part_and_repeat() -> None:
    parts = [(0, 1, "rollout", "p", 0), (1, 1, "rollout", "p", 0), (0, 2, "rollout", "p", 0), (0, 1, "seed", "p", 0)]
    parts += [(0, 1, "rollout", "q", 0), (0, 1, "rollout", "p", 1), (0, 1, "rollout", "p", "0")]
    seeds = [schedule.rng_seed(*p) for p in parts]
    assert len(set(seeds)) == len(parts)
    assert seeds == [schedule.rng_seed(*p) for p in parts]
    assert all(0 <= s < 2**63 for s in seeds)


@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 5))
def test_every_epoch_visits_every_problem_once_whatever_the_window(problems: int, window: int, run_seed: int) -> None:
    ids = [f"p{k}" for k in range(problems)]
    seen: list[str] = []
    iteration = 0
    while len(seen) < 2 * problems:
        iteration += 1
        groups = schedule.groups(ids, run_seed=run_seed, iteration=iteration, per_iteration=window)
        assert len({g.group_id for g in groups}) == window
        assert len({(g.problem_id, g.occurrence) for g in groups}) == window
        seen += [g.problem_id for g in groups]
    assert Counter(seen[:problems]) == Counter(ids)
    assert Counter(seen[problems : 2 * problems]) == Counter(ids)


def test_epochs_are_shuffled_differently() -> None:
    ids = [f"p{k}" for k in range(50)]
    first, second = (
        [g.problem_id for g in schedule.groups(ids, run_seed=0, iteration=i, per_iteration=50)] for i in (1, 2)
    )
    assert first != second
    assert first != ids


def test_seeded_samples_are_the_last_of_the_group() -> None:
    assert list(schedule.seeded_samples(pipeline(seed={"share": 0.5}, rollout={"group_size": 8}), 1)) == [4, 5, 6, 7]
    assert list(schedule.seeded_samples(pipeline(seed={"share": 0.0}), 1)) == []
    pairs = pipeline(seed={"share": 0.4, "continuations": 2}, rollout={"group_size": 8})
    assert list(schedule.seeded_samples(pairs, 1)) == [6, 7]  # round(3.2) = 3, a multiple of 2


def test_share_falls_to_zero_at_the_schedules_end() -> None:
    linear = pipeline(seed={"share": 0.5, "schedule": "linear", "schedule_end": 11})
    assert schedule.seeded_share(linear, 1) == 0.5
    assert schedule.seeded_share(linear, 6) == 0.25
    assert schedule.seeded_share(linear, 11) == 0.0
    assert schedule.seeded_share(linear, 99) == 0.0
    cosine = pipeline(seed={"share": 0.5, "schedule": "cosine", "schedule_end": 11})
    assert abs(schedule.seeded_share(cosine, 6) - 0.25) < 1e-12


def test_pool_follows_retention() -> None:
    every = pipeline(snapshot={"every": 5}).snapshot
    assert schedule.pool_steps(every, 12) == [0, 5, 10]
    last = pipeline(snapshot={"every": 5, "keep_last": 1}).snapshot
    assert schedule.pool_steps(last, 22) == [0, 20]
    both = pipeline(snapshot={"every": 5, "keep_last": 1, "keep_every": 10}).snapshot
    assert schedule.pool_steps(both, 22) == [0, 10, 20]
    budget = pipeline(snapshot={"every": 5, "disk_budget_gb": 3.0}).snapshot
    assert schedule.pool_steps(budget, 22, snapshot_bytes=10**9) == [0, 15, 20]


def test_samplers_draw_what_they_say() -> None:
    steps = [0, 10, 20, 30]

    def drawn(iteration: int, **seed: object) -> list[int]:
        return schedule.draw_snapshots(pipeline(seed=seed).seed, steps, run_seed=0, iteration=iteration)

    assert drawn(36, sampler="oldest") == [0]
    assert drawn(36, sampler="fixed_lag", lag=10) == [20]  # current step 35: 30 is too young
    assert drawn(36, sampler="spread", snapshots_per_iteration=2) == [0, 30]
    assert drawn(36, sampler="uniform", snapshots_per_iteration=9) == steps
    counts = Counter(drawn(i, sampler="uniform")[0] for i in range(1, 2001))
    assert all(abs(counts[s] - 500) < 100 for s in steps)  # five standard deviations
    recent = Counter(
        schedule.draw_snapshots(
            pipeline(seed={"sampler": "recent", "tau": 10.0}).seed, steps, run_seed=i, iteration=31
        )[0]
        for i in range(2000)
    )
    # weights e^-3, e^-2, e^-1, 1: shares .032, .087, .237, .644
    for step, share in zip(steps, (0.032, 0.087, 0.237, 0.644), strict=True):
        assert abs(recent[step] / 2000 - share) < 0.05
