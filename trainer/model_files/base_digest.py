"""A digest of a base model's files, by which a resume notices that they have changed. It reads a part of large files only. No torch."""

import hashlib
import json
from pathlib import Path
from typing import Any

from trainer.common.inputs import path_kind, user_path
from trainer.model_files.adapter_folder import in_hub_cache

_WHOLE = 64 << 20  # bytes up to which a file is read whole
_BLOCKS, _BLOCK = 256, 64 << 10  # spread over a larger file: another training changes every block
_INDEX = "model.safetensors.index.json"


def base_digest(model: str) -> str:
    """Return a SHA-256 (hex) of the configuration and the weights of a model: a folder, or a name in the cache of the hub.

    It is the same on all hosts with the same files. It is empty where the model, or one of its files of weights, is not complete here.
    """
    folder = user_path(model, "model")
    if path_kind(folder) != "folder":
        if (cached := in_hub_cache(model, "config.json")) is None:
            return ""
        folder = cached.parent
    try:
        files = _weights(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config.pop("transformers_version", None)  # of the program that wrote it
        total = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
        for file in files:
            total.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            _add(total, file)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""
    return total.hexdigest() if files else ""


def _weights(folder: Path) -> list[Path]:
    """Return the files that transformers reads. Raises OSError, ValueError or LookupError."""
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if (folder / _INDEX).exists():
        places = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return [folder / Path(name).name for name in sorted(set(places.values()))]
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _add(total: Any, path: Path) -> None:
    """Add a file, or its header and blocks that are spread over it, to a digest. Raises OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE:
            total.update(file.read())
            return
        for number in range(_BLOCKS):
            file.seek((size - _BLOCK) * number // (_BLOCKS - 1))
            total.update(file.read(_BLOCK))
