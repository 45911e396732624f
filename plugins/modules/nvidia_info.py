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
cards: {description: "C(slot), C(device) and C(module) (the kernel module in use) of every GPU.", returned: always, type: list, elements: dict}
driver: {description: "Version of the driver that is loaded, or an empty string.", returned: always, type: str}
wanted: {description: "The driver that the GPUs need, C(branch), C(modules) (open or closed), C(minimum) and C(error).", returned: always, type: dict}
lines: {description: "Summary for people; empty without GPUs.", returned: always, type: list, elements: str}
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.argument_spec import argument_spec
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.nvidia_smi import query

DISPLAY = ("0x0300", "0x0302")  # PCI classes: VGA controller, 3D controller
# The first PCI device numbers of a generation, see pci.ids.
MAXWELL, TURING, BLACKWELL = 0x1340, 0x1E00, 0x2900
LAST_CLOSED = 580  # the last driver branch for Maxwell, Pascal and Volta, which the open kernel modules do not support
FIRST_OPEN = 525  # the first branch that torch supports
FIRST_BLACKWELL = 570  # the first branch for Blackwell, which only the open kernel modules support


def find_cards(sysfs: Path) -> list[dict[str, str]]:
    """Return `slot`, `device` and `module` (the kernel module in use) of every NVIDIA GPU, without its audio functions."""
    cards = []
    for folder in sorted((sysfs / "bus/pci/devices").glob("*")):
        try:
            vendor, kind, device = (
                (folder / name).read_text(encoding="utf-8").strip().lower() for name in ("vendor", "class", "device")
            )
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith(DISPLAY):
            module = (folder / "driver").resolve().name if (folder / "driver").exists() else ""
            cards.append({"slot": folder.name, "device": device, "module": module})
    return cards


def select_driver(cards: list[dict[str, str]], branch: int) -> dict[str, Any]:
    """Return the driver for all cards of a host: `branch`, the preferred one or the nearest that supports them, `modules`, `minimum`, `error`.

    A card that is newer than Blackwell gets its driver.
    """
    numbers = [int(card["device"], 16) for card in cards]
    closed = any(number < TURING for number in numbers)
    minimum = FIRST_BLACKWELL if any(number >= BLACKWELL for number in numbers) else FIRST_OPEN
    error = ""
    if any(number < MAXWELL for number in numbers):
        error = "no driver that torch supports has a GPU as old as one of this host: train without this GPU"
    elif closed and any(number >= BLACKWELL for number in numbers):
        error = "no driver supports all GPUs of this host: remove the older or the newer ones"
    branch = max(min(branch, LAST_CLOSED) if closed else branch, minimum)
    return {"branch": branch, "modules": "closed" if closed else "open", "minimum": minimum, "error": error}


def summary(cards: list[dict[str, str]], version: str, wanted: dict[str, Any]) -> list[str]:
    """Return one line per GPU, and one line about the driver."""
    if not cards:
        return []
    lines = [
        f"{card['slot']}  10de:{card['device'].removeprefix('0x')}  "
        f"{'kernel module ' + card['module'] if card['module'] else 'no driver'}"
        for card in cards
    ]
    needed = f"no driver is loaded: the GPUs need branch {wanted['branch']} with {wanted['modules']} kernel modules"
    return [*lines, wanted["error"] or (f"driver {version} is loaded" if version else needed)]


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(DOCUMENTATION), supports_check_mode=True)
    cards = find_cards(Path(module.params["sysfs"]))
    version = next((row[0] for row in query("driver_version")), "") if cards else ""
    wanted = select_driver(cards, module.params["branch"])
    module.exit_json(changed=False, cards=cards, driver=version, wanted=wanted, lines=summary(cards, version, wanted))


if __name__ == "__main__":
    main()
