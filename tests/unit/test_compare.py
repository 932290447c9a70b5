"""Comparisons: what counts as the same run, balanced order, and statistics that tables of textbooks confirm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tseeds import compare, toy
from tseeds.errors import UserError

PIPELINES = Path(__file__).parents[2] / "pipelines"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the toy, as `just claims` starts from."""
    toy.make(tmp_path / "toy")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arm(*names: str) -> list[Path]:
    return [PIPELINES / "arms" / f"{n}.toml" for n in names]


def record_of(job: compare.Job, **finals: float) -> dict:
    return {
        "format": 1,
        "arm": job.arm,
        "seed": job.seed,
        "values": json.loads(json.dumps(job.values)),
        "iterations": 1,
        "curves": {},
        "evaluations": {"1": {"countdown": finals}},
    }


def test_every_prefix_of_the_work_is_balanced(here: Path) -> None:
    todo = compare.jobs(arm("on-policy", "seeds", "suffix"), range(2, 4))
    assert [(j.arm, j.seed, j.config.run.seed) for j in todo] == [
        ("on-policy", 2, 2), ("seeds", 2, 2), ("suffix", 2, 2), ("on-policy", 3, 3), ("seeds", 3, 3), ("suffix", 3, 3)
    ]  # fmt: skip
    assert len({j.key for j in todo}) == 6


def test_paths_and_workers_do_not_make_another_run_but_contents_do(here: Path) -> None:
    (job,) = compare.jobs(arm("seeds"), [0])
    shutil.copytree("toy", "elsewhere")
    moved = [
        'policy.path="elsewhere/policy"',
        'problems.path="elsewhere/train.jsonl"',
        'evaluate.benchmarks=[{name="countdown", path="elsewhere/test.jsonl"}]',
        "engine.threads=2",
        "score.workers=1",
    ]
    (same,) = compare.jobs(arm("seeds"), [0], moved)
    assert same.key == job.key
    lines = Path("elsewhere/train.jsonl").read_text().splitlines(keepends=True)
    Path("elsewhere/train.jsonl").write_text("".join(lines[1:]))
    (other,) = compare.jobs(arm("seeds"), [0], moved)
    changed = {k for k in job.values if job.values[k] != other.values[k]}
    assert changed == {"problems.digest"}
    for value in ("update.learning_rate=7e-4", "evaluate.samples=8", "run.iterations=3", 'engine.backend="vllm"'):
        assert compare.jobs(arm("seeds"), [0], [value])[0].key != job.key


def test_a_record_counts_until_a_value_that_it_knows_changes(here: Path) -> None:
    (job,) = compare.jobs(arm("seeds"), [0])
    record = record_of(job)
    assert compare.recorded(job, [record]) is record
    del record["values"]["seed.tau"]  # a tseeds that did not know the option: its default is what it did
    del record["values"]["problems.findings.duplicate"]
    record["values"]["score.memory_limit_mb"] = 77  # recorded when this still counted
    assert compare.recorded(job, [record]) is record
    (changed,) = compare.jobs(arm("seeds"), [0], ["seed.tau=3.0"])
    assert compare.recorded(changed, [record]) is None
    record["values"]["seed.lo"] = 0.1
    assert compare.recorded(job, [record]) is None
    (next_seed,) = compare.jobs(arm("seeds"), [1])
    assert compare.recorded(next_seed, [record_of(job)]) is None


def test_mistakes_are_named(here: Path) -> None:
    Path("on-policy.toml").write_text(f'base = "{arm("seeds")[0].as_posix()}"\n')
    with pytest.raises(UserError, match="two pipelines are called on-policy"):
        compare.jobs([*arm("on-policy"), Path("on-policy.toml")], [0])
    with pytest.raises(UserError, match=r"the same pipeline as .*seeds.toml; leave one out"):
        compare.jobs([*arm("seeds"), Path("on-policy.toml")], [0])
    shutil.rmtree("toy/policy")
    with pytest.raises(UserError, match="toy/policy"):
        compare.jobs(arm("seeds"), [0])
    Path("records.jsonl").write_text('{"format": 99}\n')
    with pytest.raises(UserError, match="line 1 is no record"):
        compare.read_records(Path("records.jsonl"))


@pytest.mark.parametrize(
    ("df", "p", "t"),
    [(1, 0.975, 12.706), (2, 0.975, 4.303), (4, 0.975, 2.776), (4, 0.95, 2.132), (9, 0.975, 2.262), (30, 0.995, 2.750)],
)
def test_student_agrees_with_the_printed_table(df: int, p: float, t: float) -> None:
    assert compare.student_quantile(p, df) == pytest.approx(t, abs=5e-4)
    assert compare.student_cdf(t, df) == pytest.approx(p, abs=2e-5)
    assert compare.student_cdf(-t, df) == pytest.approx(1 - p, abs=2e-5)


def test_paired_uses_common_seeds_only() -> None:
    test = compare.paired({0: 3.0, 1: 2.0, 2: 4.0, 9: 100.0}, {0: 1.0, 1: 1.0, 2: 1.0, 8: -100.0})
    assert test is not None
    assert (test.seeds, test.mean) == (3, 2.0)  # differences 2, 1, 3: sd 1, error 1 / sqrt 3
    assert test.high - test.mean == pytest.approx(4.3027 / 3**0.5, abs=1e-3)
    assert test.p_sign == 0.25  # 2 of 8 patterns of signs
    assert compare.paired({0: 1.0}, {0: 2.0}) is None
    same = compare.paired({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0})
    assert same is not None
    assert (same.p_t, same.p_sign) == (1.0, 1.0)


def test_five_seeds_with_one_sign_give_a_sixteenth() -> None:
    test = compare.paired({s: s + 1.0 for s in range(5)}, dict.fromkeys(range(5), 0.0))
    assert test is not None
    assert test.p_sign == 2 / 32


def test_curves_are_read_over_the_last_fifth_and_evaluations_at_the_end() -> None:
    record = {
        "iterations": 10,
        "curves": {"entropy": [1.0] * 8 + [0.5, 0.3], "probe_cosine": [None] * 9 + [0.9]},
        "evaluations": {"0": {"b": {"pass@1": 0.1}}, "10": {"b": {"pass@1": 0.4}, "c": {"pass@1": 0.2}}},
    }
    assert compare.final(record, "entropy") == pytest.approx(0.4)
    assert compare.final(record, "probe_cosine") == 0.9
    assert compare.final(record, "pass@1") == 0.4
    assert compare.final(record, "pass@1", "c") == 0.2
    assert compare.final(record | {"iterations": 11}, "pass@1") is None


def test_another_verifier_or_other_guards_are_another_run(here: Path) -> None:
    (here / "v.py").write_text("def f(gold, text):\n    return 1.0\n")
    (here / "guard.jsonl").write_text('{"problem": "a", "answer": "1"}\n')
    sets = ["problems.task=python:v.py:f", 'problems.benchmarks=[{name="guard", path="guard.jsonl"}]']

    def key() -> str:
        return compare.jobs(arm("seeds"), range(1), sets)[0].key

    keys = [key()]
    (here / "v.py").write_text("def f(gold, text):\n    return 0.0\n")
    keys.append(key())
    (here / "guard.jsonl").write_text('{"problem": "b", "answer": "1"}\n')
    keys.append(key())
    assert len(set(keys)) == 3


def test_a_pipeline_named_twice_is_one_line(here: Path) -> None:
    with pytest.raises(UserError, match="two pipelines are called seeds"):
        compare.jobs(arm("seeds", "seeds"), range(1))
