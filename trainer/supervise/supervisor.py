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
from pathlib import Path
from typing import Any

from trainer.supervise.environment import run_environment
from trainer.supervise.link_free import LinkFreePath, run_folder
from trainer.supervise.logs import limit_logs
from trainer.supervise.processes import descendants, process_stat, send_signal
from trainer.supervise.ranks import RankMonitor
from trainer.supervise.run_files import SupervisorError, check_lease, hold_lock, write_json
from trainer.supervise.start_request import StartRequest
from trainer.supervise.status import ENDED_WELL

TICK = 0.1  # s between two checks of the child processes, as torchrun's own --monitor-interval
HOLD_LIMIT = 120.0  # s to wait for the folder `state/go`
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
    def __init__(self, request: StartRequest, run_dir: LinkFreePath, log: LinkFreePath) -> None:
        self.request, self.run_dir, self.log = request, run_dir, log
        # With this option torchrun restarts its workers itself, and the death of a worker does not end the run.
        self.elastic = any(re.fullmatch(r"--max[-_]restarts=[1-9]\d*", word) for word in request.command)
        self.ranks = RankMonitor(run_dir, log, request.ranks, renumbered=self.elastic)
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
            "restarts": self.elastic,
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
        # Orphans become children of this process: torchrun starts its workers in separate sessions.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        if not self.request.unit:  # a unit has the property for this
            prctl(PR_SET_NO_NEW_PRIVS, 1)
        signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
        if self.request.hold and not self.wait_for_go():
            return
        try:
            torchrun = self.spawn()
        except (OSError, subprocess.SubprocessError) as error:
            self.node.update(status="failed", ended=time.time(), exit_code=127, error=str(error))
            self.save()
            return
        self.save()
        code = self.wait_for_torchrun(torchrun)
        self.kill_all(torchrun)
        self.end(code)

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
            try:
                check_lease(self.request.lease)
            except SupervisorError as error:  # another run may get this host at once
                self.node["error"] = str(error)
            if time.monotonic() - self.logs_limited >= LOG_INTERVAL:
                limit_logs(self.run_dir / "logs")
                self.logs_limited = time.monotonic()
            useless = self.elastic and self.ranks.mistake() not in ("", "DiskError")  # torchrun would restart the ranks
            if self.ranks.exit_is_overdue() or "error" in self.node or useless:
                self.kill_all(torchrun)
        return code

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start torchrun, which dies with this process, even when that is killed by SIGKILL. Raises OSError and SupervisorError."""
        parent = os.getpid()

        def before_exec() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        return subprocess.Popen(
            self.request.command,
            stdin=subprocess.DEVNULL,
            cwd=self.run_dir.path,
            env=run_environment(self.run_dir),
            preexec_fn=before_exec,
        )

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

    def reap(self, torchrun: subprocess.Popen[bytes]) -> int | None:
        """Reap every dead child, orphans included; return torchrun's exit code once it has one."""
        with contextlib.suppress(ChildProcessError):
            while (dead := os.waitpid(-1, os.WNOHANG))[0]:
                if dead[0] == torchrun.pid:
                    torchrun.returncode = os.waitstatus_to_exitcode(dead[1])
        return torchrun.returncode  # type: ignore[no-any-return]

    def kill_all(self, torchrun: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + KILL_LIMIT
        while time.monotonic() < deadline:
            left = descendants(os.getpid())
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
        self.node.update(ranks=self.ranks.ranks, failures=self.ranks.failures, oom=oom_kills() > self.oom_kills)
        try:
            write_json(self.run_dir / "state/node.json", self.node)
        except OSError as error:  # a full disk must not end the supervisor before its children
            print(f"supervise: {error!s}", file=sys.stderr, flush=True)


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def oom_kills() -> int:
    """Return how many processes the kernel has killed on this host so far for lack of memory."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(encoding="utf-8"), re.MULTILINE):
            return int(found[1])
    return 0
