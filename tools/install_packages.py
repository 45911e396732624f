"""Run `pip install` with its arguments, and print every few seconds what pip does. Standard library only.

Usage: PYTHONPATH=. python tools/install_packages.py ARGUMENT...
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time

from trainer.common.formats import clock

PAUSE = 5.0  # s between two lines
REPEAT = 20.0  # s after which a line is printed although nothing has changed
_COLLECT = re.compile(r"\s*(?:Collecting|Requirement already satisfied:) ([A-Za-z0-9._-]+)")
_DOWNLOAD = re.compile(r"\s*(Downloading|Processing|Using cached) (?:\S*/)?([A-Za-z0-9._]+)-\S*( \([^)]*B\))?")
_INSTALL = re.compile(r"Installing collected packages: (.*)")


class Progress:
    """The current step of pip, from its output.

    Attributes:
        now: description of the current step.
        packages: those that pip has found so far.
    """

    def __init__(self) -> None:
        self.now = "resolving versions"
        self.packages: set[str] = set()

    def read(self, line: str) -> None:
        """Take one line of pip's output."""
        if match := _COLLECT.match(line):
            self.packages.add(match[1].lower())
            if not self.now.startswith(("downloading", "reading")):
                self.now = f"resolving versions, package {len(self.packages)}"
        elif match := _DOWNLOAD.match(line):
            verb = "downloading" if match[1] == "Downloading" else "reading"
            self.now = f"{verb} {match[2]}{match[3] or ''}, package {len(self.packages)}"
        elif match := _INSTALL.match(line):
            self.now = f"installing {len(match[1].split(','))} packages"


def install(arguments: list[str]) -> int:
    """Run pip, and return its exit code. Its warnings and errors go to stderr."""
    progress, began, printed, last = Progress(), time.monotonic(), 0.0, ""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace", env=environment) as pip:
        assert pip.stdout
        lines = pip.stdout
        reader = threading.Thread(target=lambda: [progress.read(line) for line in lines])
        reader.start()
        while reader.is_alive():
            reader.join(0.2)
            age, shown = time.monotonic() - began - printed, progress.now
            if age >= (PAUSE if shown != last else REPEAT):
                printed, last = time.monotonic() - began, shown
                print(f"  {clock(printed)}  {shown}", flush=True)
        reader.join()
    return pip.returncode


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:]))
