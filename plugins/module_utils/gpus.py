"""NVIDIA cards by their PCI device numbers: which generation one is, and which driver it wants. Standard library only.

Source: the PCI ID repository (pci.ids, vendor 10de) for the numbers; NVIDIA's "Legacy GPUs" and "CUDA compatibility" pages and
the README of the open kernel modules for the drivers.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VENDOR = "0x10de"
DISPLAY = ("0x0300", "0x0302")  # PCI classes: VGA controller, 3D controller


@dataclass(frozen=True)
class Generation:
    """A generation of cards: first and last branch of the driver that run it (0: none yet), and its kernel modules.

    `modules` is "closed" (the open ones do not know it), "either", or "open" (the closed ones do not).
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

# First and last device number; whatever is above all of them is newer than this table.
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
# What today's torch still runs on begins with Maxwell; its drivers begin here.
TORCH_LEAST = 525


def generation(device: int) -> Generation | None:
    """Return the generation that a PCI device number belongs to; None for one that this table does not know."""
    return next((which for first, last, which in RANGES if first <= device <= last), None)


def find(sysfs: Path) -> list[dict[str, Any]]:
    """Return every NVIDIA card below `sysfs` (/sys): `slot`, `device`, its generation's name and the kernel `module` at work.

    Virtual functions and audio devices are not cards.
    """
    cards = []
    for folder in sorted((sysfs / "bus/pci/devices").glob("*")):
        try:
            vendor, kind, device = ((folder / name).read_text().strip() for name in ("vendor", "class", "device"))
        except OSError:
            continue
        if vendor.lower() != VENDOR or not kind.lower().startswith(DISPLAY):
            continue
        which = generation(int(device, 16))
        module = (folder / "driver").resolve().name if (folder / "driver").exists() else ""
        cards.append(
            {"slot": folder.name, "device": device, "generation": which.name if which else "", "module": module}
        )
    return cards


def answers(field: str) -> list[str]:
    """Return what the driver says of every card, such as its `driver_version` or `compute_cap`; none where none answers.

    Source: `nvidia-smi --help-query-gpu`.
    """
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines()]


def wanted(cards: list[dict[str, Any]], branch: int) -> dict[str, Any]:
    """Return the driver that suits all cards of a host: `branch` (or the last one that knows them), `modules`, `trouble`.

    `branch` is the branch to take where the cards leave the choice. `trouble` says why none suits, or is empty.
    """
    kinds = [which for card in cards if (which := generation(int(card["device"], 16)))]
    unknown = [card["device"] for card in cards if not generation(int(card["device"], 16))]
    last = min((which.last for which in kinds if which.last), default=0)
    first = max((which.first for which in kinds), default=0)
    modules = {which.modules for which in kinds} - {"either"}
    if last:
        branch = min(branch, last)
    branch = max(branch, first)
    trouble = ""
    if (last and first > last) or modules == {"open", "closed"}:
        names = ", ".join(sorted({which.name for which in kinds}))
        trouble = f"no one driver runs all its cards ({names}): take one kind out"
    elif last and last < TORCH_LEAST:
        trouble = f"its driver ends with {last}, torch needs {TORCH_LEAST}: a card that is too old to train on"
    elif unknown and not kinds:
        # A card newer than the table: what is newest is the best guess, and only the open modules know new cards.
        modules = {"open"}
    return {
        "branch": branch,
        "modules": "closed" if modules == {"closed"} else "open",
        "least": first,
        "unknown": unknown,
        "trouble": trouble,
    }
