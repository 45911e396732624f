"""Playbooks with -vvv end: no thread of a task outlives it, because it could hold the lock of Ansible's output queue."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from run_hosts import TOP, Bed, bed

__all__ = ["bed"]

LIMIT = 60.0  # s; each play takes less than ten

ACTION = """
import time
from ansible.utils.display import Display
from trainyard.ansible_adapter import ClusterAction
from trainyard.wire.connection import FanOut


def chatter():
    deadline = time.monotonic() + {seconds}
    while time.monotonic() < deadline:
        Display().vvv("x" * 1000)
    return {{}}


class ActionModule(ClusterAction):
    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        FanOut({{str(number): chatter for number in range(3)}})
        return {{"changed": False}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "times"), [(1.0, 2), (3600.0, 3)], ids=["late", "endless"])
def test_a_request_that_writes_after_its_task_does_not_block(tmp_path: Path, seconds: float, times: int) -> None:
    for folder in ("action", "library"):
        (tmp_path / folder).mkdir()
    (tmp_path / "action/chatter.py").write_text(ACTION.format(seconds=seconds))
    (tmp_path / "library/chatter.py").write_text("")
    tasks = [{"name": "Chatter", "chatter": {}}, {"name": "After", "ansible.builtin.debug": {"msg": "the end"}}]
    (tmp_path / "play.yml").write_text(
        yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": tasks * times}])
    )
    command = [Path(sys.executable).with_name("ansible-playbook"), "-vvv", "-i", "a,", tmp_path / "play.yml"]
    environment = os.environ | {
        "ANSIBLE_CONFIG": str(TOP / "ansible.cfg"),
        "ANSIBLE_ACTION_PLUGINS": str(tmp_path / "action"),
        "ANSIBLE_LIBRARY": str(tmp_path / "library"),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0 and done.stdout.count("the end") == times, done.stdout[-2000:]


@pytest.mark.slow
def test_a_run_with_verbose_output_ends(bed: Bed) -> None:
    bed.make_run(2)
    play = bed.ranks(bed.plan(2, steps=5, pause=0.1), "-vvv")
    assert play.wait(LIMIT) == 0, bed.output_text()
    assert "EXEC" in bed.output_text() and "step 5/5" in bed.output_text()
    assert not bed.live_processes()
