"""The folder of a queued run on the queue host: what the controller writes there, and what the driver of the run reads.

request.json    what the run asks of the cluster (request.py)
session.json    hosts, launch options, the prepared run (this file); mode 0600, it may hold secrets
program.zip     trainyard and trainer as the controller has them, which the driver runs
files/          dataset and model, where the controller has them
state.json      job, phase, attempts and end of the run; written by `submit` and then by the driver
driver.log      what the driver reports
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import trainer
import trainyard
from trainer.common.errors import UserError
from trainyard.run.launch_options import LaunchOptions, make_options
from trainyard.run.types import PreparedRun, plain, read
from trainyard.wire.connection import Host, Login
from trainyard.wire.trainer_archive import zip_packages

KEY = ".ssh/trainyard_queue_ed25519"  # in the home of the user of the queue host; made by the role queue
KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"  # written by the role ssh
# Of the logins of the controller, only user and port are valid on the queue host.
SSH_ARGUMENTS = (
    *("-F", "none", "-o", "IdentitiesOnly=yes", "-o", f"UserKnownHostsFile={KNOWN_HOSTS}"),
    *("-o", f"GlobalKnownHostsFile={KNOWN_HOSTS}"),
)


@dataclass(frozen=True)
class QueuedStart:
    """What starts a run without its controller."""

    hosts: list[Host]  # all hosts that it may use, in inventory order
    options: LaunchOptions
    prepared: PreparedRun  # `src` of a file is below the run's folder
    continues: bool = False  # whether hosts, or the queue host, have a folder of the run from before it was added

    def as_json(self) -> bytes:
        """Return the contents of `session.json`."""
        # The service logs in with its own key: a password of the controller stays there.
        bare = [replace(host, login=replace(host.login, password="")) for host in self.hosts]
        hosts = [asdict(host) | {"env": dict(host.env)} for host in bare]
        state = {"prepared": plain(self.prepared)}
        options = self.options.model_dump(mode="json")
        content = {"hosts": hosts, "options": options, "state": state, "continues": self.continues}
        return json.dumps(content).encode()


def read_host(entry: dict[str, Any]) -> Host:
    """Return a host as the queue reaches it: by its cluster address, with the queue's key. Raises ValueError."""
    host = read(Host, entry)
    key, user, port = str(Path.home() / KEY), host.login.user, host.login.port
    return replace(host, login=Login(host.address, user, port, key, SSH_ARGUMENTS))


def read_session(folder: Path) -> QueuedStart:
    """Read `session.json`. Raises UserError if it is missing or damaged."""
    try:
        content = json.loads((folder / "session.json").read_bytes())
        hosts = [read_host(entry) for entry in content["hosts"]]
        prepared = read(PreparedRun, content["state"]["prepared"])
        options = make_options(content["options"], str(folder / "session.json"))
        files = [replace(file, src=str(_below(folder, file.src))) if file.src else file for file in prepared.files]
        prepared = replace(prepared, files=files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / 'session.json'} is unreadable ({error}): add the run again") from None
    return QueuedStart(hosts, options, prepared, bool(content.get("continues")))


def _below(folder: Path, name: str) -> Path:
    """Return a path of the run's files: absolute names stay within the folder, too. Raises ValueError."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{name} is outside of the folder")
    return path


@functools.cache
def program_archive() -> bytes:
    """Return trainyard and trainer as one zip file."""
    return zip_packages(trainyard, trainer)
