"""Who had which host and GPU when, from the records of the queue and from the run folders of the hosts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from trainyard.dashboard.state import ClusterView, DashboardRun
from trainyard.dashboard.timeline import SCALES, STEP, Scale, Span, Timeline, make_timeline
from trainyard.queue.queue_client import MAX_TIME, QueueState
from trainyard.queue.queue_tables import ENDED, run_state
from trainyard.queue.reasons import RUNNING
from trainyard.queue.slurm_conf import MAX_GPUS
from trainyard.run.host_run import HostRun

READ = 20_000  # spans of the queue that are read
HOSTS = 300  # of the queue that are shown


class Allocation:
    """The timelines of a cluster; each is rebuilt when its contents change. Used in the event loop only."""

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._known: dict[str, tuple[Any, Timeline]] = {}

    def timeline(self, scale: str, queue: QueueState | None, asked: float) -> tuple[Any, Timeline]:
        """Return a timeline, and a key that changes with it.

        `scale`: a key of SCALES. `queue`: the newest answer of the queue host, if there is one. `asked`: time of its
        arrival, in seconds since the epoch.
        """
        cluster = self._cluster
        # In the time of the queue host, so that the age of an answer does not matter.
        now = queue.now + time.time() - asked if queue else time.time()
        gpus = {
            name: [str(gpu["uuid"]) for gpu in host.sample.get("gpus", [])[:MAX_GPUS]]
            for name, host in cluster.hosts.items()
        }
        key = (asked if queue else 0.0, now // STEP, cluster.starts, repr(gpus))
        before, known = self._known.get(scale, (None, Timeline(0.0)))
        if before != key:
            known = _timeline(cluster, queue, gpus, now, SCALES[scale])
            self._known[scale] = (key, known)
        return key, known


def _timeline(
    cluster: ClusterView, queue: QueueState | None, gpus: Mapping[str, list[str]], now: float, scale: Scale
) -> Timeline:
    numbers = {host: [str(number) for number in range(len(uuids))] for host, uuids in gpus.items()}
    for node in itertools.islice(queue.nodes.values() if queue else (), HOSTS):
        numbers[node.name] = numbers.get(node.name) or [str(number) for number in range(min(node.gpus, MAX_GPUS))]
    of_queue = list(itertools.islice(queue_spans(queue), READ)) if queue else []
    spans = itertools.chain(of_queue, run_spans(cluster, of_queue, now, scale.before))
    named = (
        # The number that the sample of its host gives a GPU.
        replace(span, gpu=str(uuids.index(span.gpu))) if span.gpu in (uuids := gpus.get(span.host, [])) else span
        for span in spans
    )
    return make_timeline(named, numbers, now, scale)


def run_spans(cluster: ClusterView, known: Iterable[Span], now: float, before: float) -> Iterator[Span]:
    """Yield the newest start of each run on each host, as the run folders describe them.

    Args:
        known: spans of the queue, whose runs have these folders, too: what they have is left out.
        before: seconds; runs that ended earlier are left out.
    """
    queued: dict[tuple[str, str], list[Span]] = {}
    for span in known:
        queued.setdefault((span.run, span.host), []).append(span)
    for run in cluster.runs.values():
        for part in run.parts.values():
            if not (found := _span(run, part, now, now - before)):
                continue
            overlapping = queued.get((run.name, part.host), [])
            if not any(span.begin < found.end and found.begin < span.end for span in overlapping):
                for gpu in (part.node.get("devices") or [""])[:MAX_GPUS]:
                    yield Span(run.name, part.host, gpu, found.begin, found.end, found.until, found.state)


def _span(run: DashboardRun, part: HostRun, now: float, oldest: float) -> Span | None:
    """Return when a host had a run; None if that is unknown, or ended before `oldest`."""
    node = part.node
    begin, end = node.get("started") or 0.0, node.get("ended") or 0.0
    alive = run.alive and not end and any(part is one for one in run.newest)
    if not alive and not end:  # a supervisor that vanished: its ranks have written their last heartbeat
        end = max((state.get("time") or 0.0 for state in part.states.values()), default=0.0)
    end = now if alive else end
    if not 0 < begin < end <= MAX_TIME or end < oldest:
        return None
    eta = run.first.get("eta") if alive else None
    return Span(run.name, part.host, "", begin, end, now + eta if eta else 0.0, "running" if alive else run.status)


def queue_spans(queue: QueueState) -> Iterator[Span]:
    """Yield the allocations: the records of the drivers, which include GPUs, and Slurm's jobs without a record."""
    known: dict[tuple[str, str], list[Span]] = {}
    for run in queue.requests:
        for span in _recorded(run, queue):
            known.setdefault((run, span.host), []).append(span)
            yield span
    for job in queue.leases:
        for host in job.hosts if queue.now > job.start and job.state in RUNNING else ():
            if not any(job.start < span.end for span in known.get((job.name, host), [])):
                yield Span(job.name, host, "", job.start, queue.now, job.end, "running")


def _recorded(run: str, queue: QueueState) -> Iterator[Span]:
    """Yield the spans of the starts that the driver of a run recorded."""
    job, how = queue.jobs.get(run), run_state(run, queue)
    attempts = queue.attempts(run)
    for attempt in attempts:
        newest = attempt is attempts[-1]
        running = newest and not attempt.get("end") and job is not None and job.state in RUNNING
        end = queue.now if running else attempt.get("end") or 0.0
        if end <= attempt["begin"]:
            continue
        until = job.end if running and job else 0.0
        state = "running" if running else attempt.get("reason") or (how if newest and how in ENDED else "ended")
        for host, granted in attempt["hosts"].items():
            for gpu in granted.get("gpus") or [""]:
                yield Span(run, host, gpu, attempt["begin"], end, until, state)
