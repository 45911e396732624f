"""The dashboard with a host that belongs to an attacker, and with clients that only want to keep others out."""

from __future__ import annotations

import contextlib
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hostile_host
import pytest
import yaml
from browser import browser, console_errors, set_size
from dashboard_site import Dashboard, body, check_accessible, ended_run, serve, shown_text, take_pictures
from hostile_host import SCRIPT
from run_hosts import Bed, until
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By

from trainyard.dashboard.http_limits import REQUEST_LIMIT

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
    variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "cluster_managed": False}
    variables |= {"cluster_python": sys.executable, "cluster_address": "127.0.0.1", "cluster_backend": "process"}
    hosts = {name: {"cluster_data_dir": str(bed.folder / name)} for name in ("node1", "evil")}
    hosts["evil"]["cluster_python"] = str(python)
    inventory = bed.folder / "inventory.yml"
    inventory.write_text(yaml.safe_dump({"cluster": {"hosts": hosts, "vars": variables}}))
    ended_run(bed, "honest", time.time() - 10)
    process, port, token = serve(inventory)
    try:
        yield Dashboard(process, port, token)
    finally:
        process.terminate()
        process.wait(20)
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


def test_clients_that_send_slowly_do_not_keep_others_out(site: Dashboard) -> None:
    session = site.session()
    until(lambda: site.ask("GET", "/runs/honest", Cookie=session)[0] == 200, 30, "the run")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", site.port))) for _ in range(200)]
        for number, client in enumerate(clients):
            client.settimeout(3 * REQUEST_LIMIT)
            # A line, and a form without its body.
            head = f"POST /runs/honest/stop HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\nCookie: {session}\r\n"
            client.sendall(f"{head}Content-Length: 9\r\n\r\n".encode() if number % 2 else b"GET / HTT")
        assert site.ask("GET", "/", Cookie=session)[0] == 200
        began = time.monotonic()
        ends = [client.recv(1000) for client in clients[:2]]
        assert ends[0] == b"" and b" 403 " in ends[1] and time.monotonic() - began < 2.5 * REQUEST_LIMIT
        assert site.ask("GET", "/", Cookie=session)[0] == 200
