"""The dashboard in headless Chromium, over real connections to two hosts of this machine and their real runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import browser, console_errors, set_size
from dashboard_site import (
    HEADING,
    Dashboard,
    body,
    end,
    ended_run,
    press,
    serve,
    shown_text,
    start_fake_ranks,
    start_training,
    take_pictures,
)
from fake_slurm import FakeSlurm, busy_queue
from run_hosts import Bed, command_line, until, write_inventory
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select
from ssh_server import Server, server, ssh_variables

from trainer.supervise.processes import descendants, environ, is_running

__all__ = ["browser", "server"]
pytestmark = pytest.mark.slow

# Records in the page when a text appears, so that polling by the test adds nothing to a latency.
WATCH = """
window.seen = 0;
const [selector, text] = arguments;
const look = () => {
  const all = [...document.querySelectorAll(selector)];
  if (!window.seen && all.some((one) => one.textContent.includes(text))) window.seen = Date.now() / 1000;
};
new MutationObserver(look).observe(document.body, {subtree: true, childList: true, characterData: true});
look();
"""
NEWEST = "return charts.runs.get('real').columns.step.at(-1)"


@dataclass
class Site(Dashboard):
    """A dashboard of two hosts, node2 over ssh."""

    bed: Bed
    training: subprocess.Popen[bytes]
    ssh_port: int
    slurm: FakeSlurm

    def samplers(self) -> list[int]:
        """Return the samplers of the hosts: a child of the dashboard for node1, one of the ssh server's for node2."""
        children = descendants(self.process.pid)
        pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
        ours = [
            pid
            for pid in pids
            if pid in children or environ(pid).get("SSH_CONNECTION", "").endswith(f" {self.ssh_port}")
        ]
        return [pid for pid in ours if is_running(pid) and b"\0sample\0" in command_line(pid)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[Site]:
    bed = Bed(tmp_path_factory.mktemp("dashboard"))
    inventory = write_inventory(
        bed.folder, {"node1": {}, "node2": ssh_variables(server.login, bed.folder / "cp")}, queue_state="present"
    )
    slurm = FakeSlurm(bed.folder / "slurm", bed.folder / "node1")
    busy_queue(slurm)
    for number in range(3):
        ended_run(bed, f"old-{number}", time.time() - 86_400 * (number + 1))
    (bed.run_dir(0, "old-1") / "spec.yml").write_text("model: tiny\nloggers: [tensorboard]\n")
    programs = str(slurm.programs)
    often = ("--checkpoint-interval=20", "--eval-interval=10")
    training = start_training(bed, inventory, "real", 5000, *often, path=programs)
    process, port, token = serve(inventory, programs)
    try:
        yield Site(process, port, token, bed, training, server.login.port, slurm)
    finally:
        end(process, training)
        bed.clean()


def seen(driver: WebDriver, limit: float = 60) -> float:
    """Return when the watched text appeared in the page, in seconds since the epoch."""
    value: float = until(lambda: driver.execute_script("return window.seen"), limit, "the watched text")
    return value


def training(site: Site) -> Callable[[], list[dict[str, Any]]]:
    """Wait until the real run has made some steps; return a function that reads its metrics on the disk."""
    metrics = site.bed.run_dir(0, "real") / "metrics.jsonl"

    def lines() -> list[dict[str, Any]]:
        text = metrics.read_text() if metrics.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def begun() -> bool:
        assert site.training.poll() is None, (site.bed.folder / "train.log").read_text()
        return len(lines()) > 12

    until(begun, 240, "the first steps")
    return lines


def test_a_real_run_is_shown_live_and_stopped(site: Site, browser: WebDriver, tmp_path: Path) -> None:
    lines = training(site)
    set_size(browser, 1440)
    site.open(browser, "/runs/real")
    until(lambda: "training" in shown_text(browser, "[data-chart=loss] .latest"), 20, "the curve")
    shown = browser.find_elements(By.CSS_SELECTOR, "[data-chart]:not([hidden])")
    assert {one.get_attribute("data-chart") for one in shown} == {
        *("loss", "lr", "grad_norm", "tokens_per_second", "step_seconds", "comm_share", "mfu")
    }
    assert "held out" in shown[0].text and "rank 0" in shown[4].text and "rank 1" in shown[4].text
    latencies = []
    for _ in range(3):
        # The loss of a step that is not yet on the disk cannot be in the page: watch the next one that appears there.
        count = len(lines())
        record = until(
            lambda before=count: (all_lines := lines()) and len(all_lines) > before and all_lines[-1], 60, "a step"
        )
        written = time.time()
        until(lambda step=record["step"]: browser.execute_script(NEWEST) >= step, 20, "the step in the page")
        latencies.append(time.time() - written)
    print(f"metric on disk to the page: {', '.join(f'{one:.2f}' for one in latencies)} s")
    assert sorted(latencies)[1] <= 2.0
    caption = "document.querySelector('[data-chart=loss] .latest').textContent"
    shown_loss = f"{caption}.includes('training ' + shown(charts.runs.get('real').columns.loss.at(-1)))"
    assert browser.execute_script(f"return {shown_loss}"), browser.execute_script(f"return {caption}")
    page = browser.execute_script("return charts.runs.get('real')")
    on_disk = {record["step"]: record["loss"] for record in lines()}
    assert [on_disk[step] for step in page["columns"]["step"]] == pytest.approx(page["columns"]["loss"])

    assert until(lambda: [*re.finditer(r"20\s+node1", body(browser))], 120, "a checkpoint")
    Select(browser.find_element(By.ID, "log-file")).select_by_visible_text("rank0.log on node1")
    until(lambda: "tokens/s" in shown_text(browser, "#log"), 20, "the log")
    browser.find_element(By.ID, "log-search").send_keys("step 1/")
    browser.find_element(By.CSS_SELECTOR, "form.logs button").click()
    until(lambda: "contain" in shown_text(browser, "#log-state"), 20, "the search")
    assert all("step 1/" in line for line in shown_text(browser, "#log").splitlines())

    press(browser, "Stop after a checkpoint")
    until(lambda: "stopped" in (browser.execute_script(HEADING) or ""), 120, "the stop")
    assert {site.bed.node(host, "real")["status"] for host in (0, 1)} == {"stopped"}
    until(lambda: "done" in body(browser), 30, "the action's end")
    assert console_errors(browser) == []


def test_a_failing_ranks_cause_is_on_the_page_within_3_seconds(site: Site, browser: WebDriver) -> None:
    start_fake_ranks(site.bed, "fails", environment="FAKE=1:30:raise\n")
    site.open(browser, "/events")
    browser.execute_script(WATCH, "#main", "rank 1 on node2: ZeroDivisionError: the loss is not a number")
    at = seen(browser)
    failed = site.bed.state(1, "fails")["time"]
    print(f"cause of a failed rank on the page after {at - failed:.2f} s")
    assert at - failed <= 3.0
    site.open(browser, "/runs/fails")
    head = "return document.getElementById('run-head').textContent"
    # The state of the run follows when every rank has ended.
    until(
        lambda: {"ZeroDivisionError", "failed"} <= set(re.findall(r"\w+", browser.execute_script(head))),
        20,
        "the cause",
    )


def test_a_lost_host_is_shown_within_6_seconds(site: Site, browser: WebDriver) -> None:
    site.open(browser, "/")
    until(lambda: body(browser).count("answers") >= 2, 30, "two hosts")
    ssh = next(pid for pid in descendants(site.process.pid) if Path(f"/proc/{pid}/comm").read_text().strip() == "ssh")
    browser.execute_script(WATCH, ".card", "no answer")
    os.kill(ssh, signal.SIGSTOP)
    lost = time.time()
    at = seen(browser)
    os.kill(ssh, signal.SIGCONT)
    print(f"lost host on the page after {at - lost:.2f} s")
    assert at - lost <= 6.0
    assert "node2" in shown_text(browser, ".card.off")
    until(lambda: "no answer" not in body(browser), 30, "the host's return")
    site.open(browser, "/events")
    until(lambda: "node2 answers again" in body(browser), 10, "the event")
    assert "node2 does not answer: sends nothing for 4 s" in body(browser)


def test_the_queue_is_shown_live_and_changed(site: Site, browser: WebDriver) -> None:
    """The programs of Slurm are stand-ins, see fake_slurm."""

    def row(run: str) -> str:
        return browser.execute_script(f"return document.getElementById('queued-{run}')?.textContent || ''")

    def press_of(run: str, button: str) -> None:
        # In one step, because the page may replace the row between two.
        buttons = f"[...document.querySelectorAll('#queued-{run} button')]"
        browser.execute_script(f"{buttons}.find((one) => one.textContent === '{button}').click()")

    site.open(browser, "/queue")
    until(lambda: "wants-gpu" in body(browser), 20, "the queue")
    assert "waits for free hosts" in row("wants-gpu")
    # In one step, because the page may replace the labels between two.
    every = "[...document.querySelectorAll('.timeline .label')]"
    labels = browser.execute_script(f"return {every}.map((one) => one.textContent.trim())")
    assert [one for one in labels if "recorded" not in one] == ["node1 GPU 0", "node1 GPU 1", "node2"]
    shown = lambda: shown_text(browser, ".timeline")  # noqa: E731
    # Of the queue, and of a run folder, which a run has once it is launched.
    until(lambda: {"first-run", "real"} <= set(shown().split()), 120, "both runs")
    site.open(browser, "/queue?time=7%20days")
    until(lambda: "old-1" in shown(), 20, "the runs of other days")
    site.open(browser, "/events")
    until(lambda: "run twice returned to the queue: node1: Slurm has asked for the host" in body(browser), 20, "it")
    site.open(browser, "/queue")
    until(lambda: "wants-gpu" in body(browser), 20, "the queue")
    assert browser.execute_script("return window.executed") is None and "<script>" in body(browser)
    press_of("parked", "Release")
    until(lambda: "waiting" in row("parked") and "released" in row("parked"), 20, "the release")
    press_of("wants-gpu", "high")
    until(lambda: "Change the priority to high: run wants-gpu" in row("wants-gpu"), 20, "the priority")
    press_of("parked", "critical")
    until(lambda: "Access/permission denied" in row("parked"), 20, "the refusal of the stand-in")
    press_of("after-it", "Cancel the run")
    until(lambda: not browser.find_elements(By.ID, "queued-after-it"), 20, "the cancelled run's end")

    site.slurm.set_up(False)
    until(lambda: "has not answered since" in body(browser), 20, "the error")
    assert "Unable to contact slurm controller" in body(browser) and "wants-gpu" in body(browser)
    site.slurm.set_up(True)
    until(lambda: "has not answered since" not in body(browser), 20, "the queue's return")
    assert console_errors(browser) == []


@pytest.mark.long
def test_pages_are_accessible_in_both_sizes(site: Site, browser: WebDriver, tmp_path: Path) -> None:
    """Screenshots of every page lie in the folder that TRAINYARD_SCREENSHOTS names, or in the test's own."""
    pages = {"nodes": "/"} | {name: f"/{name}" for name in ("runs", "events", "queue")}
    pages |= {"run": "/runs/real", "tensorboard": "/runs/old-1", "compare": "/runs/real?with=old-1"}
    session = site.session()
    until(lambda: site.ask("GET", "/runs/real", Cookie=session)[0] == 200, 120, "the real run")
    for name, path in pages.items():
        site.open(browser, path)
        command = f"{sys.executable} -m tensorboard.main --logdir {site.bed.run_dir(0, 'old-1')}/tensorboard"
        assert (command in body(browser)) == (name == "tensorboard"), name
        take_pictures(browser, name, tmp_path)


def test_nothing_is_left_on_a_host_when_the_dashboard_ends(site: Site) -> None:
    samplers = until(lambda: (found := site.samplers()) and len(found) == 2 and found, 30, "the samplers")
    site.process.send_signal(signal.SIGINT)
    assert site.process.wait(20) == 0
    until(lambda: not any(map(is_running, samplers)), 20, "the samplers' end")
