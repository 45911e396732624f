"""How the pages show numbers: each with its unit, and a dash for an unknown one."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from datetime import datetime

from trainer.common.formats import clock, thousands
from trainyard.queue.queue_client import clock_time

NONE = "–"
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def size(value: float | None) -> str:
    """Return a number of bytes with a binary unit."""
    if value is None:
        return NONE
    for unit, limit in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= limit:
            return f"{value / limit:.1f} {unit}"
    return f"{value:.0f} B"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with `digits` significant digits."""
    return NONE if value is None or not math.isfinite(value) else f"{value:.{digits}g}"


def count(value: float | None) -> str:
    """Return a number of things, with a comma before each three digits."""
    return NONE if value is None or not math.isfinite(value) else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Return tokens per second."""
    return NONE if not value else f"{thousands(value)} tok/s"


def percent(share: float | None) -> str:
    """Return a share, from 0 to 1, in percent."""
    return NONE if share is None or not math.isfinite(share) else f"{100 * share:.0f} %"


def duration(seconds: float | None) -> str:
    """Return a duration, as 1:02:03 h, 3:42 min or 42 s."""
    if seconds is None:
        return NONE
    if seconds < 60:
        return f"{int(max(0, seconds))} s"
    text = clock(seconds)
    return f"{text} {'h' if text.count(':') == 2 else 'min'}"


def moment(at: float | None) -> str:
    """Return a time of the controller's zone, without the date if it is today."""
    if not at or not 0 < at < 2**33:
        return NONE
    when = datetime.fromtimestamp(at)
    today = when.date() == datetime.fromtimestamp(time.time()).date()
    return when.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M")


def clean(text: str) -> str:
    """Return lines of untrusted text without control characters other than tabs and line feeds."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


_NAMED = (size, number, count, rate, percent, duration, moment, clean)
FILTERS: dict[str, Callable[..., str]] = {"near": clock_time, **{each.__name__: each for each in _NAMED}}
