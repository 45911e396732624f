"""Start the supervisor of one host's part of a run."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from trainer.supervise.claim import START_LOCK, consume_claim
from trainer.supervise.environment import (
    CACHE,
    IMPORT_ROOT,
    cache_variables,
    choose_backend,
    clean_environment,
    import_environment,
    run_environment,
    systemctl_environment,
)
from trainer.supervise.link_free import LinkFreePath, remove_tree
from trainer.supervise.processes import run_processes, unit_name
from trainer.supervise.run_files import (
    SupervisorError,
    check_lease,
    hold_lock,
    is_alive,
    other_runs,
    read_json,
    read_node,
    run_devices,
    run_lease,
)
from trainer.supervise.sandbox import address_properties, interpreter_paths, unit_properties
from trainer.supervise.start_request import StartRequest

STOPPED = "a user stopped the run after this start was planned"
TRAINER = "trainer.zip"  # in the run folder
START_LIMIT = 15.0  # s for a supervisor to start on a loaded machine


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Start this host's part of a run.

    `request`: the fields of StartRequest. Raises SupervisorError: this run, or another one that the message names, is
    running on this host, or another controller has claimed the run. Returns `backend` ("systemd" or "process"), `pid`
    and `started` of the supervisor; `unit`, its systemd unit; `ignored`, unit properties that have no effect without
    systemd.
    """
    wanted = StartRequest.from_json(request)
    run_dir = wanted.resolve()
    if not run_dir.is_folder():
        raise SupervisorError(f"there is no run folder {run_dir}")
    run_environment(run_dir)  # report its errors now
    for folder in ("state", "logs", CACHE):
        (run_dir / folder).make_folder()
    # One of two simultaneous starts detects the run of the other.
    with one_start(run_dir):
        check_lease(wanted.lease)
        check_idle(run_dir, wanted.devices, wanted.lease)
        if not wanted.stop_seen and (run_dir / "state/stop-wanted").exists():
            raise SupervisorError(STOPPED)
        consume_claim(run_dir, wanted.claim)
        last = read_node(run_dir) or {}
        wanted.attempt = wanted.attempt or last.get("attempt", 0) + 1
        state = run_dir / "state"
        for stale in (*(state / name for name in state.entries()), run_dir / "stop"):
            remove_tree(stale)
        log_file(wanted, run_dir).make_file()  # report its errors now
        return launch(wanted, run_dir)


@contextlib.contextmanager
def one_start(run_dir: LinkFreePath) -> Iterator[None]:
    """Exclude other starts in the folder of runs. Raises SupervisorError if another one takes too long."""
    with hold_lock(run_dir.parent / START_LOCK, wait=START_LIMIT) as locked:
        if not locked:
            raise SupervisorError(f"another start on this host has not finished within {START_LIMIT:.0f} s")
        yield


def check_idle(run_dir: LinkFreePath, devices: Collection[str] = (), lease: str = "") -> None:
    """Check that no run is alive on this host, except on GPUs other than `devices`. Raises SupervisorError.

    Runs with a `lease` may share the processors: Slurm has assigned different ones to them.
    """
    if is_alive(run_dir):
        raise SupervisorError(f"run {run_dir.name} is already running here")
    for name in other_runs(run_dir)[0]:
        taken = run_devices(run_dir.parent / name)
        apart = lease and run_lease(run_dir.parent / name)
        if not (devices and taken) and not apart:
            raise SupervisorError(f"busy: run {name} is running here")
        if same := set(devices) & set(taken):
            raise SupervisorError(f"busy: run {name} is running here and uses {', '.join(sorted(same))}")
    if left := sorted(run_processes(run_dir)):
        raise SupervisorError(
            f"processes of an earlier start of run {run_dir.name} are still running: {left}; stop the run first"
        )


def launch(wanted: StartRequest, run_dir: LinkFreePath) -> dict[str, Any]:
    """Start the supervisor and wait until it has written its state. Raises SupervisorError."""
    systemd = choose_backend(wanted.backend)
    if helper := shutil.which(
        "nvidia-modprobe"
    ):  # creates the devices of CUDA; its setuid program cannot run in a rank
        subprocess.run([helper, "-u", "-c", "0"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    wanted.unit = unit_name(run_dir) if systemd else ""
    first = Path(wanted.command[0])
    if systemd and first.is_relative_to(Path.home()) and not any(map(first.is_relative_to, interpreter_paths())):
        wanted.command[0] = sys.executable  # which a shim of pyenv, that the unit does not show, has started
    command = [sys.executable, "-m", "trainer.supervise", "run", wanted.to_json()]
    if systemd:
        start_unit(systemd, wanted, run_dir, command)
    else:
        start_process(wanted, run_dir, command)
    deadline = time.monotonic() + START_LIMIT
    while (node := read_json(run_dir / "state/node.json")) is None:
        if time.monotonic() > deadline:
            raise SupervisorError(
                f"the supervisor did not start within {START_LIMIT:.0f} s; see {log_file(wanted, run_dir)}"
            )
        time.sleep(0.01)
    if node.get("error"):
        raise SupervisorError(node["error"])
    started = {"backend": "systemd" if systemd else "process", "pid": node["pid"], "started": node["started"]}
    ignored = {"ignored": wanted.properties} if wanted.properties and not systemd else {}
    return started | ({"unit": wanted.unit} if wanted.unit else {}) | ignored


def log_file(wanted: StartRequest, run_dir: LinkFreePath) -> LinkFreePath:
    return run_dir / f"logs/torchrun.{wanted.node_rank}.log"


def start_process(wanted: StartRequest, run_dir: LinkFreePath, command: list[str]) -> None:
    with log_file(wanted, run_dir).open_append() as sink:
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            cwd=run_dir.path,
            env={**clean_environment(), **supervisor_environment(run_dir)},
            start_new_session=True,
        )


def supervisor_environment(run_dir: LinkFreePath) -> dict[str, str]:
    """Return the variables of a supervisor. It imports the staged trainer."""
    staged = run_dir / TRAINER
    return import_environment(run_dir, staged.path if staged.is_file() else IMPORT_ROOT)


def start_unit(systemd: list[str], wanted: StartRequest, run_dir: LinkFreePath, command: list[str]) -> None:
    """Start a transient systemd unit. Raises SupervisorError with systemd-run's message."""
    environment = systemctl_environment()
    # A failed unit stays loaded until this point, so that its Result can be read.
    systemctl = ["sudo", "-n", "systemctl"] if "sudo" in systemd else ["systemctl", *systemd[1:]]
    reset = [*systemctl, "reset-failed", unit_name(run_dir)]
    subprocess.run(reset, capture_output=True, check=False, env=environment)
    system = "--user" not in systemd
    # mixed: the supervisor gets the SIGTERM of a shutdown, and what it leaves behind gets SIGKILL.
    # continue: when the kernel kills a rank for lack of memory, the supervisor survives to report it.
    settings = [f"WorkingDirectory={run_dir}", "KillMode=mixed", "OOMPolicy=continue", "Type=exec"]
    places = (run_dir.path, wanted.data_dir, wanted.named)
    settings += unit_properties(*places, system=system, writable=wanted.writable, reads=wanted.reads)
    settings += (address_properties(wanted.reachable) if system else []) + wanted.properties
    options = [f"--unit={wanted.unit}", "--quiet", "--no-ask-password", f"--description=trainyard run {run_dir.name}"]
    options += [f"--property={setting}" for setting in settings]
    variables = supervisor_environment(run_dir) | (cache_variables(run_dir.path) if system else {})
    options += [f"--setenv={key}={value}" for key, value in variables.items()]
    done = subprocess.run(
        [*systemd, *options, "--", *command], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise SupervisorError(f"systemd-run: {' '.join((done.stderr or done.stdout).split())}")
