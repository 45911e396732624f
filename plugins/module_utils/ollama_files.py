"""The files of a model in an Ollama store. Standard library only."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
BLOB = re.compile(r"blobs/sha256-[0-9a-f]{64}")
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


def manifest_path(name: str) -> str:
    """Return the path of a model's manifest in a store; `name` is [host/][namespace/]model[:tag]. Raises ValueError."""
    rest, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        rest, tag = name, "latest"
    parts = rest.split("/")
    if len(parts) > 3 or not all(NAME.fullmatch(part) for part in [*(p.replace(":", "") for p in parts), tag]):
        raise ValueError(f"{name!r} is not a model name: expected a name such as llama3.2:1b")
    parts = ["registry.ollama.ai", "library"][: 3 - len(parts)] + parts
    return "/".join(["manifests", *parts, tag])


def read_model(store: Path, name: str) -> dict[str, Any] | None:
    """Return manifest, digest, blobs and sizes of a model, or None if it does not exist or is incomplete."""
    path = manifest_path(name)
    try:
        content = (store / path).read_bytes()
        document = json.loads(content)
        layers = [document["config"], *document["layers"]]
        found = [(DIGEST.fullmatch(layer["digest"]), int(layer["size"])) for layer in layers]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    sizes = {path: len(content)}
    for match, size in found:
        if not match:
            return None
        blob = f"blobs/sha256-{match[1]}"
        try:
            if (store / blob).stat().st_size != size:
                return None
        except OSError:
            return None
        sizes[blob] = size
    digest = hashlib.sha256(content).hexdigest()
    return {"manifest": path, "digest": digest, "blobs": sorted(set(sizes) - {path}), "sizes": sizes}


def is_valid(name: str, model: Any) -> bool:
    """Return whether what another host reports about a model names only the manifest and blobs of a model."""
    try:
        blobs = all(BLOB.fullmatch(blob) for blob in model["blobs"])
        return blobs and model["manifest"] == manifest_path(name) and isinstance(model["digest"], str)
    except (KeyError, TypeError, ValueError):
        return False
