"""One host's part of a run: start it in the background, say how it is, stop it. Standard library only, no torch.

    python -m trainer.supervise start --run-dir D --node-rank 0 --ranks 0 [--backend B] [--hold]
                                      [--replica 0 --restarts N [--lighthouse HOST:PORT]] -- <torchrun ...>
    python -m trainer.supervise status --run-dir D [--wait S] [--logs-from '{"rank0.log": 1234}']
    python -m trainer.supervise stop --run-dir D [--grace S] [--now] [--wanted]
    python -m trainer.supervise list --data-dir DIR

Each prints one JSON object on one line; what cannot be done is `{"error": "one plain line"}` and exit code 1. `start`
returns as soon as the supervisor (`run`, below) lives; `run` is what stays: the main process of a transient systemd
unit, or a detached process of its own where no systemd runs. With `--hold` it waits for the file `state/go` before it
starts torchrun, so that many hosts can be made ready first and then begin at once. With `--restarts` a torchrun that
breaks is started again here, alone, up to so many times in a row without a step further than before: the run goes on
without it meanwhile (docs/strategies.md); `--lighthouse` is where this host keeps the lighthouse of such a run. `status --wait` answers when there
is news, or after that time. What the files of a run folder hold: docs/run-folder.md.

Whether a run lives is asked of the kernel, never of a pid file: the supervisor holds a lock that dies with it.
Processes are told by their parents and by a mark in their environment, never by their name, and are signalled through
a pidfd, so that a pid used again by somebody else is never hit.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TICK = 0.1  # s between two looks of the supervisor at its children, as torchrun's own --monitor-interval
LOOK = 0.2  # s between two looks of a `status --wait`
START_LIMIT = 15.0  # s for a supervisor to come up on a loaded machine
HOLD_LIMIT = 120.0  # s that a supervisor waits for `state/go`
RESTART_LIMIT = 60.0  # s between two starts of a torchrun that breaks, at most; the first waits 1 s
TERM_LIMIT = 10.0  # s between SIGTERM and SIGKILL
UNLIT = 3  # times in a row that a run's lighthouse may end by itself, as where its port is taken
KILL_LIMIT = 10.0  # s for a killed process to leave; longer means that it hangs in the kernel
# s for torchrun to leave once its ranks have: where a peer is gone, its exit barrier would hold it for 300.
LEAVE_LIMIT = 10.0
LOG_LIMIT = 64 * 1024  # bytes of a log in one status
MARK = "TRAINYARD_RUN_DIR"  # in the environment of every process of a run
DONE = ("finished", "stopped")  # a rank that ended as it should

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h

# What torchrun logs as soon as it has seen a worker die (torch/distributed/elastic/multiprocessing/api.py).
FAILED = re.compile(rb"failed \(exitcode: (-?\d+)\)\s+local_rank: (\d+) \(pid: (\d+)\)")


class SupervisorError(Exception):
    """What was asked for cannot be done; the message is one plain line for the person."""


# Files ----------------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`, or None where there is none (yet). Files are renamed into place, so never half of one."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace `path` whole. Raises OSError (a full disk) and then leaves the old one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(value))
    aside.replace(path)


@contextlib.contextmanager
def held(path: Path, wait: float = 0.0) -> Iterator[bool]:
    """Try for up to `wait` seconds to hold `path`'s lock; yields whether it is ours. It dies with us."""
    with path.open("ab") as file:  # not inherited by children: closed on exec
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield True
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(0.01)


def lives(run_dir: Path) -> bool:
    """Whether a supervisor of this run folder is alive on this host."""
    try:
        with (run_dir / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True


# Processes ------------------------------------------------------------------------------------------------------------


def stat(pid: int) -> tuple[str, int, int] | None:
    """(state letter, parent, start time in clock ticks since boot) of a process, None once it is gone; see proc(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), int(fields[19])


def processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def running(pid: int) -> bool:
    now = stat(pid)
    return now is not None and now[0] not in "ZX"


def environ(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty for somebody else's."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def descendants(root: int) -> list[int]:
    """Every live process below `root`, whatever session or group it went to."""
    children: dict[int, list[int]] = {}
    for pid in processes():
        if (seen := stat(pid)) and seen[0] not in "ZX":
            children.setdefault(seen[1], []).append(pid)
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def members(run_dir: Path) -> list[int]:
    """Every live process of this run: those that carry its mark, and all below them."""
    marked = [pid for pid in processes() if environ(pid).get(MARK) == str(run_dir) and running(pid)]
    return list({*marked, *(below for pid in marked for below in descendants(pid))})


def send(pid: int, number: signal.Signals, since: int | None = None) -> None:
    """Signal `pid` if it is still the process that started at `since` (None: whatever it is now)."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            now = stat(pid)
            if now is not None and since in (None, now[2]):
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


# start ----------------------------------------------------------------------------------------------------------------


def clean_environment() -> dict[str, str]:
    """Who we are and where programs lie; nothing else of the login shell reaches a run."""
    person = pwd.getpwuid(os.getuid())
    kept = {k: v for k, v in os.environ.items() if k in ("TMPDIR", "TZ") or k.startswith("XDG_")}
    path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    who = {"HOME": person.pw_dir, "USER": person.pw_name, "LOGNAME": person.pw_name, "SHELL": "/bin/sh"}
    return {**kept, **who, "PATH": path, "LANG": os.environ.get("LANG", "C.UTF-8")}


def run_environment(run_dir: Path) -> dict[str, str]:
    """The environment of torchrun: clean, this trainer importable, and the lines of `env`, which is where secrets go.

    Raises SupervisorError if others may read `env`, or a line of it is not KEY=VALUE.
    """
    values = {**clean_environment(), MARK: str(run_dir), "PYTHONPATH": str(Path(__file__).parent.parent)}
    file = run_dir / "env"
    if not file.exists():
        return values
    if file.stat().st_mode & 0o077:
        raise SupervisorError(f"{file} may hold secrets and others can read it: chmod 600 it")
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            key, equals, value = line.partition("=")
            if not equals or not key.isidentifier():
                raise SupervisorError(f"{file}:{number} is not KEY=VALUE")
            values[key] = value
    return values


def choose_backend(wanted: str) -> list[str] | None:
    """The start of the systemd-run command that works here, None for a process of our own.

    A user unit needs no rights but lingering (else it dies with the last login); a system unit needs root or sudo.
    """
    if wanted == "process":
        return None
    if Path("/run/systemd/system").is_dir():  # sd_booted(3)
        uid = os.getuid()
        person = pwd.getpwuid(uid).pw_name
        if uid == 0:
            return ["systemd-run"]
        if Path(f"/var/lib/systemd/linger/{person}").exists() and Path(f"/run/user/{uid}/systemd/private").exists():
            return ["systemd-run", "--user"]
        if subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0:
            return ["sudo", "-n", "systemd-run", f"--uid={uid}", f"--gid={os.getgid()}"]
    if wanted == "systemd":
        raise SupervisorError(
            "no systemd unit can be started here: neither root, nor sudo without a password, nor lingering"
        )
    return None


def unit_name(run_dir: Path) -> str:
    """Two hosts of an inventory may be one machine: the folder, not the run's name alone, tells units apart."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", run_dir.name)
    return f"trainyard-{name}-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:6]}.service"


def start(a: argparse.Namespace) -> dict[str, Any]:
    """Start this host's part of a run. Raises SupervisorError, naming it, if this or another run lives here."""
    run_dir = Path(a.run_dir).resolve()
    if not run_dir.is_dir():
        raise SupervisorError(f"there is no {run_dir} here")
    run_environment(run_dir)  # what is wrong with it is said now
    for folder in ("state", "logs"):
        (run_dir / folder).mkdir(exist_ok=True)
    with held(run_dir.parent / ".start", wait=START_LIMIT) as alone:  # of two starts at once, one sees the other's run
        if not alone:
            raise SupervisorError("another start on this host does not come to its end")
        if lives(run_dir):
            raise SupervisorError(f"run {run_dir.name} is already running here")
        for other in sorted(run_dir.parent.iterdir()):
            if other != run_dir and lives(other):
                raise SupervisorError(f"busy: run {other.name} is running here")
        if left := members(run_dir):
            raise SupervisorError(
                f"processes of an earlier start of run {run_dir.name} are still here: {left}; stop it first"
            )
        before = read_json(run_dir / "state/node.json") or {}
        a.attempt = a.attempt or before.get("attempt", 0) + 1
        for stale in [*(run_dir / "state").iterdir(), run_dir / "stop"]:
            stale.unlink(missing_ok=True)
        return launch(a, run_dir)


def launch(a: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    systemd = choose_backend(a.backend)
    unit = unit_name(run_dir) if systemd else None
    command = [sys.executable, "-m", "trainer.supervise", "run", "--run-dir", str(run_dir)]
    command += ["--node-rank", str(a.node_rank), "--ranks", a.ranks, "--attempt", str(a.attempt), "--hosts", a.hosts]
    command += [*(["--unit", unit] if unit else []), *(["--hold"] if a.hold else [])]
    command += ["--restarts", str(a.restarts), *(["--replica", str(a.replica)] if a.replica is not None else [])]
    command += [*(["--lighthouse", a.lighthouse] if a.lighthouse else []), "--", *a.command]
    own = {MARK: str(run_dir), "PYTHONPATH": str(Path(__file__).parent.parent)}
    log = run_dir / f"logs/torchrun.{a.node_rank}.log"
    if systemd and unit:
        # A unit that failed stays loaded, for its Result to be read, until here.
        control = ["sudo", "-n", "systemctl"] if "sudo" in systemd else ["systemctl", *systemd[1:]]
        environment = {**clean_environment(), "XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}"}
        subprocess.run([*control, "reset-failed", unit], capture_output=True, check=False, env=environment)
        # mixed: the supervisor gets the SIGTERM of a shutdown, and what it leaves behind gets SIGKILL.
        # continue: when the kernel kills a rank for memory, the supervisor lives on to say so.
        settings = ["KillMode=mixed", "OOMPolicy=continue", "Type=exec", f"WorkingDirectory={run_dir}", *a.property]
        options = [f"--unit={unit}", "--quiet", "--no-ask-password", f"--description=trainyard run {run_dir.name}"]
        options += [f"--property={setting}" for setting in settings] + [f"--setenv={k}={v}" for k, v in own.items()]
        done = subprocess.run(
            [*systemd, *options, "--", *command], capture_output=True, text=True, check=False, env=environment
        )
        if done.returncode:
            raise SupervisorError(f"systemd-run: {' '.join((done.stderr or done.stdout).split())}")
    else:
        with log.open("ab") as sink:
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                cwd=run_dir,
                env={**clean_environment(), **own},
                start_new_session=True,
            )
    deadline = time.monotonic() + START_LIMIT
    while (node := read_json(run_dir / "state/node.json")) is None:
        if time.monotonic() > deadline:
            raise SupervisorError(f"the supervisor did not come up; see {log}")
        time.sleep(0.01)
    if node.get("error"):
        raise SupervisorError(node["error"])
    started = {"backend": "systemd" if unit else "process", "pid": node["pid"], "started": node["started"]}
    ignored = {} if unit or not a.property else {"ignored": a.property}
    return started | ({"unit": unit} if unit else {}) | ignored


# run: the supervisor itself -------------------------------------------------------------------------------------------


def prctl(option: int, value: int) -> None:
    import ctypes  # only the supervisor needs it; status is asked for twice a second

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def run(a: argparse.Namespace) -> None:
    """Hold the lock, run torchrun to its end, leave no process behind, say how it ended. Stays in the foreground."""
    run_dir = Path(a.run_dir)
    log = run_dir / f"logs/torchrun.{a.node_rank}.log"
    with held(run_dir / "lock", wait=2.0) as ours, log.open("ab", buffering=0) as sink:
        if not ours:
            raise SupervisorError(f"run {run_dir.name} is already running here")
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        Supervisor(a, run_dir, log).run()


class Supervisor:
    def __init__(self, a: argparse.Namespace, run_dir: Path, log: Path) -> None:
        self.run_dir, self.command, self.hold = run_dir, a.command, a.hold
        self.ranks = [int(rank) for rank in a.ranks.split(",")]
        # torchrun restarts its workers itself then, and a worker's death is not yet the run's.
        self.restarts = any(re.fullmatch(r"--max[-_]restarts=[1-9]\d*", argument) for argument in a.command)
        # Or we start torchrun again.
        self.limit, self.best, self.in_a_row, self.restarted = a.restarts, -1, 0, 0
        self.where, self.lit, self.unlit = a.lighthouse, 0.0, 0
        self.lighthouse: subprocess.Popen[bytes] | None = None
        self.log, self.read_to = log, log.stat().st_size
        self.workers: dict[int, int] = {}  # rank -> pid
        self.gone: dict[int, float] = {}  # rank -> when its process was first seen gone
        self.terminated = False
        self.done_since: float | None = None
        self.oom_kills = oom_kills()
        me = stat(os.getpid())
        self.node: dict[str, Any] = {
            "run": run_dir.name,
            "node_rank": a.node_rank,
            "ranks": self.ranks,
            "hosts": a.hosts.split(",") if a.hosts else [],
            "attempt": a.attempt,
            "restarts": self.restarts or self.limit > 0,
            "replica": a.replica,
            "backend": "systemd" if a.unit else "process",
            "unit": a.unit,
            "pid": os.getpid(),
            "pid_start": me[2] if me else None,
            "started": time.time(),
            "ended": None,
            "status": "starting" if a.hold else "running",
            "exit_code": None,
            "failures": [],
        }

    def run(self) -> None:
        # Orphans come to us instead of to init: torchrun starts its workers in sessions of their own.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        awaited = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
        if self.hold and not self.told_to_go(awaited):
            return
        while True:
            try:
                self.light()
                torchrun = self.spawn(self.command, None)
            except (OSError, subprocess.SubprocessError) as error:
                self.node.update(status="failed", ended=time.time(), exit_code=127, error=str(error))
                self.save()
                self.kill_all()
                return
            self.save()
            while (code := self.reap(torchrun)) is None:
                caught = signal.sigtimedwait(awaited, TICK)
                if caught and caught.si_signo in (signal.SIGTERM, signal.SIGINT):
                    self.terminated = True
                    send(torchrun.pid, signal.SIGTERM)
                elif caught and caught.si_signo == signal.SIGUSR1:  # stop --now
                    self.terminated = True
                    self.kill_all(torchrun)
                self.watch(torchrun.pid)
                self.light()
                if self.overdue() or "error" in self.node:
                    self.kill_all(torchrun, but=self.lighthouse)
            self.kill_all(torchrun, but=self.lighthouse)
            self.read_log()
            if not self.again(awaited):
                break
        self.kill_all(torchrun)
        self.end(code)

    def spawn(self, command: list[str], log: Path | None) -> subprocess.Popen[bytes]:
        """Start a program that dies with us, even by kill -9."""
        parent = os.getpid()

        def before_exec() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        environment = run_environment(self.run_dir) | {"TRAINYARD_RESTARTS": str(self.restarted)}
        with log.open("ab") if log else contextlib.nullcontext() as sink:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                cwd=self.run_dir,
                env=environment,
                preexec_fn=before_exec,
            )

    def light(self) -> None:
        """Keep the run's lighthouse, if it is here, alive; one that ends by itself again and again is the run's error."""
        code = self.lighthouse.returncode if self.lighthouse else -1
        if not self.where or code is None or "error" in self.node or time.monotonic() - self.lit < 1.0:
            return
        log = self.run_dir / "logs/lighthouse.log"
        self.unlit = self.unlit + 1 if code > 0 else 0
        if self.unlit == UNLIT:
            said = log.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"]
            self.node["error"] = f"the run's lighthouse ends again and again: {said[-1]}"
            return
        self.lit = time.monotonic()
        self.lighthouse = self.spawn([self.command[0], "-m", "trainer.distributed.lighthouse", self.where], log)

    def again(self, awaited: set[signal.Signals]) -> bool:
        """Whether a torchrun that has ended is started once more; wait first, longer every time that it comes no further.

        Not if its ranks have ended as they should, a person wants it to stop, or has to mend something.
        """
        said = [read_json(self.run_dir / f"state/rank{rank}.json") or {} for rank in self.ranks]
        mistake = "error" in self.node or any((state.get("error") or {}).get("plain") for state in said)
        if mistake or {state.get("status") for state in said} <= set(DONE):
            return False
        step = max(int(state.get("step") or 0) for state in said)
        self.in_a_row = 1 if step > self.best else self.in_a_row + 1
        self.best = max(step, self.best)
        if self.in_a_row > self.limit:
            return False
        self.save()
        deadline = time.monotonic() + min(RESTART_LIMIT, 2.0 ** (self.in_a_row - 1))
        while time.monotonic() < deadline:
            caught = signal.sigtimedwait(awaited, TICK)
            self.terminated |= bool(caught and caught.si_signo != signal.SIGCHLD)
            if self.terminated or (self.run_dir / "stop").exists():
                self.terminated = True
                return False
            self.light()
        self.restarted += 1
        print(
            f"supervise: starting again what broke at step {step} (start {self.restarted + 1})",
            file=sys.stderr,
            flush=True,
        )
        self.workers, self.gone = {}, {}
        self.node.update(failures=[], restarted=self.restarted)
        return True

    def told_to_go(self, awaited: set[signal.Signals]) -> bool:
        """Wait for `state/go`; False if we were stopped before, or nobody said it."""
        self.save()
        deadline = time.monotonic() + HOLD_LIMIT
        while not (self.run_dir / "state/go").exists():
            caught = signal.sigtimedwait(awaited, 0.01)
            if (caught and caught.si_signo != signal.SIGCHLD) or (self.run_dir / "stop").exists():
                self.node.update(status="stopped", ended=time.time())
            elif time.monotonic() > deadline:
                why = f"nobody told it to go within {HOLD_LIMIT:.0f} s"
                self.node.update(status="failed", ended=time.time(), error=why)
            else:
                continue
            self.save()
            return False
        self.node.update(status="running", started=time.time())
        return True

    def reap(self, torchrun: subprocess.Popen[bytes] | None) -> int | None:
        """Bury every dead child, orphans too; torchrun's exit code once it has one."""
        with contextlib.suppress(ChildProcessError):
            while (dead := os.waitpid(-1, os.WNOHANG))[0]:
                for child in (torchrun, self.lighthouse):
                    if child and dead[0] == child.pid:
                        child.returncode = os.waitstatus_to_exitcode(dead[1])
        return torchrun.returncode if torchrun else None

    def watch(self, torchrun: int) -> None:
        """Note what became of the ranks' processes, while torchrun still lives.

        torchrun says which worker died only after it has stopped the others, which can take it 30 s; so we look
        ourselves too, and what it says later (it alone learns the exit code) takes the place of what we saw.
        """
        before = list(self.node["failures"])
        self.read_log()
        if len(self.workers) < len(self.ranks) or (self.restarts and not all(map(running, self.workers.values()))):
            self.find_workers(torchrun)
        for rank, pid in self.workers.items():
            if rank not in self.gone and not running(pid) and not self.is_done(rank):
                self.gone[rank] = time.monotonic()
        if self.gone and not self.node["failures"]:
            first = min(self.gone, key=lambda rank: self.gone[rank])
            if time.monotonic() - self.gone[first] > 5 * TICK:
                self.node["failures"] = [failure(first, None, self.workers[first])]
        if self.node["failures"] != before:
            self.save()

    def find_workers(self, torchrun: int) -> None:
        """Note the ranks' processes. Where torchrun starts them again itself, it may number them anew."""
        found: dict[int, int] = {}
        for pid in descendants(torchrun):
            values = environ(pid)
            told = values.get("RANK", "")
            # RANK is inherited by whatever a worker starts: the worker itself is torchrun's own child.
            if told.isdigit() and (seen := stat(pid)) and seen[1] == torchrun:
                # In a replica with a torchrun of its own it counts from 0.
                found[self.ranks[int(values["LOCAL_RANK"])] if self.limit else int(told)] = pid
        if self.restarts and set(found.values()) - set(self.workers.values()):
            self.workers, self.gone = {}, {}
            self.ranks = sorted(found)
            self.node.update(ranks=self.ranks, failures=[])
            for path in (self.run_dir / "state").glob("rank*.json"):
                if not running((read_json(path) or {}).get("pid", 0)):  # of the ranks before
                    path.unlink(missing_ok=True)
            self.save()
        for rank, pid in found.items():
            self.workers.setdefault(rank, pid)

    def overdue(self) -> bool:
        """Whether all ranks have said that they are done, and torchrun should have left by now."""
        if not self.workers or any(map(running, self.workers.values())) or not all(map(self.is_done, self.ranks)):
            self.done_since = None
            return False
        self.done_since = self.done_since or time.monotonic()
        return time.monotonic() - self.done_since > LEAVE_LIMIT

    def read_log(self) -> None:
        with self.log.open("rb") as file:
            file.seek(self.read_to)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self.read_to += whole
        for code, local_rank, pid in FAILED.findall(text[:whole]):
            if int(local_rank) < len(self.ranks) and not self.is_done(rank := self.ranks[int(local_rank)]):
                known = [entry for entry in self.node["failures"] if entry["exit_code"] is not None]
                self.node["failures"] = [*known, failure(rank, int(code), int(pid))]

    def is_done(self, rank: int) -> bool:
        return (read_json(self.run_dir / f"state/rank{rank}.json") or {}).get("status") in DONE

    def kill_all(
        self, torchrun: subprocess.Popen[bytes] | None = None, but: subprocess.Popen[bytes] | None = None
    ) -> None:
        """Leave none of our processes alive, except what is below `but`."""
        deadline = time.monotonic() + KILL_LIMIT
        while time.monotonic() < deadline:
            spared = {but.pid, *descendants(but.pid)} if but else set()
            left = [pid for pid in descendants(os.getpid()) if pid not in spared]
            if not left:
                return
            for pid in left:
                send(pid, signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, 0.01)
            self.reap(torchrun)

    def end(self, code: int) -> None:
        """A rank is judged by its own word: at the end of a static run torchrun may fail though its workers did not."""
        self.read_log()
        said = {(read_json(self.run_dir / f"state/rank{rank}.json") or {}).get("status") for rank in self.ranks}
        failures = [entry for entry in self.node["failures"] if not self.is_done(entry["rank"])]
        if said <= set(DONE) or (code == 0 and not failures):
            status = "stopped" if "stopped" in said else "finished"
        else:
            status = "stopped" if self.terminated and not failures and "failed" not in said else "failed"
        self.node.update(status=status, ended=time.time(), exit_code=code, failures=failures)
        self.save()

    def save(self) -> None:
        self.node["oom"] = oom_kills() > self.oom_kills
        try:
            write_json(self.run_dir / "state/node.json", self.node)
        except OSError as error:  # a full disk must not cost us the children
            print(f"supervise: {error}", file=sys.stderr, flush=True)


def oom_kills() -> int:
    """How many processes the kernel has killed on this machine so far because memory ran out."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE):
            return int(found[1])
    return 0


def failure(rank: int, code: int | None, pid: int) -> dict[str, Any]:
    name = None
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
    return {"rank": rank, "exit_code": code, "signal": name, "pid": pid}


# status, list ---------------------------------------------------------------------------------------------------------


def status(a: argparse.Namespace) -> dict[str, Any]:
    """How this host's part is: `status` is none, starting, running, finished, failed, stopped, or lost (its supervisor
    died and could not say how)."""
    run_dir = Path(a.run_dir)
    deadline = time.monotonic() + a.wait
    before = phases(answer := look(run_dir))
    while calm(answer) and phases(answer) == before and time.monotonic() < deadline:
        time.sleep(LOOK)
        answer = look(run_dir)
    wanted = json.loads(a.logs_from)
    logs = {name: read_log(run_dir / "logs" / Path(name).name, since) for name, since in wanted.items()}
    return {**answer, "logs": logs}


def phases(answer: dict[str, Any]) -> dict[str, str]:
    return {name: rank.get("status", "") for name, rank in answer["ranks"].items()}


def calm(answer: dict[str, Any]) -> bool:
    """Whether nothing in a host's part asks for the controller's attention: it goes on as it did."""
    ranks = answer["ranks"].values()
    if answer["status"] not in ("starting", "running") or (answer["node"] and answer["node"]["failures"]):
        return False
    return not any(rank["process"] is None or rank.get("status") in ("failed", *DONE) for rank in ranks)


def look(run_dir: Path) -> dict[str, Any]:
    alive = lives(run_dir)
    node = read_json(run_dir / "state/node.json")  # after the lock: an end written meanwhile is seen
    ranks = {}
    for path in sorted((run_dir / "state").glob("rank*.json")):
        if (rank := read_json(path)) is not None:
            now = stat(rank["pid"]) if isinstance(rank.get("pid"), int) else None
            ranks[str(rank.get("rank"))] = {**rank, "process": now[0] if now else None}
    answer = {"now": time.time(), "alive": alive, "node": node, "ranks": ranks, "run_dir": str(run_dir)}
    answer["stop_wanted"] = (run_dir / "state/stop-wanted").exists()
    if node is None:
        return {**answer, "status": "starting" if alive else "none"}
    if node["status"] in ("starting", "running") and not alive:
        return {**answer, "status": "lost", "why": why_lost(node, run_dir)}
    return {**answer, "status": node["status"]}


def why_lost(node: dict[str, Any], run_dir: Path) -> str:
    """systemd's word on a supervisor that vanished (oom-kill, signal, ...), or ours if it is plain; may be empty."""
    with contextlib.suppress(OSError):
        if os.statvfs(run_dir).f_bavail == 0:
            return "the disk is full"
        booted = time.time() - float(Path("/proc/uptime").read_text().split()[0])
        if node["started"] < booted - 1:
            return "the machine was restarted"
        if node.get("unit"):
            query = ["systemctl", *(["--user"] if user_unit() else []), "show", "--value", "--property=Result"]
            environment = {**clean_environment(), "XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}"}
            shown = subprocess.run([*query, node["unit"]], capture_output=True, text=True, check=False, env=environment)
            word = shown.stdout.strip()
            return "" if word == "success" else word
    return ""


def user_unit() -> bool:
    with contextlib.suppress(SupervisorError):
        return "--user" in (choose_backend("systemd") or [])
    return False


def read_log(path: Path, since: int) -> dict[str, Any]:
    """Complete lines from byte `since` on, or the last -`since` lines; at most LOG_LIMIT bytes, `offset` tells where to
    go on."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            at = since if 0 <= since <= size else max(0, size - LOG_LIMIT)
            file.seek(at)
            text = file.read(LOG_LIMIT)
    except OSError:
        return {"path": str(path), "offset": 0, "lines": []}
    whole = len(text) if since < 0 or (len(text) == LOG_LIMIT and b"\n" not in text) else text.rfind(b"\n") + 1
    lines = text[:whole].decode(errors="replace").splitlines()
    return {"path": str(path), "offset": at + whole, "lines": lines[since:] if since < 0 else lines}


def list_runs(a: argparse.Namespace) -> dict[str, Any]:
    """Every run folder of this host with a state, as `status` tells it."""
    found = sorted(Path(a.data_dir).glob("runs/*/state/node.json"))
    return {"now": time.time(), "runs": [look(path.parent.parent) for path in found]}


# stop -----------------------------------------------------------------------------------------------------------------


def stop(a: argparse.Namespace) -> dict[str, Any]:
    """End this host's part and return when nothing of it is left: the ranks' own way within `grace` seconds, then
    SIGTERM, then SIGKILL; with `now`, SIGKILL at once. What has ended already stays as it is. Raises SupervisorError for a
    process that cannot be killed."""
    run_dir = Path(a.run_dir).resolve()
    if not (run_dir / "state").is_dir():
        return {"status": "none", "killed": 0}
    if a.wanted:  # whoever follows the run sees that it did not break, and leaves it stopped
        (run_dir / "state/stop-wanted").touch()
    node = read_json(run_dir / "state/node.json")
    was_lost = look(run_dir)["status"] == "lost"
    if lives(run_dir) and not a.now:
        (run_dir / "stop").touch()
        if not wait_end(run_dir, a.grace) and node:
            send(node["pid"], signal.SIGTERM, node["pid_start"])
            wait_end(run_dir, TERM_LIMIT)
    if lives(run_dir) and node:  # the supervisor kills its own, and writes how it ended
        send(node["pid"], signal.SIGUSR1, node["pid_start"])
        wait_end(run_dir, 2.0)
    # A supervisor that has let go of its lock has only to leave: it is not one of those that must be killed.
    deadline = time.monotonic() + 2.0
    while node and running(node["pid"]) and not lives(run_dir) and time.monotonic() < deadline:
        if (seen := stat(node["pid"])) is None or seen[2] != node["pid_start"]:
            break
        time.sleep(0.01)
    killed = kill_members(run_dir)
    node = read_json(run_dir / "state/node.json")
    if node and node["status"] in ("starting", "running"):
        write_json(
            run_dir / "state/node.json", {**node, "status": "failed" if was_lost else "stopped", "ended": time.time()}
        )
    return {"status": look(run_dir)["status"], "killed": killed}


def wait_end(run_dir: Path, limit: float) -> bool:
    deadline = time.monotonic() + limit
    while lives(run_dir):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def kill_members(run_dir: Path) -> int:
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_LIMIT
    while left := members(run_dir):
        if time.monotonic() > deadline:
            raise SupervisorError(f"processes {sorted(left)} of run {run_dir.name} do not die: they hang in the kernel")
        for pid in left:
            send(pid, signal.SIGKILL)
        killed.update(left)
        time.sleep(0.01)
    return len(killed)


# The command line -----------------------------------------------------------------------------------------------------


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="trainer.supervise", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("start", "run"):
        verb = verbs.add_parser(name)
        verb.add_argument("--run-dir", required=True)
        verb.add_argument("--node-rank", type=int, default=0)
        verb.add_argument("--ranks", default="0", help="the ranks of this host, by local rank: 0,1")
        verb.add_argument("--hosts", default="", help="all hosts of the run, by node rank: a,b")
        verb.add_argument("--attempt", type=int, help="default: one more than the last")
        verb.add_argument("--backend", choices=("auto", "systemd", "process"), default="auto")
        verb.add_argument("--property", action="append", default=[], help="of the systemd unit: MemoryMax=20G")
        verb.add_argument("--hold", action="store_true", help="be ready, and start torchrun once state/go is there")
        verb.add_argument(
            "--replica", type=int, help="the replica that this host belongs to, if each has its own torchrun"
        )
        verb.add_argument("--restarts", type=int, default=0, help="start torchrun again so many times in a row")
        verb.add_argument("--lighthouse", default="", help="HOST:PORT at which to keep the run's lighthouse")
        verb.add_argument("--unit", help=argparse.SUPPRESS)
        verb.add_argument("command", nargs="+")
    verb = verbs.add_parser("status")
    verb.add_argument("--run-dir", required=True)
    verb.add_argument("--wait", type=float, default=0.0, help="seconds to wait for news before answering")
    verb.add_argument("--logs-from", default="{}", help="JSON: name in logs/ -> byte offset, or -N: the last N lines")
    verb = verbs.add_parser("stop")
    verb.add_argument("--run-dir", required=True)
    verb.add_argument("--grace", type=float, default=60.0, help="seconds that the ranks have to leave by themselves")
    verb.add_argument("--now", action="store_true")
    verb.add_argument("--wanted", action="store_true", help="a person wants it: it is not to be started again")
    verb = verbs.add_parser("list")
    verb.add_argument("--data-dir", required=True)
    return parser.parse_args(arguments)


def main() -> int:
    a = parse(sys.argv[1:])
    act: dict[str, Callable[[argparse.Namespace], dict[str, Any] | None]]
    act = {"start": start, "run": run, "status": status, "stop": stop, "list": list_runs}
    try:
        answer, code = act[a.verb](a), 0
    except (SupervisorError, OSError) as error:
        answer, code = {"error": str(error)}, 1
    if answer is not None:
        print(json.dumps(answer), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
