"""The reason why a run waits, as text, and the missing resources of the closest host for a request that no host can
satisfy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from trainer.common.formats import counted
from trainyard import front_end
from trainyard.queue.queue_client import Job, Node, QueueState, clock_time
from trainyard.queue.request import Request, host_cores, host_gpus
from trainyard.queue.slurm_conf import PRIORITIES

_SHOWN = 3  # hosts or runs that a reason names
RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SUSPENDED", "STOPPED", "SIGNALING")
_HELD = ("JobHeldUser", "JobHeldAdmin")
_NOT_NOW = ("JobHeld", "Dependency", "BeginTime", "Partition")  # of a job that would not start on an idle host


def needs(request: Request) -> list[tuple[str, str, int]]:
    """Return the resources that the run needs on each host: the attribute of Node, its unit, and the minimum."""
    wanted = [
        ("gpu_memory", "GB of GPU memory", request.gpu_memory),
        ("gpus", "GPU", host_gpus(request)),
        ("cores", "core", host_cores(request)),
        ("memory", "GB of memory", request.memory),
    ]
    return [(name, unit, least) for name, unit, least in wanted if least]


def has(node: Node, name: str) -> int:
    """Return how much a host has of something that `needs` names."""
    return node.memory // 1024 if name == "memory" else int(getattr(node, name))


def can_run(request: Request, node: Node) -> bool:
    """Return whether the host, if nothing else ran on it, could be one of the run's hosts."""
    return all(has(node, name) >= least for name, _, least in needs(request)) and _may_use(request, node)


def _may_use(request: Request, node: Node) -> bool:
    return not request.hosts or node.name in request.hosts


def refusal(request: Request, nodes: Mapping[str, Node]) -> str:
    """Return the reason why the run can never start, with the closest host and its missing resources; empty if it
    can."""
    offered = [node for node in nodes.values() if _may_use(request, node)]
    able = [node for node in offered if can_run(request, node)]
    if len(able) >= request.nodes:
        return ""
    others = [node for node in offered if node not in able]
    if not others:
        return f"it needs {counted(request.nodes, 'host')}, and the queue has {len(offered)}{_limited(request)}"
    closest = min(others, key=lambda node: (_shortfall(request, node), node.name))
    lacks = " and ".join(
        f"{_amount(least, unit)} (it has {has(closest, name)})"
        for name, unit, least in needs(request)
        if has(closest, name) < least
    )
    if not able:
        return (
            f"no host has {_all_needs(request)}: the closest is {closest.name}, which lacks {lacks}{_limited(request)}"
        )
    names = ", ".join(node.name for node in able[:_SHOWN])
    return (
        f"it needs {request.nodes} hosts with {_all_needs(request)}, and only {names} can be one: the next is "
        f"{closest.name}, which lacks {lacks}{_limited(request)}"
    )


def _shortfall(request: Request, node: Node) -> float:
    """Return how far a host is from the request: the sum of the missing shares."""
    return sum(max(0.0, 1 - has(node, name) / least) for name, _, least in needs(request))


def _limited(request: Request) -> str:
    return f" (of the hosts {', '.join(request.hosts[:_SHOWN])})" if request.hosts else ""


def _amount(number: int, unit: str) -> str:
    return f"{number} {unit}" if unit.startswith("GB") else counted(number, unit)


def _all_needs(request: Request) -> str:
    return ", ".join(_amount(least, unit) for _, unit, least in needs(request))


def why_waiting(request: Request, job: Job, queue: QueueState) -> str:
    """Return why a pending run has not started."""
    if job.reason in _HELD:
        return f"is held: release it with {front_end.queue_verb('release', request.run)}"
    if job.reason.startswith("DependencyNeverSatisfied"):
        return f"never starts, because {_and(request.after)} did not finish: cancel it with {front_end.queue_verb('cancel', request.run)}"
    # Slurm reports "Dependency" only after it has examined the job, some seconds after the job was added.
    left = [name for name in request.after if name in queue.jobs]
    if left or job.reason.startswith("Dependency"):
        return f"waits for the end of {_and(left or request.after)}"
    if job.reason.startswith("BeginTime"):
        return f"starts again {_at(job.start, queue.now)}" if job.start else "starts again soon"
    return _why_no_host(request, job, queue)


def _why_no_host(request: Request, job: Job, queue: QueueState) -> str:
    able = [node for node in queue.nodes.values() if can_run(request, node)]
    up = [node for node in able if node.is_up]
    wanted = _wanted(request)
    if len(up) < request.nodes:
        down = [f"{node.name} is {node.state}" for node in able if not node.is_up][:_SHOWN]
        return f"waits for {wanted}: {', '.join(down) or 'too few hosts have that'}"
    busy = {node.name: runs for node in up if (runs := _on(node.name, queue.jobs.values()))}
    free = [node for node in up if node.name not in busy]
    earlier = [other.name for other in _before(job, queue.jobs.values()) if _competes(other, free, queue)]
    if len(free) >= request.nodes:
        if earlier:
            return f"waits for {wanted}: {_and(earlier)} {'comes' if len(earlier) == 1 else 'come'} first"
        if job.reason in ("", "None"):  # Slurm has not tried to start it yet
            return "starts soon"
        return f"waits for {wanted}: Slurm says {job.reason}"
    shown = sorted(busy, key=lambda name: max(run.end or 4e9 for run in busy[name]))[:_SHOWN]
    more = "" if len(busy) <= _SHOWN else f" and {len(busy) - _SHOWN} more"
    verb = "has it," if any(name != "cores" for name, _, _ in needs(request)) else "is"
    return f"waits for {wanted}: {'; '.join(_busy(name, verb, busy[name], queue.now) for name in shown)}{more}"


def _wanted(request: Request) -> str:
    """Return what distinguishes the hosts that the run waits for."""
    special = [_amount(least, unit) for name, unit, least in needs(request) if name != "cores" or request.cores]
    what = " and ".join(special[:2])
    if request.nodes > 1:
        return f"{request.nodes} hosts{f' with {what}' if what else ''}"
    return what or ("a whole host" if request.whole_host else "a core")


def _busy(host: str, verb: str, runs: Sequence[Job], now: float) -> str:
    """Return until when which runs use a host."""
    ends = [run.end for run in runs]
    until = f"until about {clock_time(max(ends), now)}" if all(ends) else "without a time limit"
    return f"{host} {verb} busy with {_and([run.name for run in runs])} {until}"


def _on(host: str, jobs: Collection[Job]) -> list[Job]:
    return [job for job in jobs if job.state in RUNNING and host in job.hosts]


def _competes(other: Job, free: Sequence[Node], queue: QueueState) -> bool:
    """Return whether a pending job may use one of these hosts."""
    request = queue.requests.get(other.name)
    return request is None or any(can_run(request, node) for node in free)


def _before(job: Job, jobs: Collection[Job]) -> list[Job]:
    """Return the pending jobs that come before a job: of a higher priority, or of the same and added earlier."""

    def place(other: Job) -> tuple[int, int]:
        return (-PRIORITIES.index(other.priority) if other.priority in PRIORITIES else 0, other.number)

    waiting = [other for other in jobs if other.state == "PENDING" and not other.reason.startswith(_NOT_NOW)]
    return sorted((other for other in waiting if place(other) < place(job)), key=place)


def _and(names: Sequence[str]) -> str:
    shown = [*names[:_SHOWN], *([f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else [])]
    word = "run" if len(names) == 1 else "runs"
    return f"{word} {', '.join(shown[:-1])}{' and ' if len(shown) > 1 else ''}{shown[-1] if shown else ''}"


def _at(seconds: float, now: float) -> str:
    return "now" if seconds <= now else f"at about {clock_time(seconds, now)}"
