"""The queue as the controller sees it: requests to the queue host, and its answers as checked data.

The queue host may be compromised, and any user of a host may name a job: every text is data until it is parsed here.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import ValidationError

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainyard.inventory import service_host
from trainyard.queue.request import Request, is_run_name
from trainyard.wire.connection import Host, HostConnection, RemoteError
from trainyard.wire.copy_files import in_time
from trainyard.wire.replies import ReplyError, checked_reply, untrusted_json
from trainyard.wire.reply_types.queue_replies import Attempt, RunRecord
from trainyard.wire.run_errors import RunError

ANSWER_LIMIT = 120.0  # s for the queue host to answer
MAX_TIME = 4e9  # s since the epoch
_NUMBER = re.compile(r"\d{1,10}")
_GRES = re.compile(r"(gpu|vram)((?::[A-Za-z0-9_-]{1,64})?):(\d{1,6})(?:\(.*\))?")


@dataclass(frozen=True)
class SlurmJob:
    """A job of Slurm."""

    number: int
    name: str  # name of its run, or the name that a user gave it
    priority: str
    state: str  # such as `PENDING`
    reason: str = ""  # why it waits, in Slurm's words
    start: float = 0.0  # seconds since the epoch, expected or past; 0 if unknown
    end: float = 0.0  # as `start`; 0 also without a time limit
    hosts: tuple[str, ...] = ()  # hosts that it has


@dataclass(frozen=True)
class SlurmNode:
    """A host of the queue."""

    name: str
    state: str  # such as `idle`, in lower case and without its flags
    cores: int
    memory: int  # memory that runs may use, in MiB
    gpus: int = 0
    gpu_memory: int = 0  # memory of its smallest GPU, in GB; 0 without GPUs


@dataclass(frozen=True)
class QueueState:
    """The state of the queue that the queue host reports."""

    jobs: dict[str, SlurmJob]  # jobs that wait or run, by the names of their runs
    nodes: dict[str, SlurmNode]
    requests: dict[str, Request] = field(default_factory=dict)  # requests of the runs that have a folder
    states: dict[str, RunRecord] = field(default_factory=dict)  # states of the runs as their drivers report them
    specs: dict[str, dict[str, Any]] = field(default_factory=dict)  # spec and digests of the runs that were asked for
    leases: tuple[SlurmJob, ...] = ()  # every job that has hosts, also those that are not runs
    now: float = 0.0  # seconds since the epoch on the queue host

    def attempts(self, run: str) -> list[Attempt]:
        """Return the last starts of a run, as its driver has recorded them."""
        return self.states.get(run, RunRecord()).get("attempts", [])[-100:]


class QueueClient:
    """The queue host. Its methods raise RemoteError if it does not answer."""

    def __init__(self, connection: HostConnection) -> None:
        self.connection = connection
        self.host: Host = connection.host
        self.folder = f"{self.host.data_dir}/queue"

    def state(self, specs: Sequence[str] = ()) -> QueueState:
        """Return jobs, hosts and runs of the queue, with the specs of these runs. Raises RunError if Slurm does not answer."""
        return parse_state(self._call("queue_info", {"folder": self.folder, "specs": list(specs)}))

    def add(
        self, request: Request, contents: Mapping[str, bytes], links: Mapping[str, str], arguments: Sequence[str]
    ) -> int:
        """Write the folder of a run and submit its job; return the id of the job.

        `contents`: contents of the files of the folder besides `request.json`; they may hold secrets. `links`: {name in
        the folder: path on the queue host} of its other files. `arguments`: arguments of sbatch. Raises RunError: Slurm
        refuses the job, or a job of this name waits or runs.
        """
        files = {"request.json": request.model_dump_json(indent=1).encode(), **contents}
        encoded = {name: (0o600, base64.b64encode(content).decode()) for name, content in files.items()}
        wanted = {"contents": encoded, "links": dict(links), "arguments": list(arguments)}
        return self._job_of("queue_add", request.run, wanted)

    def again(self, run: str, after: Sequence[int]) -> int:
        """Submit a job for a run that has ended, after those with these ids; return its id. Raises RunError as `add`."""
        return self._job_of("queue_again", run, {"after": list(after)})

    def _job_of(self, verb: str, run: str, request: dict[str, Any]) -> int:
        answer = self._call(verb, {"folder": f"{self.folder}/{run}", **request})
        if "exists" in answer:
            raise RunError(f"run {run} has been added by another controller, as job {answer['exists']}")
        if "job" not in answer:
            raise RunError(f"queue host {self.host.name}: sent no number of a job for run {run}")
        return int(answer["job"])

    def change(self, do: str, jobs: Iterable[int], priority: str = "") -> dict[int, str]:
        """Cancel, hold or release jobs, or give them another priority; return why a job was not changed, by its id."""
        request = {"do": do, "jobs": list(jobs), "priority": priority}
        refused = self._call("queue_change", request)["refused"]
        return {int(job): why for job, why in refused.items() if _NUMBER.fullmatch(job)}

    def _call(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = in_time(self.connection, lambda: self.connection.call(verb, request), ANSWER_LIMIT)
        except RemoteError as error:
            raise RunError(f"queue host {self.host.name}: {error}") from None
        return answer


def parse_state(answer: Mapping[str, Any]) -> QueueState:
    """Return the answer of the queue host as checked data; unknown data is left out."""
    names = {text: tuple(hosts) for text, hosts in answer["hosts"].items()}
    jobs = [job for line in answer["jobs"] if (job := parse_job(line, names))]
    runs = {name: folder for name, folder in answer["runs"].items() if is_run_name(name)}
    requests = {name: request for name, folder in runs.items() if (request := _request(name, folder["request"]))}
    return QueueState(
        jobs={job.name: job for job in sorted(jobs, key=lambda job: job.number)},
        nodes={node.name: node for line in answer["nodes"] if (node := parse_node(line))},
        requests=requests,
        states={name: _record(runs[name]["state"]) for name in requests},
        specs={name: dict(spec) for name, spec in answer["specs"].items()},
        leases=tuple(job for job in jobs if job.hosts and job.start),
        now=min(max(0.0, answer["now"]), MAX_TIME),
    )


def parse_job(line: str, hosts: Mapping[str, tuple[str, ...]]) -> SlurmJob | None:
    """Return the job of a line of squeue in JOB_FORMAT; None if it is not one. `hosts`: those of each list of Slurm."""
    words = line.split("|", 8)
    if len(words) < 9 or not _NUMBER.fullmatch(words[0]):
        return None
    number, priority, state, reason, start, end, limit, listed, name = words
    return SlurmJob(
        number=int(number),
        name=printable(name, 100),
        priority=printable(priority, 64),
        state=printable(state, 32),
        reason=printable(reason, 200),
        start=_time(start),
        end=_time(end) if limit != "UNLIMITED" else 0.0,
        hosts=hosts.get(listed, ()),
    )


def parse_node(line: str) -> SlurmNode | None:
    """Return the host of a line of sinfo in NODE_FORMAT of trainyard.remote.queue; None if it is not one."""
    words = line.split("|")
    if len(words) != 5 or not all(_NUMBER.fullmatch(word) for word in words[2:4]):
        return None
    gpus = gpu_memory = 0
    for word in words[4].split(","):
        if found := _GRES.fullmatch(word):
            if found[1] == "gpu":
                gpus += int(found[3])
            else:
                gpu_memory = int(found[3])
    state = re.sub(r"[^a-z].*", "", words[1].lower())
    return SlurmNode(printable(words[0], 64), state, int(words[2]), int(words[3]), gpus, gpu_memory)


def _time(word: str) -> float:
    return min(float(word), MAX_TIME) if _NUMBER.fullmatch(word) else 0.0


def _record(text: str | None) -> RunRecord:
    """Return what the driver of a run has recorded; an empty record if the text is something else."""
    try:
        return cast("RunRecord", checked_reply("state.json", untrusted_json(text or "{}")))
    except ReplyError:
        return RunRecord()


def _request(name: str, text: str | None) -> Request | None:
    try:
        found = untrusted_json(text or "{}").items()  # of other versions, too
        request = Request.model_validate({key: value for key, value in found if key in Request.model_fields})
    except (AttributeError, ReplyError, ValidationError, UserError):
        return None
    return request if request.run == name else None


def queue_host(groups: Mapping[str, Sequence[str]]) -> str:
    """Return the host of the queue. Whether Slurm runs there, only the host can tell. Raises UserError without a cluster."""
    if name := service_host(groups):
        return name
    raise UserError("queue: the inventory has no group cluster: add the hosts to one, as inventory/hosts.example.yml")


def clock_time(seconds: float, now: float) -> str:
    """Return a time of this machine's clock as `14:20`, with the date if it is further away than half a day."""
    shown = time.localtime(seconds)
    return time.strftime("%H:%M" if abs(seconds - now) < 43_200 else "%Y-%m-%d %H:%M", shown)
