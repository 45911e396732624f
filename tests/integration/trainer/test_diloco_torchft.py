"""diloco_membership=torchft: replicas, each with its own torchrun, leave and rejoin while their peers continue."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from run_hosts import free_port
from test_replicas import LONG, PAIR, newest, result
from test_torchrun import assert_every_sample_once, sample_order, weights
from trainer_runs import TOP, Cluster, Here, lines, losses, until

from trainer.common.errors import UserError
from trainer.distributed.replica import SINGLE_REPLICA, Replica
from trainer.records.run_state import RunHistory
from trainer.supervise.link_free import link_free
from trainer.supervise.processes import run_processes

FIXED = LONG | {"strategy": "diloco", "local_steps": 5}
TORCHFT = FIXED | {"diloco_membership": "torchft"}


def test_replica_flags() -> None:
    assert Replica.parse(None, None, None) is SINGLE_REPLICA
    assert Replica.parse("1/3", "2", "10.0.0.1:29501") == Replica(1, 3, 2, "10.0.0.1:29501")
    for flags in (
        ("3/3", None, "a:1"),
        ("x", None, "a:1"),
        ("0/2", None, None),
        (None, None, "a:1"),
        ("0/2", "-", "a:1"),
    ):
        with pytest.raises(UserError, match=r"--(replica|lighthouse|first-rank): got "):
            Replica.parse(*flags)


def test_replica_flags_and_membership_require_each_other(here: Here) -> None:
    assert here(strategy="diloco", diloco_membership="torchft") != 0
    assert "set --replica 0/2 and --lighthouse HOST:PORT" in here.err
    assert here(replica="0/2", lighthouse="127.0.0.1:1") != 0
    assert "--replica requires strategy=diloco and diloco_membership=torchft" in here.err


def test_records_of_an_incomplete_round_are_invalid() -> None:
    history = RunHistory([{"start": "a", "step": 0, "head": ""}])
    history.add_sync(["a", "b"], 0, 5)
    history.add_sync(["a"], 5, 10)
    history.add_sync(["a", "c"], 10, 15)
    restarted = RunHistory([*history.starts, {"start": "d", "step": 15, "head": ""}])
    last_valid = {
        name: [step for step in range(1, 20) if restarted.is_valid({"start": name, "step": step})][-1] for name in "abc"
    }
    assert last_valid == {"a": 15, "b": 5, "c": 15}
    assert history.start == "a" and restarted.start == "d"


def run_two_replicas(cluster: Cluster, lighthouse: str, run: str = "r", **fields: Any) -> None:
    launchers = [cluster.start_replica(number, 2, lighthouse, run, **(TORCHFT | fields)) for number in (0, 1)]
    assert cluster.wait(launchers, 150) == [0, 0], cluster.logs(run)


def shared_files(run_dir: Path) -> dict[str, bytes]:
    """Return the files of the newest checkpoint that are equal on all hosts."""
    folder = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    return {name: (folder / name).read_bytes() for name in ("trained.safetensors", "outer.pt")}


@pytest.mark.slow
@pytest.mark.long
def test_curve_equals_fixed_membership_and_resumes(cluster: Cluster) -> None:
    pytest.importorskip("torchft", reason="the torchft extra is not installed")
    wanted = cluster.run(2, run="plain", **FIXED)
    lighthouse = cluster.lighthouse()
    launchers = [cluster.start_replica(number, 2, lighthouse, **TORCHFT) for number in (0, 1)]
    step = cluster.stop_between(launchers, 100)
    run_two_replicas(cluster, lighthouse)
    assert losses(cluster.run_dir(0)) == losses(cluster.run_dir(1)) == wanted, "bit-equal"
    assert_every_sample_once(cluster, PAIR)
    assert weights(cluster.run_dir(0)) == weights(cluster.run_dir(1)) == weights(cluster.run_dir(0, "plain"))
    assert result(cluster)["missed_samples"] == 0 and result(cluster)["world_size"] == 2

    # A host with an empty disk receives the state of its peer; here it is the head, the default source of the state.
    shutil.rmtree(cluster.run_dir(0, "lost"))
    run_two_replicas(cluster, lighthouse, "lost")
    assert f"checkpoint: step {step} was received from another replica" in cluster.logs("lost")
    assert losses(cluster.run_dir(0, "lost")) == losses(cluster.run_dir(1, "lost"))
    assert losses(cluster.run_dir(0, "lost"))[:step] == wanted[:step]
    assert shared_files(cluster.run_dir(0, "lost")) == shared_files(cluster.run_dir(1, "lost"))


class Supervised:
    """One host of a run, as the playbook starts it."""

    def __init__(self, cluster: Cluster, number: int, count: int, lighthouse: str, **fields: Any) -> None:
        self.run_dir = cluster.run_dir(number)
        self.run_dir.mkdir(parents=True)
        (self.run_dir / "logs").mkdir()
        environment = self.run_dir / "env"
        environment.write_text(f"GLOO_SOCKET_IFNAME=lo\nHF_HUB_OFFLINE=1\nOMP_NUM_THREADS=1\nPYTHONPATH={TOP}\n")
        environment.chmod(0o600)
        started = self.ask(
            "start",
            node_rank=number,
            ranks=[number],
            replica=number,
            restarts=3,
            backend="process",
            lighthouse=lighthouse if number == 0 else "",
            command=cluster.replica_command(number, count, lighthouse, **fields),
        )
        assert "error" not in started, started

    def ask(self, verb: str, **request: Any) -> dict[str, Any]:
        command = [sys.executable, "-m", "trainer.supervise", verb]
        question = json.dumps({"run_dir": str(self.run_dir), **request})
        done = subprocess.run(command, input=question, cwd=TOP, capture_output=True, text=True, check=False)
        return json.loads(done.stdout)

    def status(self) -> dict[str, Any]:
        return self.ask("status")

    def end(self) -> None:
        self.ask("stop", now=True)


@pytest.mark.slow
def test_a_lighthouse_that_cannot_listen_is_reported_and_ends_the_run(cluster: Cluster) -> None:
    pytest.importorskip("torchft", reason="the torchft extra is not installed")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lighthouse = f"127.0.0.1:{listener.getsockname()[1]}"
        part = Supervised(cluster, 0, 2, lighthouse, **TORCHFT)
        try:
            until(lambda: part.status()["status"] != "running", 60, "the end of the run")
        finally:
            part.end()
        status = part.status()
    assert status["status"] == "failed" and not status["node"].get("restarted")
    assert status["node"]["error"].startswith(
        f"the run's lighthouse exited 3 times: cannot listen on {lighthouse}: Address already in use"
    )
    assert not run_processes(link_free(part.run_dir))


def halt_between_syncs(pid: int, samples: Path) -> bool:
    """Halt a rank, and return whether it is between two syncs. In a sync, peers notice a halt only after a minute without data."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", what="the rank to halt")
    # The samples of a step are recorded before the sync.
    if lines(samples)[-1]["step"] % FIXED["local_steps"]:
        return True
    os.kill(pid, signal.SIGCONT)
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "number"),
    [
        (0, signal.SIGKILL),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.long),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.long),
    ],
)
def test_replica_leaves_and_rejoins(victim: int, number: signal.Signals, cluster: Cluster) -> None:
    """A replica is killed, on the head or on another host, or hangs. Its peers continue, and it rejoins."""
    pytest.importorskip("torchft", reason="the torchft extra is not installed")
    lighthouse = f"127.0.0.1:{free_port()}"
    fields = TORCHFT | {"max_steps": 150, "checkpoint_interval": 50}
    parts: list[Supervised] = []
    try:
        parts += [Supervised(cluster, number, 2, lighthouse, **fields) for number in (0, 1)]
        other = 1 - victim
        cluster.at_step(20)
        pid = cluster.state(victim, victim)["pid"]
        if number == signal.SIGSTOP:
            until(lambda: halt_between_syncs(pid, cluster.run_dir(victim) / "samples" / f"rank{victim}.jsonl"))
        else:
            os.kill(pid, number)
        killed, before = time.monotonic(), lines(cluster.run_dir(other) / "metrics.jsonl")[-1]["step"]
        # Two syncs later: the end of the round in which it died, and one round without it.
        cluster.at_step(before + 10, host=other)
        alone = time.monotonic() - killed
        print(f"two rounds later, {alone:.1f} s after {number.name}")
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        assert alone < 20, f"the survivor took {alone:.1f} s"
        for part in parts:
            until(lambda part=part: part.status()["status"] != "running", 200, "the end of the run")
            assert part.status()["status"] == "finished", cluster.logs()
        assert [part.status()["node"].get("restarted") for part in parts] == [None, 1][:: 1 if victim else -1]
        assert not run_processes(link_free(cluster.run_dir(0))) and not run_processes(link_free(cluster.run_dir(1))), (
            "the lighthouse has ended"
        )
    finally:
        for part in parts:
            part.end()
    assert "was received from another replica" in cluster.logs()
    assert shared_files(cluster.run_dir(0)) == shared_files(cluster.run_dir(1))
    assert weights(cluster.run_dir(0)) == weights(cluster.run_dir(1))
    assert losses(cluster.run_dir(0)) == losses(cluster.run_dir(1)), (
        "including the records of the rounds that it missed"
    )
    assert len(losses(cluster.run_dir(0))) == 150

    # Samples of the round in which it died are not trained on, and are counted; no other sample is lost or repeated.
    order = sample_order(cluster)
    recorded: dict[int, list[list[int]]] = {}
    for host in (0, 1):
        for record in lines(cluster.run_dir(host) / "samples" / f"rank{host}.jsonl"):
            recorded.setdefault(record["step"], []).extend(record["rows"])
    assert sorted(recorded) == list(range(1, 151))
    missed: dict[int, int] = {}
    for step, rows in recorded.items():
        due = Counter(map(tuple, order.step(step - 1)))
        assert Counter(map(tuple, rows)) <= due, "no row is repeated"
        if lost := sum(map(len, order.step(step - 1))) - sum(map(len, rows)):
            missed[step] = lost
    summary = result(cluster)
    assert sum(missed.values()) == summary["missed_samples"] > 0
    assert max(missed) - min(missed) < 5 and max(missed) % 5 == 0, "all in one round"
    assert summary["replicas"] == {"configured": 2, "at_the_end": [0, 1]}
    metrics = lines(cluster.run_dir(other) / "metrics.jsonl")
    assert [sum(map(len, recorded[record["step"]])) for record in metrics] == [record["samples"] for record in metrics]


@pytest.mark.slow
@pytest.mark.long
def test_replicas_of_several_ranks(cluster: Cluster) -> None:
    """Two replicas of two ranks each: DDP within a replica, and torchft between the first ranks of the replicas."""
    pytest.importorskip("torchft", reason="the torchft extra is not installed")
    fields = FIXED | {"max_steps": 10, "total_batch_size": 8}
    assert cluster.wait(cluster.start(2, 2, "plain", **fields)) == [0, 0], cluster.logs("plain")
    lighthouse = cluster.lighthouse()
    fields |= {"diloco_membership": "torchft"}
    launchers = [cluster.start_replica(number, 2, lighthouse, ranks=2, **fields) for number in (0, 1)]
    assert cluster.wait(launchers, 150) == [0, 0], cluster.logs()
    assert_every_sample_once(cluster, [(0, 0), (0, 1), (1, 2), (1, 3)])
    assert weights(cluster.run_dir(0)) == weights(cluster.run_dir(1)) == weights(cluster.run_dir(0, "plain"))
    assert newest(cluster, 0).name == "step-00000010"
