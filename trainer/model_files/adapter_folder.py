"""Folders of adapters that a user names as a model: every way to load a model refuses them in the same words. No torch.

transformers would load the base model that the adapter names, and a run would train a new adapter of it from the start.
"""

from __future__ import annotations

import json
from pathlib import Path

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.common.inputs import path_kind, read_regular, refuse_lfs_pointer, refuse_special_files, user_path

ADAPTER_CONFIG = "adapter_config.json"
_MAX_CONFIG = 1024 * 1024  # bytes of an adapter_config.json


def adapter_error(setting: str, shown: object, base: str = "") -> UserError:
    """Return the error for an adapter that is named as a model.

    `setting`: the field of the run spec that names it. `shown`: what the user named. `base`: its base model, if that is
    known.
    """
    of_base, other = (f" of {base}", f"{setting}={base}") if base else ("", f"{setting} to its base model")
    return UserError(
        f"{setting}: {shown} holds an adapter{of_base} ({ADAPTER_CONFIG}), and a run needs a complete model: merge the adapter "
        f"into its base model first (a run with merge=true writes the folder merged), or set {other}"
    )


def refuse_adapter(name: str, setting: str = "model") -> None:
    """Check that a model, a folder or a name on the hub, is no adapter and holds none, nor pointers of Git LFS. Raises UserError."""
    folder = user_path(name, setting)
    if path_kind(folder) == "folder":
        refuse_special_files(folder, setting)
        for file in sorted(folder.iterdir()):
            refuse_lfs_pointer(file, setting)
        found = folder / ADAPTER_CONFIG
        config = found if path_kind(found) else None
    else:
        config = in_hub_cache(name, ADAPTER_CONFIG)
    if config:
        raise adapter_error(setting, name, _base_of(config))


def in_hub_cache(name: str, file: str) -> Path | None:
    """Return where the cache of the hub has a file of a model; None without it, or if the name is none of the hub."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, file)
    except ValueError:
        return None
    return Path(found) if isinstance(found, str) else None


def _base_of(config: Path) -> str:
    """Return the base model that an adapter_config.json names; empty if it names none."""
    try:
        base = json.loads(read_regular(config, _MAX_CONFIG))["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return printable(base, 200) if isinstance(base, str) else ""
