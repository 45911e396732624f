"""Choose the machines that teach: those that may receive prompts and have the same model."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import UserError
from trainer.formats import printable
from trainyard.ollama.client import OllamaClient, OllamaError, full_name
from trainyard.ollama.pool import OllamaNode

DEFAULT_PORT = 11434
MAX_SHOWN = 5  # machines named in a message


@dataclass(frozen=True)
class Candidate:
    """A machine that may run Ollama.

    Attributes:
        name: in the inventory.
        url: of its server.
        trusted: whether it is a host of the cluster whose host key is the known one. Others get no prompts unless the
            user says so.
    """

    name: str
    url: str
    trusted: bool


def candidates(
    cluster: Iterable[str], discovered: Iterable[str], variables: Mapping[str, Mapping[str, Any]]
) -> list[Candidate]:
    """Return the machines of an inventory: the hosts of the cluster, and the other discovered ones, each server once.

    Args:
        variables: of every host: `ollama_url`, or `discovered_url`, or the address and port of the cluster.
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
    if url := values.get("ollama_url") or values.get("discovered_url"):
        return str(url).rstrip("/")
    address = str(values.get("cluster_address") or values.get("ansible_host") or name)
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{values.get('ollama_port') or DEFAULT_PORT}"


@dataclass
class _Found:
    candidate: Candidate
    client: OllamaClient | None = None
    digest: str = ""
    error: str = ""


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
        report(f"not trusted, so they get no prompts: {_names(left_out)}; to include them: -e teachers=all")
    found = _ask(allowed, lambda machine: _query(machine, model))
    missing = [each for each in found if not each.digest and not each.error]
    if missing and pull:
        report(f"pulling {printable(model, 80)} on {_names(each.candidate.name for each in missing)}")
        pulled = {each.candidate: each for each in _ask([e.candidate for e in missing], lambda m: _pull(m, model))}
        found = [pulled.get(each.candidate, each) for each in found]
        missing = [each for each in found if not each.digest and not each.error]
    for each in found:
        if each.error:
            report(f"{printable(each.candidate.name, 40)} does not teach: {each.error}")
    if missing:
        report(
            f"without {printable(model, 80)}: {_names(each.candidate.name for each in missing)}; to pull it there: -e teacher_pull=true"
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
            "answers of all with -e teacher_mixed=true"
        )
    return teachers


def _none(model: str, machines: Sequence[Candidate], allowed: Sequence[Candidate], found: Sequence[_Found]) -> str:
    if not allowed:
        others = (
            f" ({len(machines)} discovered machines are not trusted: -e teachers=all asks them)" if machines else ""
        )
        return f"teacher: the inventory has no host that may teach{others}: add hosts to the group cluster"
    if errors := [f"{each.candidate.name}: {each.error}" for each in found if each.error]:
        shown = "; ".join(errors[:MAX_SHOWN])
        return f"teacher: no host has {model} ({shown}): start Ollama there, and pull it: -e teacher_pull=true"
    return f"teacher: no host has {model}: pull it with ollama pull, or with -e teacher_pull=true"


def _ask(machines: Sequence[Candidate], question: Callable[[Candidate], _Found]) -> list[_Found]:
    with concurrent.futures.ThreadPoolExecutor(max(1, min(64, len(machines)))) as executor:
        return list(executor.map(question, machines))


def _query(machine: Candidate, model: str) -> _Found:
    try:
        client = OllamaClient(machine.url)
        return _Found(machine, client, client.digest(model))
    except OllamaError as error:
        return _Found(machine, error=str(error))


def _pull(machine: Candidate, model: str) -> _Found:
    try:
        client = OllamaClient(machine.url, idle_timeout=600.0)
        client.pull(full_name(model))
        return _Found(machine, OllamaClient(machine.url), client.digest(model))
    except OllamaError as error:
        return _Found(machine, error=f"cannot pull the model: {error}")


def _names(names: Iterable[str]) -> str:
    shown = [printable(name, 40) for name in names]
    more = f" and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
    return ", ".join(shown[:MAX_SHOWN]) + more
