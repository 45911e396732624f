"""The fields of a run spec that name servers which write completions: what they may be."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trainer.common.errors import UserError
from trainer.common.formats import printable, quoted
from trainer.config.strategies import AUTO

if TYPE_CHECKING:
    from trainer.config import RunSpec

# Instead of addresses: the controller finds the Ollama servers of the cluster, or of the inventory.
FOUND = ("cluster", "all")
ONE_ADAPTER = ("ddp", AUTO)  # strategies whose ranks all have the same adapter before each step
_ADDRESS = re.compile(r"http://(\[[0-9a-zA-Z:.%]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?")


def server_name(url: str) -> str:
    """Return the name of a server for messages and metrics: ADDRESS:PORT."""
    return printable(urlsplit(url).netloc, 80)


def is_vllm(url: str) -> bool:
    """Return whether the address is that of an API of vLLM, such as http://10.0.0.5:8000/v1, and not of Ollama."""
    return url not in FOUND and urlsplit(url).path.rstrip("/") != ""


def require_addresses(spec: RunSpec) -> None:
    """Raise UserError if the controller has not replaced `cluster` or `all` by addresses."""
    if set(FOUND) & set(spec.rollout_servers):
        raise UserError(
            f"rollout_servers: {spec.rollout_servers[0]} finds servers where train.yml or trainyard train starts the run: give the addresses "
            "of the servers here"
        )


def rollout_error(spec: RunSpec) -> str:
    """Return why the servers of a run cannot write completions, or an empty string."""
    servers = spec.rollout_servers
    if not servers:
        return (
            "" if spec.rollout_ranks else "rollout_ranks: without rollout_servers, only ranks write: omit rollout_ranks"
        )
    for each in servers:
        found = _ADDRESS.fullmatch(each)
        if each not in FOUND and not (found and 0 < int((found[2] or ":1")[1:]) < 65536):
            return (
                f"rollout_servers: got {quoted(each)}, expected addresses such as http://10.0.0.5:11434 or http://10.0.0.6:8000/v1, "
                "or cluster or all"
            )
    if len(servers) > 1 and set(FOUND) & set(servers):
        return "rollout_servers: cluster and all find servers: give one of them alone, or addresses"
    if len(set(map(server_name, servers))) < len(servers):
        return "rollout_servers: an address is given twice: remove one"
    if spec.strategy not in ONE_ADAPTER:
        return "rollout_servers: replicas of diloco have different adapters: set strategy=ddp, or omit rollout_servers"
    if not spec.lora_r:
        return "rollout_servers: servers get adapters, but lora_r is 0: set lora_r, or omit rollout_servers"
    if spec.rollout_model and all(map(is_vllm, servers)):
        return "rollout_model: a vLLM server has the model that it was started with: omit rollout_model"
    if spec.rollout_folder and not any(map(is_vllm, servers)):
        return "rollout_folder: Ollama gets adapters over the network: omit rollout_folder"
    if not spec.rollout_folder and any(map(is_vllm, servers)):
        return "rollout_folder: vLLM reads adapters from a folder that it shares with the first host: set rollout_folder to it"
    if spec.rollout_folder and not spec.rollout_folder.startswith("/"):
        return f"rollout_folder: got {quoted(spec.rollout_folder)}, expected an absolute path"
    return ""
