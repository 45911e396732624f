"""Hostile strings: text that has broken parsers, templates, shells, terminals or files; strategies of hostile values; and limits for a reader."""

import contextlib
import json
import operator
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tables import table

# Every character at which str.splitlines ends a line, and NUL, at which C ends a string.
LINE_BREAKS: list[str] = ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\0"]


def spelled(strings: list[Any]) -> list[str]:
    """Return the strings of a table, in which [a, 9] stands for a nine times."""
    return [one if isinstance(one, str) else "".join(map(operator.mul, one[::2], one[1::2])) for one in strings]


_TABLE = {kind: spelled(strings) for kind, strings in table("hostile_strings").items()}
TERMINAL_STRINGS: list[str] = _TABLE["terminal"]

HOSTILE_STRINGS: list[str] = [*(f"a{char}b" for char in LINE_BREAKS), *TERMINAL_STRINGS, *_TABLE["syntax"]]
"""Every hostile string that can be encoded as UTF-8."""

UNENCODABLE_STRINGS: list[str] = ["\ud800", "a\udfffb", "\udc80\udcff"]
"""Lone surrogates: JSON can express them, UTF-8 cannot."""

HOSTILE_BYTES: list[bytes] = [b"\xff\xfe\xfd", b"\xef\xbb\xbf{}", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"]
"""Bytes that are not UTF-8, or that start like a file of another format."""
HOSTILE_BYTES += [b"\x00" * 64, "text".encode("utf-16"), b"\x1f\x8b\x08\x00", b"PK\x03\x04", b"\xe2\x80"]

NUMBERS: list[Any] = [
    *(0, -1, 1, 2**31, 2**63, 2**64, 10**30, 10**400, 10**5000, 0.5, 1e-320, 1e308, 1e300, -1e308),
    *(float("inf"), float("-inf"), float("nan")),
]
STRINGS = st.sampled_from(HOSTILE_STRINGS)
TEXTS = st.sampled_from(HOSTILE_STRINGS + UNENCODABLE_STRINGS) | st.tuples(
    st.sampled_from(["a", "1", "org/", "/tmp/"]), STRINGS
).map("".join)


def nested(depth: int, key: str | None) -> Any:
    """Return a number below this many lists, or objects with one key."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if key is None else {key: value}
    return value


VALUES: st.SearchStrategy[Any] = st.recursive(
    TEXTS
    | st.integers(0, len(NUMBERS) - 1).map(lambda place: NUMBERS[place])
    | st.sampled_from([None, True, False, "", [], {}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
) | st.builds(nested, st.sampled_from([10, 500, 3000]), st.sampled_from([None, "a"]))


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Return data with up to four changes: bytes flipped, removed or doubled, hostile text inserted."""
    out = bytearray(data)
    for kind in draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)):
        at = draw(st.integers(0, len(out)))
        if kind == 0:
            out[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif kind == 1:
            del out[at : at + draw(st.integers(1, 30))]
        elif kind == 2:
            out[at:at] = out[at : at + draw(st.integers(1, 100))] * draw(st.sampled_from([1, 2, 50]))
        else:
            out[at:at] = draw(st.sampled_from(HOSTILE_BYTES) if kind == 3 else STRINGS.map(str.encode))
    return bytes(out)


@st.composite
def changed(draw: st.DrawFn, data: Any) -> Any:
    """Return a copy of JSON data in which one value, key or list is replaced by a hostile one, renamed or removed."""
    if not isinstance(data, (dict, list)) or not data or draw(st.integers(0, 4)) == 0:
        return draw(VALUES)
    copy = dict(data) if isinstance(data, dict) else list(data)
    key = draw(st.sampled_from(list(copy) if isinstance(copy, dict) else range(len(copy))))
    kind = draw(st.integers(0, 3))
    if kind == 0:
        del copy[key]
    elif kind == 1 and isinstance(copy, dict):
        copy[draw(TEXTS)] = copy.pop(key)
    else:
        copy[key] = draw(changed(copy[key]))
    return copy if isinstance(copy, dict) else copy * draw(st.sampled_from([1, 1, 3]))


def dumps(data: Any) -> bytes:
    """Return JSON, or an empty object if Python cannot write the value."""
    try:
        return json.dumps(data).encode()
    except (ValueError, RecursionError):
        return b"{}"


LIMIT = 20.0  # seconds for one input, which takes milliseconds on an idle machine
MEMORY = (
    1 << 30
)  # bytes that one input may add to the process: it gets a MemoryError, and not the memory of the machine


@contextlib.contextmanager
def limits(seconds: float = LIMIT) -> Iterator[None]:
    """Raise TimeoutError in the main thread after these seconds, and MemoryError beyond MEMORY."""

    def expire(number: int, frame: object) -> None:
        raise TimeoutError(f"a reader takes longer than {seconds:g} s")

    before, most = signal.signal(signal.SIGALRM, expire), resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, most[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, most)
