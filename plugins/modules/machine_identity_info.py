#!/usr/bin/python
"""Which machine is this, seen from inside."""

from __future__ import annotations

DOCUMENTATION = r"""
module: machine_identity_info
short_description: Tells which machine a host is
description:
  - Reads what tells one machine from another, the links by which others reach it, and its GPUs. Changes nothing, needs
    no root.
options: {}
attributes:
  check_mode:
    support: full
"""

EXAMPLES = r"""
- name: Who are you
  machine_identity_info:
  register: identity
"""

RETURN = r"""
identity:
  description: What was found; a value that cannot be read is empty.
  returned: always
  type: dict
  contains:
    boot_id: {description: "Drawn by the kernel at each boot.", type: str}
    machine_id: {description: "Of the installation; clones share it.", type: str}
    host_keys: {description: "The public SSH host keys, without comments.", type: list, elements: str}
    links:
      description: "One entry an address: C(address), C(device), C(mbit) (Mbit/s, 0 where unknown), C(wireless)."
      type: list
      elements: dict
    gpus: {description: "UUIDs of the GPUs.", type: list, elements: str}
"""

import json
import re
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule


def read(path):
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError):
        return ""


def host_keys():
    keys = (read(path).split()[:2] for path in Path("/etc/ssh").glob("ssh_host_*_key.pub"))
    return sorted(" ".join(key) for key in keys if len(key) == 2)


def links(module):
    code, out, _ = module.run_command([module.get_bin_path("ip", required=True), "-json", "address"])
    found = []
    for link in json.loads(out) if code == 0 else []:
        device = Path("/sys/class/net", link["ifname"])
        speed = read(device / "speed")
        for address in link.get("addr_info", []):
            found.append(
                {
                    "address": address["local"],
                    "device": link["ifname"],
                    "mbit": int(speed) if speed.isdigit() else 0,
                    "wireless": (device / "wireless").exists() or (device / "phy80211").exists(),
                }
            )
    return found


def gpus():
    """NVIDIA's driver and amdgpu show the UUID in a file: no tool is needed."""
    found = set()
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        found.update(re.findall(r"GPU UUID:\s*(GPU-[0-9a-fA-F-]+)", read(path)))
    for path in Path("/sys/class/drm").glob("card*/device/unique_id"):
        found.add("AMD-" + read(path))
    return sorted(found - {"AMD-", "AMD-0"})


def main():
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    module.exit_json(
        changed=False,
        identity={
            "boot_id": read("/proc/sys/kernel/random/boot_id"),
            "machine_id": read("/etc/machine-id"),
            "host_keys": host_keys(),
            "links": links(module),
            "gpus": gpus(),
        },
    )


if __name__ == "__main__":
    main()
