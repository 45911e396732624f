"""The supervisor process: it runs torchrun to its end, leaves no process behind, and records how the run ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from trainer.supervise.environment import run_environment
from trainer.supervise.lease import check_lease
from trainer.supervise.link_free import LinkFreePath, run_folder
from trainer.supervise.logs import limit_logs
from trainer.supervise.processes import descendants, process_stat, send_signal
from trainer.supervise.ranks import RankMonitor
from trainer.supervise.run_files import SupervisorError, hold_lock, read_log, write_json
from trainer.supervise.start_request import StartRequest
from trainer.supervise.status import ENDED_WELL

TICK = 0.1  # s between two checks of the child processes, as torchrun's own --monitor-interval
HOLD_LIMIT = 120.0  # s to wait for the folder `state/go`
RESTART_DELAY_LIMIT = 60.0  # s between two starts of a torchrun that fails; the first delay is 1 s
LIGHTHOUSE_DELAY = 1.0  # s between two starts of the lighthouse
LIGHTHOUSE_STARTS = 3  # consecutive starts of a lighthouse that exits by itself, such as where its port is taken
KILL_LIMIT = 10.0  # s for killed processes to end
LOG_INTERVAL = 10.0  # s between two looks at the size of the logs

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38  # linux/prctl.h
AWAITED = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD}


def run_supervisor(arguments: list[str]) -> None:
    """Hold the run's lock and supervise torchrun, in the foreground. Raises SupervisorError if the run is alive."""
    request = StartRequest.read(arguments[0])
    run_dir = run_folder(request.run_dir)
    log = run_dir / f"logs/torchrun.{request.node_rank}.log"
    with hold_lock(run_dir / "lock", wait=2.0) as locked, log.open_append() as sink:
        if not locked:
            raise SupervisorError(f"run {run_dir.name} is already running here")
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        Supervisor(request, run_dir, log).run()


class Supervisor:
    """One torchrun at a time, its descendants, and the lighthouse of the run if it is assigned to this host."""

    def __init__(self, request: StartRequest, run_dir: LinkFreePath, log: LinkFreePath) -> None:
        self.request, self.run_dir, self.log = request, run_dir, log
        # With this option torchrun restarts its workers itself, and the death of a worker does not end the run.
        self.elastic = any(re.fullmatch(r"--max[-_]restarts=[1-9]\d*", word) for word in request.command)
        self.ranks = RankMonitor(run_dir, log, request.ranks, renumbered=self.elastic, replica=request.restarts > 0)
        self.best_step, self.failed_in_a_row, self.restarted = -1, 0, 0
        self.lighthouse: subprocess.Popen[bytes] | None = None
        self.lighthouse_started, self.lighthouse_exits = 0.0, 0
        self.logs_limited = -LOG_INTERVAL
        self.stop_requested = False
        self.oom_kills = oom_kills()
        stat = process_stat(os.getpid())
        self.node: dict[str, Any] = {
            "run": run_dir.name,
            "node_rank": request.node_rank,
            "ranks": request.ranks,
            "hosts": request.hosts,
            "devices": request.devices,
            "attempt": request.attempt,
            "restarts": self.elastic or request.restarts > 0,
            "replica": request.replica,
            "backend": "systemd" if request.unit else "process",
            "unit": request.unit or None,
            "lease": request.lease or None,
            "pid": os.getpid(),
            "pid_start": stat[2] if stat else None,
            "started": time.time(),
            "ended": None,
            "status": "starting" if request.hold else "running",
            "exit_code": None,
            "failures": [],
        }

    def run(self) -> None:
        """Run torchrun until it ends and is not restarted; record the end."""
        # Orphans become children of this process: torchrun starts its workers in separate sessions.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        if not self.request.unit:  # a unit has the property for this
            prctl(PR_SET_NO_NEW_PRIVS, 1)
        signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
        if self.request.hold and not self.wait_for_go():
            return
        while True:
            try:
                self.keep_lighthouse()
                torchrun = self.spawn(self.request.command, None)
            except (OSError, subprocess.SubprocessError) as error:
                self.node.update(status="failed", ended=time.time(), exit_code=127, error=str(error))
                self.save()
                self.kill_all()
                return
            self.save()
            code = self.wait_for_torchrun(torchrun)
            self.kill_all(torchrun, spare=self.kept_lighthouse())
            self.ranks.read_log()
            if not self.restart_is_due():
                break
        self.kill_all(torchrun)
        self.end(code)

    def kept_lighthouse(self) -> list[int]:
        """Return the pids of the lighthouse and of its descendants, if it runs."""
        return [self.lighthouse.pid, *descendants(self.lighthouse.pid)] if self.lighthouse else []

    def wait_for_torchrun(self, torchrun: subprocess.Popen[bytes]) -> int:
        """Watch torchrun and its ranks; return its exit code."""
        while (code := self.reap(torchrun)) is None:
            caught = signal.sigtimedwait(AWAITED, TICK)
            if caught and caught.si_signo in (signal.SIGTERM, signal.SIGINT):
                self.stop_requested = True
                send_signal(torchrun.pid, signal.SIGTERM)
            elif caught and caught.si_signo == signal.SIGUSR1:  # stop with `now`
                self.stop_requested = True
                self.kill_all(torchrun)
            if self.ranks.update(torchrun.pid):
                self.save()
            self.keep_lighthouse()
            try:
                check_lease(self.request.lease)
            except SupervisorError as error:  # another run may get this host at once
                self.node["error"] = str(error)
            if time.monotonic() - self.logs_limited >= LOG_INTERVAL:
                limit_logs(self.run_dir / "logs")
                self.logs_limited = time.monotonic()
            useless = self.elastic and self.ranks.mistake() not in ("", "DiskError")  # torchrun would restart the ranks
            if self.ranks.exit_is_overdue() or "error" in self.node or useless:
                self.kill_all(torchrun, spare=self.kept_lighthouse())
        return code

    def environment(self) -> dict[str, str]:
        """Return the environment of torchrun. Raises SupervisorError."""
        return run_environment(self.run_dir) | {"TRAINYARD_RESTARTS": str(self.restarted)}

    def spawn(self, command: list[str], log: LinkFreePath | None) -> subprocess.Popen[bytes]:
        """Start a program that dies with this process, even when that is killed by SIGKILL."""
        parent = os.getpid()

        def before_exec() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        with log.open_append() if log else contextlib.nullcontext() as sink:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                cwd=self.run_dir.path,
                env=self.environment(),
                preexec_fn=before_exec,
            )

    def keep_lighthouse(self) -> None:
        """Start the lighthouse if it is assigned to this host and not running. A lighthouse that exits repeatedly ends the run."""
        address = self.request.lighthouse
        code = self.lighthouse.returncode if self.lighthouse else -1
        if not address or code is None or "error" in self.node:
            return
        if time.monotonic() - self.lighthouse_started < LIGHTHOUSE_DELAY:
            return
        log = self.run_dir / "logs/lighthouse.log"
        self.lighthouse_exits = self.lighthouse_exits + 1 if code > 0 else 0
        if self.lighthouse_exits == LIGHTHOUSE_STARTS:
            output = read_log(log, -1)["lines"] or [f"exit code {code}"]
            self.node["error"] = f"the run's lighthouse exited {LIGHTHOUSE_STARTS} times: {output[-1]}"
            return
        self.lighthouse_started = time.monotonic()
        self.lighthouse = self.spawn([self.request.command[0], "-m", "trainer.distributed.lighthouse", address], log)

    def restart_is_due(self) -> bool:
        """Return whether to start torchrun again; before that, wait, twice as long after each failure without progress.

        There is no restart if the ranks ended as intended, a user stops the run, or a user must fix the cause.
        """
        states = [self.ranks.rank_state(rank) for rank in self.ranks.ranks]
        if "error" in self.node or self.ranks.mistake() or {state.get("status") for state in states} <= set(ENDED_WELL):
            return False
        step = max(int(state.get("step") or 0) for state in states)
        self.failed_in_a_row = 1 if step > self.best_step else self.failed_in_a_row + 1
        self.best_step = max(step, self.best_step)
        if self.failed_in_a_row > self.request.restarts:
            return False
        self.save()
        deadline = time.monotonic() + min(
            RESTART_DELAY_LIMIT, 2.0 ** min(self.failed_in_a_row - 1, 10)
        )  # 2 ** 1024 would overflow
        while time.monotonic() < deadline:
            caught = signal.sigtimedwait(AWAITED, TICK)
            self.stop_requested |= bool(caught and caught.si_signo != signal.SIGCHLD)
            if self.stop_requested or (self.run_dir / "stop").exists():
                self.stop_requested = True
                return False
            self.keep_lighthouse()
        self.restarted += 1
        log_line(f"torchrun failed at step {step}; starting it again (start {self.restarted + 1})")
        self.ranks.reset()
        self.node["restarted"] = self.restarted
        return True

    def wait_for_go(self) -> bool:
        """Wait for `state/go`; return whether it appeared before a stop and before the limit."""
        self.save()
        deadline = time.monotonic() + HOLD_LIMIT
        while not (self.run_dir / "state/go").exists():
            caught = signal.sigtimedwait(AWAITED, 0.01)
            if (caught and caught.si_signo != signal.SIGCHLD) or (self.run_dir / "stop").exists():
                self.node.update(status="stopped", ended=time.time())
            elif time.monotonic() > deadline:
                why = f"the controller did not release the start within {HOLD_LIMIT:.0f} s"
                self.node.update(status="failed", ended=time.time(), error=why)
            else:
                continue
            self.save()
            return False
        self.node.update(status="running", started=time.time())
        return True

    def reap(self, torchrun: subprocess.Popen[bytes] | None) -> int | None:
        """Reap every dead child, orphans included; return torchrun's exit code once it has one."""
        with contextlib.suppress(ChildProcessError):
            while (dead := os.waitpid(-1, os.WNOHANG))[0]:
                for child in (torchrun, self.lighthouse):
                    if child and dead[0] == child.pid:
                        child.returncode = os.waitstatus_to_exitcode(dead[1])
        return torchrun.returncode if torchrun else None

    def kill_all(self, torchrun: subprocess.Popen[bytes] | None = None, spare: Collection[int] = ()) -> None:
        """Kill every descendant of this process but those whose pids are in `spare`."""
        deadline = time.monotonic() + KILL_LIMIT
        while time.monotonic() < deadline:
            left = [pid for pid in descendants(os.getpid()) if pid not in spare]
            if not left:
                return
            for pid in left:
                send_signal(pid, signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, 0.01)
            self.reap(torchrun)

    def end(self, code: int) -> None:
        """Record how the run ended. The reports of the ranks take precedence: torchrun can fail although its workers have finished."""
        self.ranks.read_log()
        statuses = {self.ranks.rank_state(rank).get("status") for rank in self.ranks.ranks}
        self.ranks.failures = [entry for entry in self.ranks.failures if not self.ranks.ended_well(entry["rank"])]
        if statuses <= set(ENDED_WELL) or (code == 0 and not self.ranks.failures):
            status = "stopped" if "stopped" in statuses else "finished"
        else:
            stopped = self.stop_requested and not self.ranks.failures and "failed" not in statuses
            status = "stopped" if stopped else "failed"
        self.node.update(status=status, ended=time.time(), exit_code=code)
        self.save()

    def save(self) -> None:
        """Write the state of this host's part."""
        self.node.update(ranks=self.ranks.ranks, failures=self.ranks.failures, oom=oom_kills() > self.oom_kills)
        try:
            write_json(self.run_dir / "state/node.json", self.node)
        except OSError as error:  # a full disk must not end the supervisor before its children
            log_line(str(error))


def prctl(option: int, value: int) -> None:
    """Call prctl(2). Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def oom_kills() -> int:
    """Return how many processes the kernel has killed on this host so far for lack of memory."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(encoding="utf-8"), re.MULTILINE):
            return int(found[1])
    return 0


def log_line(text: str) -> None:
    """Write a line to torchrun's log."""
    print(f"supervise: {text}", file=sys.stderr, flush=True)
