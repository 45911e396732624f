"""Two hosts as network namespaces of this machine, one core each, with a link of a given speed between them. Needs root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOP / "molecule/resources"))

from testbed import machine  # noqa: E402  found by the line above

from trainyard.remote.host_facts import allocator  # noqa: E402

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


def come_first(group: Path, unified: bool) -> None:
    """Let a cgroup have the time that its quota allows, whatever else this machine is at."""
    (group / ("cpu.weight" if unified else "cpu.shares")).write_text("10000" if unified else "262144")


@contextmanager
def part_of_a_core(percent: int) -> Iterator[list[Path]]:
    """Yield a cgroup for each of two hosts that gives it `percent` of a core's time, in slices of 10 ms; none for 0."""
    groups: list[Path] = []
    top, unified = machine.cgroup_of("cpu")
    try:
        for side in "ab" if percent else "":
            group = top / f"tybench{os.getpid()}{side}"
            group.mkdir()
            groups.append(group)
            come_first(group, unified)
            if unified:
                (group / "cpu.max").write_text(f"{percent * 100} 10000")
            else:
                (group / "cpu.cfs_period_us").write_text("10000")
                (group / "cpu.cfs_quota_us").write_text(str(percent * 100))
        yield groups
    finally:
        for group in groups:
            deadline = time.monotonic() + 5
            while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
                time.sleep(0.05)  # the dead leave their group when they are buried
            group.rmdir()


def run(names: list[str], several: list[dict[str, Any]], limit: float = 900.0, share: int = 0) -> list[dict[str, Any]]:
    """Run speed_one.py as one torchrun over `names` (or as one process, for one name); return what it printed.

    Each has a core of its own, or `share` percent of one and the same: what a virtual machine calls two cores are often
    two threads of one, which slow each other down as two hosts do not.
    """
    with part_of_a_core(share) as groups:
        return _run(names, several, limit, groups)


def _begin(name: str, place: int, group: Path | None) -> list[str]:
    """Return what a command begins with that runs on a host: in its namespace, on its core or in its part of one."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[0] if group else cores[place % len(cores)]
    command = ["ip", "netns", "exec", name, "taskset", "-c", str(core), sys.executable]
    return ["sh", "-c", f'echo 0 >{group}/cgroup.procs; exec "$@"', "sh", *command] if group else command


def _environment() -> dict[str, str]:
    said = {"PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "HF_HUB_OFFLINE": "1"}
    # As train.yml starts ranks.
    return os.environ | said | ({"LD_PRELOAD": allocator()} if allocator() else {})


def planned(name: str, said: list[str], share: int = 0) -> dict[str, Any]:
    """Return what `python -m trainer plan` prints as JSON on the first of the hosts, with the share of a core that `run` gives."""
    with part_of_a_core(share) as groups:
        command = [*_begin(name, 0, groups[0] if groups else None), "-m", "trainer", "plan", *said, "--json"]
        done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the plan failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _run(names: list[str], several: list[dict[str, Any]], limit: float, groups: list[Path]) -> list[dict[str, Any]]:
    started = []
    for place, name in enumerate(names):
        command = _begin(name, place, groups[place] if groups else None)
        if len(names) > 1:
            command += ["-m", "torch.distributed.run", f"--nnodes={len(names)}", f"--node-rank={place}"]
            command += ["--nproc-per-node=1", "--master-addr=10.77.0.1", f"--master-port={PORT}"]
        command += [str(ONE), "trainyard", json.dumps(several)]
        started.append(
            subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
