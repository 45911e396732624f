"""Messages between ranks: two real ranks over gloo, in processes of this machine."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from run_hosts import TOP, free_port

# One rank: it gathers JSON data and bytes, and an object that only a pickle could carry.
RANKS = """
import json, os, sys
from trainer.distributed.world import World, leave
world = World.join(30)
found = {
    "data": world.gather({"rank": world.rank, "list": [1, None, 0.5, "\\u00e9"]}),
    "bytes": [part.hex() for part in world.gather_bytes(bytes([world.rank]) * (3 * world.rank))],
    "not a number": str(world.gather(float("nan"))),
}
try:
    world.gather(object())
except TypeError:
    found["object"] = "rejected"
print(json.dumps(found), flush=True)
leave(0)
"""


@pytest.mark.slow
def test_what_ranks_exchange_is_not_unpickled() -> None:
    environment = os.environ | {"PYTHONPATH": str(TOP), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS], env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    for text in outputs:
        found = json.loads(text)
        assert found["data"] == [{"rank": rank, "list": [1, None, 0.5, "é"]} for rank in (0, 1)]
        assert found["bytes"] == ["", "010101"] and found["not a number"] == "[nan, nan]"
        assert found["object"] == "rejected"


def unsafe_calls(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of a module that can unpickle: with a module for it, torch's loaders, or the object collectives."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name.partition(".")[0] for alias in node.names}
            origin = (getattr(node, "module", None) or "").partition(".")[0]
            if {"pickle", "dill", "cloudpickle", "marshal", "shelve"} & {*names, origin}:
                yield node.lineno
            if origin == "torch" and "load" in names:  # its calls would not name torch
                yield node.lineno
        if isinstance(node, ast.Call):
            kind = ast.unparse(node.func)
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            unsafe = given.get("weights_only", "True") != "True" or given.get("allow_pickle", "False") != "False"
            unsafe |= kind in ("torch.load", "_streaming_load") and "weights_only" not in given
            if unsafe or ("." in kind and kind.endswith(("_object", "_object_list"))):
                yield node.lineno


def test_no_file_loads_pickled_code() -> None:
    """No module of ours unpickles: neither directly, nor with torch.load or the object collectives."""
    sources = sorted([*TOP.glob("trainer/**/*.py"), *TOP.glob("trainyard/**/*.py"), *TOP.glob("plugins/**/*.py")])
    assert [f"{path}:{line}" for path in sources for line in unsafe_calls(ast.parse(path.read_text()))] == []


def test_the_search_finds_what_unpickles() -> None:
    bad = ["import pickle", "from pickle import loads", "from torch import load", "dist.all_gather_object(a, b)"]
    bad += ["torch.load(f)", "torch.load(f, weights_only=False)", "_streaming_load(f)", "np.load(f, allow_pickle=True)"]
    good = ["torch.load(f, weights_only=True)", "np.load(f, allow_pickle=False)", "json.load(f)", "import json"]
    assert all(list(unsafe_calls(ast.parse(text))) for text in bad)
    assert not any(list(unsafe_calls(ast.parse(text))) for text in good)
