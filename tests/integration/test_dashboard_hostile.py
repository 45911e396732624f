"""The dashboard with a host that belongs to an attacker."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hostile_host
import pytest
from browser import browser, console_errors, set_size
from dashboard_site import Dashboard, body, check_accessible, end, ended_run, serve, shown_text, take_pictures
from hostile_host import SCRIPT
from run_hosts import Bed, until, write_inventory
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By

__all__ = ["browser"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    bed = Bed(tmp_path_factory.mktemp("hostile"))
    program = bed.folder / "hostile_host.py"
    shutil.copy(hostile_host.__file__, program)
    python = bed.folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    python.chmod(0o755)
    inventory = write_inventory(bed.folder, {"node1": {}, "evil": {"cluster_python": str(python)}})
    ended_run(bed, "honest", time.time() - 10)
    process, port, token = serve(inventory)
    try:
        yield Dashboard(process, port, token)
    finally:
        end(process)
        bed.clean()


def test_a_hostile_host_is_text_and_breaks_no_page(site: Dashboard, browser: WebDriver, tmp_path: Path) -> None:
    site.open(browser, "/runs")
    until(lambda: {"evil", "honest"} <= set(body(browser).split()), 30, "both runs")
    for path in ("/", "/runs", "/queue", "/models", "/events", "/runs/honest?with=evil", "/runs/evil"):
        site.open(browser, path)
        if path == "/runs/evil":
            until(lambda: SCRIPT in shown_text(browser, "#log"), 20, "the log")
            until(lambda: browser.execute_script("return charts.runs.get('evil')?.count > 400"), 20, "the metrics")
        time.sleep(1.0)  # an update
        assert browser.execute_script("return window.executed") is None, path
        assert not browser.find_elements(By.CSS_SELECTOR, "img[src=x], main script, svg[onload]"), path
        assert not browser.find_elements(By.CSS_SELECTOR, "a[href^='javascript']"), path
        for width in (1440, 390):
            set_size(browser, width)
            check_accessible(browser, f"{path} at {width} px")  # and no wider than the window
        set_size(browser, 1440)
    take_pictures(browser, "hostile", tmp_path, check=False)
    assert "49" not in shown_text(browser, "#log"), "a template was evaluated"
    assert [line for line in console_errors(browser) if "Content Security Policy" in line] == []
