"""The embedded models and datasets, and the defaults of the run spec that depend on the model."""

from collections.abc import Mapping
from typing import Any

TINY = "tiny"
SMOLLM2, SMOLLM2_ON_HUB = "smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"
OBSERVATORY = "observatory"  # questions about an invented observatory
FORMER_DATASET = "ansible-docs"  # the default of earlier versions
TINY_RUN = {"epochs": 15, "max_steps": 40}  # of model=tiny on the observatory
# Defaults that depend on the model. Any value that is set explicitly takes precedence.
PRESETS: dict[str, dict[str, Any]] = {
    TINY: {  # a few million random weights
        "seq_length": 256,
        "lr": 3e-3,
        "total_batch_size": 16,
        "eval_interval": 20,
        "checkpoint_interval": 10,
        # Includes the head: the base weights are random, so the adapters below it are not sufficient.
        "lora_targets": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
    },
    SMOLLM2: {  # 135 million weights, a chat model
        "seq_length": 256,
        "lr": 1e-3,
        "total_batch_size": 4,
        "epochs": 6,
        "precision": "bf16-mixed",  # until the hosts decide; a part of the default name
        "eval_split": 0.0,
    },
}


def preset_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that depend on the values `given` for a spec."""
    model = given.get("model", TINY)
    preset = dict(PRESETS.get(model, {})) if isinstance(model, str) else {}
    if model == TINY and all(
        given.get(name) is None for name in ("dataset", "epochs", "max_steps", "script", "fake_data")
    ):
        preset |= TINY_RUN
    if given.get("gradient_accumulation") is not None:
        preset.pop("total_batch_size", None)
    return preset
