"""The description of a host, read from its variables in the inventory."""

from __future__ import annotations

import re
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import quoted
from trainer.generation.ollama_client import is_server_url
from trainyard.extra_vars import plain_data
from trainyard.ollama.servers import server_urls
from trainyard.run.launch_options import make_options
from trainyard.wire.connection import Host, InventoryError, Login

OLLAMA_PORT = 11434  # roles/ollama
DEFAULT_PYTHON = "/usr/bin/python3"
_DISCOVERED = re.compile(r"http://.*:([0-9]{1,5})")
_GPU = re.compile(r"[0-9]{1,3}|(GPU|MIG)-[A-Za-z0-9-]{1,64}")


def make_host(name: str, variables: Any, login: Login | None = None) -> Host:
    """Return the inventory's description of a host; without a login it is the controller itself. Raises InventoryError if `cluster_processes` is not a number."""
    python = str(variables.get("ansible_python_interpreter") or "")
    managed = str(variables.get("ollama_state")) == "present"  # by the role ollama
    try:
        processes = int(variables.get("cluster_processes") or 0)
    except ValueError:
        value = variables.get("cluster_processes")
        raise InventoryError(f"{name}: cluster_processes is {value!r}; set it to a number of ranks") from None
    return Host(
        name=name,
        address=str(variables.get("cluster_address") or ""),
        data_dir=str(variables.get("cluster_data_dir") or "").rstrip("/"),
        python=str(variables.get("cluster_python") or DEFAULT_PYTHON),
        backend=str(variables.get("cluster_backend") or "auto"),
        processes=processes,
        shows=_option(name, variables, "cluster_run_shows", "run_shows"),
        gpus=_gpus(name, variables.get("cluster_gpus")),
        env=_option(name, variables, "cluster_env", "run_env"),
        ollama_port=_server_port(variables) if managed or _DISCOVERED.fullmatch(_discovered_url(variables)) else 0,
        ollama_urls=_ollama_urls(name, variables),
        managed=bool(variables.get("cluster_managed", True)),
        services=tuple(name for name in ("ollama", "queue") if variables.get(f"{name}_state") == "present"),
        system_python=python if python.startswith("/") else DEFAULT_PYTHON,
        login=login or Login(),
    )


def _gpus(name: str, value: Any) -> tuple[str, ...] | None:
    """Return the numbers or UUIDs of a host's `cluster_gpus`; None if it is not set. Raises InventoryError."""
    if value is None or value == "all":
        return None
    words = value.strip("[] ").replace(",", " ").split() if isinstance(value, str) else value
    if isinstance(words, int) and not isinstance(words, bool):
        words = [words]
    if not isinstance(words, list | tuple) or not all(_GPU.fullmatch(str(word)) for word in words):
        expected = "a list of GPU numbers or UUIDs, as [0, 2]"
        raise InventoryError(f"{name}: cluster_gpus is {quoted(value)}; set it to {expected}")
    return tuple(str(word) for word in words)


def _server_port(variables: Any) -> int:
    """Return the port at which a host's Ollama listens, if it has one."""
    found = _DISCOVERED.fullmatch(_discovered_url(variables))
    word = str(variables.get("ollama_port") or (found[1] if found else OLLAMA_PORT))
    return int(word) if word.isdecimal() and 0 < int(word) < 65536 else OLLAMA_PORT


def _discovered_url(variables: Any) -> str:
    return str(variables.get("discovered_url") or "")


def _ollama_urls(name: str, variables: Any) -> tuple[str, ...]:
    """Return where a host reaches its own Ollama. Raises InventoryError, which shows no address: it may hold a password."""
    url = str(variables.get("ollama_url") or "")
    if url and (not is_server_url(url) or "@" in url):
        raise InventoryError(f"{name}: ollama_url is no address of a server: set it to http://ADDRESS:PORT")
    address = variables.get("cluster_address")
    return tuple(server_urls({"ollama_url": url, "cluster_address": address, "ollama_port": _server_port(variables)}))


def _option(name: str, variables: Any, variable: str, option: str) -> Any:
    """Return the variable of a host that extends a launch option. Raises InventoryError, which shows no value of `run_env`: it may be a secret."""
    try:
        return getattr(make_options({option: plain_data(variables.get(variable))}), option)
    except UserError as error:
        text = str(error).removeprefix(f"{option}: ").removesuffix(" (the launch options)")
        raise InventoryError(f"{name}: {variable}: {text}") from None
