"""The table of the hosts' hardware and of their Ollama models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.common.formats import printable, table
from trainyard.ollama.servers import host_urls
from trainyard.wire.connection import Host, HostConnection, call_hosts

COLUMNS = ["host", "GPUs", "GPU memory", "GPU links", "CPU", "cores", "RAM", "disk free", "Ollama models"]
NAME_LIMIT = 40  # characters of the name of a device
MODELS_LIMIT = 80  # characters of the models of a host


def gather_hardware(
    hosts: Sequence[Host], connect: Callable[[str], HostConnection], limit: float
) -> dict[str, dict[str, Any]]:
    """Return the hardware of every host that answers within `limit` seconds (see trainyard/remote/hardware.py), by name."""
    return call_hosts(connect, "hardware", {host.name: hardware_request(host) for host in hosts}).wait(limit).answers


def hardware_request(host: Host) -> dict[str, Any]:
    """Return the request of the verb `hardware`."""
    return {"data_dir": host.data_dir, "ollama_urls": host_urls(host)}


def hardware_table(names: Sequence[str], answers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a table with one row per host; a host without an answer has dashes."""
    rows = [COLUMNS]
    for name in names:
        found = answers.get(name)
        if not found:
            rows.append([name, *["-"] * (len(COLUMNS) - 1)])
            continue
        gpus = [
            _counted(printable(gpu["name"], NAME_LIMIT) for gpu in found["gpus"]),
            _counted(f"{gpu['memory_mib'] / 1024:.0f} GiB" for gpu in found["gpus"]),
            _counted(printable(gpu["links"], NAME_LIMIT) for gpu in found["gpus"] if gpu["links"]),
        ]
        sizes = [f"{found['memory_mib'] / 1024:.0f} GiB", f"{found['free_bytes'] / 1e9:.0f} GB"]
        rows.append([name, *gpus, printable(found["cpu"], NAME_LIMIT), str(found["cores"]), *sizes, _models(found)])
    return table(rows)


def _counted(words: Any) -> str:
    """Return equal words once with their number, such as ``2 x A``; a dash for none."""
    return ", ".join(word if count == 1 else f"{count} x {word}" for word, count in Counter(words).items()) or "-"


def _models(found: Mapping[str, Any]) -> str:
    """Return the names of a host's models as far as there is room; a dash without Ollama."""
    if found["models"] is None:
        return "-"
    shown: list[str] = []
    for name in found["models"]:
        if shown and len(", ".join([*shown, name])) > MODELS_LIMIT:
            break
        shown.append(printable(name, MODELS_LIMIT))
    more = max(found["model_count"], len(found["models"])) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])]) or "none"
