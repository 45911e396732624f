"""CPU time and memory of the dashboard's server with 20 hosts and 5 browsers.

    make bench NAME=dashboard [ARGS='--hosts 20 --pages 5 --seconds 60']

The hosts are entries of the inventory with 127.0.0.0/8 addresses, real SSH connections and real samplers. A run of stand-ins for ranks
is alive on 4 of them, and its metrics grow twice a second. The browsers are windows of headless Chromium that show the pages in turn. The CPU time is
that of the server's process from /proc, without ssh, the samplers and the browsers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import yaml
from browser import start_browser
from dashboard_site import ENVIRONMENT, Dashboard, ended_run, serve
from run_hosts import Bed, until
from ssh_server import serve_ssh

from trainyard.connection import Host, HostConnection
from trainyard.openssh import LocalTransport
from trainyard.run.launch import start_ranks

RUN, RUN_HOSTS, ENDED = "bench", 4, 100
PAGES = ("/", f"/runs/{RUN}", "/runs", "/events", "/")


def write_inventory(bed: Bed, hosts: int, login: dict[str, object]) -> Path:
    """Write an inventory of hosts with an address each."""
    variables = {"ansible_connection": "ssh", "cluster_managed": False, "cluster_backend": "process", **login}
    variables |= {"ansible_python_interpreter": sys.executable, "cluster_python": sys.executable}
    found = {}
    for number in range(1, hosts + 1):
        address = {"ansible_host": f"127.0.1.{number}", "cluster_address": f"127.0.1.{number}"}
        found[f"node{number}"] = {"cluster_data_dir": str(bed.folder / f"node{number}"), **address}
    path = bed.folder / "inventory.yml"
    path.write_text(yaml.safe_dump({"cluster": {"hosts": found, "vars": variables}}))
    return path


@contextlib.contextmanager
def live_run(bed: Bed) -> Iterator[None]:
    """Start ranks on the first hosts, and write metrics as the trainer does."""
    bed.make_run(RUN_HOSTS, RUN)
    described = {
        f"node{number + 1}": Host(
            f"node{number + 1}", "127.0.0.1", str(bed.folder / f"node{number + 1}"), sys.executable
        )
        for number in range(RUN_HOSTS)
    }
    start_ranks(
        bed.plan(RUN_HOSTS, 100_000, 0.5, RUN),
        lambda name: HostConnection(described[name], LocalTransport()),
        lambda line: None,
    )
    ended = threading.Event()

    def write() -> None:
        step = 0
        with (bed.run_dir(0, RUN) / "metrics.jsonl").open("a") as file:
            while not ended.wait(0.5):
                step += 1
                ranks = [0.4 + rank / 100 for rank in range(RUN_HOSTS)]
                record = {"step": step, "loss": 5 - step / 1000, "lr": 1e-4, "grad_norm": 1.0}
                record |= {"tokens_per_second": 1000.0, "step_seconds": ranks, "comm_share": [0.1] * RUN_HOSTS}
                file.write(json.dumps(record) + "\n")
                file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def mebibytes(pid: int, field: str) -> float:
    """Return a field of the memory of a process: Pss or Rss."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{field}:")) / 1024


def share(pid: int, seconds: float) -> float:
    """Return the share of one core that a process uses in the next `seconds`."""
    begin, before = time.monotonic(), cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - before) / (time.monotonic() - begin)


def measure(site: Dashboard, hosts: int, pages: int, seconds: float) -> None:
    """Print the figures without and with browsers."""

    def connected() -> bool:
        text = site.ask("GET", "/metrics", Authorization=f"Bearer {site.token}")[2]
        return text.count("trainyard_host_up{") == hosts and all(
            line.endswith(" 1.0") for line in text.splitlines() if line.startswith("trainyard_host_up{")
        )

    until(connected, 180, "all hosts")
    pid = site.process.pid
    time.sleep(5)
    print(
        f"hosts {hosts}, no page      {share(pid, seconds):7.1%} of a core   PSS {mebibytes(pid, 'Pss'):.0f} MiB",
        flush=True,
    )
    driver = start_browser()
    try:
        for number in range(pages):
            if number:
                driver.switch_to.new_window("window")
            site.open(driver, PAGES[number % len(PAGES)])
        time.sleep(5)
        used = share(pid, seconds)
        memory = f"PSS {mebibytes(pid, 'Pss'):.0f} MiB   RSS {mebibytes(pid, 'Rss'):.0f} MiB"
        print(f"hosts {hosts}, {pages} pages      {used:7.1%} of a core   {memory}", flush=True)
    finally:
        driver.quit()
    print(f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def main() -> None:
    """Measure; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=20, help="number of hosts, at most 254")
    parser.add_argument("--pages", type=int, default=5, help="number of open pages")
    parser.add_argument("--seconds", type=float, default=60, help="duration of each measurement")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ty-")))
        (folder / "ssh").mkdir()
        addresses = [f"127.0.1.{number}" for number in range(1, given.hosts + 1)]
        login = stack.enter_context(serve_ssh(folder / "ssh", addresses)).login
        bed = Bed(folder)
        stack.callback(bed.clean)
        for number in range(ENDED):
            ended_run(bed, f"ended-{number:03}", time.time() - 90_000 - number)
        variables: dict[str, object] = {"ansible_user": login.user, "ansible_port": login.port}
        variables |= {"ansible_ssh_private_key_file": login.key_file}
        variables |= {"ansible_ssh_common_args": " ".join(login.extra_arguments)}
        inventory = write_inventory(bed, given.hosts, variables)
        stack.enter_context(live_run(bed))
        process, port, token = serve(inventory, ENVIRONMENT | {"XDG_CACHE_HOME": str(folder / "cache")})
        stack.callback(process.wait)
        stack.callback(process.terminate)
        measure(Dashboard(process, port, token), given.hosts, given.pages, given.seconds)


if __name__ == "__main__":
    main()
