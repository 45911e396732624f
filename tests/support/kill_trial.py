"""Random kills of the processes of a run on a lab host, which has its own table of processes: nothing of the run may remain.

A trial starts a run of `fake_rank.py` over SSH, in a systemd unit or as a process, kills one process at a random moment of a
verb or of the run, and then requires: the run trains, or has ended, within `LIMIT`; a stop leaves no process that was not
there before the trial; and the next start works. It needs no torch.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lab_hosts import Host, Lab

RUN_DIR = "/home/tester/trainyard/runs/r"
LIMIT = 30.0  # s for a state to be reached on a loaded machine
VICTIMS = ("rank", "torchrun", "supervisor", "verb", "session", "client")
# Of the login itself. Everything else that a host runs for its user must be gone after a stop.
LOGIN = ("systemd", "(sd-pam)", "sshd", "sshd-session", "bash", "dbus-daemon")
# The tree of a run: the supervisor is above torchrun, which is above the rank.
PATTERNS = {
    "rank": "[f]ake_rank.py",
    "supervisor": "[t]rainer.supervise run",
    "verb": "[t]rainer.supervise (start|stop|status)",
    "session": "[s]shd.*tester",
}


@dataclass
class Trials:
    """Trials on one host, drawn from a seed."""

    lab: Lab
    host: Host
    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.before = self.processes()

    # The host

    def verb(self, verb: str, **request: Any) -> subprocess.Popen[str]:
        """Send a request to the host over SSH, as a controller does, and return its SSH client."""
        text = json.dumps({"run_dir": RUN_DIR} | request)
        code = f"PYTHONPATH={RUN_DIR}/trainer.zip {sys.executable} -P -m trainer.supervise {verb}"
        client = subprocess.Popen(
            [*map(str, self.lab.ssh(self.host)), code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert client.stdin
        client.stdin.write(text)
        client.stdin.close()
        client.stdin = None
        return client

    def ask(self, verb: str, **request: Any) -> dict[str, Any]:
        """Return the answer to a request; the verb is not killed."""
        out, err = self.verb(verb, **request).communicate(timeout=2 * LIMIT)
        assert out, f"{verb}: {err}"
        return json.loads(out)

    def start(self, backend: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "trainer.launch.torchrun", "100000", "0.05"]
        return self.verb("start", command=command, backend=backend)

    def processes(self) -> dict[str, str]:
        """Return {pid and start time: command line} of what runs for the login user, but the login itself."""
        # Of all users: `ps -u` fails where its user has none, as it does for any other reason.
        found = self.lab.inside(self.host, "ps -e -ww -o user=,pid=,lstart=,stat=,comm=,args=").splitlines()
        rows = [row for row in (line.split(maxsplit=9) for line in found) if row[0] == "tester"]
        return {f"{row[1]} {row[5]}": row[-1] for row in rows if row[7][0] not in "ZX" and row[8] not in LOGIN}

    def kill(self, victim: str, client: subprocess.Popen[str]) -> bool:
        """Kill one process with SIGKILL; return whether there was one."""
        if victim == "client":
            running = client.poll() is None
            client.kill()
            return running
        if victim == "torchrun":
            find = f"ps -o ppid= -p $(pgrep -f -d, '{PATTERNS['rank']}')"
        else:
            find = f"pgrep -f '{PATTERNS[victim]}'"
        return "killed" in self.lab.inside(
            self.host, f"p=$({find} | head -1) && [ $p -gt 1 ] && kill -9 $p && echo killed || :"
        )

    # One trial

    def settled(self) -> bool:
        """Return whether the run has ended, or its rank trains."""
        state = self.ask("status")
        if state["status"] in ("starting", "running"):
            return state["alive"] and any(rank.get("status") == "training" for rank in state["ranks"].values())
        return not state["alive"]

    def run(self, number: int) -> None:
        """Kill at a random moment. Raises AssertionError with the number of the trial, which depends on the seed alone."""
        backend, victim = self.draw.choice(["process", "systemd"]), self.draw.choice(VICTIMS)
        during, delay = self.draw.choice(["start", "run", "stop", "restart"]), self.draw.uniform(0.0, 1.2)
        label = f"seed {self.seed}, trial {number}: {victim} of a {backend} during {during} after {delay:.2f} s"
        began = time.monotonic()
        client = self.start(backend)
        if during != "start":
            out, err = client.communicate(timeout=LIMIT)
            assert '"pid"' in out, f"{label}: the next start: {out}{err}"
            self.until(self.settled, f"{label}: the first start")
            if during == "restart":
                self.kill("rank", client)
            client = self.verb("status", wait=5.0) if during == "run" else client
            client = self.verb("stop", grace=2.0) if during == "stop" else client
            client = self.start(backend) if during == "restart" else client
        time.sleep(delay)
        self.kills[victim] += self.kill(victim, client)
        client.communicate(timeout=LIMIT)
        self.until(self.settled, label)
        self.check_end(label)
        self.slowest = max(self.slowest, time.monotonic() - began)

    def check_end(self, label: str) -> None:
        """Stop the run; nothing of it remains."""
        answer = self.ask("stop", now=True)
        assert answer.get("status") not in (None, "starting", "running"), f"{label}: {answer}"
        self.until(lambda: not self.left(), f"{label}: the end of all processes", self.left)

    def left(self) -> dict[str, str]:
        return {key: args for key, args in self.processes().items() if key not in self.before}

    def until(self, true: Callable[[], bool], what: str, shown: Callable[[], Any] = lambda: "") -> None:
        deadline = time.monotonic() + LIMIT
        while not true():
            assert time.monotonic() < deadline, f"waited {LIMIT:.0f} s for {what}: {shown()} {self.ask('status')}"
            time.sleep(0.1)
