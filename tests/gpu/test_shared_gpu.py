"""The backend and the device of ranks that share a GPU, with a stand-in for CUDA."""

import types
from typing import Any

import pytest

from trainer.common.errors import UserError
from trainer.distributed import world


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace CUDA by one GPU, and record the arguments of init_process_group."""
    found: dict[str, Any] = {}
    cuda = {"is_available": lambda: True, "device_count": lambda: 1, "set_device": lambda device: None}
    for name, function in cuda.items():
        monkeypatch.setattr(world.torch.cuda, name, function)
    monkeypatch.setattr(world, "launcher_store", lambda *_: types.SimpleNamespace())
    monkeypatch.setattr(world.dist, "init_process_group", lambda backend, **other: found.update(other, backend=backend))
    return found


def start(monkeypatch: pytest.MonkeyPatch, **environment: int) -> world.World:
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    return world.World.join(60)


def test_ranks_of_one_host_share_a_gpu_over_gloo(joined: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = start(monkeypatch, RANK=1, LOCAL_RANK=1, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
    assert (joined["backend"], str(made.device), "device_id" in joined) == ("gloo", "cuda:0", False)


def test_one_rank_per_gpu_uses_nccl(joined: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = start(monkeypatch, RANK=1, LOCAL_RANK=0, WORLD_SIZE=2, LOCAL_WORLD_SIZE=1)
    assert (joined["backend"], str(joined["device_id"]), str(made.device)) == ("nccl", "cuda:0", "cuda:0")


def test_several_hosts_cannot_share_gpus(joined: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^2 ranks cannot share the GPUs of this host \(1\).*set cluster_processes=1"):
        start(monkeypatch, RANK=0, LOCAL_RANK=0, WORLD_SIZE=3, LOCAL_WORLD_SIZE=2)
    assert not joined


def test_sharded_strategies_need_a_gpu_for_every_rank(joined: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = start(monkeypatch, RANK=1, LOCAL_RANK=1, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
    monkeypatch.setattr(world.dist, "get_backend", lambda group: joined["backend"])
    with pytest.raises(
        UserError, match=r"^strategy: fsdp cannot run with ranks that share a GPU: set cluster_processes"
    ):
        made.require_own_gpus("fsdp")
    monkeypatch.setattr(world.dist, "get_backend", lambda group: "nccl")
    made.require_own_gpus("fsdp")
