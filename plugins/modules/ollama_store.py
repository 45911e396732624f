#!/usr/bin/python
"""Return the models of an Ollama store, file by file."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ollama_store
short_description: Return the models in an Ollama store, file by file
description:
  - Reads the manifests and checks that their blobs exist. Does not contact a server. Changes files only with O(verify).
options:
  path:
    description: Folder of the store, as in C(OLLAMA_MODELS).
    type: path
    required: true
  models:
    description: Model names as C(ollama pull) accepts them.
    type: list
    elements: str
    required: true
  compare_to:
    description: RV(models) of another store. The result then lists what this store is missing.
    type: dict
  verify:
    description:
      - Paths of blobs in the store. A blob whose content does not match the SHA-256 in its name is removed, and the task fails.
    type: list
    elements: str
    default: []
extends_documentation_fragment: [trainyard]
attributes:
  check_mode:
    support: full
    description: Reports damaged blobs without removing them.
"""

EXAMPLES = r"""
- name: List the models of the store
  ollama_store:
    path: /var/lib/ollama
    models: [llama3.2:1b]
  register: store
"""

RETURN = r"""
models:
  description: >-
    For every complete model C(manifest) (path in the store), C(digest) (of the manifest), C(blobs) (paths in the store) and
    C(sizes) (bytes of all these files by path).
  returned: always
  type: dict
missing:
  description: Models that do not exist or are incomplete.
  returned: always
  type: list
  elements: str
missing_blobs:
  description: Paths of blobs that O(compare_to) has and this store does not have.
  returned: when O(compare_to) is set
  type: list
  elements: str
missing_manifests:
  description: Paths of manifests that O(compare_to) has and that are absent or different in this store.
  returned: when O(compare_to) is set
  type: list
  elements: str
"""

import hashlib
from pathlib import Path
from typing import Any

from ansible.module_utils.argument_spec import argument_spec
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ollama_files import is_valid, read_model


def missing_files(store: Path, models: dict[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the paths of the blobs and manifests of `models` that the store does not have.

    Raises ValueError: `models` comes from another host, and a path in it is not that of a blob or of the model's manifest.
    """
    blobs, manifests = set(), []
    for name, model in models.items():
        if not is_valid(name, model):
            raise ValueError(
                f"the head reports invalid paths for the model {name!r}: check the Ollama store of the head"
            )
        try:
            digest = hashlib.sha256((store / model["manifest"]).read_bytes()).hexdigest()
        except OSError:
            digest = ""
        if digest != model["digest"]:
            manifests.append(model["manifest"])
        blobs |= {blob for blob in model["blobs"] if not (store / blob).exists()}
    return sorted(blobs), sorted(manifests)


def damaged_blobs(store: Path, blobs: list[str]) -> list[str]:
    """Return the blobs whose content does not match the SHA-256 in their name. Raises OSError."""
    damaged = []
    for blob in blobs:
        digest = hashlib.sha256()  # hashlib.file_digest requires Python 3.11; Ubuntu 22.04 has 3.10
        with (store / blob).open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        if blob.rpartition("sha256-")[2] != digest.hexdigest():
            damaged.append(blob)
    return damaged


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(DOCUMENTATION), supports_check_mode=True)
    params, store = module.params, Path(module.params["path"])
    try:
        models = {name: read_model(store, name) for name in params["models"]}
        damaged = damaged_blobs(store, params["verify"])
        wanted = {name: model for name, model in (params["compare_to"] or {}).items() if name in params["models"]}
        missing = missing_files(store, wanted)
    except (ValueError, OSError) as error:
        module.fail_json(msg=str(error), plain=True)
    for blob in damaged:
        if not module.check_mode:
            (store / blob).unlink()
    if damaged:
        module.fail_json(msg=f"{damaged[0]} is damaged and was removed: run the playbook again", plain=True)
    result: dict[str, Any] = {
        "models": {name: model for name, model in models.items() if model},
        "missing": [name for name, model in models.items() if not model],
    }
    if params["compare_to"] is not None:
        result["missing_blobs"], result["missing_manifests"] = missing
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
