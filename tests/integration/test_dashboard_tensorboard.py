"""TensorBoard behind the login of the dashboard: a real TensorBoard, real event files, headless Chromium."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from browser import browser, console_errors
from dashboard_site import Dashboard, ended_run, press, serve
from run_hosts import Bed, until
from selenium.webdriver.chrome.webdriver import WebDriver
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from trainer.supervise.processes import descendants, is_running

__all__ = ["browser"]
pytestmark = pytest.mark.slow

TEXT = """
const deep = (root) => [...root.querySelectorAll('*')].map((one) => one.shadowRoot ? deep(one.shadowRoot) : '').join(' ') + (root.body ?? root).textContent;
return deep(document);
"""
# Attempts of a script that was injected into a page of TensorBoard.
ESCAPE = """
const done = arguments[0];
(async () => {
const found = {}, blocked = new Set();
document.addEventListener('securitypolicyviolation', (event) => blocked.add(event.effectiveDirective));
try { await fetch('/runs'); found.fetch = true; } catch { found.fetch = false; }
try { found.window = Boolean(window.open('/runs')); } catch { found.window = false; }
const frame = document.createElement('iframe');
frame.src = '/runs';
document.body.append(frame);
const script = document.createElement('script');
script.textContent = 'window.executed = 1';
document.body.append(script);
await new Promise((resolve) => setTimeout(resolve, 1000));
found.frame = Boolean(frame.contentDocument?.querySelector('nav'));
found.inline = Boolean(window.executed);
found.blocked = [...blocked].sort();
done(found);
})();
"""


@dataclass
class Site(Dashboard):
    """A dashboard of one host with runs that have ended."""

    bed: Bed

    def boards(self) -> list[int]:
        """Return the processes of TensorBoard."""
        found = []
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                if b"tensorboard_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return [pid for pid in found if is_running(pid)]

    def post(self, run: str, fields: str = "", **headers: str) -> tuple[int, dict[str, str], str]:
        session = self.session()
        page = until(
            lambda: (got := self.ask("GET", f"/runs/{run}", Cookie=session))[0] == 200 and got[2], 30, "the run"
        )
        token = re.findall(r'name="csrf" value="(\w+)"', page)[0]
        form = {"Content_Type": "application/x-www-form-urlencoded"} | headers
        return self.ask("POST", f"/runs/{run}/tensorboard", f"csrf={token}{fields}", Cookie=session, **form)


def write_events(bed: Bed, run: str, first: int, count: int) -> None:
    """Write an event file, as the trainer does, with the scalar `loss` of these steps."""
    writer = EventFileWriter(str(bed.run_dir(0, run) / "tensorboard"))
    for step in range(first, first + count):
        summary = Summary(value=[Summary.Value(tag="loss", simple_value=5 - step / 100)])
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
    writer.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    bed = Bed(tmp_path_factory.mktemp("tensorboard"))
    for name in ("first", "second", "none"):
        ended_run(bed, name, time.time() - 3600)
    write_events(bed, "first", 1, 30)
    write_events(bed, "second", 1, 10)
    variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "cluster_managed": False}
    variables |= {"cluster_python": sys.executable, "cluster_address": "127.0.0.1", "cluster_backend": "process"}
    inventory = bed.folder / "inventory.yml"
    hosts = {"node1": {"cluster_data_dir": str(bed.folder / "node1")}}
    inventory.write_text(yaml.safe_dump({"cluster": {"hosts": hosts, "vars": variables}}))
    process, port, token = serve(inventory)
    try:
        yield Site(process, port, token, bed)
    finally:
        process.kill()
        process.wait()
        bed.clean()


def test_it_opens_only_by_a_form_of_the_page_and_for_runs_with_event_files(site: Site) -> None:
    for path in ("/tensorboard/", "/tensorboard/data/runs", "/tensorboard/../runs"):
        assert site.ask("GET", path)[0] == 401, path
    session = site.session()
    until(lambda: site.ask("GET", "/runs/first", Cookie=session)[0] == 200, 60, "the run")
    assert site.ask("GET", "/tensorboard/", Cookie=session)[0] == 404
    assert site.ask("GET", "/runs/first/tensorboard", Cookie=session)[0] == 405
    assert site.ask("POST", "/runs/first/tensorboard", "csrf=wrong", Cookie=session)[0] == 403
    assert site.post("first", Origin="http://evil.example")[0] == 403
    status, _, text = site.post("none")
    assert status == 503 and "set loggers=tensorboard" in text and len(text.splitlines()) == 1
    assert site.boards() == []


def test_curves_of_runs_are_shown_and_grow(site: Site, browser: WebDriver) -> None:
    site.open(browser, "/runs/first?with=second")
    before = set(browser.window_handles)
    press(browser, "Open in TensorBoard")
    tab = until(lambda: set(browser.window_handles) - before, 90, "the tab").pop()
    browser.switch_to.window(tab)
    until(
        lambda: "loss" in str(browser.execute_script(TEXT)) and "second" in str(browser.execute_script(TEXT)),
        90,
        "the curves",
    )
    errors = console_errors(browser)
    # TensorBoard names its fonts by a path without its prefix, where they are not, with any policy.
    errors = [line for line in errors if "/font-roboto/" not in line]
    assert [line for line in errors if "Content Security Policy" in line] == [], errors
    session = site.session()
    assert site.ask("GET", "/tensorboard/data/runs", Cookie=session)[2] == '["first", "second"]'
    assert len(site.boards()) == 1
    assert site.post("first")[0] == 303 and len(site.boards()) == 1  # the same process

    scalars = "/tensorboard/data/plugin/scalars/scalars?run=first&tag=loss"
    assert site.ask("GET", scalars, Cookie=session)[2].count("[") == 31
    write_events(site.bed, "first", 31, 5)
    until(lambda: site.ask("GET", scalars, Cookie=session)[2].count("[") == 36, 60, "the new steps")

    browser.set_script_timeout(30)
    found = browser.execute_async_script(ESCAPE)
    assert not found["fetch"] and not found["window"] and not found["frame"] and not found["inline"], found
    assert {"connect-src", "frame-src"} <= set(found["blocked"]), found
    browser.close()
    browser.switch_to.window(before.pop())


def test_neither_credentials_nor_policies_pass_the_proxy(site: Site) -> None:
    session = site.session()
    status, headers, _ = site.ask("GET", "/tensorboard/", Cookie=session, Accept_Encoding="identity")
    assert status == 200 and "set-cookie" not in headers and headers["content-type"].startswith("text/html")
    policy = headers["content-security-policy"]
    assert f"connect-src http://127.0.0.1:{site.port}/tensorboard/;" in policy and "sandbox allow-scripts" in policy
    assert "allow-popups" not in policy and headers["x-frame-options"] == "DENY"
    assert "unsafe" not in site.ask("GET", "/runs", Cookie=session)[1]["content-security-policy"]
    path = "/tensorboard/data/plugin/timeseries/timeSeries"
    for more in ({"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "cross-site"}):
        assert site.ask("POST", path, "requests=[]", Cookie=session, **more)[0] == 403
    assert site.ask("POST", path, "x" * 40_000, Cookie=session)[0] == 413
    assert site.ask("GET", "/tensorboard/", Cookie=session, Host="evil.example")[0] == 400
    assert site.ask("GET", "/tensorboard/%2e%2e/%2e%2e/etc/passwd", Cookie=session)[0] == 404
    listening = Path(f"/proc/{site.boards()[0]}/net/tcp").read_text()
    inodes = {str(path.readlink()) for path in Path(f"/proc/{site.boards()[0]}/fd").iterdir()}
    ours = [line for line in listening.splitlines()[1:] if f"socket:[{line.split()[9]}]" in inodes]
    assert ours == [], "TensorBoard listens on a port"


def test_it_ends_with_the_dashboard_even_if_that_is_killed(site: Site) -> None:
    boards = site.boards()
    assert len(boards) == 1
    assert "Open in TensorBoard" in site.ask("GET", "/runs/first", Cookie=site.session())[2]
    site.process.kill()
    site.process.wait()
    until(lambda: not any(map(is_running, boards)), 20, "TensorBoard's end")
