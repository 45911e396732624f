"""What may be the name of a model: a folder, or a name on the hub. No torch; nothing is asked."""

import os
from difflib import get_close_matches
from pathlib import Path

from trainer.common.errors import UserError
from trainer.common.inputs import path_kind, refuse_special_files, user_path
from trainer.config import SMOLLM2, SMOLLM2_ON_HUB, TINY
from trainer.data.dataset_files import is_hub_id


def check_model_name(name: str, setting: str = "model") -> None:
    """Check that a model is a folder, or that the hub may have it. Raises UserError.

    A name without an owner, such as gpt2, is one of the hub only if its cache has the model: a mistyped folder would
    otherwise be asked for on the hub, repeatedly. `setting`: the field of the run spec that names the model.
    """
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if path_kind(folder := user_path(name, setting)) == "folder":
        return refuse_special_files(folder, setting)
    if not is_path and (is_hub_id(name) or in_hub_cache(name)):
        return None
    if name == SMOLLM2:
        raise UserError(
            f"{setting}: trainyard data, plan and train and ansible-playbook train.yml fetch {name}, this program does not: "
            f"give its name on the hub, {SMOLLM2_ON_HUB}, or a folder with it, such as one below .trainyard/models"
        )
    known = ([TINY] if setting == "model" else []) + [SMOLLM2]
    near = "".join(f" (did you mean {match!r}?)" for match in get_close_matches(name, known, n=1))
    what = "folder" if is_path else "model"
    raise UserError(
        f"{setting}: no such {what}: {name}{near}: set {', '.join(map(repr, known))}, a local model folder, or a hub id (org/name)"
    )


def in_hub_cache(name: str) -> bool:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return any((hub / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"))
