"""The files of a model's weights under a strategy whose ranks receive their own layers: they are copied to one host only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from trainer.config import RunSpec
from trainer.strategy import plan_of
from trainyard.preflight.host_state import HostState
from trainyard.run.types import Files, PlanEntry, StagedFile

Group = tuple[list[PlanEntry], Files]


def hosts_that_share(spec: RunSpec, hosts: int) -> int:
    """Return how many hosts hold the weights together and receive their parts when the run starts; 1 if every host needs all files.

    `hosts`: number of hosts that train.
    """
    field = plan_of(spec).pipeline_field(spec)
    return (getattr(spec, field) or hosts) if field else 1


def weight_groups(groups: Sequence[Group], spec: RunSpec) -> list[Group]:
    """Divide groups of plan entries with their files, so that the weights go to the host of rank 0 only, where that suffices.

    The ranks of the other hosts receive the tensors of their own layers from it when the run starts.
    """
    divided: list[Group] = []
    for entries, files in groups:
        head = [entry for entry in entries if 0 in entry.ranks]
        rest = [entry for entry in entries if 0 not in entry.ranks]
        reduced = [_without_weights(file, head[0].host) for file in files] if head and rest else files
        if reduced == files or not _receives_layers(spec):
            divided.append((entries, files))
        else:
            divided += [(head, files), (rest, reduced)]
    return divided


def serves_layers(entry: PlanEntry, spec: RunSpec) -> bool:
    """Return whether a host sends other hosts the weights that they lack: it may have lacked them itself at an earlier start."""
    return 0 in entry.ranks and _receives_layers(spec)


def _receives_layers(spec: RunSpec) -> bool:
    """Return whether ranks receive the weights that their host lacks."""
    return hosts_that_share(spec, 2) > 1


def staged_paths(files: Files, data_dir: str) -> list[str]:
    """Return the paths on a host of which `space_needed` has to know the bytes."""
    return [f"{data_dir}/{file.dest}" for file in files if not file.on_hosts]


def space_needed(files: Files, host: HostState, first: str, share: float) -> int:
    """Return the bytes that the files of a run take on a host beside those that it has.

    Args:
        files: those of PreparedRun that the host needs.
        first: the host of rank 0, which receives all weights.
        share: the part of the weights that ranks of another host receive; 1 if the strategy copies all to every host.
    """
    needed = 0
    for file in files:
        path, staged = f"{host.host.data_dir}/{file.dest}", host.facts.get("staged", {})
        weights, rest = staged.get(path, (0, 0))
        reduced = file if share == 1 or host.name == first else _without_weights(file, first)
        copied = file.bytes if reduced == file else sum(file.sizes[name] for name in reduced.sha256)
        received = math.ceil((file.bytes - copied) * share)
        if received:
            needed += max(0, received - weights - host.facts.get("layers", 0)) + max(0, copied - rest)
        else:
            needed += max(0, copied - weights - rest)
    return needed


def _without_weights(file: StagedFile, head: str) -> StagedFile:
    """Return a model without its weights; unchanged if hosts have it, or another one than the head fetched it."""
    if file.kind != "model" or file.on_hosts or (file.fetched_by or head) != head:
        return file
    rest = {name: digest for name, digest in file.sha256.items() if not name.endswith(".safetensors")}
    return file if len(rest) == len(file.sha256) else replace(file, sha256=rest)
