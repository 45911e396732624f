"""Messages between ranks: two real ranks over gloo, in processes of this machine."""

import ast
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from run_hosts import TOP, free_port
from tables import table

from trainer.common.errors import UserError
from trainer.distributed.store import RunStore
from trainer.launch import torchrun

# One rank: it gathers JSON data and bytes, and an object that only a pickle could carry.
RANKS = table("world")["ranks"]


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


# The store of a run --------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for module, name in ((torchrun.torch.distributed, "TCPStore"), (torchrun.static_tcp_rendezvous, "TCPStore")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(torchrun.c10d_rendezvous_backend, "TCPStore", torchrun.c10d_rendezvous_backend.TCPStore)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"^port {port} of 127.0.0.1 is in use by another process: "):
            RunStore("127.0.0.1", port, 1, True)
        flags = ["--nnodes=1", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        with pytest.raises(SystemExit) as end:
            torchrun.main([*flags, "-m", "trainer"])
    assert end.value.code == 1
    written = capsys.readouterr().err
    assert written.endswith("which chooses a free port unless master_port is set\n") and "Traceback" not in written
