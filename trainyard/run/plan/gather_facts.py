"""Ask every host for its facts, and select the hosts that can run the spec together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

from trainer.common.formats import printable
from trainer.config import RunSpec
from trainer.data.dataset_files import needs_library
from trainer.strategy import plan_of
from trainyard import front_end
from trainyard.preflight import cluster_checks, host_checks
from trainyard.preflight.gpu_choice import assign_gpus
from trainyard.preflight.host_state import HostState
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.plan.nodes import PORTS
from trainyard.run.types import Files, PreparedRun
from trainyard.wire.connection import Host, HostConnection, InventoryError, call_hosts
from trainyard.wire.run_errors import HostUnreachableError, PlanError

LOGGER_PACKAGES = {"wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow-skinny"}  # mlflow has it too

FACTS_LIMIT = 60.0  # s for a host to return its facts
GRACE = 1.0  # s, after the other hosts' answers, for a host that was lost

Connect = Callable[[str], HostConnection]
"""Makes the connection to a host by its name. Called in the main thread only."""


def describe(host: Host) -> HostState:
    """Return the description of a host that has not been queried yet. Raises PlanError if the inventory does not describe it completely."""
    try:
        host.check()
    except InventoryError as error:
        raise PlanError(str(error)) from None
    return HostState(host)


def gather_facts(
    hosts: list[HostState], connect: Connect, prepared: PreparedRun, options: LaunchOptions, lost: Collection[str] = ()
) -> dict[str, str]:
    """Add `facts` (see trainyard/remote/host_facts.py) to every host.

    `hosts`: in rank order, the head first. `lost`: hosts that have not answered recently; they have a shorter timeout.
    Returns why a host did not answer, by name; such a host has no facts.
    """
    requested = [options.master_port] if options.master_port else []
    ports = requested or list(PORTS)
    requests: dict[str, dict[str, Any]] = {}
    for place, host in enumerate(hosts):
        requests[host.name] = {
            "head": hosts[0].address,
            "address": host.address,
            "ports": ports if place == 0 else [],
            "python": host.host.python,
            "data_dir": host.host.data_dir,
            "run_dir": f"{host.host.data_dir}/runs/{prepared.run}",
            "staged": [f"{host.host.data_dir}/{file.dest}" for file in prepared.files if not file.on_hosts],
        }
    asked = call_hosts(connect, "host_facts", requests).wait(FACTS_LIMIT, doubtful=lost, grace=GRACE)
    for host in hosts:
        host.facts = asked.answers.get(host.name, {})
        if host.facts and host.host.cpus:
            host.facts["cpus"] = len(host.host.cpus)
    return {host.name: _missing_answer(host, asked.errors[host.name]) for host in hosts if host.name in asked.errors}


def _missing_answer(host: HostState, message: str) -> str:
    """Return why a host did not answer: ssh's message, or that it has no Python where it should."""
    if "not found" in message or "No such file" in message:
        return f"there is no Python at {host.host.python}: run {front_end.playbook('site')}, or correct cluster_python"
    return f"does not answer: {message}"


def _unreachable_line(unreachable: dict[str, str]) -> str:
    """Return one line for all hosts that did not answer."""
    host, why = next(iter(unreachable.items()))
    if len(unreachable) > 1 and why.startswith("does not answer"):
        return f"{', '.join(unreachable)} do not answer: {why.partition(': ')[2]}"
    return f"{host} {why}" if why.startswith("does not answer") else f"{host}: {why}"


def usable_hosts(
    hosts: list[HostState],
    connect: Connect,
    prepared: PreparedRun,
    options: LaunchOptions,
    lost: Collection[str] = (),
    preview: bool = False,
) -> tuple[list[HostState], dict[str, str]]:
    """Return the hosts that can take part, with their `facts`, and why each other host cannot.

    `preview`: nothing will be started, so hosts where another run is in progress can take part. Raises PlanError: a
    host cannot take part and `min_nodes` is 0, or too few hosts can.
    """
    minimum = options.min_nodes
    left_out: dict[str, str] = {}
    any_unreachable = False
    while True:
        unreachable = gather_facts(hosts, connect, prepared, options, lost)
        any_unreachable = any_unreachable or bool(unreachable)
        if not minimum and unreachable:
            raise HostUnreachableError(_unreachable_line(unreachable))
        reached = [host for host in hosts if host.name not in unreachable]
        unfit = {finding.host: finding.message for finding in assign_gpus(reached)}
        unfit |= {host.name: why for host in reached if (why := unfitness(host, prepared.files, preview))}
        if not minimum and unfit:
            raise PlanError(": ".join(next(iter(unfit.items()))))
        left_out |= unreachable | unfit
        able = [host for host in hosts if host.name not in left_out]
        count = len(able)
        if count < minimum:
            raise (HostUnreachableError if any_unreachable else PlanError)(
                f"{count} of {count + len(left_out)} hosts can take part, min_nodes is {minimum}: "
                + ("; ".join(f"{host}: {why}" for host, why in left_out.items()) or "set min_nodes, or add hosts")
            )
        if not left_out or able[0] is hosts[0]:
            return able, left_out
        hosts = able  # the head has changed: repeat the query for its ports and for the routes to it


def space_needed(files: Files, host: HostState) -> int:
    """Return the bytes that the files of a run take on a host beside those that it has."""
    staged = host.facts.get("staged", {})
    return sum(max(0, file.bytes - staged.get(f"{host.host.data_dir}/{file.dest}", 0)) for file in files)


def unfitness(host: HostState, files: Files, preview: bool = False) -> str:
    """Return why a host cannot take part, or an empty string. `files`: those of the run."""
    found = [finding for finding in host_checks.environment(host) if not preview or finding.check != "busy"]
    if not host.facts["running"]:
        found += host_checks.disk_space(host, space_needed(files, host) + host_checks.RUN_OVERHEAD)
    return found[0].message if found else ""


def fit_hosts(
    hosts: list[HostState], connect: Connect, prepared: PreparedRun, options: LaunchOptions, strategy: str
) -> list[str]:
    """Return which hosts could take part in the next start of a run that is running on the first of `hosts`, without that one."""
    head = hosts[0]
    missing = gather_facts(hosts, connect, prepared, options)  # nothing waits for this check: a loaded host has time
    reached = [host for host in hosts if host.name not in missing]
    if reached[:1] != [head]:
        return []
    unfit = {finding.host for finding in assign_gpus(reached)}
    found = []
    for host in reached[1:]:
        with contextlib.suppress(PlanError):
            check_consistency([head, host])
            check_requirements([host], prepared.spec.model_copy(update={"strategy": strategy}))
            if host.name not in unfit and not unfitness(host, prepared.files):
                found.append(host.name)
    return found


def check_consistency(hosts: list[HostState]) -> None:
    """Check that the hosts are different machines with the same versions. Raises PlanError."""
    for finding in [*cluster_checks.duplicates(hosts), *cluster_checks.package_versions(hosts)]:
        # A finding about versions names its hosts itself.
        raise PlanError(finding.headline if finding.check == "address" else finding.message)


def check_requirements(hosts: list[HostState], spec: RunSpec) -> None:
    """Check that every host has the packages and tools that the spec needs. Raises PlanError."""
    eight, four = spec.optimizer == "adamw8bit", spec.quantize == "nf4"
    dataset = next((source.path for source in spec.sources if needs_library(source.path)), "")
    needs = {
        "bitsandbytes": (eight and "optimizer=adamw8bit") or (four and "quantize=nf4"),
        **plan_of(spec).needs_packages(spec),
        **{package: f"loggers={name}" for name, package in LOGGER_PACKAGES.items() if name in spec.loggers},
        "unsloth": spec.backend == "unsloth" and "backend=unsloth",
        "datasets": bool(dataset) and not spec.fake_data and not spec.script and f"dataset={printable(dataset)}",
    }
    for host in hosts:
        name, facts = host.name, host.facts
        if spec.backend == "unsloth" and not host.gpus:
            raise PlanError(f"{name}: backend=unsloth needs an NVIDIA GPU and the host has none: use backend=peft")
        for package, setting in needs.items():
            if setting and package not in facts["versions"]:
                raise PlanError(f"{name}: {setting} needs the Python package {package}: install it, or omit {setting}")
        if spec.torch_compile and not facts["compiler"]:
            raise PlanError(f"{name}: torch_compile needs a C++ compiler: apt install g++, or set torch_compile=false")
