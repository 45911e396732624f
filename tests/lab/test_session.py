"""A run that restarts after faults of its hosts."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_trial import Trial, run_variables
from lab_hosts import NEEDS_LAB, Host, Lab, run_playbook
from run_hosts import questions

pytestmark = [*NEEDS_LAB, pytest.mark.slow]


@pytest.fixture
def trial(provisioned: Lab, hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    one = Trial(provisioned, provisioned.inventory, run_variables("faulty", questions(tmp_path, 600), 90))
    yield one
    one.clean()
    run_playbook("playbooks/stop.yml", one.inventory, {"run": one.variables["run"]})


def test_run_outlives_its_hosts_and_its_controller(trial: Trial, lab: Lab) -> None:
    """A rank fails, the head is disconnected, and the terminal of the controller closes; the result is that of an
    undisturbed run."""
    trial.start()
    trial.wait_line(r"step ([3-9]|\d\d)/", 0.0)
    first = trial.inject("kill", lab.hosts[1])
    assert "rank 1 on node2 was killed by SIGKILL" in first
    second = trial.inject("cut", lab.hosts[0])
    assert "node1 has not answered" in second
    assert trial.run_hosts() == lab.hosts[1:], "node2 is the head; node1 answers again and joins at the next start"
    trial.inject("kill", lab.hosts[2])
    assert trial.run_hosts() == lab.hosts, "node1 has joined again as the head"

    os.killpg(trial.process.pid, signal.SIGHUP)
    trial.process.wait(30)
    at = json.loads(trial.read(lab.hosts[0], "state/rank0.json"))
    assert at["status"] in ("training", "saving", "finished")
    trial.start()  # the same command monitors the run, or reports that it has ended
    assert trial.end() == 0, trial.output()
    assert "90 of 90 steps" in trial.output()
    assert not trial.leftovers()
    assert trial.wrong_samples() == []
    assert trial.metrics_steps() == list(range(1, 91))

    straight = Trial(lab, trial.inventory, trial.variables | {"run": "straight", "hosts": "node3"} | {"nodes_min": 0})
    straight.start()
    assert straight.end() == 0, straight.output()
    there = json.loads(straight.read(lab.hosts[2], "result.json"))
    assert trial.result()["loss_last"] == pytest.approx(there["loss_last"], abs=1e-3)


def test_the_end_of_a_run_leaves_no_process_on_a_host_that_returned_before_it(trial: Trial, lab: Lab) -> None:
    """Its rank waits for peers that ended meanwhile."""
    host = lab.hosts[1]
    trial.variables |= {"run": "ends", "max_steps": 100_000}
    trial.start()
    trial.wait_line(r"step ([3-9]|\d\d)/", 0.0)
    trial.inject("cut", host)
    assert trial.run_hosts() == [lab.hosts[0], lab.hosts[2]]
    assert f"{host.name}: " in trial.leftovers()
    lab.inside(lab.hosts[0], f"touch {trial.run_dir}/stop")  # stop.yml would stop all hosts
    assert trial.end() == 0, trial.output()
    assert not trial.leftovers()


@pytest.mark.long
def test_a_host_that_returns_takes_part_again_when_that_pays(trial: Trial, lab: Lab) -> None:
    trial.variables |= {"run": "returns", "max_steps": 100_000}
    trial.start()
    trial.wait_line(r"step ([3-9]|\d\d)/", 0.0)
    trial.inject("crash", lab.hosts[1])
    assert trial.run_hosts() == [lab.hosts[0], lab.hosts[2]]
    back, _ = trial.wait_line("node2 can take part again: the run stops at a checkpoint", time.time(), 240)
    again, _ = trial.wait_line("following returns: 3 ranks on node1, node2, node3", back)
    trial.wait_line(r"step \d+/", again)
    assert trial.run_hosts() == lab.hosts
    assert "failed: " not in "\n".join(line for at, line in trial.lines if at > back)


def test_elastic_run_continues_and_ends(trial: Trial, lab: Lab) -> None:
    """torchrun restarts its ranks when one dies, and the playbook ends although a launcher may wait for its peers."""
    trial.variables |= {"run": "elastic", "elastic": True, "retries": 3, "nodes_min": 0, "max_steps": 40}
    trial.variables |= {"hosts": "node1,node2"}
    trial.start()
    trial.wait_line(r"step ([5-9]|\d\d)/", 0.0)
    state = json.loads(trial.read(lab.hosts[1], "state/rank1.json") or trial.read(lab.hosts[1], "state/rank0.json"))
    lab.inside(lab.hosts[1], f"kill -9 {state['pid']}")
    assert trial.end(300) == 0, trial.output()
    assert "40 of 40 steps" in trial.output() and "failed: " not in trial.output()
    # Restarted ranks do not use the previous addresses of their peers.
    logs = [trial.read(host, f"logs/rank{rank}.log") for host in lab.hosts[:2] for rank in (0, 1)]
    assert any(logs) and not any(b"connectFullMesh" in log for log in logs), logs
    assert trial.wrong_samples() == []
    assert not trial.leftovers()


@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_pipeline_continues_without_a_host(place: int, trial: Trial, lab: Lab) -> None:
    trial.variables |= {"run": "lost", "max_steps": 100_000, "strategy": "pipeline", "batch_size": 1}
    trial.start()
    trial.wait_line(r"step \d+/", 0.0)
    message = trial.inject("cut", lab.hosts[place])
    assert f"{lab.hosts[place].name} has not answered" in message
    assert trial.run_hosts() == [host for host in lab.hosts if host != lab.hosts[place]]
