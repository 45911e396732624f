"""The fields of a run spec that the hosts decide, unless a user does."""

from collections.abc import Mapping
from typing import Any

from trainer.config.fields import split_words

# Their value `auto` is the default.
CHOSEN = ("precision", "batch_size", "gradient_checkpointing", "quantize", "torch_compile")
# strategy=auto chooses the fastest strategy; by default, another one than ddp is chosen only if the model does not fit.
AUTOMATIC = (*CHOSEN, "strategy")
DECIDED = (*AUTOMATIC, "automatic")  # what a decision sets


def with_automatic(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values given for a spec, with the names of the fields that the hosts decide as its field `automatic`.

    These have a default value until then, so that a spec always has a value of each field.
    """
    asked = [name for name in CHOSEN if isinstance(value := given.get(name), str) and value.strip().lower() == "auto"]
    values = {name: value for name, value in given.items() if name not in asked}
    names = split_words(values.get("automatic", [name for name in AUTOMATIC if name not in values]))
    if not isinstance(names, tuple | list):
        return values  # an error, which the validation of the field names
    if values.get("gradient_accumulation") is not None:
        # The rows of a step are a number of micro-batches, so they depend on its value.
        names = [name for name in names if name != "batch_size"]
    return values | {"automatic": (*names, *(name for name in asked if name not in names))}


def without_state(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the file of a run of an earlier version says, as a user would write it: it had a field `automatic`, and a `template_date`.

    The checkpoints of the run also have the date.
    """
    found = {name: value for name, value in values.items() if name not in ("automatic", "template_date")}
    names = split_words(values.get("automatic", ()))
    undecided = [name for name in names if name in AUTOMATIC] if isinstance(names, list | tuple) else []
    found |= dict.fromkeys(undecided, "auto")
    if "strategy" in undecided:
        del found["strategy"]
    return found
