"""A real headless browser for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--hide-scrollbars", "--window-size=1400,1000",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium through selenium; offline, and every message of a page's console is kept."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver on this machine (Debian: apt-get install chromium chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    chrome.set_script_timeout(90)
    chrome.set_page_load_timeout(90)
    yield chrome
    chrome.quit()


def look(chrome: Any, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
    """Window size and the system's colour scheme for the next pages."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def wait(chrome: Any, condition: Callable[[Any], Any], seconds: float = 60) -> Any:
    """The condition's value once it is true."""
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    passing = (NoSuchElementException, StaleElementReferenceException)  # a page that is being redrawn
    return WebDriverWait(chrome, seconds, poll_frequency=0.1, ignored_exceptions=passing).until(condition)


def complaints(chrome: Any) -> list[str]:
    """Messages of the console since the last call: errors, warnings, refused content."""
    return [entry["message"] for entry in chrome.get_log("browser")]


def requests(chrome: Any) -> list[str]:
    """Addresses that pages asked for since the last call."""
    import json

    found = []
    for entry in chrome.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found.append(message["params"]["request"]["url"])
    return found


def colours(file: Path) -> int:
    """How many colours a screenshot has: a page that drew nothing has a handful."""
    from PIL import Image

    image = Image.open(file).convert("RGB")
    return len(image.getcolors(maxcolors=1 << 24) or ())
