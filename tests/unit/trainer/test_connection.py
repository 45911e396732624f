"""Programs of the trainer that answer over a connection."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", [("trainer", "merge"), ("trainer", "evaluate"), ("trainer.gguf.export",)], ids="-".join
)
def test_a_program_ends_when_nobody_reads_its_answer(module: tuple[str, ...]) -> None:
    """It waits for its request meanwhile, which stands for its work."""
    reader, writer = os.pipe()
    program = subprocess.Popen([sys.executable, "-m", *module], stdin=subprocess.PIPE, stdout=writer)
    os.close(writer)
    os.close(reader)
    try:
        assert program.wait(120) == -signal.SIGKILL
    finally:
        program.kill()
        assert program.stdin
        program.stdin.close()
        program.wait()
