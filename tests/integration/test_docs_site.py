"""The documentation site: it builds strictly without the network, and its search works in a browser."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import browser, console_errors
from run_hosts import TOP
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

__all__ = ["browser"]
pytestmark = pytest.mark.slow
REMOTE = re.compile(r"<(?:script|link|img)[^>]+(?:src|href)=\"(?:https?:)?//(?!trainyard\.github\.io)", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site behind a proxy that does not exist, because the build must not use the network."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: make setup installs it")
    folder = tmp_path_factory.mktemp("docs") / "site"
    environment = {"PATH": "/usr/bin:/bin", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(build, cwd=TOP, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    assert (site / "run-spec/index.html").exists()
    assert not [str(page) for page in site.glob("**/*.html") if REMOTE.search(page.read_text())]


def test_the_search_finds_a_page(site: Path, browser: webdriver.Chrome) -> None:
    handler = functools.partial(SimpleHTTPRequestHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.get(f"http://127.0.0.1:{server.server_port}/")
        browser.find_element(By.CSS_SELECTOR, "[role=search] input").send_keys("pipeline_layers\n")
        links = "#mkdocs-search-results a"
        WebDriverWait(browser, 20).until(lambda driver: driver.find_elements(By.CSS_SELECTOR, links))
        found = browser.find_element(By.CSS_SELECTOR, "#mkdocs-search-results a[href*='/run-spec/']")
        browser.execute_script("arguments[0].click()", found)
        WebDriverWait(browser, 20).until(lambda driver: driver.title == "Run spec - trainyard")
        assert not console_errors(browser)
        server.shutdown()
