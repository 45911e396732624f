"""A sample of the fuzzed command lines, given to the real program."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import SEED, arguments

TOP = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_twenty_hostile_command_lines(tmp_path: Path) -> None:
    codes = []
    for number in range(20):
        argv = arguments(random.Random(f"process:{SEED}:{number}"), tmp_path)
        done = subprocess.run(
            [sys.executable, "-m", "trainer", *argv],
            cwd=TOP, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert done.returncode in (0, 2) and "Traceback" not in done.stderr, (argv, done.stderr[-2000:])
        assert all(line.isprintable() for line in done.stderr.split("\n")), argv
        codes.append(done.returncode)
    assert {0, 2} == set(codes), "the sample has accepted and refused command lines"
