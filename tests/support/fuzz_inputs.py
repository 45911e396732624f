"""Hostile inputs for the fuzzers: valid examples, hostile values, and mutations."""

from __future__ import annotations

import json
import random
from typing import Any

from hostile import HOSTILE_BYTES, HOSTILE_STRINGS, UNENCODABLE_STRINGS
from tables import table

_EXAMPLES = table("fuzz_examples")
SPECS: list[str] = _EXAMPLES["specs"]
RECORDS: list[dict[str, Any]] = _EXAMPLES["records"]
CONFIGS: list[dict[str, Any]] = _EXAMPLES["configs"]
MODELS: dict[str, Any] = _EXAMPLES["models"]
YAML_PARTS = [
    *("!!bool x", "!!int ''", "!!float x", "!!timestamp x", "!!binary x", "!!set {a, b}", "!!omap [a: 1]", "!!null x"),
    *(
        "1:" * 50 + "1",
        "1:" * 2000 + "1.5",
        "0x" + "f" * 5000,
        "2024-01-01T00:00:00+99:99",
        "0001-01-01T00:00:00+23:00",
    ),
    *(
        ".inf",
        "-.inf",
        ".nan",
        "<<: {a: 1}",
        "? [a]",
        "? {b: c}",
        "&a [*a, *a]",
        "&b {c: *b}",
        "*a",
        "|\n  text",
        ">-\n  x",
    ),
    "\n".join(f"b{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 9) if n else 'x'}]" for n in range(9)),
    f"t: &t {'x' * 50_000}\nmany: [{', '.join(['*t'] * 5000)}]",
    "\n".join(f"unknown{n}: 1" for n in range(3000)),
    "{" * 2000,
    "- " * 3000,
]
VALID: list[tuple[str, Any]] = [
    *(("lr", "1e-3"), ("max_steps", "5"), ("run", "mine"), ("strategy", "diloco"), ("dataset", "x.jsonl"), ("seed", 3)),
    *(("packing", "false"), ("loggers", "none"), ("lora_targets", "q_proj,v_proj"), ("outer_lr", 0.5)),
    *(("min_nodes", "2"), ("run_env", {"A": "b"}), ("unit_properties", "MemoryMax=1G"), ("master_port", "29501")),
]
NUMBERS: list[Any] = [
    *(0, -1, 1, 2**31, 2**63, 2**64, 10**30, 10**400, 10**5000, 0.5, 1e-320, 1e308, 1e300, -1e308),
    *(float("inf"), float("-inf"), float("nan")),
]


def text(rng: random.Random) -> str:
    """Return a hostile string, or two joined."""
    one = rng.choice(HOSTILE_STRINGS + UNENCODABLE_STRINGS)
    return (
        one if rng.random() < 0.8 else rng.choice(["a", "1", "org/", "/tmp/", one[:50]]) + rng.choice(HOSTILE_STRINGS)
    )


def value(rng: random.Random, depth: int = 0) -> Any:
    """Return a hostile value of any type that JSON or YAML can express."""
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind <= 2:
        return text(rng)
    if kind == 3:
        return rng.choice(NUMBERS)
    if kind == 4:
        return rng.choice([None, True, False, "", [], {}])
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {text(rng): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    deep: Any = 1
    for _ in range(rng.choice([10, 500, 3000])):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    return deep


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Return data with up to four changes: bytes flipped, removed or doubled, hostile text inserted."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 1:
            del out[at : at + rng.randrange(1, 30)]
        elif kind == 2:
            out[at:at] = out[at : at + rng.randrange(1, 100)] * rng.choice([1, 2, 50])
        elif kind == 3:
            out[at:at] = rng.choice(HOSTILE_BYTES)
        else:
            out[at:at] = rng.choice(HOSTILE_STRINGS).encode()
    return bytes(out)


def change(rng: random.Random, data: Any) -> Any:
    """Return a copy of JSON data in which one value, key or list is replaced by a hostile one."""
    if isinstance(data, dict) and data and rng.random() < 0.8:
        copy = dict(data)
        key = rng.choice(list(copy))
        kind = rng.randrange(4)
        if kind == 0:
            copy[text(rng)] = copy.pop(key)
        elif kind == 1:
            del copy[key]
        else:
            copy[key] = change(rng, copy[key])
        return copy
    if isinstance(data, list) and data and rng.random() < 0.8:
        at = rng.randrange(len(data))
        return [*data[:at], change(rng, data[at]), *data[at + 1 :]] * rng.choice([1, 1, 3])
    return value(rng)


def dumps(data: Any) -> bytes:
    """Return JSON, or an empty object if Python cannot write the value."""
    try:
        return json.dumps(data).encode()
    except (ValueError, RecursionError):
        return b"{}"
