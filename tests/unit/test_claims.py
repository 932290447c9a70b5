"""docs/claims.md: verdicts follow their rule, and setups that differ in more than the mixing are never put together."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("claims", ROOT / "benchmarks" / "claims.py")
assert _spec is not None and _spec.loader is not None  # noqa: PT018
claims = importlib.util.module_from_spec(_spec)
sys.modules["claims"] = claims
_spec.loader.exec_module(claims)


def record(arm: str, seed: int, finals: dict[str, float], **values: object) -> dict:
    share = 0.0 if arm == "on-policy" else 0.5
    return {
        "format": 1,
        "arm": arm,
        "seed": seed,
        "iterations": 5,
        "values": {
            "run.seed": seed, "seed.share": share, "update.learning_rate": 1e-4, "update.eps_low": 0.2,
            "update.eps_high": 0.2, "update.minibatches": 4, "update.epochs": 1, "rollout.group_size": 8,
            "rollout.problems_per_iteration": 32, "snapshot.every": 10, "evaluate.samples": 64,
            "evaluate.temperature": 1.0, "engine.backend": "transformers", **values,
        },
        "curves": {"entropy": [0.4, 0.3, 0.2, 0.2, finals.get("entropy", 0.2)]},
        "evaluations": {"0": {"b": {"pass@1": 0.2, "problems": 256}}, "5": {"b": finals}},
        "tokens": {"trained": 100, "sampled": 140},
        "cpu_s": 10.0,
        "machine": "one",
        "versions": {"torch": "2"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("gains", "above", "word"),
    [
        ([0.1, 0.11, 0.09, 0.1, 0.1], True, "shown"),
        ([0.1, 0.11, 0.09, 0.1, 0.1], False, "contradicted"),
        ([0.1, -0.11, 0.09, -0.1, 0.0], True, "no difference"),
        ([0.1, 0.11, 0.09, 0.1], True, "not yet measured"),  # four seeds are too few, however clear
        ([], True, "not yet measured"),
    ],
)
def test_a_verdict_needs_five_seeds_and_an_interval_clear_of_zero(gains: list[float], above: bool, word: str) -> None:
    records = [record("on-policy", s, {"pass@1": 0.4 + 0.01 * s}) for s in range(5)]
    records += [record("seeds", s, {"pass@1": 0.4 + 0.01 * s + g}) for s, g in enumerate(gains)]
    assert claims.outcome(claims.Check("pass@1", "seeds", "on-policy", above), records)[0] == word


def test_another_size_of_group_is_another_setup_and_another_mixing_or_learning_rate_is_not() -> None:
    first = record("on-policy", 0, {})
    mixed = record("seeds", 3, {}, **{"update.kl_coef": 0.1, "seed.lo": 0.2})
    other = record("seeds", 0, {}, **{"rollout.group_size": 4})
    slower = record("seeds-lr-5e-5", 0, {}, **{"update.learning_rate": 5e-5, "run.iterations": 240})
    newer = record("seeds", 4, {}, **{"update.warmup_steps": 0})  # written by a tseeds that knows one more option
    assert [len(g) for g in claims.setups([first, mixed, other, newer, slower])] == [4, 1]


def test_sensitivity_lists_each_value_that_has_run_beside_the_default() -> None:
    arms = {a: claims.configuration_file(a) for levels in claims.FACTORS.values() for a in levels.values()}
    assert all(path.is_file() for path in arms.values())
    lines = [record("seeds", s, {"pass@1": 0.4, "pass@16": 0.7, "pass@64": 0.9}) for s in range(3)]
    lines += [record("seeds-quarter", s, {"pass@1": 0.5 + 0.1 * s, "pass@16": 0.7, "pass@64": 0.9}) for s in range(3)]
    text = "\n".join(claims.sensitivity(lines))
    # differences .1, .2, .3: mean .2, sd .1, half an interval 4.303 * .1 / sqrt(3) = .248
    assert "| seeded share | 0.25 | 3 | 0.600 ± 0.100 | 0.700 ± 0.000 | 0.900 ± 0.000 | +0.200 ± 0.248 |" in text
    assert "seeded share | 0.5 | 3 | 0.400" in text
    assert "cut of the chain" not in text  # one value only: nothing to compare


def test_the_page_is_written_from_the_records_alone(tmp_path: Path) -> None:
    finals = {"pass@1": 0.4, "pass@16": 0.7, "pass@64": 0.8, "distinct": 1.5, "entropy": 0.21}
    lines = [record(a, s, finals | {"pass@1": 0.4 + 0.01 * s}) for s in range(2) for a in ("on-policy", "seeds")]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "reading.md").write_text("Words of a person.\n")
    page = claims.write(tmp_path / "records.jsonl", tmp_path).read_text()
    assert "Words of a person." in page
    assert "| on-policy | 2 | 0.405 ± 0.007 |" in page
    assert "4 runs: 2 arms, seeds 0, 1" in page
    assert page.count(": not yet measured") == len(claims.CLAIMS)
    svg = (tmp_path / "claims" / "pass-at-k.svg").read_bytes()
    claims.write(tmp_path / "records.jsonl", tmp_path)
    assert (tmp_path / "claims" / "pass-at-k.svg").read_bytes() == svg
    assert len((tmp_path / "claims" / "runs.csv").read_text().splitlines()) == 5


def test_every_arm_of_a_claim_has_its_pipeline() -> None:
    named = {name for claim in claims.CLAIMS for check in claim.checks for name in (check.arm, check.other)}
    assert all(claims.configuration_file(name).is_file() for name in named | set(claims.FIRST))


def test_mixed_inference_is_copied_out_of_its_run(tmp_path: Path) -> None:
    cell = {"pass@1": 0.25, "pass@4": 0.5, "distinct": 1.25, "problems": 8, "samples": 4, "ci": {"pass@1": [0, 1]}}
    cells = [
        {"snapshot_step": None, "lag": None, "seed_length": 0} | cell,
        {"snapshot_step": 10, "lag": 40, "seed_length": -1} | cell,
        {"snapshot_step": None, "lag": None, "seed_length": 3} | cell,
    ]
    run = tmp_path / "on-policy" / "seed-000"
    (run / "mixed" / "000050" / "countdown").mkdir(parents=True)
    manifest = {"config": {"step": 50}, "facts": {"cells": cells}}
    (run / "mixed" / "000050" / "countdown" / "manifest.json").write_text(json.dumps(manifest))
    claims.keep_mixed(run, tmp_path / "mixed.json")
    text = "\n".join(claims.mixed_section(tmp_path / "mixed.json"))
    assert "policy of step 50; 8 held-out problems x 4 samples" in text
    assert "| final policy alone | – | 0.250 | 0.500 | 1.25 |" in text
    assert "| snapshot alone | 40 |" in text
    assert "| snapshot, first 3 tokens | all, mixed |" in text
    assert claims.mixed_section(tmp_path / "none.json") == ["Not yet measured.", ""]


def test_a_page_without_records_says_so(tmp_path: Path) -> None:
    assert "No run is recorded yet." in claims.write(tmp_path / "none.jsonl", tmp_path).read_text()
