"""Headless Chromium by Selenium, for tests of pages and for pictures of them."""

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

PROGRAMS = ("chromium", "chromedriver")
NEEDED = "needs Chromium and its driver (Debian packages chromium, chromium-driver)"


def start_browser() -> webdriver.Chrome:
    """Start headless Chromium. Call `quit` on it."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    if not all(map(shutil.which, PROGRAMS)):
        pytest.skip(NEEDED)
    driver = start_browser()
    yield driver
    driver.quit()


def set_size(driver: webdriver.Chrome, width: int, height: int = 900, dark: bool = False) -> None:
    """Set the size of the page in CSS pixels, and the colour scheme that the user prefers."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})


def screenshot(driver: webdriver.Chrome, file: Path, whole: bool = True) -> None:
    """Write a PNG image of the whole page, or of its visible part."""
    taken: dict[str, Any] = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": whole})
    file.write_bytes(base64.b64decode(taken["data"]))


def console_errors(driver: webdriver.Chrome) -> list[str]:
    """Return the errors that the page has logged since the last call, such as violations of its CSP."""
    entries: list[dict[str, Any]] = driver.get_log("browser")  # type: ignore[no-untyped-call]
    return [str(entry["message"]) for entry in entries if entry["level"] == "SEVERE"]
