"""Two hosts as network namespaces of this machine, one core each, with a link of a given speed between them. Needs root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[2]
ONE = Path(__file__).with_name("speed_one.py")
PORT = 29500


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


@contextmanager
def two_hosts(mbit: int = 0) -> Iterator[list[str]]:
    """Yield two namespaces joined by a veth pair that is shaped to `mbit` Mbit/s both ways (0: as fast as it goes)."""
    names = [f"tybench{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            _do(f"ip netns add {name}")
        _do(f"ip -n {names[0]} link add eth0 type veth peer name eth0 netns {names[1]}")
        for place, name in enumerate(names):
            _do(f"ip -n {name} link set lo up")
            _do(f"ip -n {name} addr add 10.77.0.{place + 1}/24 dev eth0")
            _do(f"ip -n {name} link set eth0 up")
            if mbit:
                burst = max(32_000, mbit * 1000)  # bytes: 8 ms of the link
                _do(f"tc -n {name} qdisc add dev eth0 root tbf rate {mbit}mbit burst {burst} latency 400ms")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def run(names: list[str], several: list[dict[str, Any]], limit: float = 900.0) -> list[dict[str, Any]]:
    """Run speed_one.py as one torchrun over `names` (or as one process, for one name); return what it printed."""
    cores = sorted(os.sched_getaffinity(0))
    environment = os.environ | {
        "PYTHONPATH": str(TOP),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "HF_HUB_OFFLINE": "1",
    }
    started = []
    for place, name in enumerate(names):
        command = ["ip", "netns", "exec", name, "taskset", "-c", str(cores[place % len(cores)]), sys.executable]
        if len(names) > 1:
            command += ["-m", "torch.distributed.run", f"--nnodes={len(names)}", f"--node-rank={place}"]
            command += ["--nproc-per-node=1", "--master-addr=10.77.0.1", f"--master-port={PORT}"]
        command += [str(ONE), "trainyard", json.dumps(several)]
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        said = [process.communicate(timeout=limit) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, trouble) in zip(started, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"a rank failed:\n{trouble[-3000:]}")
    answer: list[dict[str, Any]] = json.loads(said[0][0].strip().splitlines()[-1])
    return answer
