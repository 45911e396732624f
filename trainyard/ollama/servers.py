"""The Ollama servers of hosts: at which addresses a host reaches its own one, and which hosts share one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainyard.wire.connection import Host

_PORT = 11434
_LOOPBACK = re.compile(r"http://(127\.[0-9.]+|\[::1\]|localhost)(?=[:/]|$)")


def server_urls(variables: Mapping[str, Any]) -> list[str]:
    """Return the addresses at which a host may reach its own Ollama server, from its variables.

    `ollama_url` names the address. Without it, these are the loopback address and then the address in the cluster, at
    `ollama_port`. The last one is for other machines: a loopback address is that of the host.
    """
    address, port = str(variables.get("cluster_address") or "127.0.0.1"), variables.get("ollama_port") or _PORT
    own = f"[{address}]" if ":" in address else address
    urls = [str(variables.get("ollama_url") or f"http://127.0.0.1:{port}").rstrip("/")]
    if _LOOPBACK.match(urls[0]) and not (variables.get("ollama_url") and _LOOPBACK.match(f"http://{own}/")):
        urls.append(_LOOPBACK.sub(f"http://{own}", urls[0]))
    return list(dict.fromkeys(urls))


def host_urls(host: Host) -> list[str]:
    """Return the addresses at which a host may reach its own Ollama server."""
    return list(host.ollama_urls) or server_urls({"cluster_address": host.address, "ollama_port": host.ollama_port})


def shared_servers(states: Mapping[str, Mapping[str, Any]], urls: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return {host: the host whose server it has too}, for entries of the inventory that are one machine or have one `ollama_url`.

    The host whose record fits the model counts as that of the server, else the first one. `states`: the reply to the
    step `state` of each host, see trainyard/remote/ollama.py. `urls`: the addresses of each host's server.
    """
    keepers: dict[str, str] = {}
    servers = {name: str(state["server"]) or urls[name][0] for name, state in states.items()}

    def has_no_record(name: str) -> bool:
        record, digest = states[name]["record"], states[name]["digest"]
        return not record or not digest or record["digest"] != digest

    for name in sorted(states, key=has_no_record):  # sorted() keeps the order otherwise
        keepers.setdefault(servers[name], name)
    return {name: keeper for name, server in servers.items() if (keeper := keepers[server]) != name}
