"""Choose the GPUs of every host for a run: the pool of `cluster_gpus`, without those that other runs hold. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.common.formats import quoted
from trainyard.preflight.findings import Finding
from trainyard.preflight.host_state import HostState

# What CUDA_VISIBLE_DEVICES takes as the name of a device: the UUID of a GPU, or of a part of one (MIG).
_UUID = re.compile(r"(GPU|MIG)-[A-Za-z0-9-]{1,64}")


class _UnusableError(Exception):
    """Why a host has not the GPUs for the run: `args` are the problem and its remedy."""


def assign_gpus(states: Sequence[HostState]) -> list[Finding]:
    """Set `gpus` of every host, and return a finding for each host that lacks GPUs for the run.

    A host with `cluster_processes` takes that number of free GPUs of its pool, otherwise all of the pool. Hosts of the
    inventory that are one machine divide its GPUs, and share one where it has fewer GPUs than hosts. A run that is
    running keeps its GPUs. `states`: the hosts of one run, with `facts`.
    """
    found: list[Finding] = []
    taken: dict[str, str] = {}
    for place, state in enumerate(states):
        try:
            state.gpus = _choose(state, states[place + 1 :], taken, len(states) == 1)
        except _UnusableError as error:
            text, remedy = error.args
            found.append(Finding("gpu", state.name, "failure", text, remedy))
            continue
        taken |= {gpu["uuid"]: state.name for gpu in state.gpus if "uuid" in gpu}
    return found


def devices(gpus: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the UUIDs of GPUs; an empty list if the driver shows none, so that a rank finds its GPU by its number."""
    found = [str(gpu.get("uuid")) for gpu in gpus]
    return found if all(map(_UUID.fullmatch, found)) and len({*found}) == len(found) else []


def numbers(state: HostState) -> list[int]:
    """Return the numbers of the chosen GPUs in the order of nvidia-smi."""
    return [place for place, gpu in enumerate(state.facts["gpus"]) if gpu in state.gpus]


def _choose(
    state: HostState, later: Sequence[HostState], taken: Mapping[str, str], alone: bool
) -> list[dict[str, Any]]:
    """Return the GPUs of one host. Raises _UnusableError.

    `later`: the hosts that choose after it. `taken`: {UUID: host} of GPUs that hosts have chosen. `alone`: no other host.
    """
    part = state.facts.get("part") or {}
    if state.facts.get("running") and part.get("devices"):
        return [gpu for gpu in state.facts["gpus"] if gpu.get("uuid") in part["devices"]]
    pool, processes = _pool(state), state.host.processes
    if not pool:
        return []
    if processes > len(pool) and not alone:  # the ranks of a run on one host may share its GPUs
        text = f"cluster_processes is {processes}, and a run of several hosts may use {_gpus(len(pool))} of this host"
        raise _UnusableError(text, f"set cluster_processes to at most {len(pool)}, or change cluster_gpus")
    held: dict[str, str] = state.facts.get("held_gpus", {})
    free = [gpu for gpu in pool if gpu.get("uuid") not in held and gpu.get("uuid") not in taken]
    unset = processes == 0 and state.host.gpus is None
    sharers = [other for other in later if unset and _shares(state, other)]
    beside = [name for gpu in pool if (name := taken.get(str(gpu.get("uuid"))))]
    wanted = min(processes or len(pool), len(pool))
    if unset and (sharers or beside):
        left = [gpu for gpu in pool if gpu.get("uuid") not in taken]
        wanted = max(1, len(left) // (1 + len(sharers)))
    if wanted <= len(free):
        return free[:wanted]
    if runs := sorted({held[gpu["uuid"]] for gpu in pool if gpu.get("uuid") in held}):
        uses = f"run {runs[0]} uses {_gpus(sum(run == runs[0] for run in held.values()))} of this host"
        text = f"{uses}, {len(free)} of {len(pool)} are free and the run needs {wanted}"
        fewer = f", or set cluster_processes to {len(free)}" if free else ""
        raise _UnusableError(text, f"wait until run {runs[0]} ends, or stop it{fewer}")
    if unset and pool:  # one machine as several hosts has fewer GPUs than hosts, such as the default inventory
        return [pool[len(taken) % len(pool)]]
    names = ", ".join(dict.fromkeys(beside))
    text = f"it is one machine with {names}, which uses its {_gpus(len(pool))}"
    raise _UnusableError(text, "exclude one with --limit, or set cluster_gpus: [] for both to train on the CPU")


def _pool(state: HostState) -> list[dict[str, Any]]:
    """Return the GPUs that `cluster_gpus` names, in its order, or all GPUs. Raises _UnusableError."""
    here: list[dict[str, Any]] = state.facts["gpus"]
    if state.host.gpus is None:
        return here
    uuids = devices(here)
    found = []
    for name in state.host.gpus:
        matches = [gpu for place, gpu in enumerate(here) if uuids and name in (str(place), gpu["uuid"])]
        if not matches:
            shown = f"the driver shows GPUs 0 to {len(here) - 1}" if here else "the driver shows no GPU"
            raise _UnusableError(f"cluster_gpus names GPU {quoted(name)}, and {shown}", "correct cluster_gpus")
        if matches[0] in found:
            raise _UnusableError(f"cluster_gpus names GPU {quoted(name)} twice", "correct cluster_gpus")
        found += matches[:1]
    return found


def _shares(state: HostState, other: HostState) -> bool:
    """Return whether two hosts without settings for GPUs have a GPU in common: they are one machine."""
    if other.host.processes or other.host.gpus is not None:
        return False
    here, there = ({gpu["uuid"] for gpu in one.facts.get("gpus", []) if "uuid" in gpu} for one in (state, other))
    return bool(here & there)


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
