"""A dashboard in a process of its own, as tests and benchmarks use it, and checks of its pages in a browser."""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from browser import screenshot, set_size
from run_hosts import TOP, Bed, until
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from trainyard.run.launch.start_ranks import start_ranks
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.host_relay import make_transfer_key
from trainyard.wire.openssh import LocalTransport

AXE = TOP / "tests/support/axe/axe.min.js"
SCRIPT = "<script>window.executed=1</script><img src=x onerror=window.executed=1>"
HEADING = "return document.querySelector('h1')?.textContent"
PROGRAM = [sys.executable, "-m", "trainyard.cli"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TOP), "HF_HUB_OFFLINE": "1", "ANSIBLE_NOCOLOR": "1"}
# Width in CSS pixels, and whether the user prefers dark colours.
SIZES = ((1440, False), (1440, True), (390, False), (390, True))


@dataclass
class Dashboard:
    """A dashboard on 127.0.0.1 with a token."""

    process: subprocess.Popen[str]
    port: int
    token: str
    opened: set[str] = field(default_factory=set, kw_only=True)

    def url(self, path: str = "/") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def ask(self, method: str, path: str, body: str = "", **headers: str) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(
                method, path, body or None, {name.replace("_", "-"): value for name, value in headers.items()}
            )
            reply = connection.getresponse()
            return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read().decode()

    def session(self) -> str:
        """Log in; return the cookie."""
        return self.ask("GET", f"/login?token={self.token}")[1]["set-cookie"].partition(";")[0]

    def open(self, driver: WebDriver, path: str) -> None:
        if driver.session_id not in self.opened:
            driver.get(self.url(f"/login?token={self.token}"))
            self.opened.add(driver.session_id or "")
        driver.get(self.url(path))
        until(lambda: shown_text(driver, "#live-state") == "live", 20, "the live connection")


def serve(inventory: Path, path: str = "") -> tuple[subprocess.Popen[str], int, str]:
    """Start a dashboard; return its process, port and token. `path` precedes PATH."""
    words = [*PROGRAM, "dashboard", "--dashboard-port=0", "-i", str(inventory)]
    process = subprocess.Popen(words, cwd=TOP, env=with_programs(path), stdout=subprocess.PIPE, text=True)
    assert process.stdout
    found = re.search(r"http://127\.0\.0\.1:(\d+)/login\?token=(\S+)", process.stdout.readline())
    assert found, "the dashboard printed no URL"
    return process, int(found[1]), found[2]


def certificate_file(path: Path) -> Path:
    """Write a certificate and its key into one PEM file; return its path."""
    path.touch(0o600)
    path.write_text("".join(make_transfer_key()))
    return path


def end(*processes: subprocess.Popen[Any]) -> None:
    """End processes, by force if they take long."""
    for process in processes:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        process.kill()


def ended_run(bed: Bed, name: str, started: float) -> None:
    """Write the folder of a run of one rank that has finished after 60 s."""
    folder = bed.run_dir(0, name)
    (folder / "state").mkdir(parents=True)
    node = {"run": name, "node_rank": 0, "attempt": 1, "pid": 1, "started": started, "ended": started + 60}
    node |= {"oom": False, "status": "finished", "exit_code": 0, "failures": [], "ranks": [0], "hosts": ["node1"]}
    node["backend"] = "process"
    rank = {"rank": 0, "pid": 1, "status": "finished", "time": started + 60, "step": 40, "steps": 40, "loss": 5.3}
    (folder / "state/node.json").write_text(json.dumps(node))
    (folder / "state/rank0.json").write_text(json.dumps(rank))


def start_training(
    bed: Bed, inventory: Path, run: str, steps: int, *more: str, dataset: str = "data.jsonl", path: str = ""
) -> subprocess.Popen[bytes]:
    """Start `trainyard train` of the model tiny in the folder of the bed, to which the path of the dataset is relative; write the dataset.

    Its output is in train.log there. `path` precedes PATH.
    """
    rows = [{"prompt": f"What follows {n}?", "completion": f"After {n} comes {n + 1}."} for n in range(200)]
    (bed.folder / dataset).write_text("\n".join(map(json.dumps, rows)))
    words = ["--model=tiny", f"--dataset={dataset}", f"--run={run}", "--epochs=100", f"--max-steps={steps}"]
    words += ["--seq-length=64", "--total-batch-size=4", "--loggers=none", *more]
    with (bed.folder / "train.log").open("wb") as log:
        command = [*PROGRAM, "train", "-i", str(inventory), *words]
        environment = with_programs(path)
        return subprocess.Popen(command, cwd=bed.folder, env=environment, stdout=log, stderr=subprocess.STDOUT)


def with_programs(folder: str) -> dict[str, str]:
    """Return the environment with the programs of a folder first."""
    return ENVIRONMENT | ({"PATH": f"{folder}:{ENVIRONMENT['PATH']}"} if folder else {})


def start_fake_ranks(bed: Bed, run: str, environment: str = "", **changes: Any) -> None:
    """Start a run of fake ranks on two hosts: the files of a run without torch. `changes` are fields of the plan's entries."""
    bed.make_run(2, run, environment)
    plan = [replace(entry, **changes) for entry in bed.plan(2, 100_000, 0.2, run)]
    host = lambda name: Host(name, "127.0.0.1", str(bed.folder / name), sys.executable)  # noqa: E731
    start_ranks(plan, lambda name: HostConnection(host(name), LocalTransport()), lambda line: None)


def press(driver: WebDriver, button: str) -> None:
    """Press a button of the page in one step, because an update may replace it between two."""
    find = "[...document.querySelectorAll('main button')].find((one) => one.textContent === arguments[0])"
    until(lambda: driver.execute_script(f"const one = {find}; one?.click(); return Boolean(one)", button), 30, button)


def press_keys(driver: WebDriver, *keys: str) -> None:
    """Press keys, wherever the focus is."""
    ActionChains(driver).send_keys(*keys).perform()


def tab_to(driver: WebDriver, id: str) -> None:
    """Move the focus to an element with the tabulator key alone."""
    for _ in range(200):
        if driver.execute_script("return document.activeElement.id") == id:
            return
        press_keys(driver, Keys.TAB)
    raise AssertionError(f"the keyboard does not reach #{id}")


def shown_text(driver: WebDriver, selector: str) -> str:
    """Return the visible text of an element; empty without it. An update or the next page may replace the element while it is read."""
    while True:
        with contextlib.suppress(StaleElementReferenceException):
            found = driver.find_elements(By.CSS_SELECTOR, selector)
            return found[0].text if found else ""


def body(driver: WebDriver) -> str:
    """Return the visible text of the page."""
    return shown_text(driver, "main")


def check_accessible(driver: WebDriver, name: str) -> None:
    """Fail if axe-core finds a serious fault in the page, or if the page is wider than the browser."""
    driver.execute_script(AXE.read_text())
    driver.set_script_timeout(120)
    found = driver.execute_async_script("axe.run().then((one) => arguments[0](one.violations))")
    serious = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
    assert serious == [], name
    wide = driver.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"{name} is {wide} px too wide"


def take_pictures(driver: WebDriver, name: str, own: Path, check: bool = True) -> None:
    """Write pictures of the page, and of its accessibility in light and dark; to TRAINYARD_SCREENSHOTS if that is set, or to `own`."""
    folder = Path(os.environ.get("TRAINYARD_SCREENSHOTS") or own)
    for width, dark in SIZES:
        set_size(driver, width, dark=dark)
        if check and (width > 390) != dark:  # colours and widths are independent of each other
            check_accessible(driver, f"{name} at {width} px")
        screenshot(driver, folder / f"{name}-{width}{'-dark' if dark else ''}.png")
    set_size(driver, 1440)
