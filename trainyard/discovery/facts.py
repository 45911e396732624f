"""The variables and groups of a discovered machine.

Every variable has the prefix `discovered_`, which no role, playbook or option uses. A host variable has priority over the
group variables of an operator, so any other name would let a neighbour change the behaviour of a role.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from trainyard.discovery.networks import Target
from trainyard.discovery.ollama_replies import MAX_MODELS
from trainyard.discovery.scan_result import LanMachine, ScanReport
from trainyard.discovery.trust import Trust

PREFIX = "discovered_"
# Set for machines that no earlier source declares. They say how to log in, and contain no text from the network.
CONNECTION_VARIABLES = ("ansible_host", "ansible_port", "ansible_connection", "ansible_python_interpreter")
MAX_GROUPS = 200  # per machine; further models and families have no group
MAX_GROUP_NAME = 128  # characters; a longer name has no group
_OLD_NAME = re.compile(
    r"\bollama_(url|urls|version|models|loaded|vram|response_ms|addresses|this_machine|ready|trust|fingerprint|accept"
    r"|scanned_at|scan)\b"
)


def machine_facts(machine: LanMachine, trust: Trust, report: ScanReport) -> dict[str, Any]:
    """Return the variables of a machine; sizes in bytes, times in milliseconds.

    At most MAX_MODELS models are listed, the first by name.
    """
    servers = machine.servers
    urls = [Target(server.address, server.port).url for server in servers]
    models = {m.name: m for s in reversed(servers) for m in s.models}
    loaded = {m.name: m for s in reversed(servers) for m in s.loaded}
    facts = {
        "url": urls[0],
        "urls": urls,
        "version": servers[0].version,
        "models": [models[name].model_dump() for name in sorted(models)[:MAX_MODELS]],
        "loaded": [loaded[name].model_dump() for name in sorted(loaded)[:MAX_MODELS]],
        "vram": sum(m.vram for m in loaded.values()),
        "response_ms": servers[0].response_ms,
        "addresses": machine.addresses,
        "this_machine": machine.local,
        "ready": trust.ready,
        "trust": trust.reason,
        "fingerprint": trust.fingerprint,
        "accept": trust.accept,
        "scanned_at": report.scanned_at,
    }
    return {PREFIX + name: value for name, value in facts.items()}


def scan_facts(report: ScanReport, ready: int, verdict: str) -> dict[str, Any]:
    """Return the variables of a scan, for the group of all discovered machines; `ready`: those that can be logged in to."""
    scan = {"networks": list(report.networks), "addresses": report.addresses, "seconds": report.seconds}
    return {f"{PREFIX}scan": scan | {"machines": len(report.machines), "ready": ready, "verdict": verdict}}


def model_groups(models: Sequence[dict[str, Any]]) -> list[str]:
    """Return the groups for the `discovered_models` and families of a machine, families first; none for models of a cloud."""
    own = [model for model in models if not model.get("remote")]
    families = sorted(_group_names("family", {model["family"] for model in own}))
    names = sorted(_group_names("model", {model["name"] for model in own}))
    return [*families, *names][:MAX_GROUPS]


def old_names(expressions: Any) -> list[str]:
    """Return the variables in expressions that had the prefix `ollama_` up to version 0.2, with their present names."""
    found = dict.fromkeys(match[0] for match in _OLD_NAME.finditer(str(expressions)))
    return [f"{old} is now {PREFIX}{old.removeprefix('ollama_')}" for old in found]


def _group_names(kind: str, words: Iterable[str]) -> set[str]:
    """Return `ollama_model_qwen2_5_0_5b` for `qwen2.5:0.5b`; none for words without letters and digits, or too long."""
    safe = {re.sub(r"[^a-z0-9]", "_", word.lower()) for word in words}
    return {f"ollama_{kind}_{word}" for word in safe if re.search("[a-z0-9]", word) and len(word) <= MAX_GROUP_NAME}
