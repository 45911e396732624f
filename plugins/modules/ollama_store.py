#!/usr/bin/python
"""What lies in an Ollama's model store, and whether it is whole."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ollama_store
short_description: Tells which models an Ollama's store has, file by file
description:
  - Reads manifests and looks for the blobs that they name. Asks no server. Writes nothing, but for C(verify).
options:
  path:
    description: The store, as in C(OLLAMA_MODELS).
    type: path
    required: true
  models:
    description: Names as C(ollama pull) takes them.
    type: list
    elements: str
    required: true
  like:
    description: The C(models) of another store. C(lacking_blobs) and C(lacking_manifests) are then what this one lacks.
    type: dict
  verify:
    description: Blobs, by their paths in the store. One whose content has not the SHA-256 of its name is removed, and the task fails.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
"""

EXAMPLES = r"""
- name: See which models there are
  ollama_store:
    path: /var/lib/ollama
    models: [llama3.2:1b]
  register: store
"""

RETURN = r"""
models:
  description: For every model that is whole, C(manifest) (path in the store), C(digest) of the manifest, C(blobs) (paths in the store).
  returned: always
  type: dict
missing:
  description: The models that are not there, or not whole.
  returned: always
  type: list
  elements: str
lacking_blobs:
  description: Paths of blobs that C(like) has and this store has not.
  returned: when C(like) is given
  type: list
  elements: str
lacking_manifests:
  description: Paths of manifests that C(like) has and this store has not, or has in another state.
  returned: when C(like) is given
  type: list
  elements: str
"""

import hashlib
import json
import re
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


def manifest_path(name: str) -> str:
    """Return where a store keeps the manifest of `name` ([host/][namespace/]model[:tag]). Raises ValueError."""
    rest, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        rest, tag = name, "latest"
    parts = rest.split("/")
    if len(parts) > 3 or not all(PART.fullmatch(part) for part in [*(p.replace(":", "") for p in parts), tag]):
        raise ValueError(f"{name!r} is no name of a model, such as llama3.2:1b")
    parts = ["registry.ollama.ai", "library"][: 3 - len(parts)] + parts
    return "/".join(["manifests", *parts, tag])


def read_model(store: Path, name: str) -> dict | None:
    """Return manifest, digest and blobs of a model, or None if it is not there, or not whole."""
    path = manifest_path(name)
    try:
        content = (store / path).read_bytes()
        document = json.loads(content)
        layers = [document["config"], *document["layers"]]
        found = [(DIGEST.fullmatch(layer["digest"]), int(layer["size"])) for layer in layers]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    blobs = []
    for match, size in found:
        if not match:
            return None
        blob = f"blobs/sha256-{match[1]}"
        try:
            if (store / blob).stat().st_size != size:
                return None
        except OSError:
            return None
        blobs.append(blob)
    return {"manifest": path, "digest": hashlib.sha256(content).hexdigest(), "blobs": sorted(set(blobs))}


def lacking(store: Path, like: dict) -> tuple[list[str], list[str]]:
    """Return the paths of blobs and of manifests that the models `like` have and this store has not."""
    blobs, manifests = set(), []
    for model in like.values():
        try:
            mine = hashlib.sha256((store / model["manifest"]).read_bytes()).hexdigest()
        except OSError:
            mine = ""
        if mine != model["digest"]:
            manifests.append(model["manifest"])
        blobs |= {blob for blob in model["blobs"] if not (store / blob).exists()}
    return sorted(blobs), sorted(manifests)


def spoilt(store: Path, blobs: list[str]) -> list[str]:
    """Return the blobs whose content has not the SHA-256 of their name."""
    bad = []
    for blob in blobs:
        total = hashlib.sha256()
        with (store / blob).open("rb") as file:
            while part := file.read(1 << 20):
                total.update(part)
        if blob.rpartition("sha256-")[2] != total.hexdigest():
            bad.append(blob)
    return bad


def main():
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "models": {"type": "list", "elements": "str", "required": True},
            "like": {"type": "dict"},
            "verify": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    a, store = module.params, Path(module.params["path"])
    try:
        models = {name: read_model(store, name) for name in a["models"]}
        bad = spoilt(store, a["verify"])
    except (ValueError, OSError) as error:
        module.fail_json(msg=str(error), plain=True)
    for blob in bad:
        if not module.check_mode:
            (store / blob).unlink()
    if bad:
        module.fail_json(msg=f"{bad[0]} arrived damaged and was removed: run it again", plain=True)
    answer = {
        "models": {name: model for name, model in models.items() if model},
        "missing": [name for name, model in models.items() if not model],
    }
    if a["like"] is not None:
        answer["lacking_blobs"], answer["lacking_manifests"] = lacking(store, a["like"])
    module.exit_json(changed=False, **answer)


if __name__ == "__main__":
    main()
