"""Take the picture of the dashboard for the README: ``draw_dashboard.py docs/dashboard.png``.

It trains the model `tiny` on this machine as two hosts, in a temporary folder, and shows the page of the run in Chromium.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from browser import screenshot, set_size, start_browser

TOP = Path(__file__).resolve().parents[1]
RUN = "tiny-demo"
STEP = 34  # of 40; the picture is taken after it
LIMIT = 600.0  # s


def main(target: Path) -> None:
    """Train, take the picture, and stop what was started."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inventory = write_inventory(folder)
        words = [sys.executable, "-m", "trainyard.cli"]
        options = {"cwd": TOP, "env": {**os.environ, "PYTHONPATH": str(TOP), "HF_HUB_OFFLINE": "1"}}
        train = [
            *words,
            "train",
            "-i",
            inventory,
            "--model=tiny",
            f"--run={RUN}",
            "--eval-interval=5",
            "--checkpoint-interval=10",
        ]
        training = subprocess.Popen(train, **options, stdout=subprocess.DEVNULL)
        serve = [*words, "dashboard", "--dashboard-port=0", "-i", inventory]
        server = subprocess.Popen(serve, **options, stdout=subprocess.PIPE, text=True)
        try:
            url = re.search(r"http://\S+", server.stdout.readline())[0]
            wait_for_step(folder / "node1/runs" / RUN / "metrics.jsonl", training)
            take(url, target)
        finally:
            subprocess.run([*words, "stop", RUN, "--force", "-i", inventory], **options, check=False)
            for process in (server, training):
                process.terminate()
                process.wait(30)


def write_inventory(folder: Path) -> str:
    hosts = {f"node{number}": {"cluster_data_dir": str(folder / f"node{number}")} for number in (1, 2)}
    variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "cluster_managed": False}
    variables |= {"cluster_python": sys.executable, "cluster_address": "127.0.0.1", "cluster_backend": "process"}
    path = folder / "inventory.yml"
    path.write_text(yaml.safe_dump({"cluster": {"hosts": hosts, "vars": variables}}), encoding="utf-8")
    return str(path)


def wait_for_step(metrics: Path, training: subprocess.Popen) -> None:
    deadline = time.monotonic() + LIMIT
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < STEP:
        if training.poll() is not None or time.monotonic() > deadline:
            sys.exit("error: the run did not reach the step of the picture: see the lines above")
        time.sleep(0.5)


def take(url: str, target: Path) -> None:
    driver = start_browser()
    try:
        set_size(driver, 1280, 1120)
        driver.get(url)
        driver.get(url.partition("/login")[0] + f"/runs/{RUN}")
        time.sleep(3)  # the browser draws the curves
        screenshot(driver, target, whole=False)
    finally:
        driver.quit()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
