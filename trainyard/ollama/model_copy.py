"""Copy a model from the Ollama store of one host to those of other hosts, over the relay: its bytes do not pass the controller.

The files are copied between folders of the login users, because only root may read or write a store.
roles/ollama/tasks/copy.yml fills the folder of the source before the copy, and the stores of the targets after it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha1
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.generation.ollama_client import OllamaClient, OllamaError, full_name
from trainyard.ollama.teachers import Candidate, ask_servers, find_model
from trainyard.wire.connection import HostConnection
from trainyard.wire.host_relay import Copy, Member, run_relay
from trainyard.wire.reply_fields import Digest
from trainyard.wire.run_errors import RunError

MODE = 0o644  # of the files of a store
_BLOB = re.compile(r"blobs/sha256-([0-9a-f]{64})")
_FROM = re.compile(r'^FROM "?(/[^\n"]{1,1000})/blobs/sha256[-:][0-9a-f]{64}"?$', re.MULTILINE)
_MANIFEST = r"manifests(/[A-Za-z0-9_][A-Za-z0-9_.:-]*){4}"


@dataclass(frozen=True)
class CopyPlan:
    """Where a model is, and which hosts lack it. `stores` are the folders of the models by host."""

    source: str
    targets: tuple[str, ...]
    stores: Mapping[str, str]


class StoredModel(BaseModel):
    """The files of a model, as the module `ollama_store` of the source reports them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    manifest: str = Field(pattern=rf"^{_MANIFEST}$", max_length=500)
    digest: Digest
    blobs: list[str] = Field(min_length=1, max_length=1000)
    sizes: dict[str, int] = Field(max_length=1001)

    def copies(self) -> dict[str, Copy]:
        """Return every file with its size and SHA-256, by its path in the folder of `ollama_staging`.

        Raises ValueError for a path that is not that of a blob.
        """
        digests = {self.manifest: self.digest}
        for blob in self.blobs:
            if not (match := _BLOB.fullmatch(blob)):
                raise ValueError(f"{printable(blob)} is no blob")
            digests[blob] = match[1]
        if set(digests) != set(self.sizes) or min(self.sizes.values()) < 0:
            raise ValueError("the sizes are not those of the files")
        files = [Copy(f"store/{name}", "", self.sizes[name], digest, MODE) for name, digest in digests.items()]
        return {file.dest: file for file in files}


def plan_copy(
    machines: Sequence[Candidate],
    model: str,
    hosts: Collection[str],
    report: Callable[[str], None] = lambda line: None,
) -> CopyPlan | None:
    """Return how the hosts of the play get a model that they lack, or None if none of them lacks it.

    Args:
        machines: machines of the inventory; only trusted ones take part.
        hosts: names of the hosts of the play.

    Raises:
        UserError: no host has the model, the hosts have different ones, or the folder of models of a host is unknown.
    """
    found = ask_servers(
        [machine for machine in machines if machine.trusted], lambda machine: find_model(machine, model)
    )
    having = sorted((each for each in found if each.digest), key=lambda each: each.candidate.name not in hosts)
    lacking = [each for each in found if not each.digest and not each.error and each.candidate.name in hosts]
    if not lacking:
        return None
    if not having:
        raise UserError(f"teacher: no host has {printable(model, 80)}: teacher_copy=true needs one that has it")
    if len({each.digest for each in having}) > 1:
        shown = ", ".join(f"{each.candidate.name} {each.digest[:12]}" for each in having)
        raise UserError(
            f"teacher: the hosts have different models under the name {printable(model, 80)} ({shown}): remove all but one"
        )
    stores = {each.candidate.name: _store(each.candidate, model) for each in (having[0], *lacking)}
    plan = CopyPlan(having[0].candidate.name, tuple(each.candidate.name for each in lacking), stores)
    report(f"copying {printable(model, 80)} from {plan.source} to {', '.join(plan.targets)}")
    return plan


def _store(machine: Candidate, model: str) -> str:
    """Return the folder of the models of a server: that of the inventory, or that of a model which it has."""
    if machine.models:
        return machine.models
    try:
        client = OllamaClient(machine.url)
        tags = client.tags()
        for name in sorted(tags, key=lambda name: name != full_name(model))[:3]:
            match = _FROM.search(str(client.show(name).get("modelfile")))
            if match and match[1].isprintable() and not {"", ".", ".."} & set(match[1].split("/")[1:]):
                return match[1]
    except OllamaError as error:
        raise UserError(f"{machine.name}: cannot find the folder of Ollama's models: {error}") from None
    raise UserError(f"{machine.name}: the folder of Ollama's models is unknown: set ollama_models for the host")


def copy_model(
    files: Mapping[str, Any],
    source: str,
    targets: Sequence[str],
    folders: str,
    connect: Callable[[str], HostConnection],
) -> None:
    """Copy the files of a model from the folder of the source to those of the targets, from host to host.

    Args:
        files: as StoredModel.
        folders: path of the folder of the login user; on every host, the SHA-1 (hex) of its name follows.
    Raises:
        RunError: the report of the source is invalid, or a copy failed; the message names the host.
    """
    try:
        copies = StoredModel.model_validate(dict(files)).copies()
    except (ValidationError, ValueError):
        raise RunError(f"{source}: the report of the files of the model is invalid") from None
    addresses = {name: connect(name).host.address for name in (source, *targets)}
    if unknown := [name for name, address in addresses.items() if not address]:
        raise RunError(
            f"{unknown[0]}: cluster_address is not set; set it to the IP address at which its peers reach it"
        )
    chain = [
        Member(
            name,
            address,
            f"{folders}{sha1(name.encode()).hexdigest()}",
            frozenset() if name == source else frozenset(copies),
        )
        for name, address in addresses.items()
    ]
    failed = run_relay(chain, copies, connect, secrets.token_hex(8))
    if failed:
        host, why = next(iter(failed.items()))
        raise RunError(f"{host}: cannot copy the model from {source}: {why}")
