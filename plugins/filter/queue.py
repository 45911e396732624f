"""Filters of the role queue. The logic is in trainyard/queue/slurm_conf.py."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from ansible.errors import AnsibleFilterError

from trainyard.queue import slurm_conf as slurm


def _facts(hostvars: Any, addresses: dict[str, str]) -> dict[str, Any]:
    found = {host: hostvars[host].get("__queue_info", {}) for host in addresses}
    return {host: facts for host, facts in found.items() if "hostname" in facts}


def queue_facts(hostvars: Any, addresses: dict[str, str], controller: str) -> dict[str, Any]:
    """Return what the hosts of the queue report; what it reported before for one that fails or does not answer, if it was in the queue."""
    known = json.loads(hostvars[controller].get("__queue_known", {}).get("stdout") or "{}")
    pairs = {host: {controller: addresses[controller], host: addresses[host]} for host in addresses}
    fit = {host for host, pair in pairs.items() if not queue_problems(hostvars, pair, controller)}
    facts = {**known, **{host: hostvars[host]["__queue_info"] for host in fit}}
    return {host: facts[host] for host in addresses if host in facts}


def queue_problems(hostvars: Any, addresses: dict[str, str], controller: str) -> list[str]:
    """Return one line for each reason why these hosts, the controller of the queue among them, cannot be in one Slurm cluster."""
    facts = _facts(hostvars, addresses)
    if missing := [host for host in addresses if host not in facts]:
        what = f"the queue needs facts of {', '.join(missing)}, which failed or did not answer"
        return [f"{what}: run site.yml without --limit while they are on, or remove them from the inventory"]
    problems = [
        f"{host} has a Slurm that trainyard did not install ({', '.join(found)}): remove these files, or leave the host out"
        for host in facts
        if (found := facts[host]["foreign"])
    ]
    python = str(hostvars[controller]["cluster_python"])
    if python.startswith(("/tmp/", "/var/tmp/")):
        problems.append(
            f"cluster_python of {controller} is {python}, but its services have another /tmp: move the environment"
        )
    problems += slurm.version_problems({host: facts[host]["version"] for host in facts}, controller)
    problems += slurm.clock_problems({host: facts[host]["time"] for host in facts}, controller)
    try:
        queue_nodes(hostvars, facts, addresses)
    except AnsibleFilterError as error:
        problems.append(str(error))
    return problems


def queue_nodes(hostvars: Any, facts: dict[str, Any], addresses: dict[str, str]) -> list[dict[str, Any]]:
    """Return the nodes in inventory order, with the fields of trainyard.queue.slurm_conf.QueueNode and its properties."""
    gpus = {host: hostvars[host]["cluster_gpus"] for host in facts if "cluster_gpus" in hostvars[host]}
    try:
        nodes = slurm.queue_nodes(facts, {host: addresses[host] for host in facts}, gpus)
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from error
    return [asdict(node) | {"gres": node.gres, "core_memory_mib": node.core_memory_mib} for node in nodes]


def queue_oldest(facts: dict[str, Any]) -> str:
    """Return the oldest release of Slurm among these hosts."""
    return slurm.oldest([each["version"] for each in facts.values()])


class FilterModule:
    """Filters for the queue, by their names in templates."""

    def filters(self) -> dict[str, Any]:
        filters = (queue_facts, queue_problems, queue_nodes, queue_oldest)
        return {each.__name__: each for each in filters}
