"""The store of a run where another process has its port."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("torch")

from trainer.common.errors import UserError
from trainer.distributed.store import RunStore
from trainer.launch import torchrun


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
