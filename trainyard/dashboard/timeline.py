"""The drawing of who had which host and GPU when: bars in rows, with a common scale."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

STEP = 30  # s in which the drawing moves
LANES = 12  # runs that a host or GPU shows side by side
SPANS = 300  # in a timeline, the newest
ROWS = 300  # hosts and GPUs in the drawing
HEAD, LABEL, LANE = 34, 20, 24  # pixels of the times, of the label of a row, and of a lane


@dataclass(frozen=True)
class Scale:
    """What a timeline shows. `before, after`: seconds before and after now; after now are expected ends."""

    before: int
    after: int
    tick: int  # seconds between two marks

    def place(self, at: float, now: float) -> float:
        """Return the place of a time from the left, in percent."""
        return 100.0 * (at - (now - self.before)) / (self.before + self.after)

    def ticks(self, now: float) -> list[tuple[float, float]]:
        """Return times and places of the marks: whole hours or days of this machine's clock."""
        offset = time.localtime(now).tm_gmtoff
        first = -(-(now - self.before + offset) // self.tick)
        times = [self.tick * (first + number) - offset for number in range((self.before + self.after) // self.tick)]
        return [(at, self.place(at, now)) for at in times]


HOUR = 3600
SCALES = {
    "6 hours": Scale(6 * HOUR, 2 * HOUR, HOUR),
    "24 hours": Scale(24 * HOUR, 8 * HOUR, 4 * HOUR),
    "7 days": Scale(168 * HOUR, 24 * HOUR, 24 * HOUR),
}


@dataclass(frozen=True)
class Span:
    """A run that has or had a host or a GPU.

    Attributes:
        begin, end: seconds since the epoch; `end` is the present for a run that has it now.
    """

    run: str
    host: str  # its name
    gpu: str  # its number or UUID; empty for cores, or without a record of the GPUs
    begin: float
    end: float
    until: float = 0.0  # when a run that has it now is expected to end; 0 if unknown, and for others
    state: str = ""  # running, or the end of this start

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
class TimelineRow:
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
    """The allocation of the last hours or days. `ticks`: (seconds since the epoch, place in percent) of the marks."""

    now: float  # seconds since the epoch, rounded to STEP
    rows: list[TimelineRow] = field(default_factory=list)  # the drawing
    ticks: list[tuple[float, float]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)  # the same as a list, the newest first
    present: float = 0.0  # place of the present in percent

    @property
    def places(self) -> list[tuple[int, TimelineRow]]:
        """The rows, each with its place from the top in pixels."""
        tops = itertools.accumulate((row.height for row in self.rows), initial=HEAD)
        return list(zip(tops, self.rows, strict=False))

    @property
    def height(self) -> int:
        """Height in pixels."""
        return HEAD + sum(row.height for row in self.rows) + LABEL // 2


def make_timeline(spans: Iterable[Span], gpus: Mapping[str, Sequence[str]], now: float, scale: Scale) -> Timeline:
    """Return a timeline.

    Args:
        gpus: the numbers of the GPUs of each host, in the order of the rows. Other hosts and GPUs of spans follow them.
        now: seconds since the epoch.
    """
    at = now // STEP * STEP
    recent = (span for span in spans if span.end > at - scale.before and span.begin <= now)
    shown = heapq.nsmallest(SPANS, recent, key=lambda span: (-span.begin, span.run, span.host, span.gpu))
    labels = {host: list(numbers) for host, numbers in gpus.items()}
    by_host: dict[str, list[Span]] = {}
    for span in shown:
        named = labels.setdefault(span.host, [])
        if span.gpu and span.gpu not in named:
            named.append(span.gpu)
        by_host.setdefault(span.host, []).append(span)
    rows: list[TimelineRow] = []
    for host, numbers in labels.items():
        on_host = by_host.get(host, [])
        without = [span for span in on_host if not span.gpu]
        if without or not numbers:
            label = f"{host}, no recorded GPU" if numbers else host
            rows.append(TimelineRow(label, _bars(without, at, scale)))
        rows += [
            TimelineRow(f"{host} GPU {number}", _bars([span for span in on_host if span.gpu == number], at, scale))
            for number in numbers
        ]
        if len(rows) >= ROWS:
            break
    return Timeline(at, rows, scale.ticks(at), shown, scale.place(at, at))


def _bars(spans: Sequence[Span], now: float, scale: Scale) -> list[Bar]:
    """Return the bars of a row: each in the first lane that is free at its start."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.begin, span.run)):
        free = (number for number, lane in enumerate(lanes) if max(lane[-1].end, lane[-1].until) <= span.begin)
        number = next(free, len(lanes))
        if number == len(lanes):
            if number == LANES:
                continue  # the table has it
            lanes.append([])
        lanes[number].append(span)
    bars = []
    for number, lane in enumerate(lanes):
        for span, after in zip(lane, [*lane[1:], None], strict=True):
            left = max(0.0, scale.place(span.begin, now))
            right = max(left, scale.place(now if span.running else span.end, now))
            rest = max(0.0, min(100.0, scale.place(span.until, now)) - right) if span.until else 0.0
            room = (scale.place(after.begin, now) if after else 100.0) - left
            bars.append(Bar(span, number, left, max(0.3, right - left), rest, room))
    return bars
