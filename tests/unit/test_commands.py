"""The table of commands: every name has its module, every module its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tseeds_cli.main import PANELS, Commands

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
