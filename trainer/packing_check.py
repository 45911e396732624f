"""Whether a model keeps the samples of a packed row apart, which decides `packing=auto`. The proof is cached."""

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import __version__
from trainer.config import RunSpec
from trainer.distributed.world import World
from trainer.errors import UserError
from trainer.files import to_json, write_atomic
from trainer.model import isolates_packed_samples

_PACKAGES = ("torch", "transformers", "peft")
_NAMES = ("_name_or_path", "transformers_version")  # entries of a configuration that do not describe the model


def resolve_packing(
    spec: RunSpec, model: nn.Module, vocabulary: int, world: World, store: Path, name: str = "this model"
) -> bool:
    """Return whether rows are packed. Every rank calls it, in the precision of the run, after the model is distributed.

    Args:
        vocabulary: number of tokens of the tokenizer.
        store: folder in which the hosts cache the proof.
        name: name of the model in a message.

    Raises:
        UserError: `packing: true`, but the model mixes the samples of a packed row.
    """
    if spec.packing is False:
        return False
    file = store / "packing" / f"{proof_key(spec, model, world.device)}.json"
    known = world.gather(_read(file))
    isolated = known[0]
    if isolated is None or any(each != isolated for each in known):
        # A rank may hold only a part of the layers.
        isolated = all(world.gather(isolates_packed_samples(model, vocabulary)))
        if world.is_host_leader:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, to_json({"isolated": isolated}))
    if not isolated and spec.packing is True:
        raise mixes_samples(name)
    return isolated


def mixes_samples(name: str) -> UserError:
    """Return the error for `packing: true` with a model that cannot be used with it."""
    return UserError(f"packing: {name} mixes the samples of a packed row: set packing=auto or packing=false")


def proof_key(spec: RunSpec, model: nn.Module, device: torch.device) -> str:
    """Return a digest of what the proof depends on: the model's configuration, versions of packages, precision and kernels."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = {name: value for name, value in base.config.to_dict().items() if name not in _NAMES}
    settings = [
        getattr(base.config, "_attn_implementation", ""),
        device.type,
        spec.precision,
        spec.kernels,
        spec.backend,
    ]
    versions = [__version__, *map(importlib.metadata.version, _PACKAGES)]
    text = json.dumps([type(base).__name__, config, settings, versions], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(file: Path) -> bool | None:
    """Return the proof in a file, or None if there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["isolated"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, bool) else None
