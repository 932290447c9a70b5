"""The generated command reference: every command, every option, as the command line has them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tseeds_cli.main import PANELS

DOCS = Path(__file__).parents[2] / "docs"


def test_every_command_and_its_options_are_in_the_reference() -> None:
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.commands()
    for name in (n for names in PANELS.values() for n in names):
        assert f"## tseeds {name}" in page
    evaluate = page.split("## tseeds evaluate\n")[1].split("\n## ")[0]
    for option in ("--mixed", "--lengths", "--benchmark", "--greedy"):
        assert f"`{option}`" in evaluate


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda p: p.name)
def test_every_link_leads_to_a_file_of_the_repository(page: Path) -> None:
    """Read on a forge, unbuilt, where a page that only the built site has is a dead link."""
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []
