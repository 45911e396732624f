"""Hosts as network namespaces of this machine, each with a core or a part of one, and shaped links between them. Requires root."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testbed import machine

from benchmarks.inputs import SIZES
from trainyard.remote.host_facts import allocator

TOP = Path(__file__).resolve().parents[1]
ONE = Path(__file__).with_name("speed_one.py")
PORT = 29500
# Uses the CPU time of a core that no other process wants, until its standard input closes.
REST_OF_A_CORE = """
import os, select, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while not select.select([0], [], [], 0)[0]:
    for _ in range(100_000):
        pass
"""


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add the options that benchmarks of linked hosts share, and return the parsed options. Exits with 2 without root."""
    parser.add_argument("--models", nargs="+", default=["tiny"], choices=["tiny", *SIZES])
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16, help="rows per step over all hosts")
    parser.add_argument(
        "--share",
        type=int,
        nargs="+",
        default=[0],
        help="percent of a core per host, or of each host; 0: one core each",
    )
    options = parser.parse_args()
    if os.geteuid():
        parser.error("this benchmark requires root for network namespaces: run it with sudo")
    return options


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


def _shape(name: str, device: str, mbit: int) -> None:
    """Limit the traffic that a device of a namespace sends to `mbit` Mbit/s; 0: no limit."""
    if mbit:
        burst = max(32_000, mbit * 1000)  # bytes: 8 ms of the link
        _do(f"tc -n {name} qdisc add dev {device} root tbf rate {mbit}mbit burst {burst} latency 400ms")


@contextmanager
def linked_hosts(mbit: int = 0, count: int = 2) -> Iterator[list[str]]:
    """Yield namespaces whose links carry `mbit` Mbit/s in both directions (0: not shaped).

    Two hosts have a veth pair between them, more hosts a switch with a link each.
    """
    names = [f"tybench{os.getpid()}h{place}" for place in range(count)]
    switch = f"tybench{os.getpid()}s"
    try:
        for name in [*names, *([switch] if count > 2 else [])]:
            _do(f"ip netns add {name}")
        if count > 2:
            _do(f"ip -n {switch} link add br0 type bridge")
            _do(f"ip -n {switch} link set br0 up")
            for place, name in enumerate(names):
                _do(f"ip -n {name} link add eth0 type veth peer name p{place} netns {switch}")
                _do(f"ip -n {switch} link set p{place} master br0 up")
                _shape(switch, f"p{place}", mbit)
        else:
            _do(f"ip -n {names[0]} link add eth0 type veth peer name eth0 netns {names[1]}")
        for place, name in enumerate(names):
            _do(f"ip -n {name} link set lo up")
            _do(f"ip -n {name} addr add 10.77.0.{place + 1}/24 dev eth0")
            _do(f"ip -n {name} link set eth0 up")
            _shape(name, "eth0", mbit)
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def prioritize(group: Path, unified: bool) -> None:
    """Give a cgroup priority over other load of this machine, within its quota."""
    (group / ("cpu.weight" if unified else "cpu.shares")).write_text("10000" if unified else "262144")


def shares_of(share: Sequence[int], count: int) -> list[int]:
    """Return the share of each of `count` hosts; the last one of `share` is that of all further hosts."""
    return [share[min(place, len(share) - 1)] for place in range(count)]


def shared_core() -> int:
    """Return the core that hosts with a share share."""
    return min(os.sched_getaffinity(0))


@contextmanager
def core_without_pauses() -> Iterator[None]:
    """Keep the shared core busy.

    A virtual core that is idle for some milliseconds of every slice computes 10 to 20 % less in its CPU time than one that is busy.
    """
    command = [sys.executable, "-I", "-S", "-c", REST_OF_A_CORE, str(shared_core())]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.kill()


@contextmanager
def part_of_a_core(share: Sequence[int], count: int = 1) -> Iterator[list[Path]]:
    """Yield a cgroup for each of `count` hosts with its `share` of one core, in slices of 10 ms; no cgroups for 0.

    Args:
        share: percent of the core, by host, as in `shares_of`.
    """
    if not share[0]:
        yield []
        return
    groups: list[Path] = []
    top, unified = machine.cgroup_of("cpu")
    try:
        for place, percent in enumerate(shares_of(share, count)):
            group = top / f"tybench{os.getpid()}h{place}"
            group.mkdir()
            groups.append(group)
            prioritize(group, unified)
            if unified:
                (group / "cpu.max").write_text(f"{percent * 100} 10000")
            else:
                (group / "cpu.cfs_period_us").write_text("10000")
                (group / "cpu.cfs_quota_us").write_text(str(percent * 100))
        with core_without_pauses():
            yield groups
    finally:
        for group in groups:
            deadline = time.monotonic() + 5
            while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
                time.sleep(0.05)  # a killed process leaves its cgroup when it is reaped
            group.rmdir()


def run(
    names: list[str], requests: list[dict[str, Any]], limit: float = 900.0, share: Sequence[int] = (0,)
) -> list[dict[str, Any]]:
    """Run speed_one.py as one torchrun over `names` (or as one process, for one name); return its results.

    Each host has one core, or `share` percent of the same core: two virtual cores are often two threads of one core and slow
    each other down, which hosts do not.
    """
    with part_of_a_core(share, len(names)) as groups:
        answer: list[dict[str, Any]] = _run(names, [str(ONE), "trainyard", json.dumps(requests)], limit, groups)
    return answer


def host_command(name: str, place: int, group: Path | None) -> list[str]:
    """Return the prefix of a command on a host: its namespace, its core or its cgroup, and the interpreter."""
    cores = sorted(os.sched_getaffinity(0))
    core = shared_core() if group else cores[place % len(cores)]
    command = ["ip", "netns", "exec", name, "taskset", "-c", str(core), sys.executable]
    return ["sh", "-c", f'echo 0 >{group}/cgroup.procs; exec "$@"', "sh", *command] if group else command


def host_environment() -> dict[str, str]:
    fixed = {"PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "HF_HUB_OFFLINE": "1"}
    # The allocator that train.yml loads for ranks.
    return os.environ | fixed | ({"LD_PRELOAD": allocator()} if allocator() else {})


def planned(name: str, arguments: list[str], share: Sequence[int] = (0,)) -> dict[str, Any]:
    """Return the JSON output of `python -m trainer plan` on a host with `share` percent of a core (0: one core)."""
    with part_of_a_core(share) as groups:
        command = [*host_command(name, 0, groups[0] if groups else None), "-m", "trainer", "plan", *arguments, "--json"]
        done = subprocess.run(command, env=host_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the plan failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _run(names: list[str], script: list[str], limit: float, groups: list[Path]) -> Any:
    started = []
    for place, name in enumerate(names):
        command = host_command(name, place, groups[place] if groups else None)
        if len(names) > 1:
            command += ["-m", "torch.distributed.run", f"--nnodes={len(names)}", f"--node-rank={place}"]
            command += ["--nproc-per-node=1", "--master-addr=10.77.0.1", f"--master-port={PORT}"]
        started.append(
            subprocess.Popen(
                command + script, env=host_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        outputs = [process.communicate(timeout=limit) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, stderr) in zip(started, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"a rank failed:\n{stderr[-3000:]}")
    *said, last = outputs[0][0].strip().splitlines()
    for line in said:
        if line.startswith("pipeline: "):  # the division of the layers
            print(line, file=sys.stderr, flush=True)
    return json.loads(last)
