#!/usr/bin/python
"""Return the NVIDIA GPUs of a host and their driver."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_info
short_description: Return the NVIDIA GPUs of a host and the driver that they need
description: Reads sysfs, so it finds GPUs without a driver and needs neither lspci nor root.
options:
  sysfs:
    description: Path of sysfs.
    type: path
    default: /sys
  branch:
    description: Preferred driver branch, if the GPUs support several.
    type: int
    required: true
extends_documentation_fragment: [trainyard, trainyard.info]
"""

EXAMPLES = r"""
- name: Find NVIDIA GPUs
  nvidia_info:
    branch: 580
  register: gpus
"""

RETURN = r"""
cards:
  description: C(slot), C(device), C(generation) and C(module) (the kernel module in use) of every GPU.
  returned: always
  type: list
  elements: dict
driver:
  description: Version of the driver that is loaded, or an empty string.
  returned: always
  type: str
wanted:
  description: >-
    The driver that the GPUs need: C(branch), C(modules) (open or closed), C(minimum), C(unknown) and C(error).
  returned: always
  type: dict
lines:
  description: Summary for people; empty without GPUs.
  returned: always
  type: list
  elements: str
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.argument_spec import argument_spec
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpus import find_cards, select_driver
from ansible.module_utils.nvidia_smi import query


def summary(cards: list[dict[str, Any]], version: str, wanted: dict[str, Any]) -> list[str]:
    """Return one line per GPU, and one line about the driver."""
    lines = [
        f"{card['slot']}  10de:{card['device'].removeprefix('0x')}  {card['generation'] or 'unknown generation'}  "
        f"{'kernel module ' + card['module'] if card['module'] else 'no driver'}"
        for card in cards
    ]
    if not cards:
        return []
    if wanted["error"]:
        return [*lines, wanted["error"]]
    if version:
        return [*lines, f"driver {version} is loaded"]
    return [
        *lines,
        f"no driver is loaded: the GPUs need branch {wanted['branch']} with {wanted['modules']} kernel modules",
    ]


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(DOCUMENTATION), supports_check_mode=True)
    cards = find_cards(Path(module.params["sysfs"]))
    version = next((row[0] for row in query("driver_version")), "") if cards else ""
    wanted = select_driver(cards, module.params["branch"])
    module.exit_json(changed=False, cards=cards, driver=version, wanted=wanted, lines=summary(cards, version, wanted))


if __name__ == "__main__":
    main()
