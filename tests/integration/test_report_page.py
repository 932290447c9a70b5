"""The report in a real browser: everything drawn, nothing fetched, both themes, narrow windows, hover."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.integration.browser import browser, colours, complaints, look, requests, wait  # noqa: F401
from tests.synthetic import make_run
from tseeds.report import html, read

ALL = "const done = arguments[0]; drawAll().then(() => done(true))"
ONE = "const done = arguments[1]; draw(report.figures.find((f) => f.id === arguments[0])).then(() => done(true))"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    small = {"iterations": 4, "problems": 8, "per_iteration": 4, "group_size": 4, "tokens": False}
    for name, more in (("<b>seeds-0", {"seed": 0}), ("<b>seeds-1", {"seed": 1}), ("on-policy", {"seeded_share": 0.0})):
        make_run(root / name, **small, **more)  # type: ignore[arg-type]
    groups = read.groups([str(root / n) for n in ("<b>seeds-0", "<b>seeds-1", "on-policy")])
    return html.write(groups, root / "out" / "report.html", title="two arms")


def test_everything_is_drawn_and_nothing_is_fetched(browser: Any, page: Path, tmp_path: Path) -> None:  # noqa: F811
    look(browser)
    requests(browser)
    complaints(browser)
    browser.get(page.as_uri())
    assert browser.execute_async_script(ALL)
    cards = browser.find_elements("tag name", "figure")
    assert len(cards) >= 20
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('figure .plot')].filter(p => p.querySelector('svg.main-svg, .main-svg')).length"
    )
    assert drawn == len(cards)
    curves = browser.execute_script("return document.querySelectorAll('#plot-reward .scatterlayer .trace').length")
    assert curves >= 2  # the mean of two runs and the single run, beside the band
    assert complaints(browser) == []
    assert [u for u in requests(browser) if not u.startswith(("file:", "data:", "blob:"))] == []
    browser.save_screenshot(str(tmp_path / "light.png"))
    assert colours(tmp_path / "light.png") > 100


def test_names_are_text_and_axes_have_units(browser: Any, page: Path) -> None:  # noqa: F811
    browser.get(page.as_uri())
    browser.execute_async_script(ONE, "reward")
    browser.execute_async_script(ONE, "entropy")
    assert browser.execute_script("return document.querySelectorAll('main b').length") == 0
    assert "<b>seeds" in browser.find_element("css selector", "table").text
    legend = browser.execute_script("return document.querySelector('#plot-reward .legend').textContent")
    assert "<b>seeds" in legend
    axis = browser.execute_script("return document.querySelector('#plot-entropy .ytitle').textContent")
    assert axis == "nats per token"


def test_dark_and_narrow(browser: Any, page: Path) -> None:  # noqa: F811
    look(browser, width=420, height=800, dark=True)
    browser.get(page.as_uri())
    browser.execute_async_script(ONE, "entropy")
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    wide = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    assert wide <= 0, "the page is wider than the window"
    line = "return document.querySelector('#plot-entropy .scatterlayer .lines path.js-line').style.stroke"
    dark = browser.execute_script(line)
    browser.find_element("id", "theme").click()
    browser.execute_async_script(ONE, "entropy")
    assert browser.execute_script(line) != dark
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(244, 245, 247)"
    browser.find_element("id", "theme").click()
    look(browser)


def test_hover_gives_numbers_and_smoothing_changes_curves(browser: Any, page: Path) -> None:  # noqa: F811
    from selenium.webdriver import ActionChains

    look(browser)
    browser.get(page.as_uri())
    browser.execute_async_script(ONE, "reward")
    plot = browser.find_element("css selector", "#plot-reward .nsewdrag")
    shown = "return document.querySelector('#plot-reward .hoverlayer').textContent"
    places = itertools.cycle(range(0, 80, 9))

    def moved(chrome: Any) -> str:
        """Plotly listens to movement, not to a mouse that is simply there, and takes its time."""
        ActionChains(chrome).move_to_element_with_offset(plot, next(places), 3).pause(0.3).perform()
        return chrome.execute_script(shown)

    hover = wait(browser, moved)
    assert "on-policy" in hover
    value = "return document.getElementById('plot-reward').data.at(-1).y.join()"
    before = browser.execute_script(value)
    browser.execute_script(
        "const s = document.getElementById('smooth'); s.value = '5'; s.dispatchEvent(new Event('change'))"
    )
    wait(browser, lambda b: b.execute_script(value) != before)
    assert complaints(browser) == []
