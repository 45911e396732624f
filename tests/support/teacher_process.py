"""A real teacher process on this machine, as a run with `teacher_host` starts it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from run_hosts import free_port, until

from trainer.distributed import TEACHER_ADDRESS, TEACHER_TOKEN
from trainer.spec import make_spec

TOP = Path(__file__).resolve().parents[2]
RANK = 7  # the number of the teacher's heartbeat and log


class TeacherProcess:
    """`environment`: what its ranks need; `process`: the teacher."""

    def __init__(self, folder: Path, fields: dict[str, Any], token: str | None = None) -> None:
        """`fields`: of the run spec."""
        self.folder, self.token = folder, token or secrets.token_hex(32)
        self.address = f"127.0.0.1:{free_port()}"
        self.environment = {TEACHER_ADDRESS: self.address, TEACHER_TOKEN: self.token}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spec.yml").write_text(make_spec(fields, "test").to_yaml())
        self.start()

    def start(self) -> None:
        """Start the process; it may be a restart."""
        command = [sys.executable, "-m", "trainer.launch.teacher_server", str(self.folder / "spec.yml")]
        self.process = subprocess.Popen(
            [*command, f"--run-dir={self.folder}", f"--rank={RANK}"],
            env=os.environ | {"PYTHONPATH": str(TOP)} | self.environment,
            stdin=subprocess.DEVNULL,
        )

    @property
    def state(self) -> dict[str, Any]:
        """Its heartbeat."""
        file = self.folder / f"state/rank{RANK}.json"
        return json.loads(file.read_text()) if file.exists() else {}

    @property
    def log(self) -> str:
        """Its output."""
        file = self.folder / f"logs/rank{RANK}.log"
        return file.read_text() if file.exists() else ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait_until_loaded(self) -> None:
        until(lambda: self.state.get("status") == "teaching", 120, "the teacher")


@contextlib.contextmanager
def teacher_process(folder: Path, fields: dict[str, Any]) -> Iterator[TeacherProcess]:
    """Run a teacher until the end of the context."""
    made = TeacherProcess(folder, fields)
    try:
        yield made
    finally:
        made.kill()
