"""Where a host keeps the tensors of a pipeline that its ranks received. Without torch: the controller uses the names, too."""

from __future__ import annotations

import hashlib


def kept_folder(model: str) -> str:
    """Return the name of the folder beside that of a model; `model`: the model's name or path, which is extended."""
    return f"{model}.layers"


def kept_file(stored: str) -> str:
    """Return the name of the file of one tensor; `stored`: its name in the model's files, which may be no valid name of a file."""
    return f"{hashlib.sha256(stored.encode()).hexdigest()[:32]}.safetensors"
