"""The lease of a run, as its driver reads it from Slurm and the hosts: the job, its hosts with processors and GPUs, its end."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.supervise.run_files import SupervisorError
from trainyard.remote.queue_job import WARNING, command
from trainyard.run.plan.gather_facts import Connect
from trainyard.wire.connection import Host, call_hosts

ANSWER_LIMIT = 10.0  # s for a host to answer
FINAL = ("COMPLETED", "CANCELLED", "TIMEOUT", "DEADLINE")  # ends after which the run is not started again
ENDED = (*FINAL, "FAILED", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY")
TIME_LIMIT = "its time limit"  # why a run must leave its hosts
SIGNAL_EARLY = 65  # s: Slurm may send the signal before a time limit up to 60 s earlier than requested
ASKED_FOR = "Slurm has asked for the host"  # for a run of a higher priority, or because its administrator drains it
MAX_CPUS = 65_536
_LIMIT = re.compile(r"(?:(\d{1,5})-)?(\d{1,2}):(\d{2}):(\d{2})")
_FIELD = re.compile(r"(?:^|\s)([A-Za-z_/:-]+)=(\S*)")
_PART = re.compile(r"\sNodes=(\S+)\s+CPU_IDs=([\d,-]+)\s")


@dataclass(frozen=True)
class LeaseJob:
    """A job of Slurm."""

    number: int
    state: str  # its main state, such as RUNNING
    restart: int = 0  # how often the job was returned to the queue
    hosts: tuple[str, ...] = ()  # those that it has, or had
    cpus: dict[str, tuple[int, ...]] = field(default_factory=dict)  # its processors by host, by Slurm's numbers
    whole: bool = False  # whether it has its hosts for itself
    reason: str = ""  # why it waits or has ended, in Slurm's word
    name: str = ""  # name of its run
    end: float = math.inf  # when its time limit ends it (s since the epoch), while it runs


def read_job(number: int, run: str) -> LeaseJob | None:
    """Return the job of a run; None if Slurm has forgotten it. Raises SupervisorError if Slurm does not answer.

    A slurmctld that is killed forgets its last seconds, and then gives the number of a job that it has forgotten to another one.
    """
    try:
        text = command(["scontrol", "show", "job", "--detail", "--oneliner", str(number)])
    except SupervisorError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    job = parse_job(text, expand)
    return job if job.name == run else None


def parse_job(text: str, expand: Any) -> LeaseJob:
    """Return the job of `scontrol show job --detail --oneliner`; `expand` names the hosts of a list as `node[1-3]`."""
    fields = dict(reversed(_FIELD.findall(text)))  # of several with one name, the first
    nodes = fields.get("NodeList", "")
    parts: dict[str, tuple[int, ...]] = {}
    for names, numbers in _PART.findall(text):
        parts |= dict.fromkeys(expand(names), number_list(numbers))
    return LeaseJob(
        number=int(fields["JobId"]),
        state=fields["JobState"].partition(",")[0],
        restart=int(fields.get("Restarts", "0")),
        hosts=tuple(expand(nodes)) if nodes not in ("", "(null)") else (),
        cpus=parts,
        whole=fields.get("OverSubscribe") == "NO",
        reason=fields.get("Reason", ""),
        name=fields.get("JobName", ""),
        end=_limit_end(fields.get("StartTime", ""), fields.get("TimeLimit", "")),
    )


def _limit_end(start: str, limit: str) -> float:
    """Return when a time limit ends, in seconds since the epoch; infinity without a limit or a start.

    Not Slurm's EndTime, which a preemption sets to the end of its grace time. `start`: time in this host's zone.
    `limit`: `[DAYS-]HOURS:MINUTES:SECONDS`, or `UNLIMITED`.
    """
    found = _LIMIT.fullmatch(limit)
    try:
        began = time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return math.inf
    if not found:
        return math.inf
    days, hours, minutes, seconds = (int(number or 0) for number in found.groups())
    return began + ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def expand(names: str) -> list[str]:
    """Return the names of a list of hosts such as `node[1-3],head`. Raises SupervisorError."""
    return command(["scontrol", "show", "hostnames", "--", names]).split() if "[" in names else names.split(",")


def number_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `0-3,8`. Raises ValueError."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not 0 <= low <= high < MAX_CPUS:
            raise ValueError(f"{text[:80]!r} is not a list of processors")
        found += range(low, high + 1)
    return tuple(found)


def leased_hosts(hosts: Iterable[Host], job: LeaseJob, grants: dict[str, list[str]]) -> list[Host]:
    """Return the hosts of a job in inventory order, limited to what Slurm has granted.

    A job with whole hosts that requests no GPUs gets all GPUs that the inventory permits. `grants`: the numbers of the
    granted GPUs by host.
    """
    found = []
    for host in hosts:
        if host.name in job.hosts:
            gpus = tuple(grants[host.name]) or (host.gpus if job.whole else ())
            lease = f"{host.data_dir}/leases/{job.number}"
            found.append(replace(host, lease=lease, gpus=gpus, cpus=() if job.whole else job.cpus.get(host.name, ())))
    return found


class Leases:
    """The leases of one allocation of a job."""

    def __init__(self, hosts: Iterable[Host], run: str, job: LeaseJob, connect: Connect) -> None:
        """Take the hosts of the allocation without a query."""
        self.hosts = [host for host in hosts if host.name in job.hosts]
        self.run, self.job, self.connect = run, job, connect

    def ask(self, **more: Any) -> dict[str, dict[str, Any]]:
        """Return the state of the lease on every host that answers; see trainyard/remote/lease_state.py."""
        requests = {}
        for host in self.hosts:
            path, run_dir = f"{host.data_dir}/leases/{self.job.number}", f"{host.data_dir}/runs/{self.run}"
            requests[host.name] = {"path": path, "run_dir": run_dir, **more}
        return call_hosts(self.connect, "lease", requests).wait(ANSWER_LIMIT).answers

    def lost(self) -> dict[str, str]:
        """Return why the run must leave a host, by host; empty while the run has all of them."""
        answers = self.ask()
        found = {}
        for host in self.hosts:
            answer = answers.get(host.name)
            if answer is None:
                found[host.name] = "does not answer"
            elif answer["ending"] and answer["restart"] == self.job.restart:  # also once its step has ended
                # Slurm gives both the same signal: close to the limit, the limit is the cause.
                at_limit = answer["time"] > self.job.end - WARNING - SIGNAL_EARLY
                found[host.name] = TIME_LIMIT if at_limit else ASKED_FOR
            elif not answer["held"] or answer["restart"] != self.job.restart:
                found[host.name] = "the lease has ended"
        return found

    def grants(self) -> dict[str, list[str]] | None:
        """Return the granted GPUs by host once every host has its lease; else None."""
        answers = self.ask()
        ready = all(
            (answer := answers.get(host.name)) and answer["held"] and answer["restart"] == self.job.restart
            for host in self.hosts
        )
        return {name: list(answer["gpus"]) for name, answer in answers.items()} if ready else None

    def end(self, code: int) -> None:
        """End the steps of the job with this exit code."""
        self.ask(end=code, restart=self.job.restart)
