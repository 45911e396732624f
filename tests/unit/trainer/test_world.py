"""Messages between ranks: two real ranks over gloo, in processes of this machine."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

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


def test_no_file_loads_pickled_code() -> None:
    """No module of ours unpickles: neither directly, nor with torch.load or the object collectives."""
    rejected = []
    for path in sorted([*TOP.glob("trainer/**/*.py"), *TOP.glob("trainyard/**/*.py"), *TOP.glob("plugins/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                if {"pickle", "dill", "cloudpickle", "marshal", "shelve"} & {name.partition(".")[0] for name in names}:
                    rejected.append(f"{path}:{node.lineno}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                kind = ast.unparse(node.func)
                safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
                if kind.endswith(("_object", "_object_list")) or (kind == "torch.load" and not safe):
                    rejected.append(f"{path}:{node.lineno}")
    assert rejected == []
