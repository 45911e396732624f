"""The CPU of this machine. Standard library only."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_model() -> str:
    """Return the model of the CPU as the kernel names it, or else the machine's architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model", "cpu model")))
    return next((name for name in names if name), platform.machine())


def multiplies_bfloat16() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    # Not avx512_bf16 alone: with it, a Xeon without AMX trains SmolLM2-135M at 0.74 x the speed of 32 bits.
    return "amx_bf16" in text
