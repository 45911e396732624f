"""The requests that preflight sends to every host: its facts and its health."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from trainyard.preflight.hardware_table import hardware_request
from trainyard.preflight.host_state import HostState, responding
from trainyard.wire.connection import FanOut, Host, HostConnection

FACTS_LIMIT = 20.0  # s; a host that hangs never answers
HEALTH_LIMIT = 300.0  # s; the host computes the digests of all datasets


def gather(
    hosts: Sequence[Host], connect: Callable[[Host], HostConnection], run: str, memory_mib: int
) -> list[HostState]:
    """Return the hosts, the head first, with `facts`, `health` and `asked`, or with `error` if they do not answer.

    The hosts answer with the interpreter that Ansible uses, because the cluster's may be missing. `run`: whose trainer is
    compared; empty for none. `memory_mib`: what one process must be able to allocate.
    """
    states = [HostState(host) for host in hosts]
    connections = {host.name: connect(host) for host in hosts}
    requests: dict[str, Callable[[], dict[str, Any]]] = {}
    request: dict[str, Any]
    for host in hosts:
        request = {"head": hosts[0].address, "address": host.address, "ports": [], "python": host.python}
        request |= {"data_dir": host.data_dir, "run_dir": f"{host.data_dir}/runs/{run or '.preflight'}"}
        call = connections[host.name].call
        requests[host.name] = functools.partial(call, "host_facts", request, python=host.system_python)
    fan_out = FanOut(requests).wait(FACTS_LIMIT)
    for state in states:
        state.facts = fan_out.answers.get(state.name, {})
        state.error = fan_out.errors.get(state.name, "")

    requests = {}
    for state in responding(states):
        request = {
            **hardware_request(state.host),
            "run": run,
            "memory_mib": memory_mib,
            "peers": [host.name for host in hosts if host is not state.host],
            "sudo": state.host.managed,
            "python": state.host.python,
            "services": list(state.host.services),
            "ssh_port": state.host.login.port or 22,
        }
        requests[state.name] = functools.partial(_timed_health, connections[state.name], request)
    fan_out = FanOut(requests).wait(HEALTH_LIMIT)
    for state in responding(states):
        if answer := fan_out.answers.get(state.name):
            state.asked = answer.pop("asked")
            state.health = answer
        else:
            state.error = fan_out.errors[state.name]
    return states


def _timed_health(connection: HostConnection, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of `health` with the controller's clock before and after it as `asked`. Raises RemoteError."""
    sent = time.time()
    answer = connection.call("health", request, python=connection.host.system_python)
    return answer | {"asked": (sent, time.time())}
