"""The servers that write completions of a run: which machines of the inventory they are, and at which addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.config import RunSpec
from trainer.config.rollout_fields import FOUND
from trainer.generation.ollama_client import OllamaClient, OllamaError
from trainer.generation.ollama_models import takes_adapters
from trainyard.ollama.teachers import Candidate, Found, ask_servers, shown_names


@dataclass(frozen=True)
class _Server:
    candidate: Candidate
    problem: str


def with_rollout_servers(
    spec: RunSpec, machines: Callable[[], Sequence[Candidate]], report: Callable[[str], None]
) -> RunSpec:
    """Return the spec with the addresses of the Ollama servers that `rollout_servers` asks for, instead of cluster or all.

    Args:
        machines: returns the machines of the inventory.

    Raises:
        UserError: none of them can write completions.
    """
    if not set(spec.rollout_servers) & set(FOUND):
        return spec
    every = "all" in spec.rollout_servers
    known = machines()
    asked = [machine for machine in known if machine.trusted or every]
    found = ask_servers(asked, _asked)
    model = spec.rollout_model
    servers = [_Server(each.candidate, each.error or _misfit(each, model)) for each in found]
    for server in servers:
        if server.problem:
            report(f"{printable(server.candidate.name, 40)} writes no completions: {server.problem}")
    urls = [server.candidate.url for server in servers if not server.problem]
    if not urls:
        why = f": {servers[0].candidate.name}: {servers[0].problem}" if servers else ""
        raise UserError(
            f"rollout_servers: the inventory has no Ollama server that can write completions{why}: start Ollama there, or omit "
            "rollout_servers"
        )
    report(f"completions are written by {shown_names(s.candidate.name for s in servers if not s.problem)}, too")
    return spec.model_copy(update={"rollout_servers": tuple(urls)})


def _asked(machine: Candidate) -> Found:
    try:
        client = OllamaClient(machine.url)
        version = client.version()
        return Found(machine, client, version=version)
    except OllamaError as error:
        return Found(machine, error=str(error))


def _misfit(found: Found, model: str) -> str:
    if not takes_adapters(found.version):
        return f"Ollama {'.'.join(map(str, found.version))} runs no adapters: update it to 0.30 or later"
    try:
        if model and found.client and not found.client.digest(model):
            return f"it has no model {printable(model, 80)}: run ollama pull there"
    except OllamaError as error:
        return str(error)
    return ""
