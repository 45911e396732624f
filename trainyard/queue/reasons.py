"""Why a run waits, by Slurm's words, and whether the hosts of the queue can ever satisfy a request."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.common.formats import counted
from trainyard import front_end
from trainyard.queue.queue_client import QueueState, SlurmJob, SlurmNode
from trainyard.queue.request import Request, host_cores, host_gpus

RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SUSPENDED", "STOPPED", "SIGNALING")
# `squeue -o %r`, up to the first word that is not one of Slurm's.
_WAITS = {
    "": "starts soon",
    "None": "starts soon",
    "BeginTime": "starts again soon",
    "Dependency": "waits for the end of {after}",
    "DependencyNeverSatisfied": "never starts, because a run of {after} did not finish",
    "JobHeldAdmin": "is held: release it with {release}",
    "JobHeldUser": "is held: release it with {release}",
    "Nodes": "waits for hosts that are down, drained or reserved",
    "PartitionDown": "waits for its partition, which is down",
    "Priority": "waits for runs that come first",
    "ReqNodeNotAvail": "waits for hosts that are down, drained or reserved",
    "Resources": "waits for free hosts",
}


def why_waiting(request: Request, job: SlurmJob, queue: QueueState) -> str:
    """Return why a pending run has not started."""
    reason = job.reason.partition(" ")[0].rstrip(",")
    # Slurm reports "Dependency" only after it has examined the job, some seconds after the job was added.
    if reason in ("", "None") and any(name in queue.jobs for name in request.after):
        reason = "Dependency"
    words = _WAITS.get(reason, "waits: Slurm says {reason}")
    after = ", ".join(request.after[:3]) + (", ..." if len(request.after) > 3 else "")
    return words.format(after=after, release=front_end.queue_verb("release", request.run), reason=job.reason)


def _needs(request: Request) -> list[tuple[str, int]]:
    """Return the resources that the run needs on each host: the attribute of SlurmNode, and the minimum."""
    wanted = {"gpus": host_gpus(request), "gpu_memory": request.gpu_memory}
    wanted |= {"cores": host_cores(request), "memory": 1024 * request.memory}
    return [(name, least) for name, least in wanted.items() if least]


def can_run(request: Request, node: SlurmNode) -> bool:
    """Return whether the host, if nothing else ran on it, could be one of the run's hosts."""
    enough = all(getattr(node, name) >= least for name, least in _needs(request))
    return enough and (not request.hosts or node.name in request.hosts)


def refusal(request: Request, nodes: Mapping[str, SlurmNode]) -> str:
    """Return the reason why the run can never start; empty if it can."""
    able = sum(can_run(request, node) for node in nodes.values())
    if able >= request.nodes:
        return ""
    units = {"gpus": "GPU", "gpu_memory": "GB of GPU memory", "cores": "core", "memory": "MiB of memory"}
    needs = _needs(request)
    wanted = [counted(n, units[name]) if name in ("gpus", "cores") else f"{n} {units[name]}" for name, n in needs]
    where = f" among {', '.join(request.hosts[:3])}" if request.hosts else ""
    return (
        f"it needs {counted(request.nodes, 'host')} with {', '.join(wanted)}, and the queue has {able}{where}: "
        "`sinfo -N -o '%N %c %m %G'` lists what its hosts have"
    )
