"""Queued runs on three lab hosts: leases, preemption, crashes, a reboot of the queue host and a lost host."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fault_trial import questions
from lab_hosts import NEEDS_LAB, Host, Lab
from queue_events import EventTrial
from queued_runs import LEFT, QueuedRun, QueueLab, tiny_spec
from testbed import faults
from testbed.root import DATA_DIR

pytestmark = [*NEEDS_LAB, pytest.mark.long]

# s until slurmctld has saved that a job has started. If it is killed before, it starts the job again:
# test_a_crash_of_slurmctld_that_forgets_a_start.
SAVED = 8.0
KILL_WAIT = 30.0  # s after which Slurm kills a lease step that it has asked to end
JOB_STATE = "/var/lib/slurm/slurmctld/job_state"
RESTORE = f"systemctl stop slurmctld && cp -p /root/job_state {JOB_STATE} && systemctl start slurmctld"
RECEIVER = """import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print(told["run"], told["event"], flush=True)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", 8085), Handler).serve_forever()"""
SUMMING = Path(__file__).parents[1] / "support/summing_script.py"


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QueueLab]:
    """Three hosts with the queue and two stand-in GPUs each."""
    name, folder = f"leases-{os.getpid()}", tmp_path_factory.mktemp("leases")
    try:
        yield QueueLab.start(name, folder, dict.fromkeys(("node1", "node2", "node3"), 2))
    finally:
        Lab(name).down()


def node(lab: Lab, run: QueuedRun, host: Host, of: str = "node") -> dict[str, Any]:
    """Return the state of a run's supervisor on a host, or of one of its ranks; empty while the run starts."""
    return json.loads(lab.inside(host, f"cat {run.run_dir}/state/{of}.json 2>/dev/null || echo '{{}}'"))


def test_two_runs_share_a_host_and_survive_crashes(queue: QueueLab) -> None:
    """Different GPUs and cores; the driver, Slurm's daemons and a lease step are killed; the queue host reboots.

    The ranks count instead of training: see counting_rank.py.
    """
    lab = queue.lab
    head, host = lab.hosts[:2]
    one, two = (queue.add(name, 1800, gpus=1, hosts=["node2"], counting=True) for name in ("one", "two"))
    for run in (one, two):
        run.wait_step(10, 100)
    states = [node(lab, run, host) for run in (one, two)]
    assert sorted(states[0]["devices"] + states[1]["devices"]) == ["GPU-node2-0", "GPU-node2-1"]
    affinity = [lab.inside(host, f"grep Cpus_allowed_list /proc/{state['pid']}/status").split()[1] for state in states]
    assert sorted(affinity) == ["0", "1"]

    time.sleep(SAVED)
    lab.inside(head, f"kill -9 {' '.join(queue.pids(head, 'trainyard.queue.driver.*/one$'))} $(pidof slurmctld)")
    lab.inside(
        host, f"kill -9 $(pidof slurmd); kill -9 {' '.join(queue.pids(host, '^/usr/bin/python3.*lease_step two'))}"
    )
    two.wait(lambda state: len(state["attempts"]) == 2, "started again", 150)
    assert len(one.state()["attempts"]) == 1
    begun = two.state()["attempts"][1]["begin"]
    lab.wait(lambda: node(lab, two, host).get("started", 0) > begun, "the ranks outlive their lease", 60)
    lab.wait(
        lambda: node(lab, two, host, "rank0").get("time", 0) > node(lab, two, host)["started"],
        "the ranks do not start",
        60,
    )
    reached = two.step(host)
    lab.reboot(head)
    one.wait_phase("finished", 300)
    two.wait_phase("finished", 300)
    assert "monitors the run again" in one.log() and reached > 20 * SAVED / 2, "the run did not resume"
    for run in (one, two):
        assert run.result(host)["loss_last"] == sum(range(1801))
    assert [len(run.state()["attempts"]) for run in (one, two)] == [1, 2]
    assert lab.inside(host, LEFT) == ""


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
    assert lab.inside(host, f"cat {DATA_DIR}/store/cache/overlaps 2>/dev/null || :") == lab.inside(host, LEFT) == ""


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


def test_run_over_hosts_is_preempted_and_resumes(queue: QueueLab) -> None:
    """A critical job takes one of two hosts: the run returns to the queue, gets two hosts again, and ends as without."""
    lab = queue.lab
    trio = queue.add("trio", 12, nodes=3, cores=1, batch=6)
    trio.wait_phase("finished", 400)
    assert len(trio.on()) == 3 and all(trio.result(host)["world_size"] == 3 for host in trio.on())
    shown = lab.inside(lab.hosts[0], f"scontrol show job {trio.job}")
    assert "JobState=COMPLETED" in shown and "Restarts=0" in shown, "the steps of all hosts end together"
    straight = queue.add("straight-pair", 60, nodes=2, cores=1)
    straight.wait_phase("finished", 400)
    pair = queue.add("pair", 60, nodes=2, cores=1, priority="low")
    queue.take(pair.wait_step(3, 400))
    pair.wait_phase("finished", 400)
    attempts = pair.state()["attempts"]
    assert [attempt["order"] for attempt in attempts] == [75, 10], pair.log()
    assert [len(attempt["hosts"]) for attempt in attempts] == [2, 2]
    expected = straight.result(straight.on()[0])
    for result in map(pair.result, pair.on()):
        assert result["loss_last"] == pytest.approx(expected["loss_last"], abs=1e-6)
        assert (result["step"], result["samples"]) == (60, expected["samples"])
    for host in lab.hosts:
        assert lab.inside(host, LEFT) == ""


def test_shards_of_a_run_move_with_it(queue: QueueLab) -> None:
    """Every host has only its shards. One of the two hosts is taken, and the run continues with the third one."""
    fields = {"strategy": "fsdp", "lora_r": 0}
    straight, moved = (tiny_spec(run, questions(queue.folder), 30) | fields for run in ("whole", "shards"))
    one = {"options": {"run_env": {"OMP_NUM_THREADS": "1"}}, "nodes": 2, "cores": 1}
    expected = queue.add_run(straight, **one)
    expected.wait_phase("finished", 400)
    run = queue.add_run(moved, **one, priority="low")
    queue.take(run.wait_step(8, 400))
    run.wait_phase("finished", 400)
    attempts = run.state()["attempts"]
    assert [attempt["order"] for attempt in attempts] == [75, 10], run.log()
    assert set(attempts[0]["hosts"]) != set(attempts[1]["hosts"]) and "copied the checkpoint step-" in run.log()
    for result in map(run.result, run.on()):
        assert result["loss_last"] == pytest.approx(expected.result(expected.on()[0])["loss_last"], abs=1e-6)


def test_script_is_preempted_and_continues_elsewhere(queue: QueueLab) -> None:
    """The ranks of a script add up their steps, so a lost or repeated step changes the sum. Its checkpoint moves with
    it."""
    spec = {"run": "script", "script": str(SUMMING), "max_steps": 400, "checkpoint_interval": 100}
    run = queue.add_run(spec, cores=1, priority="low", hosts=["node2", "node3"])
    first = run.wait_step(10, 300)
    queue.take(first)
    run.wait_phase("finished", 400)
    assert [attempt["order"] for attempt in run.state()["attempts"]] == [75, 10] and run.on() != [first], run.log()
    assert "copied the checkpoint step-" in run.log()
    result = run.result(run.on()[0])
    assert result["total"] == sum(range(401)) and result["first"] >= 10
    assert result["script"].startswith("summing_script-")


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


def test_a_run_ends_at_its_time_limit_with_a_checkpoint(queue: QueueLab) -> None:
    lab = queue.lab
    run = queue.add("timed", 1_000_000, hosts=["node2"], cores=1, counting=True, time_limit=2)
    host = run.wait_step(6, 120)
    run.wait_phase("failed", 180)
    state = run.state()
    assert (state["exit"]["reason"], len(state["attempts"])) == ("its time limit", 1), run.log()
    assert "step-" in lab.inside(host, f"ls {DATA_DIR}/runs/timed/checkpoints")
    lab.wait(lambda: lab.inside(run.head, f"squeue -h -j {run.job} || :").strip() == "", "the job waits", 60)


def test_a_mistake_is_not_repeated_and_a_cancelled_run_ends(queue: QueueLab) -> None:
    """A server on the queue host is told of each end, and that the queue is empty."""
    lab, notify = queue.lab, {"notify": ["http://127.0.0.1:8085/"]}
    lab.inside(
        lab.hosts[0],
        f"cat >/tmp/receiver.py <<'_END_'\n{RECEIVER}\n_END_\nnohup python3 /tmp/receiver.py >/tmp/told 2>&1 & echo $! >/tmp/receiver.pid",
    )
    wrong = queue.add("wrong", 5, hosts=["node2"], options=notify | {"master_port": 22})
    long = queue.add("long", 100_000, hosts=["node1"], cores=1, counting=True, options=notify)
    wrong.wait_phase("failed", 120)
    assert "port 22 is in use" in wrong.state()["exit"]["reason"] and len(wrong.state()["attempts"]) == 1
    long.wait(lambda state: state["phase"] == "running", "running", 120)
    lab.inside(lab.hosts[0], f"scancel {long.job}")
    long.wait_phase("cancelled", 120)
    lab.wait(lambda: lab.inside(lab.hosts[0], LEFT) == "", "ranks are left", 60)
    told = lab.inside(lab.hosts[0], "cat /tmp/told; kill $(cat /tmp/receiver.pid)").splitlines()
    assert {"wrong started", "wrong failed", "long started", "long stopped", "long queue empty"} == set(told), told
    assert told[-1] == "long queue empty"


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


def test_runs_end_as_they_should_in_spite_of_random_events(queue: QueueLab) -> None:
    """Preemptions, SIGKILL of ranks, drivers, lease steps and Slurm's daemons, reboots: benchmarks/queued_runs.py has more of them."""
    trial = EventTrial(queue, seed=7)
    trial.inject(12)
    trial.wait()
    assert trial.problems() == []
