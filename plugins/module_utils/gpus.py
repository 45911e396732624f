"""Find NVIDIA GPUs by their PCI device numbers and select a driver for them. Standard library only.

Sources: the PCI ID repository (pci.ids, vendor 10de) for device numbers; NVIDIA's pages "Legacy GPUs" and "CUDA
compatibility" and the README of the open kernel modules for drivers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

VENDOR = "0x10de"
DISPLAY = ("0x0300", "0x0302")  # PCI classes: VGA controller, 3D controller


@dataclass(frozen=True)
class Generation:
    """A GPU generation, the driver branches that support it, and the kernel modules that it requires.

    `first` and `last` are driver branches; `last` is 0 while support continues. `modules` is "closed" (the open kernel
    modules do not support it), "open" (only the open ones do) or "either".
    """

    name: str
    first: int
    last: int
    modules: str


FERMI = Generation("Fermi", 340, 390, "closed")
KEPLER = Generation("Kepler", 340, 470, "closed")
MAXWELL = Generation("Maxwell", 340, 580, "closed")
PASCAL = Generation("Pascal", 367, 580, "closed")
VOLTA = Generation("Volta", 384, 580, "closed")
TURING = Generation("Turing", 410, 0, "either")
AMPERE = Generation("Ampere", 450, 0, "either")
ADA = Generation("Ada", 520, 0, "either")
HOPPER = Generation("Hopper", 515, 0, "either")
BLACKWELL = Generation("Blackwell", 570, 0, "open")

# First and last device number, and the generation. A number above the last range is a newer GPU.
RANGES = (
    (0x06C0, 0x0DFF, FERMI),
    (0x0E00, 0x0E3F, FERMI),
    (0x0FC0, 0x103F, KEPLER),
    (0x1040, 0x117F, FERMI),
    (0x1180, 0x11FF, KEPLER),
    (0x1200, 0x127F, FERMI),
    (0x1280, 0x12FF, KEPLER),
    (0x1340, 0x15EF, MAXWELL),
    (0x15F0, 0x15FF, PASCAL),
    (0x1600, 0x17FF, MAXWELL),
    (0x1B00, 0x1D7F, PASCAL),
    (0x1D80, 0x1DFF, VOLTA),
    (0x1E00, 0x1FFF, TURING),
    (0x2080, 0x20FF, AMPERE),
    (0x2180, 0x21FF, TURING),
    (0x2200, 0x22FF, AMPERE),
    (0x2300, 0x23FF, HOPPER),
    (0x2400, 0x25FF, AMPERE),
    (0x2600, 0x28FF, ADA),
    (0x2900, 0x2FFF, BLACKWELL),
)
# The first driver branch that current torch builds support; they support Maxwell and later.
TORCH_MINIMUM = 525


def generation_of(device: int) -> Generation | None:
    """Return the generation of a PCI device number, or None if the table does not contain it."""
    return next((generation for first, last, generation in RANGES if first <= device <= last), None)


def find_cards(sysfs: Path) -> list[dict[str, Any]]:
    """Return `slot`, `device`, `generation` (a name) and `module` (the kernel module in use) of every NVIDIA GPU.

    `sysfs` is /sys, or a folder of the same layout. Audio devices and other functions of a card are left out.
    """
    cards = []
    for folder in sorted((sysfs / "bus/pci/devices").glob("*")):
        try:
            vendor, kind, device = (
                (folder / name).read_text(encoding="utf-8").strip() for name in ("vendor", "class", "device")
            )
        except OSError:
            continue
        if vendor.lower() != VENDOR or not kind.lower().startswith(DISPLAY):
            continue
        generation = generation_of(int(device, 16))
        module = (folder / "driver").resolve().name if (folder / "driver").exists() else ""
        cards.append(
            {
                "slot": folder.name,
                "device": device,
                "generation": generation.name if generation else "",
                "module": module,
            }
        )
    return cards


def select_driver(cards: list[dict[str, Any]], branch: int) -> dict[str, Any]:
    """Return the driver that supports all cards of a host.

    `branch` is the preferred branch; the result may be an older or a newer one. Keys of the result: `branch`, `modules`
    ("open" or "closed"), `minimum` (the oldest branch that works, 0 if unknown), `unknown` (device numbers that the table
    does not contain) and `error` (one line if no driver is suitable, otherwise empty).
    """
    known = [generation for card in cards if (generation := generation_of(int(card["device"], 16)))]
    unknown = [card["device"] for card in cards if not generation_of(int(card["device"], 16))]
    last = min((generation.last for generation in known if generation.last), default=0)
    first = max((generation.first for generation in known), default=0)
    modules = {generation.modules for generation in known} - {"either"}
    if last:
        branch = min(branch, last)
    branch = max(branch, first)
    error = ""
    if (last and first > last) or modules == {"open", "closed"}:
        names = ", ".join(sorted({generation.name for generation in known}))
        error = f"no driver supports all GPUs of this host ({names}): remove the GPUs of one generation"
    elif last and last < TORCH_MINIMUM:
        error = f"the last driver for this GPU is {last}, torch needs {TORCH_MINIMUM} or later: train without this GPU"
    elif unknown and not known:
        # A GPU that is newer than the table: the open kernel modules are the only ones that new GPUs support.
        modules = {"open"}
    return {
        "branch": branch,
        "modules": "closed" if modules == {"closed"} else "open",
        "minimum": first,
        "unknown": unknown,
        "error": error,
    }
