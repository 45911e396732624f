"""Choose the machines that teach: those that may receive prompts and have the same model."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.generation.ollama_client import OllamaClient, OllamaError
from trainer.generation.ollama_models import ABSENT, ModelFacts, read_facts
from trainer.generation.ollama_names import full_name
from trainyard import front_end
from trainyard.ollama.servers import server_urls
from trainyard.ollama.teacher_nodes import OllamaNode, require_local

MAX_SHOWN = 5  # machines named in a message


@dataclass(frozen=True)
class Candidate:
    """A machine that may run Ollama.

    Attributes:
        trusted: whether it is a host of the cluster whose host key is the known one. Others get no prompts unless the
            user requests it.
    """

    name: str  # in the inventory
    url: str  # URL of its server
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
    """A server's reply about the model. `facts` has no digest if it does not have it; `error` says why it does not
    answer."""

    candidate: Candidate
    client: OllamaClient | None = None
    facts: ModelFacts = ABSENT
    error: str = ""
    version: tuple[int, int, int] = (0, 0, 0)

    @property
    def digest(self) -> str:
        """Digest of the model; empty if the server does not have it."""
        return self.facts.digest


def find_teachers(
    machines: Sequence[Candidate],
    model: str,
    *,
    untrusted: bool = False,
    mixed: bool = False,
    remote: bool = False,
    pull: bool | None = False,
    limit: float = 1800.0,
    report: Callable[[str], None] = lambda line: None,
) -> list[OllamaNode]:
    """Return the servers that teach. Raises UserError: no server has the model, or the digests differ.

    Args:
        model: name of the model; without a tag `:latest`.
        untrusted: include machines that are not trusted.
        mixed: accept different models of this name.
        remote: accept a model that a cloud computes.
        pull: let servers without the model pull it; None: the caller has no such option.
        limit: seconds for one answer.
    """
    allowed = [machine for machine in machines if machine.trusted or untrusted]
    if left_out := [machine.name for machine in machines if machine not in allowed]:
        report(
            f"not trusted, so they get no prompts: {shown_names(left_out)}; to include them: {front_end.option('teachers', 'all')}"
        )
    found = ask_servers(allowed, lambda machine: find_model(machine, model))
    how = "pull it with ollama pull" + (f", or {front_end.option('teacher_pull')}" if pull is not None else "")
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
        report(f"without {printable(model, 80)}: {shown_names(each.candidate.name for each in missing)}; {how}")
    teachers = [
        OllamaNode(each.candidate.name, each.client, full_name(model), each.facts, limit)
        for each in found
        if each.digest and each.client
    ]
    if not teachers:
        raise UserError(_none(model, machines, allowed, found, how))
    for teacher in teachers:
        if not remote:
            require_local(teacher.facts.remote, model, teacher.name)
        if not teacher.facts.chats:
            raise UserError(f"teacher: {model} of {teacher.name} does not support chat: choose another model")
    # The digest of a model that a server has created covers the folder of its files, too.
    same = len({teacher.digest for teacher in teachers}) == 1
    contents = {teacher.facts.contents for teacher in teachers}
    if not same and (len(contents) > 1 or contents == {""}) and not mixed:
        shown = ", ".join(f"{teacher.name} {teacher.digest[:12]}" for teacher in teachers)
        raise UserError(
            f"teacher: the hosts have different models under the name {model} ({shown}): pull it again on them, or accept "
            f"answers of all with {front_end.option('teacher_mixed')}"
        )
    return teachers


def _none(
    model: str, machines: Sequence[Candidate], allowed: Sequence[Candidate], found: Sequence[Found], how: str
) -> str:
    if not allowed:
        asks = f"{len(machines)} discovered machines are not trusted: {front_end.option('teachers', 'all')} asks them"
        others = f" ({asks})" if machines else ""
        return f"teacher: the inventory has no host that may teach{others}: add hosts to the group cluster"
    if errors := [f"{each.candidate.name}: {each.error}" for each in found if each.error]:
        shown = "; ".join(errors[:MAX_SHOWN])
        return f"teacher: no host has {model} ({shown}): start Ollama there, and {how}"
    return f"teacher: no host has {model}: {how}"


def ask_servers(machines: Sequence[Candidate], question: Callable[[Candidate], Found]) -> list[Found]:
    """Return the answers of all servers to a question, asked at the same time."""
    with concurrent.futures.ThreadPoolExecutor(max(1, min(64, len(machines)))) as executor:
        return list(executor.map(question, machines))


def find_model(machine: Candidate, model: str) -> Found:
    """Ask a server for a model."""
    try:
        client = OllamaClient(machine.url)
        return Found(machine, client, read_facts(client, model), version=client.version())
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
