"""The servers that write completions of a run: which machines of the inventory they are, and at which addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.config import RunSpec
from trainer.config.rollout_fields import FOUND
from trainer.generation.ollama_models import adapter_misfit
from trainyard.ollama.teachers import Candidate, Found, ask_servers, find_model, shown_names


def with_rollout_servers(
    spec: RunSpec, machines: Callable[[], Sequence[Candidate]], report: Callable[[str], None]
) -> RunSpec:
    """Return the spec with the addresses of the Ollama servers that `rollout_servers` asks for, instead of cluster or all.

    `machines`: returns the machines of the inventory. Raises UserError: none of them can write completions.
    """
    if not set(spec.rollout_servers) & set(FOUND):
        return spec
    every = "all" in spec.rollout_servers
    known = machines()
    asked = [machine for machine in known if machine.trusted or every]
    found = ask_servers(asked, lambda machine: find_model(machine, spec.rollout_model))
    servers = [(each.candidate, _misfit(each, spec.rollout_model)) for each in found]
    for machine, why in servers:
        if why:
            report(f"{printable(machine.name, 40)} writes no completions: {why}")
    ready = [machine for machine, why in servers if not why]
    urls = [machine.url for machine in ready]
    if not urls:
        why = f": {servers[0][0].name}: {servers[0][1]}" if servers else ""
        raise UserError(
            f"rollout_servers: the inventory has no Ollama server that can write completions{why}: start Ollama there, or omit "
            "rollout_servers"
        )
    report(f"completions are written by {shown_names(machine.name for machine in ready)}, too")
    return spec.model_copy(update={"rollout_servers": tuple(urls)})


def _misfit(found: Found, model: str) -> str:
    """Return why a server writes no completions; empty if it does. An empty `model` is one that the run brings."""
    if why := found.error or adapter_misfit(found.version):
        return why
    if found.facts.remote:
        return f"{found.facts.remote} computes {printable(model, 80)}, which takes no adapters"
    return f"it has no model {printable(model, 80)}: run ollama pull there" if model and not found.digest else ""
