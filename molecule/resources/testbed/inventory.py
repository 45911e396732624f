"""The inventory of a lab: the variables of inventory/hosts.example.yml with their values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from . import root

if TYPE_CHECKING:
    from .lab import Lab


def write(lab: Lab, venv: Path | None) -> None:
    """Write `lab.inventory`; `venv` is the environment that the hosts use, if any."""
    hosts = lab.hosts
    variables = {
        "ansible_user": root.USER,
        "ansible_ssh_private_key_file": str(lab.key),
        "ansible_ssh_common_args": (
            f"-o UserKnownHostsFile={lab.known_hosts} -o StrictHostKeyChecking=yes -o IdentitiesOnly=yes"
        ),
        # The sockets of persistent connections are in the folder of the lab: `down` closes them before the hosts end.
        "ansible_control_path_dir": str(lab.folder / "cp"),
        "ansible_python_interpreter": "/usr/bin/python3",
        "cluster_data_dir": root.DATA_DIR,
    }
    if venv:
        # The environment of this machine, read-only: site.yml checks it and does not change it.
        variables["cluster_python"] = str(venv / "bin/python")
        variables["python_env"] = "as-is"
    cluster = {
        "vars": variables,
        "hosts": {host.name: {"ansible_host": host.address, "cluster_address": host.address} for host in hosts},
    }
    head = {"hosts": {hosts[0].name: None}}
    workers = {"hosts": {host.name: None for host in hosts[1:]}}
    document = {"all": {"children": {"cluster": cluster, "head": head, "workers": workers}}}
    text = f"---\n# Written by the lab {lab.name!r}, and removed with it.\n"
    lab.inventory.write_text(text + yaml.safe_dump(document, sort_keys=False))
