"""Ranks of torchrun: they are its children, hold none of its sockets, and end with it."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from trainer_runs import Cluster, until

pytestmark = pytest.mark.slow


def listeners(pid: int) -> set[int]:
    """Return the ports at which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = str(entry.readlink())
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def test_ranks_end_with_torchrun(cluster: Cluster) -> None:
    made = Cluster(cluster.folder, cluster.spec, cold=True)
    try:
        (launcher,) = made.start(1, 2, max_steps=500)
        made.at_step(2)
        pids = [made.state(rank)["pid"] for rank in (0, 1)]
        for pid in pids:
            assert int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == launcher.pid
            assert os.getsid(pid) == pid, "a signal to torchrun's group must not reach the ranks"
        (port,) = listeners(launcher.pid)
        assert not any(port in listeners(pid) for pid in pids), "the port must be free once torchrun has ended"

        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait(30)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what="the end of the ranks")
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
    finally:
        made.end()


def test_the_signal_that_killed_a_rank_and_the_code_of_a_mistake_are_reported(cluster: Cluster) -> None:
    (launcher,) = cluster.start(1, 2, max_steps=500)
    cluster.at_step(2)
    pid = cluster.state(1)["pid"]
    os.kill(pid, signal.SIGSEGV)
    assert cluster.wait([launcher]) == [1]
    log = (cluster.run_dir() / "torchrun.log").read_text()
    # In the table: the line above it names either rank, if torchrun finds that both have ended.
    assert f"Signal 11 (SIGSEGV) received by PID {pid}" in log

    (launcher,) = cluster.start(1, 1, run="wrong", dataset="/nowhere.jsonl")
    assert cluster.wait([launcher]) == [1]
    assert "failed (exitcode: 1) local_rank: 0" in (cluster.run_dir(run="wrong") / "torchrun.log").read_text()
    assert cluster.state(0, run="wrong")["error"]["plain"]
