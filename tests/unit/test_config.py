"""Pipeline files: every mistake is one clear line; every file that we ship loads."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tseeds import config
from tseeds.errors import UserError

BASE = {"policy": {"path": "p"}, "problems": {"path": "x.jsonl"}}
PIPELINES = sorted((Path(__file__).parents[2] / "pipelines").rglob("*.toml"))


def parse(**sections: dict) -> config.Pipeline:
    return config.parse({**BASE, **{k: {**BASE.get(k, {}), **v} for k, v in sections.items()}}, "file.toml")


@pytest.mark.parametrize("path", PIPELINES, ids=lambda p: p.stem)
def test_every_shipped_pipeline_loads_and_survives_being_printed(path: Path) -> None:
    loaded = config.load(path)
    again = config.parse(tomllib.loads(config.dumps(loaded)), "printed")
    assert again == loaded


def test_the_printed_pipeline_names_the_choices_of_every_key_that_has_them() -> None:
    text = config.dumps(parse())
    for section in config.Pipeline.model_fields:
        for key, info in type(getattr(parse(), section)).model_fields.items():
            choices = re.findall(r"'(\w+)'", str(info.annotation)) if "Literal" in str(info.annotation) else []
            if choices and not str(info.annotation).startswith("dict"):
                assert re.search(rf"One of: {', '.join(choices)}\.\n(# )?{key} ", text), f"{section}.{key}"
    assert "One of: tensorboard, wandb, trackio.\nto = []" in text
    assert text.count("One of: ") > 15


def test_there_are_pipelines() -> None:
    assert {"toy", "smollm2-svamp"} <= {p.stem for p in PIPELINES}


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"rollout": {"top_p": 0.95}}, ["rollout", "top_p 0.95", "use 1"]),
        ({"rollout": {"top_k": 50}}, ["rollout", "top_k 50"]),
        ({"seed": {"share": 1.5}}, ["seed.share", "1.5"]),
        ({"seed": {"shar": 0.5}}, ["unknown key seed.shar", "did you mean seed.share"]),
        ({"seed": {"lo": 0.6, "hi": 0.4}}, ["seed", "lo 0.6 is above hi 0.4"]),
        ({"seed": {"cut": "tokens", "lo": 2, "hi": 64}, "rollout": {"max_response_tokens": 64}}, ["seed.hi 64"]),
        ({"seed": {"share": 0.05}}, ["seed.share 0.05", "rounds to no seeded"]),
        ({"update": {"prefix_weight": "klip"}}, ["update.prefix_weight", "'klip'"]),
        ({"update": {"minibatches": 200}}, ["update.minibatches 200", "whole groups"]),
        ({"update": {"advantage": "per_seed"}}, ["per_seed", "seed.continuations"]),
        ({"run": {"seed": "zero"}}, ["run.seed", "'zero'"]),
        ({"problems": {"limit": "12"}}, ["problems.limit", "'12' is no number"]),
        ({"seed": {"share": True}}, ["seed.share", "True is no number"]),
        ({"policy": {"trust_remote_code": "yes"}}, ["policy.trust_remote_code", "'yes' is neither true nor false"]),
        ({"update": {"learning_rate": float("inf")}}, ["update.learning_rate", "finite"]),
        ({"update": {"betas": [2.0, 0.9]}}, ["update.betas.0", "less than 1"]),
        ({"update": {"reject_lo": 1.5}}, ["update.reject_lo <= 1"]),
        ({"problems": {"task": "maths"}}, ["problems.task", "unknown task 'maths'"]),
        ({"seed": {"continuations": 8}}, ["rounds to no 8 continuations of one seed"]),
        ({"seed": {"position": "suffix", "cut": "line"}}, ["seed", 'cut "line"', 'use cut = "uniform"']),
        ({"seed": {"source": "replay", "temperature": 1.2}}, ["seed", "temperature is of live seeds"]),
        ({"nonsense": {}}, ["unknown key nonsense"]),
        ({"log": {"to": [], "project": "a\udcff"}}, [r"'a\udcff' is not UTF-8 text"]),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(sections: dict, names: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse(**sections)
    message = str(caught.value)
    assert message.startswith("file.toml: ")
    assert "\n" not in message
    for name in names:
        assert name in message


def test_adapters_have_a_learning_rate_of_their_own() -> None:
    assert parse().update.learning_rate == 1e-6
    adapters = parse(update={"lora": {"rank": 4}})
    assert adapters.update.learning_rate == 1e-5
    assert parse(update={"lora": {}, "learning_rate": 3e-6}).update.learning_rate == 3e-6
    assert config.parse(tomllib.loads(config.dumps(adapters)), "printed") == adapters


def test_each_of_two_mistakes_gets_its_line() -> None:
    with pytest.raises(UserError) as caught:
        parse(seed={"shar": 1}, run={"seed": "x"})
    assert len(str(caught.value).splitlines()) == 2


def test_set_reads_toml_values_and_falls_back_to_text() -> None:
    data: dict = {}
    for assignment in (
        "seed.share=0.25",
        "update.lora.rank=4",
        "problems.path=a b.jsonl",
        "policy.trust_remote_code=true",
    ):
        config.set_value(data, assignment)
    assert data == {
        "seed": {"share": 0.25},
        "update": {"lora": {"rank": 4}},
        "problems": {"path": "a b.jsonl"},
        "policy": {"trust_remote_code": True},
    }


@pytest.mark.parametrize("assignment", ["seed", "seed=1", "=1", "seed.=1"])
def test_set_refuses_what_names_no_key(assignment: str) -> None:
    with pytest.raises(UserError, match=r"section\.key=value"):
        config.set_value({}, assignment)


def test_missing_file_and_broken_toml_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such pipeline file"):
        config.load(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\nseed = 1")
    with pytest.raises(UserError, match="not valid TOML"):
        config.load(broken)


def test_every_field_is_documented() -> None:
    for name, field in config.Pipeline.model_fields.items():
        section = field.annotation
        assert section.__doc__, name
        for key, info in section.model_fields.items():
            assert info.description, f"{name}.{key}"


def test_a_base_gives_what_the_file_does_not_set(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "root.toml").write_text(
        '[policy]\npath = "p"\n[problems]\npath = ["a", "b"]\n[seed]\nlo = 0.1\nhi = 0.3\n[run]\niterations = 7\n'
    )
    (tmp_path / "deep" / "middle.toml").write_text('base = "../root.toml"\n[seed]\nhi = 0.4\n')
    (tmp_path / "deep" / "leaf.toml").write_text('base = "middle.toml"\n[seed]\nlo = 0.2\n[problems]\npath = ["c"]\n')
    leaf = config.load(tmp_path / "deep" / "leaf.toml", ["run.seed=3"])
    assert (leaf.seed.lo, leaf.seed.hi) == (0.2, 0.4)
    assert leaf.problems.path == ["c"]  # a list is replaced whole
    assert (leaf.run.iterations, leaf.run.seed) == (7, 3)
    assert config.parse(tomllib.loads(config.dumps(leaf))) == leaf


@pytest.mark.parametrize(
    ("base", "names"),
    [
        ('"gone.toml"', ["a.toml: base", "gone.toml: no such pipeline file"]),
        ('"a.toml"', ["a.toml", "back to the file itself"]),
        ('"b.toml"', ["a.toml", "back to the file itself"]),
        ("3", ["a.toml: base = 3", "name one pipeline file"]),
        ('"broken.toml"', ["a.toml: base", "broken.toml: not valid TOML"]),
    ],
)
def test_a_wrong_base_is_one_line(tmp_path: Path, base: str, names: list[str]) -> None:
    (tmp_path / "a.toml").write_text(f"base = {base}\n")
    (tmp_path / "b.toml").write_text('base = "a.toml"\n')
    (tmp_path / "broken.toml").write_text("[[[")
    with pytest.raises(UserError) as caught:
        config.load(tmp_path / "a.toml")
    for name in names:
        assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_arms_differ_in_their_mixing_alone() -> None:
    """Same task, policy, sampling, optimizer, minibatches and evaluation in every arm."""
    mixing = {
        "prefix_weight", "prefix_coef", "prefix_top_entropy", "prefix_cap", "advantage", "aggregation", "eps_high",
        "dual_clip", "ratio", "drop_degenerate", "kl_coef", "kl_reference", "kl_sampler", "entropy_coef",
    }  # fmt: skip
    arms = [p for p in PIPELINES if p.parent.name == "arms"]
    assert len(arms) >= 14
    base = config.flatten(config.load(arms[0].parents[1] / "claims.toml"))
    assert base["update.minibatches"] >= 2
    for arm in arms:
        values = config.flatten(config.load(arm))
        changed = {k for k in values if values[k] != base[k]}
        assert {k for k in changed if not k.startswith("seed.")} <= {f"update.{k}" for k in mixing}, arm.stem
        assert bool(changed) == (arm.stem != "on-policy"), arm.stem
