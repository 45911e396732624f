"""The driver of a queued run, on the queue host: it trains the run on the hosts that its job has, and ends the job.

    python -m trainyard.queue.driver FOLDER     started by service.py when the job has hosts

One call drives one allocation of the job: it waits for the leases, starts or monitors the ranks through RunSession, and
says how the lease ends: the run has finished, it has failed permanently, or it returns to the queue because it was
preempted or lost a host. Killed and started again, the driver finds the ranks running and monitors them. It also ends a run that loses a host in every attempt.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.planner.decisions import as_before
from trainer.supervise.run_files import SupervisorError, hold_lock, read_json, write_json
from trainyard.queue.carry import CheckpointCopy, CopyThread
from trainyard.queue.lease_step import AGAIN, FAILED, FINISHED
from trainyard.queue.run_folder import QueuedStart, read_session
from trainyard.queue.slurm_lease import ASKED_FOR, ENDED, FINAL, TIME_LIMIT, LeaseJob, Leases, leased_hosts, read_job
from trainyard.remote.queue_job import command, submit
from trainyard.remote.queue_phases import LIVE
from trainyard.run.follow.announce import Announcer, Event
from trainyard.run.follow.restart_policy import furthest_step
from trainyard.run.host_run import HostRun
from trainyard.run.launch.start_ranks import stop_parts
from trainyard.run.session import RunSession
from trainyard.run.types import SessionState
from trainyard.wire.connection import Host, HostConnection, InventoryError, RemoteError
from trainyard.wire.openssh import open_connection
from trainyard.wire.run_errors import HostUnreachableError, PartlyActiveError, RunError

POLL = 0.3  # s between two queries to Slurm
LEASE_LIMIT = 60.0  # s for the steps of a job to take their leases
LOST_LIMIT = 90.0  # s for Slurm to see that a host is lost
LOSSES = 10  # attempts in a row that lose a host and reach no further step, after which the run has failed
END_LIMIT = 60.0  # s for a job to end after its leases
# s after its submission in which a crash of slurmctld can lose a job; it saves its state every 6 s
FORGET_LIMIT = 600.0
STOPPED = "it was stopped"  # why a run has ended
PHASES = {FINISHED: "finished", FAILED: "failed", AGAIN: "waiting"}
REASONS = {"TIMEOUT": TIME_LIMIT, "DEADLINE": "its deadline", "CANCELLED": "it was cancelled"}


class Driver:
    """Drives the run of one folder."""

    def __init__(self, folder: Path) -> None:
        """Read the folder. Raises UserError."""
        self.folder = folder
        self.session: QueuedStart = read_session(folder)
        state = read_json(folder / "state.json")
        if state is None:
            raise UserError(f"{folder / 'state.json'} is missing: add the run again")
        self.state: dict[str, Any] = state
        self.run = self.session.prepared.run
        # Whether the first attempt continues a run that existed before it was added.
        self.continues = self.session.continues and self.session.prepared.spec.resume != "never"
        self.announce = Announcer(self.session.options, self.report)
        self.copy = CheckpointCopy(folder, self.run, self.connect, self.report)
        self.reached = max((attempt.get("reached", 0) for attempt in state["attempts"]), default=0)  # furthest step

    def drive(self) -> None:
        """Drive the run until its job waits or has ended."""
        if self.state["phase"] not in LIVE:
            self.end_again()
        while self.state["phase"] in LIVE:
            job = self.job()
            if job is None or job.state in ENDED:
                if not self.close(job):
                    continue
                return
            if job.state == "PENDING":
                if self.state["phase"] != "waiting":
                    self.save(phase="waiting")
                if not self.give_up(job):
                    return
                continue
            if job.state != "RUNNING":
                time.sleep(POLL)
            elif (order := self.order(job)) is None:
                self.allocated(job)
            else:  # a driver before this one was killed with its order, or slurmctld has forgotten the end of the job
                Leases(self.session.hosts, self.run, job, self.connect).end(order)
                self.wait_for_end(job)

    def job(self) -> LeaseJob | None:
        """Return the job; wait while Slurm does not answer."""
        while True:
            with contextlib.suppress(SupervisorError):
                return read_job(int(self.state["job"]), self.run)
            time.sleep(POLL)

    def order(self, job: LeaseJob) -> int | None:
        """Return the exit code with which a driver has ended this allocation already; None if none has."""
        last = self.state["attempts"][-1] if self.state["attempts"] else {}
        return last.get("order") if last.get("restart") == job.restart else None

    # One allocation ---------------------------------------------------------------------------------------------------

    def allocated(self, job: LeaseJob) -> None:
        """Run on the hosts of an allocation, and end it."""
        leases = Leases(self.session.hosts, self.run, job, self.connect)
        if missing := sorted(set(job.hosts) - {host.name for host in leases.hosts}):
            self.end(job, leases, FAILED, f"{', '.join(missing)} is not a host of the run: add the run again")
            return
        grants = self.wait_for_leases(job, leases)
        if grants is None:
            self.requeue(job, "a host did not take its lease")
            return
        hosts = leased_hosts(self.session.hosts, job, grants)
        self.begin(job, hosts)
        code, reason = self.train(leases, hosts)
        if code == AGAIN:
            self.leave(job, leases, reason)
        else:
            self.end(job, leases, code, reason)

    def wait_for_leases(self, job: LeaseJob, leases: Leases) -> dict[str, list[str]] | None:
        """Return the granted GPUs by host; None if a host did not take its lease, or the job has ended."""
        deadline = time.monotonic() + LEASE_LIMIT
        while (grants := leases.grants()) is None:
            if time.monotonic() > deadline or not self.has_hosts(job):
                return None
            time.sleep(POLL)
        return grants

    def has_hosts(self, job: LeaseJob) -> bool:
        """Return whether the job still has the hosts of this allocation."""
        now = self.job()
        return now is not None and now.state == "RUNNING" and now.restart == job.restart

    def train(self, leases: Leases, hosts: list[Host]) -> tuple[int, str]:
        """Train the run; return how the lease ends, and why."""
        while True:
            try:
                if self.follow(leases, hosts) != "stopped":
                    return FINISHED, ""
                stopped = leases.lost()
                return left_for(stopped) if stopped else (FAILED, STOPPED)
            except PartlyActiveError:
                self.report("ranks of an interrupted start are stopped")
                parts = [HostRun(host.name, f"{host.data_dir}/runs/{self.run}") for host in hosts]
                stop_parts(parts, self.connect, {"now": True})
            except (RunError, UserError, InventoryError) as error:
                for line in [f"failed: {error}", *getattr(error, "details", {}).get("lines", [])]:
                    self.report(line)
                self.reached = max(self.reached, furthest_step(getattr(error, "details", {})))
                if lost := leases.lost():
                    return left_for(lost)
                # A host that did not answer may answer now.
                cause = getattr(error, "details", {}).get("cause") or {}
                silent = isinstance(error, HostUnreachableError) or cause.get("kind") == "lost"
                return AGAIN if silent else FAILED, str(error)

    def follow(self, leases: Leases, hosts: list[Host]) -> str:
        """Do the steps of the session; return the status of the run: finished, or stopped."""
        prepared = self.session.prepared
        again = len(self.state["attempts"]) > 1
        if again:  # resume=never refuses only checkpoints from before the run was added
            prepared = replace(prepared, spec=prepared.spec.model_copy(update={"resume": "auto"}))
        if again or self.continues:
            try:
                if step := self.copy.carry(hosts, self.session.hosts):
                    self.report(f"copied the checkpoint {step} to {hosts[0].name}")
            except RemoteError as error:
                raise RunError(f"cannot carry the checkpoint: {error}") from None
            if earlier := self.copy.spec():  # these hosts may lack the run's folder, and would decide differently
                prepared = replace(prepared, spec=as_before(prepared.spec, earlier)[0])
        head = self.session.options.head if self.session.options.head in {host.name for host in hosts} else ""
        session = RunSession(
            hosts,
            self.connect_host,
            # The driver announces the events: what ends an attempt may not end the run.
            self.session.options.model_copy(update={"limit": "cluster", "head": head, "notify": ()}),
            home=self.folder,
            report=self.report,
            state=SessionState(prepared=prepared),
            veto=lambda failure: describe(leases.lost()),
        )
        copying = CopyThread(self.copy, hosts)
        copying.start()
        try:
            session.run()
        finally:
            copying.stop()
        # A driver that finds the run finished has nothing to follow.
        return "finished" if session.state.phase == "finished" else session.state.status

    def connect(self, name: str) -> HostConnection:
        """Make the connection to a host of the run."""
        return self.connect_host(next(host for host in self.session.hosts if host.name == name))

    def connect_host(self, host: Host) -> HostConnection:
        """Make the connection to a host."""
        return open_connection(host)

    # Ends -------------------------------------------------------------------------------------------------------------

    def leave(self, job: LeaseJob, leases: Leases, reason: str) -> None:
        """Return the run to the queue; Slurm does this itself when it preempts a job or loses a host."""
        self.report(f"returns to the queue: {reason}")
        deadline = time.monotonic() + LOST_LIMIT
        while self.has_hosts(job) and leases.lost():
            if time.monotonic() > deadline:
                self.requeue(job, reason)
                return
            time.sleep(POLL)
        self.record(job, AGAIN, reason)
        if self.has_hosts(job):  # a host answers again
            leases.end(AGAIN)
            self.wait_for_end(job)

    def requeue(self, job: LeaseJob, reason: str) -> None:
        """Let Slurm end the allocation and return the job to the queue."""
        self.record(job, AGAIN, reason)
        tell_slurm("scontrol requeue", job)
        self.wait_for_end(job)

    def end(self, job: LeaseJob, leases: Leases, code: int, reason: str) -> None:
        """End the leases with an exit code, and then the run."""
        self.report("finished" if code == FINISHED else f"ended: {reason}")
        self.record(job, code, reason)
        leases.end(code)
        self.wait_for_end(job)
        self.close_run(phase_of(code, reason), code, reason)
        if reason == TIME_LIMIT and (now := self.job()) is not None and now.state not in ENDED:
            # The steps had ended before the order, and Slurm has returned the job to the queue.
            tell_slurm("scancel", now)

    def end_again(self) -> None:
        """End a job that Slurm has started again after the end of its run, because slurmctld or a host failed as it ended.

        The job ends as its run did. If it were cancelled, the runs `after` this one would never start.
        """
        job = self.job()
        if job is None or job.state != "RUNNING":
            return
        self.report("Slurm has started the job again after the end of the run: it ends again")
        leases = Leases(self.session.hosts, self.run, job, self.connect)
        self.wait_for_leases(job, leases)
        leases.end((self.state["exit"] or {}).get("code", FAILED))
        self.wait_for_end(job)

    def give_up(self, job: LeaseJob) -> bool:
        """Cancel the job of a run that loses a host every time; return whether it does."""
        why = str(self.state.get("given_up") or "") or loses_hosts(self.state["attempts"])
        if not why:
            return False
        self.save(given_up=why)  # a driver after this one finds the job cancelled
        tell_slurm("scancel", job)
        time.sleep(POLL)
        return True

    def wait_for_end(self, job: LeaseJob) -> None:
        """Wait until the job no longer has the hosts of an allocation; let Slurm return it to the queue if that takes too long.

        A slurmctld that was killed may have forgotten the end of the steps. If the job were cancelled, its run, or the runs `after`
        it, would be. The job of a run that has ended ends again once it has hosts.
        """
        deadline = time.monotonic() + END_LIMIT
        while self.has_hosts(job):
            if time.monotonic() > deadline:
                self.report("the steps of the job do not end: Slurm returns it to the queue")
                tell_slurm("scontrol requeue", job)
                deadline += END_LIMIT
            time.sleep(POLL)

    def close(self, job: LeaseJob | None) -> bool:
        """Record the end of a job that ended without an order of this driver; return whether the run has ended, too."""
        last = self.state["attempts"][-1] if self.state["attempts"] else {}
        order = last.get("order")
        if order in (FINISHED, FAILED) and (job is None or last.get("restart") == job.restart):
            reason = last.get("reason", "")
            self.close_run(phase_of(order, reason), order, reason)
            return True
        if job is not None and job.state not in FINAL:
            self.report(f"the job ended with {job.state}: it returns to the queue")
            if tell_slurm("scontrol requeue", job):
                time.sleep(POLL)
                return False
        if job is None and self.submit_again():
            return True
        if given_up := self.state.get("given_up"):
            phase, reason = "failed", str(given_up)
        elif job is None:
            phase, reason = "failed", "Slurm has forgotten its job: add the run again"
        elif job.reason.startswith("DependencyNeverSatisfied"):  # Slurm has cancelled it: --kill-on-invalid-dep
            phase, reason = "failed", "a run for which it waits did not finish"
        else:
            phase = "cancelled" if job.state == "CANCELLED" else "failed"
            reason = REASONS.get(job.state, f"its job ended: {job.state}")
        self.report(f"ended: {reason}")
        self.close_run(phase, FAILED, reason)
        return True

    def submit_again(self) -> bool:
        """Submit the job again that slurmctld has forgotten in a crash; return whether that was possible."""
        arguments, submitted = self.state.get("arguments"), self.state.get("submitted")
        if arguments is None or time.time() - float(submitted or 0) > FORGET_LIMIT:
            return False
        before = [attempt | {"restart": -1} for attempt in self.state["attempts"]]
        try:
            submit(self.folder, arguments)
        except (SupervisorError, OSError) as error:
            self.report(f"Slurm has forgotten the job, and refuses it now: {error}")
            return False
        self.state = read_json(self.folder / "state.json") or self.state
        self.report(f"Slurm has forgotten the job: it is submitted again, as job {self.state['job']}")
        self.save(attempts=before)
        return True

    # Records ----------------------------------------------------------------------------------------------------------

    def begin(self, job: LeaseJob, hosts: list[Host]) -> None:
        """Record the start of an attempt, unless a driver before this one did."""
        attempts = self.state["attempts"]
        if attempts and attempts[-1]["restart"] == job.restart:
            self.report("the driver monitors the run again")
        else:
            if not attempts and not self.continues:
                self.copy.discard()  # of an earlier run of this name
            shown = {host.name: {"gpus": list(host.gpus or ()), "cpus": list(host.cpus)} for host in hosts}
            attempts.append({"restart": job.restart, "begin": time.time(), "end": None, "hosts": shown, "order": None})
            self.report(f"has {', '.join(shown)}")
            self.announce("restarting" if len(attempts) > 1 else "started", self.run, f"on {', '.join(shown)}")
        self.save(phase="running")

    def close_run(self, phase: str, code: int, reason: str) -> None:
        """Record the end of the run; announce it, and that no other run waits or is active."""
        self.save(phase=phase, exit={"code": code, "reason": reason, "time": time.time()})
        ends: dict[str, Event] = {"finished": "finished", "failed": "failed"}
        self.announce(ends.get(self.state["phase"], "stopped"), self.run, self.state["exit"]["reason"])
        others = self.folder.parent.glob("*/state.json")
        if not any((read_json(path) or {}).get("phase") in LIVE for path in others):
            self.announce("queue empty", self.run)

    def record(self, job: LeaseJob, order: int, reason: str) -> None:
        """Record the end of an attempt."""
        attempts = self.state["attempts"]
        if not attempts or attempts[-1]["restart"] != job.restart:
            attempts.append({"restart": job.restart, "begin": time.time(), "hosts": {}})
        attempts[-1] |= {"end": time.time(), "order": order, "reason": reason, "reached": self.reached}
        self.save()

    def save(self, **changed: Any) -> None:
        """Update the state of the driver with `changed`, and write `state.json`."""
        self.state |= changed
        write_json(self.folder / "state.json", self.state)

    def report(self, line: str) -> None:
        """Write a line to the log of the driver, which is standard output."""
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)


def tell_slurm(words: str, job: LeaseJob) -> bool:
    """Give Slurm a command for a job; return whether it obeyed."""
    try:
        command([*words.split(), str(job.number)])
    except SupervisorError:
        return False
    return True


def phase_of(code: int, reason: str) -> str:
    """Return the phase of a run whose lease was ended with this code."""
    return "stopped" if (code, reason) == (FAILED, STOPPED) else PHASES[code]


def loses_hosts(attempts: list[dict[str, Any]]) -> str:
    """Return why a run that lost a host in each of its last attempts does not start again; empty if it may.

    Attempts that reached a further step, or that Slurm ended, for example for a preemption, begin the count anew.
    """
    last = attempts[-LOSSES:]
    lost = [attempt for attempt in last if attempt.get("order") == AGAIN and ASKED_FOR not in attempt.get("reason", "")]
    if len(lost) < LOSSES or len({attempt.get("reached", 0) for attempt in lost}) > 1:
        return ""
    return f"{LOSSES} attempts in a row lost a host and made no progress, the last one: {lost[-1]['reason']}"


def left_for(lost: dict[str, str]) -> tuple[int, str]:
    """Return how a lease ends whose run must leave hosts, and why."""
    return (FAILED, TIME_LIMIT) if TIME_LIMIT in lost.values() else (AGAIN, describe(lost))


def describe(lost: dict[str, str]) -> str:
    """Return one line for the hosts that a run must leave; empty for none."""
    return "; ".join(f"{host}: {why}" for host, why in lost.items())


def main() -> int:
    """Drive the run of the folder that the argument names."""
    folder = Path(sys.argv[1])
    with hold_lock(folder / "driver.lock") as locked:
        if not locked:
            return 0
        try:
            Driver(folder).drive()
        except UserError as error:
            print(f"error: {error}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
