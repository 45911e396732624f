"""Validation of the variables of the role ollama."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.formats import quoted

_VERSION = re.compile(r"\d{1,5}(\.\d{1,5}){1,3}(-[0-9a-z]+([.-][0-9a-z]+)*)?", re.ASCII)
_PORT = re.compile(r"\d{1,5}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s\x00-\x20\x7f\"'<>\\^`{|}]+")
_MODEL = re.compile(r"\w[\w.:/-]*", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


def ollama_problems(values: Mapping[str, Any]) -> list[str]:
    """Return one line for each variable of the role ollama that is not valid for `ollama_state: present`.

    Args:
        values: `version`, `sha256`, `archive`, `models`, `pull`, `environment` and `port` as in the role, and `address`,
            the address to listen on.
    """
    problems = []
    if not _VERSION.fullmatch(str(values["version"])) or not _DIGEST.fullmatch(str(values["sha256"])):
        problems.append(
            "ollama_state=present requires ollama_version (such as 0.12.11, without v) and ollama_sha256 (64 hex digits, from "
            f"sha256sum.txt of that release); got {quoted(values['version'])} and {quoted(values['sha256'])}"
        )
    archive = str(values["archive"])
    if not _URL.fullmatch(archive) and not _is_path(archive):
        problems.append(f"ollama_archive is {quoted(archive)}, expected a URL or an absolute path on the controller")
    if not _is_path(str(values["models"])) or ":" in str(values["models"]):
        problems.append(
            f"ollama_models is {quoted(values['models'])}, expected an absolute path without control characters and ':'"
        )
    if not _PORT.fullmatch(str(values["port"])) or not 1 <= int(values["port"]) <= 65535:
        problems.append(f"ollama_port is {quoted(values['port'])}, expected 1 to 65535")
    if not _is_address(str(values["address"])):
        problems.append(f"cluster_address is {quoted(values['address'])}, expected an IP address or a host name")
    return problems + _model_problems(values["pull"]) + _environment_problems(values["environment"])


def _model_problems(models: Sequence[Any]) -> list[str]:
    wrong = [name for name in models if not _MODEL.fullmatch(str(name)) or len(str(name)) > 256]
    return [f"ollama_pull has {quoted(name)}, expected a name such as llama3.2:1b" for name in wrong]


def _environment_problems(environment: Mapping[Any, Any]) -> list[str]:
    problems = [
        f"ollama_environment has the name {quoted(name)}, expected letters, digits and underscores"
        for name in environment
        if not _NAME.fullmatch(str(name))
    ]
    return problems + [
        f"ollama_environment: {name} contains NUL; remove it"
        for name, value in environment.items()
        if "\0" in str(value)
    ]


def _is_path(text: str) -> bool:
    """Return whether text is an absolute path of one line that names no parent folder."""
    return text.startswith("/") and text.isprintable() and ".." not in text.split("/")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return bool(_HOST.fullmatch(text))
    return "%" not in text or text.isprintable()
