"""Queued runs on three lab hosts: leases, preemption, crashes, a reboot of the queue host and a lost host."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from lab_hosts import NEEDS_LAB, Lab
from queued_runs import LEFT, SHARED, QueueLab
from testbed import faults

pytestmark = [*NEEDS_LAB, pytest.mark.long]

# s until slurmctld has saved that a job has started. If it is killed before, it starts the job again:
# test_a_crash_of_slurmctld_that_forgets_a_start.
SAVED = 8.0
KILL_WAIT = 30.0  # s after which Slurm kills a lease step that it has asked to end
JOB_STATE = "/var/lib/slurm/slurmctld/job_state"
RESTORE = f"systemctl stop slurmctld && cp -p /root/job_state {JOB_STATE} && systemctl start slurmctld"


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QueueLab]:
    """Three hosts with the queue and two stand-in GPUs each."""
    name, folder = f"leases-{os.getpid()}", tmp_path_factory.mktemp("leases")
    try:
        yield QueueLab.start(name, folder, dict.fromkeys(("node1", "node2", "node3"), 2))
    finally:
        Lab(name).down()


def test_a_crash_of_slurmctld_that_forgets_a_start(queue: QueueLab) -> None:
    """The job restarts after the end of the ranks of a start that slurmctld has lost."""
    lab, (head, host) = queue.lab, queue.lab.hosts[:2]
    lab.inside(head, "scontrol update NodeName=node2 State=DRAIN Reason=test")
    run = queue.add("forgotten-start", 400, gpus=1, hosts=["node2"], counting=True)
    time.sleep(SAVED)
    assert run.state()["attempts"] == []
    lab.inside(head, f"cp -p {JOB_STATE} /root/job_state; scontrol update NodeName=node2 State=RESUME")
    run.wait_step(20, 100)
    lab.inside(head, RESTORE)
    run.wait_phase("finished", 300)
    assert [(each["order"], each["restart"]) for each in run.state()["attempts"]] == [(75, 0), (10, 1)], run.log()
    assert run.result(host)["loss_last"] == sum(range(401)), "steps were lost or repeated"
    assert lab.inside(host, f"cat {SHARED}/overlaps 2>/dev/null || :") == lab.inside(host, LEFT) == ""


def test_preempted_run_resumes_on_another_host(queue: QueueLab) -> None:
    straight = queue.add("straight", 60, hosts=["node1"], cores=1)
    low = queue.add("low", 60, priority="low", hosts=["node2", "node3"], cores=2)
    first = low.wait_step(3, 300)
    # It has its host for longer than Slurm waits before it starts a requeued job.
    critical = queue.add("critical", 1200, priority="critical", hosts=[first.name], cores=2, counting=True)
    submitted = time.time()
    critical.wait(lambda state: bool(state["attempts"]), "running", 60)
    began, ended = critical.state()["attempts"][0]["begin"], low.state()["attempts"][0]["end"]
    print(f"critical has its host {began - submitted:.1f} s after it was added")
    assert began - submitted < KILL_WAIT, "the ranks were not asked for a checkpoint, but killed"
    low.wait_phase("finished", 400)
    attempts = low.state()["attempts"]
    assert len(attempts) == 2 and attempts[0]["order"] == 75 and ended is not None
    assert list(attempts[0]["hosts"]) == [first.name] and list(attempts[1]["hosts"]) != [first.name]
    assert "copied the checkpoint step-" in low.log()
    straight.wait_phase("finished", 300)
    critical.wait_phase("finished", 300)
    results = [run.result(run.on()[0]) for run in (straight, low)]
    assert results[1]["loss_last"] == pytest.approx(results[0]["loss_last"], abs=1e-6)


def test_run_of_a_lost_host_continues_elsewhere(queue: QueueLab) -> None:
    lab = queue.lab
    run = queue.add("lost", 1200, hosts=["node2", "node3"], cores=2, counting=True)
    host = run.wait_step(6, 300)
    lab.wait(lambda: "step-" in lab.inside(run.head, f"ls {run.folder}/checkpoint 2>/dev/null || :"), "no copy", 60)
    began = time.time()
    faults.inject(lab, host, "crash")
    try:
        run.wait(lambda state: len(state["attempts"]) == 2 and state["phase"] == "running", "elsewhere", 150)
        print(f"the run has another host {time.time() - began:.1f} s after the loss of the first one")
        run.wait_phase("finished", 400)
    finally:
        faults.undo(lab, host, "crash")
    assert run.result(run.on()[0])["loss_last"] == sum(range(1201)) and run.on()[0] != host
    assert "copied the checkpoint step-" in run.log()


@contextmanager
def remembered(lab: Lab) -> Iterator[str]:
    """Keep the state of slurmctld from before the release of the job that is submitted meanwhile; yield the command that restores it.

    The command does what SIGKILL does in the first seconds after the release: slurmctld saves its state every 6 s.
    """
    head, program = lab.hosts[0], "/usr/local/bin/scontrol"
    slow = '#!/bin/sh\n[ "$1" != release ] || { touch /tmp/submitted; sleep 10; }\nexec /usr/bin/scontrol "$@"'
    keep = f"until [ -e /tmp/submitted ]; do sleep 0.2; done; sleep 8; cp -p {JOB_STATE} /root/job_state"
    lab.inside(head, f"rm -f /tmp/submitted; cat >{program} <<'_END_'\n{slow}\n_END_\nchmod 755 {program}")
    lab.inside(head, f"nohup sh -c '{keep}' >/dev/null 2>&1 &")
    try:
        yield RESTORE
    finally:
        lab.inside(head, f"rm {program}")


def test_a_crash_of_slurmctld_that_forgets_jobs_and_their_release(queue: QueueLab) -> None:
    """Once after the end of a run, when the job of a later run is lost, too; and once while the run has its host."""
    lab, head = queue.lab, queue.lab.hosts[0]
    with remembered(lab) as forget:
        ended = queue.add("forgotten", 20, gpus=1, counting=True)
    ended.wait_phase("finished")
    lost = queue.add("lost-job", 20, gpus=1, counting=True)
    lost.wait_phase("finished")
    lab.inside(head, forget)
    states = "squeue --noheader --states=all --format='%j %T'"
    lab.wait(lambda: "forgotten COMPLETED" in lab.inside(head, states), "the job of a finished run is held", 60)
    assert ended.state()["phase"] == "finished"

    with remembered(lab) as forget:
        live = queue.add("live", 600, gpus=1, counting=True)
    assert live.job == lost.job, "Slurm gives the number to another job"
    live.wait_step(50)
    lab.inside(head, forget)
    live.wait_phase("finished", 300)
    assert [attempt["order"] for attempt in live.state()["attempts"]][-1] == 10
    assert live.result(live.on()[0])["loss_last"] == sum(range(601)), live.log()
    assert lost.state()["phase"] == "finished" and "it ends again" not in lost.log()
    lab.wait(lambda: "live COMPLETED" in lab.inside(head, states), "the job does not end", 60)
    assert lab.inside(head, LEFT) == ""
