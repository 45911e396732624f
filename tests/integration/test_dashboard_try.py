"""Questions to a real Ollama, and a run, from the dashboard in headless Chromium, with the keyboard alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import real_ollama
from browser import browser, console_errors
from dashboard_site import HEADING, Dashboard, body, end, press_keys, serve, shown_text, tab_to, take_pictures
from run_hosts import TOP, Bed, free_port, until, write_inventory
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

__all__ = ["browser"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not real_ollama.weights(), reason="needs an ollama on PATH, and its small model"),
]

RUN = f"form-{os.getpid()}"


@dataclass
class Site(Dashboard):
    """A dashboard, and the folders of its hosts."""

    bed: Bed


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A dashboard of two local hosts, of which the first has an Ollama with two models."""
    bed = Bed(tmp_path_factory.mktemp("try"))
    place = f"127.0.0.1:{free_port()}"
    with real_ollama.serve([place], bed.folder) as [client]:
        for name in ("one", "two"):
            real_ollama.create(client, name)
        inventory = write_inventory(bed.folder, {"node1": {"ollama_port": int(place.rpartition(":")[2])}, "node2": {}})
        process, port, token = serve(inventory)
        try:
            yield Site(process, port, token, bed)
        finally:
            end(process)
            bed.clean()
            (TOP / f".trainyard/starts/{RUN}.json").unlink(missing_ok=True)


def test_two_models_are_asked_side_by_side(site: Site, browser: WebDriver, tmp_path: Path) -> None:
    site.open(browser, "/models")
    until(lambda: "one:latest" in shown_text(browser, "#ask-models"), 30, "the models")
    tab_to(browser, "ask-model-1")
    press_keys(browser, "one")
    tab_to(browser, "ask-model-2")
    press_keys(browser, "two")
    tab_to(browser, "ask-question")
    press_keys(browser, "What is <b>Ansible</b>?", Keys.TAB, Keys.ENTER)
    lengths: list[int] = []

    def done() -> bool:
        texts = browser.execute_script(
            "return [...document.querySelectorAll('#ask-answers .text')].map(t => t.textContent.length)"
        )
        lengths.append(sum(texts))
        return shown_text(browser, "#ask-answers").count("node1: ") == 2

    until(done, 120, "both answers")
    assert len({*lengths}) > 3, "it arrives in parts"
    found = shown_text(browser, "#ask-answers")
    assert {"one:latest", "two:latest"} <= set(found.split()), found
    # The weights are random: the server may end an answer that repeats itself.
    assert found.count(" tokens, ") + found.count("the answer is incomplete") == 2, found
    one, two = browser.execute_script(
        "return [...document.querySelectorAll('#ask-answers .text')].map(t => t.textContent)"
    )
    assert one == two and len(one) > 20, "both names are one model, which is asked without sampling"
    take_pictures(browser, "ask", tmp_path)
    tab_to(browser, "ask-question")
    press_keys(browser, " Again.", Keys.TAB, Keys.ENTER, Keys.TAB, Keys.ENTER)  # Ask, then Stop
    until(lambda: shown_text(browser, "#ask-answers").count("stopped") == 2, 20, "the end")
    assert console_errors(browser) == []


@pytest.mark.long
def test_a_run_is_planned_and_started(site: Site, browser: WebDriver, tmp_path: Path) -> None:
    site.open(browser, "/runs")
    browser.find_element(By.LINK_TEXT, "Start a run").send_keys(Keys.ENTER)
    tab_to(browser, "field-run")
    press_keys(browser, "../" + RUN, Keys.ENTER)
    until(lambda: "run: expected letters, digits" in body(browser), 20, "the error")
    take_pictures(browser, "start-refused", tmp_path)
    for field, text in {"run": RUN, "dataset": "observatory", "max_steps": "3", "total_batch_size": "4"}.items():
        tab_to(browser, f"field-{field}")
        if field == "run":
            press_keys(browser, Keys.HOME, Keys.DELETE * 3)
        else:
            press_keys(browser, text)
    press_keys(browser, Keys.ENTER)
    draft = lambda: shown_text(browser, "#start-draft")  # noqa: E731
    until(lambda: f"Start {RUN}" in draft(), 120, "the plan")
    assert "world size 2, rendezvous 127.0.0.1:" in draft() and "data: " in draft(), draft()
    assert not any(site.bed.run_dir(host, RUN).exists() for host in (0, 1)), "the plan starts nothing"
    take_pictures(browser, "start-planned", tmp_path)
    tab_to(browser, "start-run")
    press_keys(browser, Keys.ENTER)
    until(lambda: f"The page of {RUN}" in draft(), 120, "the run")
    take_pictures(browser, "start-started", tmp_path)
    tab_to(browser, "run-page")
    press_keys(browser, Keys.ENTER)
    until(lambda: "finished" in (browser.execute_script(HEADING) or ""), 240, "the run's end")
    until(lambda: "done" in shown_text(browser, "#run-action"), 60, "the collected result")
    spec = json.loads((TOP / f".trainyard/starts/{RUN}.json").read_text())["spec"]
    assert (spec["max_steps"], spec["dataset"], site.bed.state(0, RUN)["step"]) == (3, "observatory", 3)
    assert [line for line in console_errors(browser) if "status of 400" not in line] == []
