"""Time to set up three stock hosts with torch and train on them, and the time of a second set-up.

    sudo make bench NAME=environment

Starts a lab of three stock hosts, runs site.yml (tags storage, nvidia, python) twice and one run of train.yml between, and prints
the duration of each step. Requires root on Debian or Ubuntu, and a package index that serves torch. Takes about ten minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from testbed.lab import Lab

TOP = Path(__file__).resolve().parents[1]
SITE = ("site.yml", "--tags", "storage,nvidia,python")
STEPS = {
    "first set-up": SITE,
    "train": ("train.yml", "-e", "model=tiny", "-e", "max_steps=4"),
    "second set-up": SITE,
}


def main() -> None:
    """Run every step once, and print its duration in seconds."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    lab = Lab(f"bench-{os.getpid()}")
    playbook = str(Path(sys.executable).with_name("ansible-playbook"))
    try:
        start = time.monotonic()
        lab.up(hosts=3, persistent=False)  # the hosts install their environments
        print(f"lab: {time.monotonic() - start:.0f} s", flush=True)
        for name, words in STEPS.items():
            start = time.monotonic()
            command = [playbook, "-i", str(lab.inventory), *words]
            done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
            print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        print(done.stdout[done.stdout.index("PLAY RECAP") :])
    finally:
        lab.down()


if __name__ == "__main__":
    main()
