"""Several `torchrun --standalone` with `--hv.*` are one run: real torchruns, whose workers meet in a store."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_hosts import free_port
from test_torchrun import weights
from trainer_runs import TOP, Cluster, losses, until

from trainer.supervise.processes import descendants

pytestmark = pytest.mark.slow

FIELDS = {"strategy": "diloco", "local_steps": 2, "packing": "false", "max_steps": 4, "balance": "even"}
ENVIRONMENT = os.environ | {"PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Workers:
    """Torchruns on this machine as a user starts them, each in a folder of its own."""

    def __init__(self, folder: Path, spec: dict[str, Any]) -> None:
        self.folder, self.spec, self.started = folder, spec, list[subprocess.Popen[bytes]]()

    def start(self, rank: int, size: int, peers: str, ranks: int = 1, **fields: Any) -> subprocess.Popen[bytes]:
        cwd = self.folder / f"worker{rank}"
        cwd.mkdir(exist_ok=True)
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "trainer"]
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in (self.spec | fields).items()]
        galaxy = [*peers.split(), "--hv.galaxy-size", str(size), "--hv.world-rank", str(rank), "--hv.local-steps", "2"]
        with (cwd / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *words, *flags, *galaxy], cwd=cwd, env=ENVIRONMENT, stdout=log, stderr=log
            )
        self.started.append(process)
        return process

    def log(self, rank: int) -> str:
        return (self.folder / f"worker{rank}" / "log").read_text()

    def run_dir(self, rank: int, run: str) -> Path:
        return self.folder / f"worker{rank}" / "runs" / run

    def send(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """Send a signal to a torchrun and its ranks."""
        for pid in [*descendants(process.pid), process.pid]:
            os.kill(pid, number)

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                self.send(process, signal.SIGKILL)
                process.wait()


@pytest.fixture
def workers(tmp_path: Path, model_folder: Path, dataset: Path) -> Iterator[Workers]:
    spec = {"path-model": model_folder, "dataset": dataset, "seq_length": 64, "total_batch_size": 6, "batch_size": 2}
    made = Workers(tmp_path, spec | {"lr": 1e-2, "loggers": "none", "packing": "false", "balance": "even"})
    yield made
    made.end()


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[str]:
    """The line that `python -m trainer store` prints, which takes the place of hivemind-dht."""
    command = [sys.executable, "-m", "trainer", "store", "--identity_path", "fixed_private_key.pem"]
    command += ["--host_maddrs", f"/ip4/127.0.0.1/tcp/{free_port()}"]
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout
        yield store.stdout.readline().strip()
        store.terminate()
        assert store.wait(10) == 0 and not (tmp_path / "fixed_private_key.pem").exists()


def test_two_torchruns_are_the_run_of_one(workers: Workers, peers: str, cluster: Cluster) -> None:
    """Same losses and weights as one torchrun over two hosts; then again at the same store, with ranks that differ in number."""
    assert peers.startswith("--hv.initial-peers /ip4/127.0.0.1/tcp/")
    host, port = peers.split("/")[2], peers.rpartition("/")[2]
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    bound = [line.split()[1] for line in listening.splitlines() if line.split()[1].endswith(f":{int(port):04X}")]
    assert host == "127.0.0.1" and {address.partition(":")[0] for address in bound} == {"0100007F"}, "nowhere else"

    second = workers.start(1, 2, f"{peers}/p2p/QmXy", run_name="a", max_steps=4)
    until(lambda: "waiting for worker 0 of 2 (--hv.world-rank 0)" in workers.log(1), 120)
    first = workers.start(0, 2, peers, run_name="a", max_steps=4)
    assert [first.wait(240), second.wait(60)] == [0, 0], workers.log(0)[-3000:]
    cluster.spec |= {"total_batch_size": 6}
    wanted = cluster.run(2, **FIELDS)
    assert losses(workers.run_dir(0, "a")) == wanted
    ended = {weights(workers.run_dir(rank, "a")) for rank in (0, 1)}
    assert ended == {weights(cluster.run_dir(0))}

    both = [workers.start(rank, 2, peers, ranks, run_name="b", max_steps=2) for rank, ranks in ((0, 1), (1, 2))]
    assert [each.wait(240) for each in both] == [0, 0], workers.log(1)[-3000:]
    results = [json.loads((workers.run_dir(rank, "b") / "result.json").read_text()) for rank in (0, 1)]
    assert [found["world_size"] for found in results] == [3, 3]
    assert sorted(path.name for path in (workers.run_dir(1, "b") / "state").glob("rank*.json")) == [
        "rank1.json",
        "rank2.json",
    ]


@pytest.mark.long
def test_a_silent_worker_ends_all_and_both_start_again(workers: Workers, peers: str) -> None:
    fields = {"run_name": "r", "epochs": 400, "max_steps": 2000, "checkpoint_interval": 2}
    both = [workers.start(rank, 2, peers, **fields) for rank in (0, 1)]
    until(lambda: list(workers.run_dir(0, "r").glob("checkpoints/step-*")), 240)
    duplicate = workers.start(1, 2, peers, **fields)
    assert duplicate.wait(120) == 1
    assert f"--hv.world-rank: 1 is taken by worker 1 (--hv.world-rank 1) on '{socket.gethostname()}'" in workers.log(1)
    workers.send(both[1], signal.SIGSTOP)
    began = time.monotonic()
    assert both[0].wait(60) == 1
    assert time.monotonic() - began < 45
    line = f"error: worker 1 (--hv.world-rank 1) on '{socket.gethostname()}' has been silent for 10 s: look at its log"
    assert workers.log(0).count(line) == 1, workers.log(0)[-3000:]
    workers.send(both[1], signal.SIGKILL)
    both[1].wait()
    both = [workers.start(rank, 2, peers, **fields) for rank in (0, 1)]
    until(lambda: "resuming from step" in workers.log(0), 240)
    for rank in (0, 1):
        (workers.run_dir(rank, "r") / "stop").touch()
    assert [each.wait(120) for each in both] == [0, 0], workers.log(0)[-3000:]


@pytest.mark.long
def test_without_a_store_the_worker_at_the_address_serves_it(workers: Workers) -> None:
    """Both in one folder: each has a run folder of its own. A worker that is killed ends the other one, which names it."""
    workers.spec |= {"data_dir": workers.folder, "run_name": "r", "epochs": 400, "max_steps": 2000}
    peers = f"--hv.initial-peers 127.0.0.1:{free_port()}"
    both = [workers.start(rank, 2, peers) for rank in (0, 1)]
    logs = [workers.folder / f"runs/{name}/metrics.jsonl" for name in ("r", "r-worker1")]
    until(lambda: all(log.exists() for log in logs), 240)
    workers.send(both[0], signal.SIGKILL)
    assert both[1].wait(60) == 1
    assert f"error: worker 0 (--hv.world-rank 0) on '{socket.gethostname()}' has " in workers.log(1), workers.log(1)[
        -3000:
    ]
