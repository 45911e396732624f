"""A playbook that does not end after Ctrl-C."""

from __future__ import annotations

import subprocess
import sys

# The program stands for an ansible-playbook that waits for a lock whose holder Ctrl-C has ended.
_ENDS = """
import signal, subprocess, sys, threading
from trainyard.cli import playbooks
playbooks._INTERRUPT_LIMIT = 0.2
program = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(60)"
process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
process.stdout.readline()
threading.Timer(0.1, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
print(playbooks._wait(process), threading.active_count())
"""


def test_a_playbook_that_does_not_end_after_ctrl_c_is_terminated() -> None:
    done = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.stderr) == ("(-15, True) 1\n", "")
