"""Start the supervisor of one host's part of a run."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from trainer.supervise.claim import START_LOCK, consume_claim
from trainer.supervise.environment import (
    choose_backend,
    clean_environment,
    import_environment,
    run_environment,
    systemctl_environment,
)
from trainer.supervise.files import SupervisorError, hold_lock, other_runs, read_json, run_devices, run_lease
from trainer.supervise.lease import check_lease
from trainer.supervise.options import StartRequest
from trainer.supervise.processes import run_processes
from trainer.supervise.sandbox import unit_properties
from trainer.supervise.status import is_active

START_LIMIT = 15.0  # s for a supervisor to start on a loaded machine


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Start this host's part of a run.

    Args:
        request: the fields of StartRequest.

    Returns:
        `backend` ("systemd" or "process"), `pid` and `started` of the supervisor; `unit`, its systemd unit; `ignored`,
        unit properties that have no effect without systemd.

    Raises:
        SupervisorError: this run, or another one that the message names, is running on this host, or another controller
            has claimed the run.
    """
    wanted = StartRequest.from_json(request)
    run_dir = Path(wanted.run_dir).resolve()
    if not run_dir.is_dir():
        raise SupervisorError(f"there is no run folder {run_dir}")
    run_environment(run_dir)  # report its errors now
    for folder in ("state", "logs"):
        (run_dir / folder).mkdir(exist_ok=True)
    # One of two simultaneous starts sees the run of the other.
    with hold_lock(run_dir.parent / START_LOCK, wait=START_LIMIT) as locked:
        if not locked:
            raise SupervisorError(f"another start on this host has not finished within {START_LIMIT:.0f} s")
        check_lease(wanted.lease)
        check_idle(run_dir, wanted.devices, wanted.lease)
        consume_claim(run_dir, wanted.claim)
        last = read_json(run_dir / "state/node.json") or {}
        wanted.run_dir = str(run_dir)
        wanted.attempt = wanted.attempt or last.get("attempt", 0) + 1
        for stale in [*(run_dir / "state").iterdir(), run_dir / "stop"]:
            stale.unlink(missing_ok=True)
        if wanted.backend == "slurm":
            from trainer.supervise.slurm import submit

            return submit(wanted, run_dir)
        return launch(wanted, run_dir)


def check_idle(run_dir: Path, devices: Collection[str] = (), lease: str = "") -> None:
    """Check that no run is alive on this host, except on GPUs other than `devices`. Raises SupervisorError.

    Runs with a `lease` may share the processors: Slurm has assigned different ones to them.
    """
    if is_active(run_dir):
        raise SupervisorError(f"run {run_dir.name} is already running here")
    for name in other_runs(run_dir)[0]:
        taken = run_devices(run_dir.parent / name)
        apart = lease and run_lease(run_dir.parent / name)
        if not (devices and taken) and not apart:
            raise SupervisorError(f"busy: run {name} is running here")
        if same := set(devices) & set(taken):
            raise SupervisorError(f"busy: run {name} is running here and uses {', '.join(sorted(same))}")
    if left := run_processes(run_dir):
        raise SupervisorError(
            f"processes of an earlier start of run {run_dir.name} are still running: {left}; stop the run first"
        )


def launch(wanted: StartRequest, run_dir: Path) -> dict[str, Any]:
    """Start the supervisor and wait until it has written its state. Raises SupervisorError."""
    systemd = choose_backend(wanted.backend)
    load_gpu_driver()
    wanted.unit = unit_name(run_dir) if systemd else ""
    command = [sys.executable, "-m", "trainer.supervise", "run", *wanted.flags()]
    log = run_dir / f"logs/torchrun.{wanted.node_rank}.log"
    if systemd:
        start_unit(systemd, wanted, run_dir, command)
    else:
        with log.open("ab") as sink:
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                cwd=run_dir,
                env={**clean_environment(), **import_environment(run_dir, wanted.lease)},
                start_new_session=True,
            )
    deadline = time.monotonic() + START_LIMIT
    while (node := read_json(run_dir / "state/node.json")) is None:
        if time.monotonic() > deadline:
            raise SupervisorError(f"the supervisor did not start within {START_LIMIT:.0f} s; see {log}")
        time.sleep(0.01)
    if node.get("error"):
        raise SupervisorError(node["error"])
    started = {"backend": "systemd" if systemd else "process", "pid": node["pid"], "started": node["started"]}
    ignored = {"ignored": wanted.properties} if wanted.properties and not systemd else {}
    return started | ({"unit": wanted.unit} if wanted.unit else {}) | ignored


def start_unit(systemd: list[str], wanted: StartRequest, run_dir: Path, command: list[str]) -> None:
    """Start a transient systemd unit. Raises SupervisorError with systemd-run's message."""
    environment = systemctl_environment()
    # A failed unit stays loaded, so that its Result can be read, until here.
    systemctl = ["sudo", "-n", "systemctl"] if "sudo" in systemd else ["systemctl", *systemd[1:]]
    subprocess.run([*systemctl, "reset-failed", wanted.unit], capture_output=True, check=False, env=environment)
    # mixed: the supervisor gets the SIGTERM of a shutdown, and what it leaves behind gets SIGKILL.
    # continue: when the kernel kills a rank for lack of memory, the supervisor survives to report it.
    settings = ["KillMode=mixed", "OOMPolicy=continue", "Type=exec", f"WorkingDirectory={run_dir}"]
    system, env = "--user" not in systemd, run_environment(run_dir)
    settings += unit_properties(run_dir, system=system, reachable=wanted.reachable, env=env)
    settings += wanted.properties
    options = [f"--unit={wanted.unit}", "--quiet", "--no-ask-password", f"--description=trainyard run {run_dir.name}"]
    options += [f"--property={setting}" for setting in settings]
    options += [f"--setenv={key}={value}" for key, value in import_environment(run_dir, wanted.lease).items()]
    done = subprocess.run(
        [*systemd, *options, "--", *command], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise SupervisorError(f"systemd-run: {' '.join((done.stderr or done.stdout).split())}")


def load_gpu_driver() -> None:
    """Create the devices that CUDA needs. Its own setuid helper does so otherwise, which a rank cannot run."""
    if helper := shutil.which("nvidia-modprobe"):
        subprocess.run([helper, "-u", "-c", "0"], stdin=subprocess.DEVNULL, capture_output=True, check=False)


def unit_name(run_dir: Path) -> str:
    """Return the unit's name. It depends on the folder, because two hosts of an inventory may be one machine."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", run_dir.name)
    return f"trainyard-{name}-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:6]}.service"
