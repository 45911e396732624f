"""The embedded model and dataset, and the defaults of the run spec that depend on the model."""

from typing import Any

TINY = "tiny"
EMBEDDED_DATASET = "ansible-docs"
# Defaults for a model of a few million random weights. Any value that is set explicitly takes precedence.
PRESETS: dict[str, dict[str, Any]] = {
    TINY: {
        "seq_length": 256,
        "lr": 3e-3,
        "total_batch_size": 16,
        "eval_interval": 20,
        "checkpoint_interval": 10,
        # Includes the head: the base weights are random, so the adapters below it are not sufficient.
        "lora_targets": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
    },
}
