"""The trajectory viewer in a real browser, served and static: rendered, filtered, hovered, walked through, attacked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.integration.browser import browser, colours, complaints, look, requests, wait  # noqa: F401
from tests.synthetic import make_run
from tseeds.artifacts.rundir import RunDir
from tseeds.report import viewer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("view") / "run", iterations=4, problems=6, per_iteration=6, group_size=8)


@pytest.fixture(scope="module")
def served(run: RunDir) -> Iterator[str]:
    with viewer.server(run.root) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}/"
        httpd.shutdown()


@pytest.fixture(scope="module")
def static(run: RunDir, tmp_path_factory: pytest.TempPathFactory) -> str:
    return viewer.write(run.root, tmp_path_factory.mktemp("static") / "bundle").as_uri()


@pytest.fixture(scope="module")
def inlined(run: RunDir, tmp_path_factory: pytest.TempPathFactory) -> str:
    return viewer.write(run.stage(3, "rollout"), tmp_path_factory.mktemp("inlined") / "page.html").as_uri()


@pytest.fixture(params=["served", "static"])
def address(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


def _open(chrome: Any, address: str) -> None:
    chrome.get("about:blank")
    chrome.get(address)
    wait(chrome, lambda c: c.execute_script("return document.body.dataset.ready === 'yes'"))


def _count(chrome: Any) -> str:
    return chrome.find_element("id", "count").text


def _choose(chrome: Any, name: str, value: str) -> None:
    chrome.execute_script(
        "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event('input', {bubbles: true})); e.dispatchEvent(new Event('change', {bubbles: true}))",
        name,
        value,
    )


def test_rendered(browser: Any, address: str, run: RunDir, tmp_path: Path) -> None:  # noqa: F811
    look(browser)
    requests(browser)
    complaints(browser)
    _open(browser, address)
    assert _count(browser) == "1–50 of 192 trajectories"
    assert len(browser.find_elements("css selector", "#list li")) == 50
    first = pl.read_parquet(run.stage(1, "rollout") / "*.parquet").row(0, named=True)
    assert browser.find_element("css selector", "#head h2").text == first["row_id"]
    tokens = browser.find_elements("css selector", "#tokens [data-i]")
    assert len(tokens) == len(first["response_ids"])
    said = browser.execute_script(
        "return [...document.querySelectorAll('#tokens [data-i]')].map(s => s.lastChild ? s.lastChild.textContent : '').join('')"
    )
    assert said.removesuffix("<eos>") == first["text"]
    assert complaints(browser) == []
    here = address.rsplit("/", 1)[0]
    assert [u for u in requests(browser) if not u.startswith((here, "about:", "data:"))] == []
    browser.save_screenshot(str(tmp_path / "view.png"))
    assert colours(tmp_path / "view.png") > 100


def test_filtered(browser: Any, address: str, run: RunDir) -> None:  # noqa: F811
    _open(browser, address)
    rows = pl.read_parquet(run.root / "iterations/*/rollout/*.parquet").join(
        pl.read_parquet(run.root / "iterations/*/score/*.parquet"), on="row_id"
    )
    wrong = rows.filter((pl.col("verdict") == "wrong") & (pl.col("off_stop") > 0) & (pl.col("snapshot_step") == 2))
    for name, value in (("verdict", "wrong"), ("seeded", "yes"), ("snapshot", "2")):
        _choose(browser, name, value)
    wait(browser, lambda b: _count(b).endswith(f"of {wrong.height} trajectories"))
    assert {e.text for e in browser.find_elements("css selector", "#list .badge")} == {"wrong"}
    assert "snapshot=2" in browser.current_url  # the address leads back to what is seen
    browser.find_element("id", "clear").click()
    wait(browser, lambda b: _count(b).endswith("of 192 trajectories"))
    _choose(browser, "q", "nothing at all")
    wait(browser, lambda b: _count(b) == "no trajectory fits these filters")


def test_hovered(browser: Any, address: str, run: RunDir) -> None:  # noqa: F811
    from selenium.webdriver import ActionChains

    seeded = (
        pl.read_parquet(run.stage(4, "rollout") / "*.parquet").filter(pl.col("snapshot_step") == 2).row(0, named=True)
    )
    values = pl.read_parquet(run.stage(4, "update") / "tokens.parquet").filter(pl.col("row_id") == seeded["row_id"])
    _open(browser, f"{address}#row={seeded['row_id']}&colour=ratio")
    token = browser.find_element("css selector", "#tokens [data-i='1']")
    ActionChains(browser).move_to_element(token).perform()
    said = wait(browser, lambda b: b.find_element("id", "tip").text)
    assert f"2 of {len(seeded['response_ids'])}, id {seeded['response_ids'][1]}" in said
    assert "by the snapshot of step 2" in said
    assert f"{values['ratio'][1]:.4g}"[:5] in said
    assert f"{values['entropy'][1]:.4g}"[:5] in said
    last = len(seeded["response_ids"]) - 1
    ActionChains(browser).move_to_element(browser.find_element("css selector", f"#tokens [data-i='{last}']")).perform()
    wait(browser, lambda b: "by the policy of step 3" in b.find_element("id", "tip").text)


def test_colours_follow_the_choice(browser: Any, address: str, run: RunDir) -> None:  # noqa: F811
    rows = pl.read_parquet(run.root / "iterations/*/update/tokens.parquet")
    clipped = rows.filter("clipped").row(0, named=True)
    mine = rows.filter(pl.col("row_id") == clipped["row_id"])
    _open(browser, f"{address}#row={clipped['row_id']}&colour=clipped")
    painted = browser.execute_script(
        "return [...document.querySelectorAll('#tokens [data-i]')].map(s => !/, 0\\)|transparent/.test(s.style.background))"
    )
    assert painted == mine["clipped"].to_list()
    seeds = browser.execute_script(
        "return [...document.querySelectorAll('#tokens [data-i]')].map(s => s.classList.contains('seed'))"
    )
    assert seeds == (mine["region"] == "seed").to_list()


def test_groups_and_iterations_are_linked(browser: Any, address: str) -> None:  # noqa: F811
    _open(browser, address)
    chips = browser.find_elements("css selector", "#links > div:first-child .chip")
    assert [c.text for c in chips] == [f"#{k}" for k in range(8)]
    chips[3].click()
    wait(browser, lambda b: b.find_element("css selector", "#head h2").text == "000001-00000-003")
    browser.find_element("tag name", "body").send_keys("l")
    wait(browser, lambda b: b.find_element("css selector", "#head h2").text == "000001-00000-004")
    others = browser.find_elements("css selector", "#links > div:nth-child(2) .chip")
    assert [o.text.split(":")[0] for o in others] == ["1", "2", "3", "4"]
    others[2].click()
    wait(browser, lambda b: b.find_element("css selector", "#head h2").text.startswith("000003-"))
    browser.find_element("tag name", "body").send_keys("c")
    assert browser.find_element("id", "colour").get_attribute("value") == "behaviour"


def test_evaluations_are_there_too(browser: Any, address: str) -> None:  # noqa: F811
    _open(browser, address)
    _choose(browser, "set", "evaluation-held-out")
    wait(browser, lambda b: _count(b).endswith("of 96 trajectories"))


def test_one_file_dark_and_narrow(browser: Any, inlined: str) -> None:  # noqa: F811
    look(browser, width=420, height=900, dark=True)
    complaints(browser)
    _open(browser, inlined)
    assert _count(browser) == "1–48 of 48 trajectories"
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    assert browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth") <= 0
    assert complaints(browser) == []
    look(browser)


@pytest.mark.parametrize("served_", [True, False], ids=["served", "static"])
def test_what_a_model_writes_stays_text(browser: Any, tmp_path: Path, served_: bool) -> None:  # noqa: F811
    """A response full of markup, in every column that is shown: no element and no script comes of it."""
    import pyarrow as pa

    from tseeds.artifacts.store import Identity, writing

    run = make_run(tmp_path / "run", iterations=1, problems=2, per_iteration=2, group_size=2, tokens=False)
    attack = "</script><script>document.body.dataset.owned='yes'</script><img src=x onerror=\"document.body.dataset.owned='yes'\">"
    for stage, columns in (("rollout", ("text", "row_id", "group_id")), ("score", ("row_id", "extracted", "verdict"))):
        table = pa.Table.from_pylist(pl.read_parquet(run.stage(1, stage) / "*.parquet").to_dicts())
        for column in columns:
            values = [f"{attack}{v}" for v in table[column].to_pylist()]
            table = table.set_column(table.column_names.index(column), column, pa.array(values, pa.string()))
        with writing(tmp_path / "nasty" / stage, Identity(stage, 1, {}, {})) as writer:
            writer.part(0, table)
    if served_:
        with viewer.server(tmp_path / "nasty" / "rollout") as httpd:
            threading.Thread(target=httpd.serve_forever, daemon=True).start()
            _attacked(browser, f"http://127.0.0.1:{httpd.server_address[1]}/", attack)
            httpd.shutdown()
    else:
        _attacked(browser, viewer.write(tmp_path / "nasty" / "rollout", tmp_path / "out").as_uri(), attack)


def _attacked(chrome: Any, address: str, attack: str) -> None:
    _open(chrome, address)
    assert attack in chrome.find_element("css selector", "#head h2").text
    assert attack in chrome.find_element("id", "facts").text
    assert chrome.execute_script("return document.body.dataset.owned") is None
    assert chrome.execute_script("return document.querySelectorAll('img').length") == 0
