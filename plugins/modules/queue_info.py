#!/usr/bin/python
"""Return the properties of a host for Slurm's configuration."""

from __future__ import annotations

DOCUMENTATION = r"""
module: queue_info
short_description: Return the hardware of a host, and its packages of Slurm
description: Reads files, nvidia-smi and the package lists of apt. Needs no root.
options:
  packages:
    description: Packages that the host needs. The first one tells the version of Slurm.
    type: list
    elements: str
    required: true
  record:
    description: File with the packages that the role installed.
    type: path
    required: true
extends_documentation_fragment: [trainyard, trainyard.info]
"""

EXAMPLES = r"""
- name: Read the hardware and the version of Slurm
  queue_info:
    packages: [slurmd, slurm-client, munge]
    record: /var/lib/trainyard/queue/packages
  register: queue
"""

RETURN = r"""
hostname: {description: Name of the host without its domain., returned: always, type: str}
cpus: {description: Number of cores that are online., returned: always, type: int}
memory_mib: {description: Memory in MiB., returned: always, type: int}
time: {description: Its clock in seconds since the epoch., returned: always, type: float}
gpus:
  description: C(name), C(memory_mib), C(uuid) and C(device), a device file, of every NVIDIA GPU.
  returned: always
  type: list
  elements: dict
version: {description: "Version of Slurm that is installed, or that apt would install; empty if apt knows none.", returned: always, type: str}
missing: {description: Packages that are not installed., returned: always, type: list, elements: str}
recorded: {description: Packages that the role installed earlier., returned: always, type: list, elements: str}
foreign: {description: Files of a Slurm that the role did not install., returned: always, type: list, elements: str}
"""

import os
import re
import socket
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.argument_spec import argument_spec
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.foreign_files import foreign_files
from ansible.module_utils.nvidia_smi import mib, query

# slurmd only checks that a GPU has a device file: these exist also where the driver creates its files on first use.
DEVICES = ("/dev/zero", "/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/tty")


def gpus() -> list[dict[str, Any]]:
    """Return every NVIDIA GPU with a device file of its own."""
    found = []
    for number, (name, memory, uuid) in enumerate(query("name", "memory.total", "uuid")):
        own = f"/dev/nvidia{number}"
        device = own if Path(own).exists() else DEVICES[number % len(DEVICES)]
        found.append({"name": name, "memory_mib": mib(memory), "uuid": uuid, "device": device})
    return found


def policy(module: AnsibleModule, packages: list[str]) -> dict[str, tuple[str, str]]:
    """Return {package: (installed version, version that apt would install)}; an empty string for none."""
    _code, out, _err = module.run_command(["apt-cache", "policy", *packages], environ_update={"LC_ALL": "C"})
    pattern = re.compile(r"^(\S+):\n  Installed: (\S+)\n  Candidate: (\S+)$", re.MULTILINE)
    return {
        name: (installed.replace("(none)", ""), candidate.replace("(none)", ""))
        for name, installed, candidate in pattern.findall(out)
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(DOCUMENTATION), supports_check_mode=True)
    packages, record = module.params["packages"], Path(module.params["record"])
    known = policy(module, packages)
    installed, candidate = known.get(packages[0], ("", ""))
    module.exit_json(
        changed=False,
        hostname=socket.gethostname().split(".")[0],
        cpus=os.cpu_count() or 1,
        memory_mib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        time=time.time(),
        gpus=gpus(),
        version=installed or candidate,
        missing=[name for name in packages if not known.get(name, ("", ""))[0]],
        recorded=record.read_text(encoding="utf-8").split() if record.exists() else [],
        foreign=foreign_files("queue"),
    )


if __name__ == "__main__":
    main()
