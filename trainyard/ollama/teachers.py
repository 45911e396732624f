"""Choose the machines that teach: those that may receive prompts and have the same model."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.generation.ollama_client import OllamaClient, OllamaError, full_name
from trainyard import front_end
from trainyard.ollama.servers import server_urls
from trainyard.ollama.teacher_nodes import OllamaNode

MAX_SHOWN = 5  # machines named in a message


@dataclass(frozen=True)
class Candidate:
    """A machine that may run Ollama.

    Attributes:
        name: in the inventory.
        url: URL of its server.
        trusted: whether it is a host of the cluster whose host key is the known one. Others get no prompts unless the
            user requests it.
    """

    name: str
    url: str
    trusted: bool


def candidates(
    cluster: Iterable[str], discovered: Iterable[str], variables: Mapping[str, Mapping[str, Any]]
) -> list[Candidate]:
    """Return the machines of an inventory: the hosts of the cluster, and the other discovered ones, each server once.

    Args:
        variables: variables of every host: `ollama_url`, or `discovered_url`, or the address and port of the cluster.
    """
    members = list(cluster)
    found: dict[str, Candidate] = {}
    for name in [*members, *discovered]:
        values = variables[name]
        trusted = name in members and values.get("discovered_ready", True) is not False
        candidate = Candidate(name, _url(name, values), trusted)
        if candidate.url not in found:
            found[candidate.url] = candidate
    return list(found.values())


def _url(name: str, values: Mapping[str, Any]) -> str:
    address = values.get("cluster_address") or values.get("ansible_host") or name
    url = values.get("ollama_url") or values.get("discovered_url")
    return server_urls({"ollama_url": url, "cluster_address": address, "ollama_port": values.get("ollama_port")})[-1]


@dataclass
class Found:
    """A server's reply about the model. `digest` is empty if it does not have it; `error` says why it does not
    answer."""

    candidate: Candidate
    client: OllamaClient | None = None
    digest: str = ""
    error: str = ""
    version: tuple[int, int, int] = (0, 0, 0)


def find_teachers(
    machines: Sequence[Candidate],
    model: str,
    *,
    untrusted: bool = False,
    mixed: bool = False,
    pull: bool = False,
    limit: float = 1800.0,
    report: Callable[[str], None] = lambda line: None,
) -> list[OllamaNode]:
    """Return the servers that teach.

    Args:
        model: name of the model; without a tag `:latest`.
        untrusted: include machines that are not trusted.
        mixed: accept different digests of the model.
        pull: let servers without the model pull it.
        limit: seconds for one answer.

    Raises:
        UserError: no server has the model, or the digests differ.
    """
    allowed = [machine for machine in machines if machine.trusted or untrusted]
    if left_out := [machine.name for machine in machines if machine not in allowed]:
        report(
            f"not trusted, so they get no prompts: {shown_names(left_out)}; to include them: {front_end.option('teachers', 'all')}"
        )
    found = ask_servers(allowed, lambda machine: find_model(machine, model))
    missing = [each for each in found if not each.digest and not each.error]
    if missing and pull:
        report(f"pulling {printable(model, 80)} on {shown_names(each.candidate.name for each in missing)}")
        pulled = {
            each.candidate: each for each in ask_servers([e.candidate for e in missing], lambda m: _pull(m, model))
        }
        found = [pulled.get(each.candidate, each) for each in found]
        missing = [each for each in found if not each.digest and not each.error]
    for each in found:
        if each.error:
            report(f"{printable(each.candidate.name, 40)} does not teach: {each.error}")
    if missing:
        report(
            f"without {printable(model, 80)}: {shown_names(each.candidate.name for each in missing)}; to pull it there: "
            f"{front_end.option('teacher_pull')}"
        )
    teachers = [
        OllamaNode(each.candidate.name, each.client, full_name(model), each.digest, limit)
        for each in found
        if each.digest and each.client
    ]
    if not teachers:
        raise UserError(_none(model, machines, allowed, found))
    if len({teacher.digest for teacher in teachers}) > 1 and not mixed:
        shown = ", ".join(f"{teacher.name} {teacher.digest[:12]}" for teacher in teachers)
        raise UserError(
            f"teacher: the hosts have different models under the name {model} ({shown}): pull it again on them, or accept "
            f"answers of all with {front_end.option('teacher_mixed')}"
        )
    return teachers


def _none(model: str, machines: Sequence[Candidate], allowed: Sequence[Candidate], found: Sequence[Found]) -> str:
    if not allowed:
        others = (
            f" ({len(machines)} discovered machines are not trusted: {front_end.option('teachers', 'all')} asks them)"
            if machines
            else ""
        )
        return f"teacher: the inventory has no host that may teach{others}: add hosts to the group cluster"
    if errors := [f"{each.candidate.name}: {each.error}" for each in found if each.error]:
        shown = "; ".join(errors[:MAX_SHOWN])
        return f"teacher: no host has {model} ({shown}): start Ollama there, and pull it: {front_end.option('teacher_pull')}"
    return f"teacher: no host has {model}: pull it with ollama pull, or with {front_end.option('teacher_pull')}"


def ask_servers(machines: Sequence[Candidate], question: Callable[[Candidate], Found]) -> list[Found]:
    """Return the answers of all servers to a question, asked at the same time."""
    with concurrent.futures.ThreadPoolExecutor(max(1, min(64, len(machines)))) as executor:
        return list(executor.map(question, machines))


def find_model(machine: Candidate, model: str) -> Found:
    """Ask a server for a model."""
    try:
        client = OllamaClient(machine.url)
        return Found(machine, client, client.digest(model), version=client.version())
    except OllamaError as error:
        return Found(machine, error=str(error))


def _pull(machine: Candidate, model: str) -> Found:
    try:
        client = OllamaClient(machine.url, idle_timeout=600.0)
        client.pull(full_name(model))
    except OllamaError as error:
        return Found(machine, error=f"cannot pull the model: {error}")
    return find_model(machine, model)


def shown_names(names: Iterable[str]) -> str:
    """Return the first of several names, for a message."""
    shown = [printable(name, 40) for name in names]
    more = f" and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
    return ", ".join(shown[:MAX_SHOWN]) + more
