"""The table of commands: every name has its module, every module its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tseeds.artifacts import disk
from tseeds.errors import UserError
from tseeds_cli.console import plain_progress
from tseeds_cli.main import PANELS, Commands, app

CLI = Path(__file__).parents[2] / "cli"
NAMES = [name for commands in PANELS.values() for name in commands]
SHARED = {"__init__", "main", "console", "options", "panel"}


def test_every_command_module_is_in_the_table() -> None:
    assert {p.stem.rstrip("_") for p in CLI.glob("*.py") if p.stem not in SHARED} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_loads_under_its_name_and_documents_its_options(name: str) -> None:
    command = Commands(name="tseeds").get_command(None, name)
    assert command.name == name
    assert command.help
    for inner in [command, *[command.get_command(None, n) for n in getattr(command, "commands", {})]]:
        for parameter in inner.params:
            if parameter.name not in ("help", "install_completion", "show_completion"):
                assert getattr(parameter, "help", None), f"{name}: {parameter.name}"


@pytest.mark.parametrize(
    ("name", "said"),
    [("stat", "no command stat; did you mean status?"), ("xyz", "no command xyz; tseeds --help lists them")],
)
def test_an_unknown_command_is_answered_with_the_nearest(name: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        app([name, "x"], standalone_mode=False)
    assert str(caught.value) == said


FILES = {
    "problems": ["config", "policy", "out"],
    "curriculum": ["config", "policy", "problems", "out"],
    "seed": ["config", "problems", "snapshot", "curriculum", "out"],
    "rollout": ["config", "policy", "problems", "seeds", "snapshot", "curriculum", "out"],
    "score": ["config", "rollouts", "problems", "out"],
    "update": ["config", "policy", "state", "rollouts", "scores", "reference", "out"],
    "evaluate": ["config", "policy", "out"],
    "snapshot": ["config"],
}


@pytest.mark.parametrize(("stage", "option"), [(stage, option) for stage in FILES for option in FILES[stage]])
def test_an_option_for_explicit_files_is_refused_beside_a_run(stage: str, option: str) -> None:
    with pytest.raises(UserError, match=f"--{option} goes without a run directory: leave out either it or runs/x"):
        app([stage, "runs/x", f"--{option}", "place"], standalone_mode=False)


@pytest.mark.parametrize("extra", [[], ["--dry-run"]])
def test_a_run_cannot_be_a_file(extra: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file: a file; name a directory for the run \(--run NEW\)"):
        app(["run", str(tmp_path / "x.toml"), "--run", str(tmp_path / "file"), *extra], standalone_mode=False)


def test_a_place_that_cannot_be_written_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = r"file/a: cannot write here \(Not a directory\); choose another place"
    with pytest.raises(UserError, match=said) as caught, disk.refusals(tmp_path / "file" / "a"):
        (tmp_path / "file" / "a").mkdir(parents=True)
    assert caught.value.exit_code == 2


def test_a_stage_that_counts_no_rows_says_only_that_it_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    progress = plain_progress()
    for stage, total in (("problems", 1), ("score", 3)):
        progress.begin(stage, total)
        progress.advance(total)
        progress.end()
    assert [line.rpartition(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "problems: done",
        "score: 3 of 3 rows",
    ]
