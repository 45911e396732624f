"""Programs of the trainer that answer over a connection."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

# Descriptor 1 is another one before the thread starts, as with the export to Ollama.
REPLACED = """
import os, sys, threading
from trainer.common.lost_connection import end_with_connection
start = threading.Thread.start
threading.Thread.start = lambda thread: (os.dup2(2, 1), start(thread))
end_with_connection()
sys.stdin.read()
"""
PROGRAMS = {
    "merge": ("-m", "trainer", "merge"),
    "evaluate": ("-m", "trainer", "evaluate"),
    "export": ("-m", "trainer.launch.gguf_export"),
    "replaced": ("-c", REPLACED),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_when_nobody_reads_its_answer(name: str) -> None:
    """It waits for its request meanwhile, which stands for its work."""
    reader, writer = os.pipe()
    program = subprocess.Popen([sys.executable, *PROGRAMS[name]], stdin=subprocess.PIPE, stdout=writer)
    os.close(writer)
    os.close(reader)
    try:
        assert program.wait(120) == -signal.SIGKILL
    finally:
        program.kill()
        assert program.stdin
        program.stdin.close()
        program.wait()
