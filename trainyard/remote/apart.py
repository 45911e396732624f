"""Programs of the trainer that read what ranks wrote: merge, evaluate and export. They run in a unit like that of a run, where one is possible.

The program replaces this process, so its streams are those of the connection; it ends with the connection, see trainer/common/lost_connection.py.
Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from trainer.supervise.environment import cache_variables, choose_backend, clean_environment, systemctl_environment
from trainer.supervise.link_free import link_free, run_folder
from trainer.supervise.sandbox import address_properties, unit_properties
from trainyard.remote.digests import sha256_file

STALE = 86_400.0  # s after which an archive that an earlier deployment has sent is removed


def merge(request: dict[str, Any]) -> NoReturn:
    """Run `trainer merge`; see `run_apart`."""
    run_apart(request, ["trainer", "merge"])


def evaluate(request: dict[str, Any]) -> NoReturn:
    """Run `trainer evaluate`; see `run_apart`."""
    run_apart(request, ["trainer", "evaluate"])


def gguf_export(request: dict[str, Any]) -> NoReturn:
    """Run `trainer.launch.gguf_export`; see `run_apart`."""
    remove_stale(Path(request["trainer"]))
    run_apart(request, ["trainer.launch.gguf_export"])


def run_apart(request: dict[str, Any], module: list[str]) -> NoReturn:
    """Become a program of the trainer, whose last line of output is the answer.

    `request`: `trainer`, its archive in the store, and `digest`, its SHA-256; `run_dir`, the only folder that it
    writes; `reads`, further folders; `backend`, that of the host; `limit`, in seconds; `input` of the program. Raises
    ValueError: the archive is not the one that the controller has sent.
    """
    Path(request["run_dir"]).parent.mkdir(exist_ok=True)  # no run has been here yet
    trainer, run_dir = Path(request["trainer"]), run_folder(request["run_dir"]).resolved()
    if sha256_file(trainer) != request["digest"]:
        raise ValueError(f"{trainer} has changed; remove it and run the same command again")
    run_dir.make_folder()
    limit, data_dir = int(request["limit"]), Path(request["run_dir"]).parents[1].resolve()
    variables = {"PYTHONPATH": str(trainer), "PYTHONUTF8": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-m", *module]
    systemd = choose_backend(request["backend"])
    if systemd is None:
        signal.alarm(limit)  # survives execve(2)
        environment = clean_environment()
    else:
        system = "--user" not in systemd
        # The spec of a run names what it reads of the store, and a rank may have written that.
        reads = [str(Path(request["run_dir"]).parents[1] / "store"), *request["reads"]]
        settings = unit_properties(run_dir.path, data_dir, request["run_dir"], system=system, reads=reads)
        settings += address_properties(["127.0.0.1"]) if system else []
        settings += [f"RuntimeMaxSec={limit}", f"WorkingDirectory={run_dir}"]
        # In the unit's own /tmp: compiled code in the cache of the run is that of its ranks.
        variables |= cache_variables(Path("/tmp")) if system else {}
        options = ["--quiet", "--no-ask-password", "--pipe", "--wait", "--collect", "--service-type=exec"]
        options += [f"--unit=trainyard-apart-{secrets.token_hex(6)}", *(f"--property={entry}" for entry in settings)]
        options += [f"--setenv={name}={value}" for name, value in variables.items()]
        command = [*systemd, *options, "--", *command]
        environment = systemctl_environment()
    source = os.memfd_create("request")
    os.write(source, json.dumps(request["input"]).encode())
    os.lseek(source, 0, os.SEEK_SET)
    os.dup2(source, 0)
    os.execvpe(command[0], command, environment | variables)


def remove_stale(trainer: Path) -> None:
    """Remove the archives of trainer and converter that earlier deployments have sent. `trainer` is used now."""
    folder = link_free(trainer).parent
    for name in folder.entries():
        with contextlib.suppress(OSError):
            if name.endswith(".zip") and name != trainer.name and time.time() - (folder / name).stat().st_mtime > STALE:
                (folder / name).remove()
