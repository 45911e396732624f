"""Actions on a run through the dashboard, in headless Chromium: a real run of two hosts, and real servers of Ollama."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import real_ollama
from browser import browser, console_errors
from dashboard_site import (
    HEADING,
    Dashboard,
    body,
    end,
    ended_run,
    press,
    serve,
    shown_text,
    start_training,
    take_pictures,
)
from fake_nvidia_smi import write_nvidia_smi
from run_hosts import TOP, Bed, free_port, until, write_inventory
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from trainer.generation.ollama_client import OllamaClient

__all__ = ["browser"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not real_ollama.weights(), reason="needs an ollama on PATH, and its small model"),
]

RUN = f"again-{os.getpid()}"
STEPS = 120


@dataclass
class Site(Dashboard):
    """A dashboard, its hosts, and the program that follows the run."""

    bed: Bed
    training: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def ollamas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[OllamaClient]]:
    places = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with real_ollama.serve(places, tmp_path_factory.mktemp("ollama")) as clients:
        yield clients


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, ollamas: list[OllamaClient]) -> Iterator[Site]:
    """A dashboard of two local hosts with an Ollama each, and a run of them."""
    bed = Bed(tmp_path_factory.mktemp("actions"))
    ports = {f"node{i}": {"ollama_port": int(client.url.rpartition(":")[2])} for i, client in enumerate(ollamas, 1)}
    inventory = write_inventory(bed.folder, ports, ollama_state="present")
    ended_run(bed, "hostile", time.time() - 10)
    # From another folder than the dashboard: the path of the dataset is relative to it.
    training = start_training(bed, inventory, RUN, STEPS, "--checkpoint-interval=10")
    write_nvidia_smi(bed.folder / "bin", 1)
    process, port, token = serve(inventory, str(bed.folder / "bin"))
    try:
        yield Site(process, port, token, bed, training)
    finally:
        end(process, training)
        bed.clean()
        (TOP / f".trainyard/starts/{RUN}.json").unlink(missing_ok=True)
        shutil.rmtree(TOP / f".trainyard/deploy/{RUN}", ignore_errors=True)


def step_of(site: Site) -> int:
    return site.bed.state(0, RUN).get("step") or 0


def action(driver: WebDriver) -> str:
    text: str = driver.execute_script("return document.getElementById('run-action')?.textContent || ''")
    return text


@pytest.mark.long
def test_a_run_is_watched_stopped_started_again_and_deployed(
    site: Site, browser: WebDriver, ollamas: list[OllamaClient], tmp_path: Path
) -> None:
    log = site.bed.folder / "train.log"
    until(lambda: step_of(site) > 1 or site.training.poll() is not None, 300, "the first steps")
    assert site.training.poll() is None, log.read_text()
    site.open(browser, f"/runs/{RUN}")
    shown = lambda: shown_text(browser, "#log")  # noqa: E731
    until(lambda: re.search(r"rank 0 step .*tokens/s", shown()), 30, "lines of all ranks")
    before = shown().count("tokens/s")
    until(lambda: shown().count("tokens/s") > before, 30, "a new line")
    Select(browser.find_element(By.ID, "log-file")).select_by_visible_text("rank0.log on node1")
    until(lambda: "tokens/s" in shown() and "rank 0" not in shown(), 20, "the log of one rank")
    find = "[...document.querySelectorAll('#run-head dt')].find((one) => one.textContent === 'Communication')"
    share = until(
        lambda: browser.execute_script(f"return {find}?.nextElementSibling?.textContent || ''"), 20, "the share"
    )
    assert 0 <= int(share.split()[0]) <= 100, share

    press(browser, "Stop after a checkpoint")
    until(lambda: "stopped" in (browser.execute_script(HEADING) or ""), 120, "the stop")
    until(lambda: "Stop after a checkpoint at" in action(browser) and "done" in action(browser), 30, "the action's end")
    assert site.training.wait(60) == 0
    stopped_at = step_of(site)
    assert 0 < stopped_at < STEPS

    press(browser, "Start again")
    until(lambda: "Start again at" in action(browser), 20, "the action")
    until(lambda: "following the run" in action(browser), 120, "the start")
    until(lambda: f"following {RUN}: 2 ranks" in action(browser), 30, "the progress")
    assert "1 earlier" in action(browser)
    until(lambda: "finished" in (browser.execute_script(HEADING) or ""), 300, "the run's end")
    assert step_of(site) == STEPS
    log_text = (site.bed.run_dir(0, RUN) / "logs/rank0.log").read_text()
    assert f"resuming from step {stopped_at} of {STEPS}" in log_text
    until(lambda: "Start again at" in action(browser) and "done" in action(browser), 30, "the collected result")

    press(browser, "Deploy")
    until(lambda: "Deploy as" in action(browser) and "in progress" not in action(browser), 300, "the deployment")
    deployed = f"deployed {RUN}:latest (merged, f16)"
    assert f"node1: {deployed}" in action(browser) and f"node2: {deployed}" in action(browser), action(browser)
    assert all(f"{RUN}:latest" in client.tags() for client in ollamas)
    site.open(browser, "/models")
    until(lambda: "node1, node2" in body(browser).partition("Models on the hosts")[2], 30, "the models of the hosts")
    assert [line for line in console_errors(browser) if "Content Security Policy" in line] == []
    for name, path in {"actions": f"/runs/{RUN}", "models": "/models", "gpu": "/"}.items():
        site.open(browser, path)
        # In one script: an update of the page may replace the elements between two commands of the browser's driver.
        browser.execute_script("document.querySelectorAll('#run-action summary').forEach((item) => item.click())")
        take_pictures(browser, name, tmp_path)
