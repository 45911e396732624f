"""Questions to real servers of Ollama from the dashboard, in headless Chromium, with the keyboard alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import real_ollama
from browser import browser, console_errors
from dashboard_site import Dashboard, body, end, press_keys, serve, shown_text, tab_to, take_pictures, write_inventory
from run_hosts import Bed, free_port, until
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.keys import Keys

__all__ = ["browser"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not real_ollama.weights(), reason="needs an ollama on PATH, and its small model"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """A dashboard of two local hosts, of which the first has an Ollama with two models."""
    bed = Bed(tmp_path_factory.mktemp("try"))
    place = f"127.0.0.1:{free_port()}"
    with real_ollama.serve([place], bed.folder) as [client]:
        for name in ("one", "two"):
            real_ollama.create(client, name)
        inventory = write_inventory(bed, {"node1": {"ollama_port": int(place.rpartition(":")[2])}, "node2": {}})
        process, port, token = serve(inventory)
        try:
            yield Dashboard(process, port, token)
        finally:
            end(process)
            bed.clean()


def test_two_models_are_asked_side_by_side(site: Dashboard, browser: WebDriver, tmp_path: Path) -> None:
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
    assert "stopped" in body(browser) and console_errors(browser) == []
