"""The files of a model's weights under a strategy whose ranks receive their own layers: they are copied to one host only."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from trainer.config import RunSpec
from trainer.distributed.kept_layers import kept_file, kept_folder
from trainer.strategy import plan_of
from trainyard.connection import FanOut, HostConnection
from trainyard.preflight.host_state import HostState
from trainyard.run.spec_files import spec_of

ASK_LIMIT = 10.0  # s for a host to list the layers that it kept
WEIGHTS = "*.safetensors"
Files = list[dict[str, Any]]
Group = tuple[list[dict[str, Any]], Files]


def hosts_that_share(spec: RunSpec, hosts: int) -> int:
    """Return how many hosts hold the weights together and receive their parts when the run starts; 1 if every host needs all files.

    `hosts`: number of hosts that train.
    """
    field = plan_of(spec).pipeline_field(spec)
    return (getattr(spec, field) or hosts) if field else 1


def weight_groups(groups: Sequence[Group]) -> list[Group]:
    """Divide groups of plan entries with their files, so that the weights go to the host of rank 0 only, where that suffices.

    The ranks of the other hosts receive the tensors of their own layers from it when the run starts.
    """
    divided: list[Group] = []
    for entries, files in groups:
        head = [entry for entry in entries if 0 in entry["ranks"]]
        rest = [entry for entry in entries if 0 not in entry["ranks"]]
        reduced = [_without_weights(file, head[0]["host"]) for file in files] if head and rest else files
        if reduced == files or not _receives_layers(head[0]):
            divided.append((entries, files))
        else:
            divided += [(head, files), (rest, reduced)]
    return divided


def serves_layers(entry: dict[str, Any]) -> bool:
    """Return whether a host sends other hosts the weights that they lack: it may have lacked them itself at an earlier start."""
    return 0 in entry["ranks"] and _receives_layers(entry)


def _receives_layers(entry: dict[str, Any]) -> bool:
    """Return whether ranks receive the weights that their host lacks."""
    return hosts_that_share(spec_of(entry["spec"]), 2) > 1


def layers_are_kept(entries: Sequence[dict[str, Any]], files: Files, connect: Callable[[str], HostConnection]) -> bool:
    """Return whether the hosts of a plan together kept every tensor of the model from an earlier start, so that none needs its files.

    Only then they can start without the host that had the files. A host that does not answer has kept nothing.
    """
    model = next((file for file in files if file["kind"] == "model"), None)
    if not model or not model["src"] or not _receives_layers(entries[0]):
        return False
    needed = set()
    for path in Path(model["src"]).glob(WEIGHTS):
        try:
            with safe_open(path, framework="numpy") as file:  # type: ignore[no-untyped-call]
                needed |= {kept_file(stored) for stored in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return False
    requests = {
        entry["host"]: {"folder": f"{entry['data_dir']}/{kept_folder(model['dest'])}", "sizes": [WEIGHTS]}
        for entry in entries
    }
    calls = {host: functools.partial(connect(host).call, "read_files", request) for host, request in requests.items()}
    answers = FanOut(calls).wait(ASK_LIMIT).answers.values()
    return bool(needed) and needed <= {name for answer in answers for name in answer["sizes"]}


def staged_paths(files: Files, data_dir: str) -> list[str]:
    """Return the paths on a host of which `space_needed` has to know the bytes."""
    copied = {f"{data_dir}/{file['dest']}": file["kind"] for file in files if not file.get("on_hosts")}
    return [*copied, *(kept_folder(path) for path, kind in copied.items() if kind == "model")]


def space_needed(files: Files, host: HostState, first: str, share: float) -> int:
    """Return the bytes that the files of a run take on a host beside those that it has.

    Args:
        files: those of PreparedRun that the host needs.
        first: the host of rank 0, which receives all weights.
        share: the part of the weights that ranks of another host receive; 1 if the strategy copies all to every host.
    """
    needed = 0
    for file in files:
        path, staged = f"{host.host.data_dir}/{file['dest']}", host.facts.get("staged", {})
        weights, rest = staged.get(path, (0, 0))
        reduced = file if share == 1 or host.name == first else _without_weights(file, first)
        copied = file["bytes"] if reduced == file else sum(file["sizes"][name] for name in reduced["sha256"])
        received = math.ceil((file["bytes"] - copied) * share)
        if received:
            needed += max(0, received - weights - sum(staged.get(kept_folder(path), (0, 0)))) + max(0, copied - rest)
        else:
            needed += max(0, copied - weights - rest)
    return needed


def _without_weights(file: dict[str, Any], head: str) -> dict[str, Any]:
    """Return the entry of a model without its weights; unchanged if hosts have it, or another one than the head fetched it."""
    if file["kind"] != "model" or file.get("on_hosts") or (file.get("fetched_by") or head) != head:
        return file
    rest = {name: digest for name, digest in file["sha256"].items() if not name.endswith(".safetensors")}
    return file if len(rest) == len(file["sha256"]) else file | {"sha256": rest}
