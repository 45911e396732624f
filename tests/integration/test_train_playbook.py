"""train.yml as users run it, on this machine as two hosts: real torchrun, real files, real faults."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab_hosts import run_playbook
from run_hosts import TOP, free_port, local_inventory, questions, start_playbook, unreachable_inventory, until
from safetensors.numpy import load_file
from tables import table

from trainer.common.errors import UserError
from trainer.supervise.environment import run_environment
from trainer.supervise.link_free import link_free
from trainyard.extra_vars import read_run_spec
from trainyard.run.launch_options import options_from_variables
from trainyard.run.session import RunSession
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.run_errors import RunError

SMALL = {"seq_length": 64, "total_batch_size": 4, "max_steps": 8, "checkpoint_interval": 2, "eval_interval": 4}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return questions(tmp_path)


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """inventory/local.yml, but with data dirs and a port of the test's own: another test process may start a run at the same time."""
    return local_inventory(tmp_path, {"master_port": free_port()})


def run_dir(inventory: Path, host: str, run: str) -> Path:
    return inventory.parent / host / "runs" / run


def error_line(output: str) -> str:
    errors = [line for line in output.splitlines() if "error: " in line]
    assert len(errors) == 1 and "Traceback" not in output, output
    return errors[0]


BAD_INPUT: list[tuple[dict[str, Any], list[str]]] = table("bad_input")["bad_input"]


@pytest.fixture
def bad_files(tmp_path: Path) -> Path:
    """The folder of the files that BAD_INPUT names with @."""
    for name, text in table("bad_input")["files"].items():
        (tmp_path / name).write_text(text.replace("@x", "x" * 100_000))
    return tmp_path


@pytest.mark.parametrize(
    ("said", "words"),
    # A model is read in a process of its own.
    [pytest.param(*case, marks=[pytest.mark.slow] if "model" in case[0] else []) for case in BAD_INPUT],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_one_line(said: dict[str, Any], words: list[str], bad_files: Path) -> None:
    """As the action plugin reads extra variables and prepares a run; no host may be reached."""
    said = {
        name: str(next(bad_files.glob(f"{value[1:]}.*"))) if str(value).startswith("@") else value
        for name, value in said.items()
    }

    def connect(host: Host) -> HostConnection:
        raise AssertionError(f"{host.name} was reached")

    with pytest.raises((UserError, RunError)) as raised:
        options = options_from_variables(said, lambda value: value)
        spec = read_run_spec(options.spec, said, TOP)
        RunSession(
            [Host("node1", "127.0.0.1", "/data", "/python")], connect, options, spec=spec, home=bad_files, report=print
        ).prepare()
    (line,) = str(raised.value).splitlines()
    for word in words:
        assert word in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "words"), [({"lrr": 1}, ["-e lrr", "'lr'"]), ({"hosts": "nobody"}, ["no host matches nobody", "node1"])]
)
def test_bad_input_ends_the_playbook_before_any_host(said: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    played = run_playbook("train.yml", unreachable_inventory(tmp_path), said)
    assert played.rc != 0
    assert played.count("dark") == 0
    line = error_line(played.stdout)
    for word in words:
        assert word in line


@pytest.mark.slow
def test_an_unreachable_host_is_named(tmp_path: Path, dataset: Path) -> None:
    nowhere = unreachable_inventory(tmp_path, cluster_data_dir="/tmp/trainyard-none")
    played = run_playbook("train.yml", nowhere, {"dataset": str(dataset)} | SMALL)
    assert played.rc != 0
    assert "node1, node2 do not answer" in error_line(played.stdout)


@pytest.mark.slow
def test_a_run_from_one_command(inventory: Path, dataset: Path) -> None:
    said = {"run": "first", "dataset": str(dataset), "lr": "1e-2", "max_steps": 20, "epochs": 20} | {
        name: value for name, value in SMALL.items() if name != "max_steps"
    }
    said |= {"run_env": {"NOTE": "one\u2028line"}}
    dataset.chmod(0o600)
    played = run_playbook("train.yml", inventory, said)
    assert played.rc == 0, played.stdout
    assert "/20  loss" in played.stdout and "node2  1     1" in played.stdout
    head, other = run_dir(inventory, "node1", "first"), run_dir(inventory, "node2", "first")

    result = json.loads((head / "result.json").read_text())
    assert result["status"] == "finished" and result["world_size"] == 2 and result["steps"] == 20
    assert result["tokens"] > 0 and result["tokens_per_second"] > 0 and result["eval_loss"] > 0
    assert result["loss_last"] < result["loss_first"]
    mine = load_file(head / "adapter" / "adapter_model.safetensors")
    theirs = load_file(other / "adapter" / "adapter_model.safetensors")
    assert mine.keys() == theirs.keys() and all((mine[name] == theirs[name]).all() for name in mine)
    assert any(abs(value).max() > 0 for name, value in mine.items() if "lora_B" in name)
    assert {path.name for path in (head / "logs").iterdir()} >= {"rank0.log", "rank1.log"}
    assert list((head / "tensorboard").glob("events.*"))
    assert (head / "env").stat().st_mode & 0o777 == 0o600
    assert run_environment(link_free(head))["NOTE"] == "one\u2028line"
    private = [path for folder in (head.parents[1] / "store/datasets", head / "cache") for path in folder.iterdir()]
    assert len(private) == 2 and {path.stat().st_mode & 0o777 for path in private} == {0o600}
    assert [json.loads(line)["step"] for line in (head / "metrics.jsonl").read_text().splitlines()] == list(
        range(1, 21)
    )

    again = run_playbook("train.yml", inventory, said)
    assert again.rc == 0 and "finished: 20 of 20 steps" in again.stdout
    assert again.count("changed") == 0, again.stdout

    other_spec = run_playbook("train.yml", inventory, said | {"lr": "1e-3"})
    assert other_spec.rc != 0 and "lr: was 0.01, now 0.001" in error_line(other_spec.stdout)


@pytest.mark.slow
def test_check_mode_touches_nothing(inventory: Path, dataset: Path) -> None:
    played = run_playbook("train.yml", inventory, {"run": "checked", "dataset": str(dataset)} | SMALL, "--check")
    assert played.rc == 0, played.stdout
    assert "world size 2" in played.stdout
    assert not (inventory.parent / "node1").exists() and not (inventory.parent / "node2").exists()


def start(inventory: Path, said: dict[str, Any]) -> tuple[subprocess.Popen[str], Path]:
    """Start a run; return its playbook and the file of the output."""
    output = inventory.parent / "output.txt"
    with output.open("w") as sink:
        return start_playbook(inventory, "train.yml", "-e", json.dumps(said), stdout=sink), output


def step_of(folder: Path, rank: int) -> int:
    try:
        return int(json.loads((folder / "state" / f"rank{rank}.json").read_text())["step"])
    except (OSError, ValueError):
        return 0


@pytest.mark.slow
@pytest.mark.long
def test_a_first_start_that_fails_is_restarted(inventory: Path, dataset: Path) -> None:
    """One after the other: a host without its Python, a folder that cannot be written, a start that is not let in."""
    document = yaml.safe_load(inventory.read_text())
    hosts = document["all"]["children"]["cluster"]["children"]["workers"]["hosts"]
    python, store = inventory.parent / "python", inventory.parent / "node2/store"
    hosts["node2"]["cluster_python"] = str(python)
    inventory.write_text(yaml.safe_dump(document, sort_keys=False))
    store.parent.mkdir()
    store.touch()
    runs = inventory.parent / "node2/runs"
    runs.mkdir()
    said = {"run": "patient", "dataset": str(dataset), "max_restarts": 9, **SMALL}
    with (runs / ".start").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        playing, output = start(inventory, said)

        def told(words: str) -> None:
            until(lambda: words in output.read_text(), 120, words)

        told("failed: node2: there is no Python at")
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        told("failed: node2: cannot write")
        store.unlink()
        told("failed: node2: another start on this host has not finished within 20 s")
    assert playing.wait(300) == 0, output.read_text()
    assert "8 of 8 steps on 2 ranks" in output.read_text()
    assert [line for line in output.read_text().splitlines() if "restarting in" in line][:3] == [
        f"restarting in {2**count} s (restart {count + 1} of 9 without progress in between)" for count in range(3)
    ]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """node2's data dir on a disk of its own that can be filled."""
    if os.geteuid():
        pytest.skip("needs root to mount a small disk")
    folder = tmp_path / "node2"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
@pytest.mark.long
def test_a_full_disk_is_named_and_nothing_is_lost(inventory: Path, dataset: Path, small_disk: Path) -> None:
    said = {"run": "full", "dataset": str(dataset), **SMALL, "max_steps": 400, "epochs": 100}
    playing, output = start(inventory, said)
    folder = run_dir(inventory, "node2", "full")
    until(lambda: step_of(folder, 1) >= 4 or playing.poll() is not None, 120, "step 4")
    assert playing.poll() is None, output.read_text()
    filler = small_disk / "filler"
    # The rank must not run meanwhile: the space that it frees for its error message would be filled again.
    pid = json.loads((folder / "state" / "rank1.json").read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    # Without a buffer: what is left in one would be written when the file is closed, and fail once more.
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 65536)
    os.kill(pid, signal.SIGCONT)
    assert playing.wait(300) != 0, output.read_text()
    line = error_line(output.read_text())
    # The last is for a failed write of torch.save, which hides the error of the system.
    reasons = ("No space left on device", "no space left on the disk", "the disk is full or not writable")
    assert "node2" in line and any(reason in line for reason in reasons) and "free disk space" in line, line
    kept = sorted((folder / "checkpoints").glob("step-*"))
    assert kept and not list((folder / "checkpoints").glob(".tmp-*"))
    refused = run_playbook("train.yml", inventory, said)
    assert refused.rc != 0, refused.stdout
    line = error_line(refused.stdout)
    assert "MB free in" in line and "the run needs about" in line, line
    filler.unlink()
    shutil.rmtree(inventory.parent / "node1" / "runs" / "full" / "checkpoints")  # the head's copies are not needed
    # (node1's spec is kept with its checkpoints: without them the folder is free for the same run)
    playing, output = start(inventory, said)
    log = run_dir(inventory, "node1", "full") / "logs/rank0.log"
    until(lambda: "resuming from step" in log.read_text(), 120, "a resume")
    stopped = start_playbook(inventory, "playbooks/stop.yml", "-e", "run=full", "-e", "force=true")
    assert stopped.wait(120) == 0
    playing.wait(300)
