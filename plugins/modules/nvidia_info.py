#!/usr/bin/python
"""Which NVIDIA cards and driver a host has."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_info
short_description: Look for NVIDIA cards and their driver
description: Reads sysfs, so that it sees cards without a driver and needs neither lspci nor root. Changes nothing.
options:
  sysfs:
    description: Where sysfs is.
    type: path
    default: /sys
  branch:
    description: Branch of the driver to want where the cards leave the choice.
    type: int
    required: true
attributes:
  check_mode:
    support: full
    description: It only looks.
author: trainyard
"""

EXAMPLES = r"""
- name: Look for cards
  nvidia_info:
    branch: 580
  register: cards
"""

RETURN = r"""
cards:
  description: For every card C(slot), C(device), C(generation) and C(module), the kernel module that drives it.
  returned: always
  type: list
  elements: dict
driver:
  description: Version of the driver that answers, or an empty string.
  returned: always
  type: str
wanted:
  description: C(branch), C(modules) (open or closed), C(least), C(unknown) and C(trouble) of the driver that suits the cards.
  returned: always
  type: dict
lines:
  description: What a person should know of it, if there are cards.
  returned: always
  type: list
  elements: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpus import answers, find, wanted


def main() -> None:
    module = AnsibleModule(
        argument_spec={"sysfs": {"type": "path", "default": "/sys"}, "branch": {"type": "int", "required": True}},
        supports_check_mode=True,
    )
    cards = find(Path(module.params["sysfs"]))
    version = next(iter(answers("driver_version")), "") if cards else ""
    want = wanted(cards, module.params["branch"])
    lines = [
        f"{card['slot']}  10de:{card['device'].removeprefix('0x')}  {card['generation'] or 'newer than this table'}  "
        f"{'driven by ' + card['module'] if card['module'] else 'without a driver'}"
        for card in cards
    ]
    if cards and not want["trouble"]:
        lines.append(
            f"driver {version} answers"
            if version
            else f"no driver answers; the cards want branch {want['branch']} with {want['modules']} kernel modules"
        )
    elif cards:
        lines.append(want["trouble"])
    module.exit_json(changed=False, cards=cards, driver=version, wanted=want, lines=lines)


if __name__ == "__main__":
    main()
