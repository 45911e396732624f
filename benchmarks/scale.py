"""Time, CPU time and memory of the controller by the number of hosts: in simulation up to 1,000 hosts, and on lab hosts.

    make bench NAME=scale [ARGS='--hosts 3 10 20 100 300 1000']
    sudo make bench NAME=scale ARGS='--lab 3 10 20 --hosts'

The simulated hosts answer in the controller's process (benchmarks/simulated_hosts.py), without SSH; everything else is the code that
train.yml and preflight.yml run. With --processes, every request also starts a process and passes its pipes, as ssh does.
Every number of hosts has a process of its own. The lab needs root on Debian or Ubuntu.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lying_host import RUN

from benchmarks.peak import peak_mib
from benchmarks.simulated_hosts import Cluster
from trainer.config import make_spec
from trainyard.preflight.runner import run_preflight
from trainyard.run.options import make_options
from trainyard.run.session import RunSession
from trainyard.run.session_state import SessionState
from trainyard.run.spec_files import PreparedRun

STEPS = ("plan", "preflight", "stage", "launch", "follow")


def prepared_run(rows: int) -> PreparedRun:
    """Return a run whose files are already on the hosts."""
    spec = make_spec({"run": RUN, "model": "tiny", "fake_data": True, "total_batch_size": rows}, "the benchmark")
    fields = spec.model_dump(mode="json") | {"rows_per_step": spec.rows_per_step}
    trainer = {"kind": "trainer", "src": "/dev/null", "dest": "store/t.zip", "sha256": {"": "0" * 64}, "bytes": 1}
    return PreparedRun(RUN, fields, [trainer], {})


def simulate(count: int, duration: float, processes: bool) -> dict[str, Any]:
    """Return the figures of the controller with `count` simulated hosts, by step: seconds, CPU seconds and peak MiB so far."""
    found: dict[str, Any] = {"hosts": count, "base_mib": peak_mib(), "steps": {}}
    with tempfile.TemporaryDirectory() as work:
        cluster = Cluster(count, Path(work), duration, processes)
        session = RunSession(
            cluster.hosts,
            cluster.connect,
            make_options({}),
            home=Path(work),
            report=lambda line: None,
            state=SessionState(prepared=prepared_run(count).as_dict()),
        )
        calls: dict[str, Callable[[], Any]] = {name: getattr(session, name) for name in STEPS}
        whole = {"preflight.yml": lambda: run_preflight(cluster.hosts, cluster.connect, 29500, all_reduce=False)}
        for name, call in (whole | calls).items():
            began, cpu, own = time.monotonic(), time.process_time(), cluster.own_seconds
            answer = call()
            used = time.process_time() - cpu - (cluster.own_seconds - own)
            found["steps"][name] = {"seconds": time.monotonic() - began, "cpu": used, "mib": peak_mib()}
            if name == "launch":
                found["skew"] = answer["skew_seconds"]
        return found | {"requests": cluster.requests, "sent": cluster.sent, "received": cluster.received}


def simulated_row(count: int, options: argparse.Namespace) -> str:
    """Measure in a process of its own; return a row of the table."""
    command = [sys.executable, "-m", "benchmarks.scale", "--one", str(count), "--seconds", str(options.seconds)]
    command += ["--processes"] if options.processes else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"| {count} | failed: {done.stderr.strip().splitlines()[-1]} |"
    found = json.loads(done.stdout.splitlines()[-1])
    steps = found["steps"]
    cells = [f"{steps[name]['seconds']:.1f} ({steps[name]['cpu']:.1f})" for name in ("preflight.yml", *STEPS[:-1])]
    share = steps["follow"]["cpu"] / steps["follow"]["seconds"]
    cells += [f"{found['skew']:.2f}", f"{share:.0%}", f"{steps['follow']['mib']:.0f} ({found['base_mib']:.0f})"]
    cells += [f"{found['sent'] / 1e6:.0f} / {found['received'] / 1e6:.0f}"]
    return " | ".join([f"| {count}", *cells]) + " |"


def print_head(*heads: str) -> None:
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}", flush=True)


def main() -> None:
    """Print one row for each number of hosts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="*", default=[3, 10, 20, 100, 300, 1000], help="simulated hosts")
    parser.add_argument("--lab", type=int, nargs="*", default=[], help="numbers of lab hosts")
    parser.add_argument("--seconds", type=float, default=20, help="duration of the simulated training")
    parser.add_argument("--processes", action="store_true", help="start a process for every request")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.one:
        print(json.dumps(simulate(a.one, a.seconds, a.processes)), flush=True)
        return
    if a.lab:
        from benchmarks.scale_lab import lab_row  # imports more than the simulation needs, whose memory is measured

        print_head("lab hosts", "site.yml", "site.yml again", "preflight.yml", "train.yml", "start skew")
        for count in a.lab:
            print(lab_row(count), flush=True)
    if a.hosts:
        names = (f"train.yml: {name}" for name in STEPS[:-1])
        print_head("hosts", "preflight.yml", *names, "start skew", "following", "MiB (before)", "MB sent / received")
        for count in a.hosts:
            print(simulated_row(count, a), flush=True)


if __name__ == "__main__":
    main()
