"""Who had which host and GPU when: intervals from the records of the queue, and their places in a drawing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainyard.queue.client import Job, QueueState
from trainyard.queue.history import ENDED, read_attempts, run_state
from trainyard.queue.reasons import RUNNING
from trainyard.queue.slurm import MAX_GPUS

BEFORE = 6 * 3600  # s that the timeline shows before now
AFTER = 3600  # s that it shows after now: expected ends
STEP = 30  # s in which the drawing moves
TICK = 3600  # s between two marks
LANES = 12  # runs that a host or GPU shows beside each other
SPANS = 300  # in a timeline, the newest
READ = 20_000  # spans that are read, of which these are the newest
ROWS = 300  # hosts and GPUs in the drawing
HEAD, LABEL, LANE = 34, 20, 24  # pixels of the times, of the label of a row, and of a lane


@dataclass(frozen=True)
class Span:
    """A run that has or had a host or a GPU.

    Attributes:
        host: its name.
        gpu: its number or UUID; empty for cores, or where the queue has no record of the GPUs.
        begin, end: seconds since the epoch; `end` is the present for a run that has it now.
        until: when a run that has it now is expected to end; 0 if unknown, and for others.
        state: running, or the end of this start.
    """

    run: str
    host: str
    gpu: str
    begin: float
    end: float
    until: float = 0.0
    state: str = ""

    @property
    def running(self) -> bool:
        """Whether the run has it now."""
        return self.state == "running"


@dataclass(frozen=True)
class Bar:
    """A span in the drawing: `left`, `width` of the past, of the expected rest and of the room for its label, in percent."""

    span: Span
    lane: int
    left: float
    width: float
    rest: float
    room: float


@dataclass(frozen=True)
class Row:
    """A host or a GPU in the drawing."""

    label: str
    bars: list[Bar]

    @property
    def lanes(self) -> int:
        """Lanes that the bars need, at least one."""
        return max((bar.lane for bar in self.bars), default=0) + 1

    @property
    def height(self) -> int:
        """Height in pixels, with the label above the bars."""
        return LABEL + self.lanes * LANE


@dataclass(frozen=True)
class Timeline:
    """The allocation of the last hours.

    Attributes:
        now: seconds since the epoch, rounded to STEP.
        rows: the drawing.
        ticks: (seconds since the epoch, place in percent) of the marks.
        spans: the same as a list, the newest first.
        present: place of the present in percent.
    """

    now: float
    rows: list[Row] = field(default_factory=list)
    ticks: list[tuple[float, float]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    present: float = 100.0 * BEFORE / (BEFORE + AFTER)

    @property
    def places(self) -> list[tuple[int, Row]]:
        """The rows, each with its place from the top in pixels."""
        tops = itertools.accumulate((row.height for row in self.rows), initial=HEAD)
        return list(zip(tops, self.rows, strict=False))

    @property
    def height(self) -> int:
        """Height in pixels."""
        return HEAD + sum(row.height for row in self.rows) + LABEL // 2


def make_timeline(queue: QueueState) -> Timeline:
    """Return the timeline of the hosts of the queue."""
    now = queue.now // STEP * STEP
    recent = (span for span in allocation(queue) if span.end > now - BEFORE and span.begin <= queue.now)
    spans = sorted(itertools.islice(recent, READ), key=lambda span: (-span.begin, span.run, span.host, span.gpu))[
        :SPANS
    ]
    nodes = itertools.islice(queue.nodes.values(), ROWS)
    gpus = {node.name: [str(number) for number in range(min(node.gpus, MAX_GPUS))] for node in nodes}
    for span in spans:  # UUIDs, and hosts that the queue no longer has
        named = gpus.setdefault(span.host, [])
        if span.gpu and span.gpu not in named:
            named.append(span.gpu)
    rows: list[Row] = []
    for host, numbers in gpus.items():
        if len(rows) >= ROWS:
            break
        on_host = [span for span in spans if span.host == host]
        without = [span for span in on_host if not span.gpu]
        if without or not numbers:
            label = f"{host}, runs without a recorded GPU" if numbers else host
            rows.append(Row(label, _bars(without, now)))
        rows += [
            Row(f"{host} GPU {number}", _bars([span for span in on_host if span.gpu == number], now))
            for number in numbers
        ]
    first = -(-(now - BEFORE) // TICK)
    times = [TICK * (first + number) for number in range((BEFORE + AFTER) // TICK)]
    return Timeline(now, rows, [(at, _place(at, now)) for at in times], spans)


def allocation(queue: QueueState) -> Iterator[Span]:
    """Yield who had which host: the records of the drivers, which know GPUs, and of Slurm's jobs that have none."""
    jobs: dict[str, list[Job]] = {}
    for job in queue.leases:
        jobs.setdefault(job.name, []).append(job)
    known: dict[tuple[str, str], list[Span]] = {}
    for run in queue.requests:
        for span in _recorded(run, queue, jobs):
            known.setdefault((run, span.host), []).append(span)
            yield span
    for job in queue.leases:
        running = job.state in RUNNING
        end = queue.now if running else job.end
        state = "running" if running else job.state.lower()
        for host in job.hosts if end > job.start else ():
            if not any(span.begin < end and job.start < span.end for span in known.get((job.name, host), [])):
                yield Span(job.name, host, "", job.start, end, job.end if running else 0.0, state)


def _recorded(run: str, queue: QueueState, jobs: Mapping[str, list[Job]]) -> Iterator[Span]:
    """Yield the spans of the starts that the driver of a run recorded."""
    job, how = queue.jobs.get(run), run_state(run, queue)
    attempts = read_attempts(queue.states.get(run, {}))
    for attempt in attempts:
        newest = attempt is attempts[-1]
        running = newest and not attempt["end"] and job is not None and job.state in RUNNING
        # A driver that was killed has not recorded the end; Slurm has.
        ends = [one.end for one in jobs.get(run, []) if one.state not in RUNNING and one.end > attempt["begin"]]
        end = queue.now if running else attempt["end"] or min(ends, default=0.0)
        if not attempt["begin"] or end <= attempt["begin"]:
            continue
        until = job.end if running and job else 0.0
        state = "running" if running else attempt["reason"] or (how if newest and how in ENDED else "ended")
        for host in attempt["hosts"]:
            for gpu in attempt["gpus"].get(host) or [""]:
                yield Span(run, host, gpu, attempt["begin"], end, until, state)


def _place(at: float, now: float) -> float:
    return 100.0 * (at - (now - BEFORE)) / (BEFORE + AFTER)


def _bars(spans: Sequence[Span], now: float) -> list[Bar]:
    """Return the bars of a row: each in the first lane that is free at its begin."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.begin, span.run)):
        free = (number for number, lane in enumerate(lanes) if _until(lane[-1]) <= span.begin)
        number = next(free, len(lanes))
        if number == len(lanes):
            if number == LANES:
                continue  # the table has it
            lanes.append([])
        lanes[number].append(span)
    bars = []
    for number, lane in enumerate(lanes):
        for span, after in zip(lane, [*lane[1:], None], strict=True):
            left = max(0.0, _place(span.begin, now))
            right = max(left, _place(now if span.running else span.end, now))
            rest = max(0.0, min(100.0, _place(span.until, now)) - right) if span.until else 0.0
            room = (_place(after.begin, now) if after else 100.0) - left
            bars.append(Bar(span, number, left, max(0.3, right - left), rest, room))
    return bars


def _until(span: Span) -> float:
    return max(span.end, span.until)
