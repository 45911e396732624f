"""The conditions under which torchrun forks its ranks or starts them as separate programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch.distributed.elastic.multiprocessing import api

from trainer.launch import forked_ranks
from trainer.spec import make_spec


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the changes that the function makes in this process."""
    monkeypatch.setattr(api, "get_subprocess_handler", api.get_subprocess_handler)
    monkeypatch.setitem(forked_ranks.sys.modules, "bitsandbytes", None)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    monkeypatch.setattr(forked_ranks.gc, "freeze", lambda: None)
    yield


def arguments(folder: Path, **fields: str) -> list[str]:
    text = "".join(f"{name}: {value}\n" for name, value in {"model": "tiny", **fields}.items())
    (folder / "spec.yml").write_text(text)
    return ["--nnodes=1", "-m", "trainer", "train", str(folder / "spec.yml"), f"--run-dir={folder}"]


def test_ranks_of_a_usual_spec_are_forked(tmp_path: Path) -> None:
    assert forked_ranks.import_for_ranks(arguments(tmp_path))
    assert api.get_subprocess_handler is forked_ranks._Handler


@pytest.mark.parametrize(
    "fields",
    [
        {"script": "mine.py"},
        {"quantize": "nf4", "lora_r": "8"},
        {"optimizer": "adamw8bit"},
        {"backend": "unsloth", "lora_r": "8"},
        {"lr": "no number"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_ranks_that_import_otherwise_are_separate_programs(tmp_path: Path, fields: dict[str, str]) -> None:
    before = api.get_subprocess_handler
    assert not forked_ranks.import_for_ranks(arguments(tmp_path, **fields))
    assert api.get_subprocess_handler is before


@pytest.mark.parametrize("kind", ["starcoder2", "os.path", 7, None])
def test_the_code_of_the_architecture_is_imported(kind: object, tmp_path: Path) -> None:
    """A name that transformers does not know imports nothing."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    before = set(sys.modules)
    for model in (tmp_path, "org/name"):
        forked_ranks.import_architecture(make_spec({"model": str(model)}, "the test"))
    assert ("transformers.models.starcoder2.modeling_starcoder2" in set(sys.modules) - before) is (kind == "starcoder2")


def test_nothing_is_forked_once_cuda_is_initialized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_ranks, "_open_files", lambda: {3: "/dev/null", 4: "/dev/nvidia-uvm"})
    before = api.get_subprocess_handler
    assert not forked_ranks.import_for_ranks(arguments(tmp_path))
    assert api.get_subprocess_handler is before


def test_the_standby_process_uses_what_forked_ranks_use() -> None:
    """Its modules can be imported: a standby process that cannot is replaced silently by a torchrun that imports itself."""
    from trainer.distributed import worker_process
    from trainer.launch import standby_process as standby

    assert standby.may_fork is forked_ranks.may_fork and standby.die_with_launcher is worker_process.die_with_launcher


def test_other_programs_than_the_trainer_are_started_as_usual() -> None:
    handler = forked_ranks._Handler("/bin/true", (), {}, None, None, 0, None)  # type: ignore[arg-type]
    assert handler.proc.wait() == 0


def test_the_rank_that_ended_first_is_the_first_that_torchrun_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have ended before torchrun checks: the lower rank is not taken for the first failure."""
    ready, start = os.pipe()

    def run_rank(arguments: Sequence[str], env: dict[str, str]) -> None:
        if arguments[0] == "0":
            os.close(start)
            os.read(ready, 1)  # ends with the parent's copy
        os._exit(int(arguments[0]) + 3)

    monkeypatch.setattr(forked_ranks, "_run_rank", run_rank)
    ranks = [forked_ranks._ForkedRank([str(number)], {}) for number in (0, 1)]
    try:
        os.waitid(os.P_PID, ranks[1].pid, os.WEXITED | os.WNOWAIT)
        os.close(start)
        os.waitid(os.P_PID, ranks[0].pid, os.WEXITED | os.WNOWAIT)
        assert [rank.poll() for rank in ranks] == [None, 4]
        assert [rank.poll() for rank in ranks] == [3, 4]
        assert [rank.wait(1) for rank in ranks] == [3, 4]
    finally:
        os.close(ready)


def test_waiting_for_one_rank_does_not_depend_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        forked_ranks, "_run_rank", lambda arguments, env: (time.sleep(float(arguments[0])), os._exit(0))
    )
    late, early = (forked_ranks._ForkedRank([seconds], {}) for seconds in ("0.3", "0"))
    os.waitid(os.P_PID, early.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(subprocess.TimeoutExpired):
        late.wait(0)
    assert late.wait(30) == 0
    assert early.poll() == 0


def test_nvml_is_ended_before_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per initialization, and only if it is in use. The library is a stand-in."""
    calls: list[int] = []

    class Library:
        def nvmlShutdown(self) -> int:  # the name in the library
            calls.append(len(calls))
            return 1 if len(calls) > 2 else 0

    monkeypatch.setattr(forked_ranks.ctypes, "CDLL", lambda name: Library())
    forked_ranks.close_nvml()
    assert not calls
    monkeypatch.setattr(forked_ranks, "_open_files", lambda: {5: "/dev/nvidiactl"})
    forked_ranks.close_nvml()
    assert len(calls) == 3
