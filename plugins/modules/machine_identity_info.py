#!/usr/bin/python
"""Return the identity of a machine."""

from __future__ import annotations

DOCUMENTATION = r"""
module: machine_identity_info
short_description: Return the identity of a machine
description:
  - Returns the identifiers of a machine, its network addresses, and its GPUs. Does not need root.
options: {}
extends_documentation_fragment: [trainyard, trainyard.info]
"""

EXAMPLES = r"""
- name: Read the identity of the machine
  machine_identity_info:
  register: identity
"""

RETURN = r"""
identity:
  description: The identity. A value that cannot be read is empty.
  returned: always
  type: dict
  contains:
    boot_id: {description: "Random ID that the kernel generates at every boot.", type: str}
    machine_id: {description: "ID of the installation. Clones share it.", type: str}
    host_keys: {description: "Public SSH host keys without comments.", type: list, elements: str}
    links: {description: "One entry per address: C(address), C(device), C(mbit) (Mbit/s, 0 if unknown) and C(wireless).", type: list, elements: dict}
    gpus: {description: "UUIDs of the GPUs.", type: list, elements: str}
"""

import json
import re
from pathlib import Path
from typing import Any

from ansible.module_utils.argument_spec import argument_spec
from ansible.module_utils.basic import AnsibleModule


def read(path: Path | str) -> str:
    """Return the content of a file without surrounding whitespace, or an empty string."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def host_keys() -> list[str]:
    """Return type and key of every public SSH host key."""
    keys = (read(path).split()[:2] for path in Path("/etc/ssh").glob("ssh_host_*_key.pub"))
    return sorted(" ".join(key) for key in keys if len(key) == 2)


def links(module: AnsibleModule) -> list[dict[str, Any]]:
    """Return every address with its network device."""
    code, out, _err = module.run_command([module.get_bin_path("ip", required=True), "-json", "address"])
    found = []
    for link in json.loads(out) if code == 0 else []:
        device = Path("/sys/class/net", link["ifname"])
        speed = read(device / "speed")
        mbit, wireless = (
            int(speed) if speed.isdigit() else 0,
            any((device / n).exists() for n in ("wireless", "phy80211")),
        )
        more = {"device": link["ifname"], "mbit": mbit, "wireless": wireless}
        found += [{"address": address["local"]} | more for address in link.get("addr_info", [])]
    return found


def gpus() -> list[str]:
    """Return the UUIDs of the GPUs from the files of NVIDIA's driver and of amdgpu."""
    found = set()
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        found.update(re.findall(r"GPU UUID:\s*(GPU-[0-9a-fA-F-]+)", read(path)))
    for path in Path("/sys/class/drm").glob("card*/device/unique_id"):
        found.add("AMD-" + read(path))
    return sorted(found - {"AMD-", "AMD-0"})


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(DOCUMENTATION), supports_check_mode=True)
    files = {"boot_id": read("/proc/sys/kernel/random/boot_id"), "machine_id": read("/etc/machine-id")}
    identity = {**files, "host_keys": host_keys(), "links": links(module), "gpus": gpus()}
    module.exit_json(changed=False, identity=identity)


if __name__ == "__main__":
    main()
