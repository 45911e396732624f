"""Names of models as servers write and compare them. Standard library only, for hosts."""

import re
from collections.abc import Mapping

_REGISTRY = "registry.ollama.ai/"
_WORD = "[A-Za-z0-9][A-Za-z0-9._-]{0,79}"
MODEL_NAME = re.compile(f"{_WORD}(/{_WORD}){{0,2}}(:{_WORD})?")


def full_name(model: str) -> str:
    """Return the name of a model with its tag: `llama3` is `llama3:latest`."""
    return model if ":" in model.rpartition("/")[2] else f"{model}:latest"


def server_form(model: str) -> str:
    """Return the one spelling of all that a server takes for the same model: `REGISTRY/library/Mine` is `mine:latest`."""
    name = full_name(model).lower().removeprefix(_REGISTRY)
    return name.removeprefix("library/")


def same_model(tags: Mapping[str, str], model: str) -> str:
    """Return the digest of a model from the digests by listed name, whatever its spelling; empty if it is not listed."""
    wanted = server_form(model)
    return next((digest for name, digest in tags.items() if server_form(name) == wanted), "")
