"""The hardware of this host and the models of its Ollama, for the table of hosts. Standard library only."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

from trainer.generation.ollama_client import OllamaClient, OllamaError
from trainer.supervise import nvidia_smi
from trainer.supervise.cpu import cpu_model
from trainyard.remote.host_facts import nearest_folder

OLLAMA_LIMIT = 2.0  # s for each address
MODELS = 100  # names in the answer


def gather(request: dict[str, Any]) -> dict[str, Any]:
    """Return the hardware of this host. `request`: `data_dir`; `ollama_urls`, where this host may reach its Ollama.

    Returns:
        `gpus` with `name`, `memory_mib` and `links`, such as "PCIe 4 x16, 12 NVLinks"; `cpu`, the model; `cores`; `memory_mib`; `free_bytes` below `data_dir`;
        `models`, names of Ollama's models, or None if no Ollama answers; `model_count`.
    """
    rows = nvidia_smi.query("name", "memory.total", "uuid")
    links = gpu_links() if rows else {}
    models = ollama_models(request["ollama_urls"])
    gpus = [{"name": name, "memory_mib": nvidia_smi.mib(mib), "links": links.get(uuid, "")} for name, mib, uuid in rows]
    return {
        "gpus": gpus,
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 1,
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "free_bytes": shutil.disk_usage(nearest_folder(Path(request["data_dir"]))).free,
        "models": None if models is None else models[:MODELS],
        "model_count": len(models or []),
    }


def gpu_links() -> dict[str, str]:
    """Return {UUID: the generation of PCI Express, the width of the slot or of both where they differ, and the NVLinks}."""
    found, nvlinks = {}, nvidia_smi.nvlinks()
    fields = ("pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max", "uuid")
    for generation, width, most, uuid in nvidia_smi.query(*fields):
        parts = []
        if generation.isdigit() and width.isdigit() and most.isdigit():
            parts.append(f"PCIe {generation} x{width}" + (f" of x{most}" if width != most else ""))
        if count := nvlinks.get(uuid):
            parts.append(f"{count} NVLink{'s' if count > 1 else ''}")
        found[uuid] = ", ".join(parts)
    return found


def ollama_models(urls: list[str]) -> list[str] | None:
    """Return the names of the models of an Ollama at the first address that answers, or None."""
    for url in urls:
        with contextlib.suppress(OllamaError, OSError):
            client = OllamaClient(url, connect_timeout=OLLAMA_LIMIT, idle_timeout=OLLAMA_LIMIT, deadline=OLLAMA_LIMIT)
            client.version()
            return sorted(client.tags())
    return None
