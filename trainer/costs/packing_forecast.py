"""Whether rows will be packed, as far as the architecture of the model determines it. No torch: the plan of a run says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.config.methods import METHODS
from trainer.model_files.model_shape import model_type

if TYPE_CHECKING:
    from trainer.config import RunSpec

# Model types of transformers by whether they keep the samples of a packed row apart. The ranks test every model themselves:
# these lists only allow the plan to say it before a run starts. tests/integration/trainer/test_architectures.py verifies them.
KEEPS_APART = frozenset(
    ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "ministral3", "mixtral", "gemma2", "gemma3_text", "phi", "phi3")
    + ("smollm3", "olmo2", "granite", "glm4", "cohere", "starcoder2", "stablelm", "gpt2", "gpt_neox")
)
MIXES = frozenset(("gpt_oss", "opt", "falcon", "bloom", "mamba"))


def packing_text(spec: RunSpec) -> str:
    """Return whether rows are packed, and the reason if they are not or if only the ranks can find out."""
    if spec.packing is False:
        return "not packed: packing=false"
    if not METHODS[spec.method].packs:
        return f"not packed: a row has one sequence with method={spec.method}"
    if spec.packing is True:
        return _packed(spec)
    try:
        kind = model_type(spec)
    except UserError:
        return "packed if the model keeps the samples of a row apart, which the ranks test"
    if kind in MIXES:
        return f"not packed: {kind} mixes the samples of a packed row"
    if kind in KEEPS_APART:
        return _packed(spec)
    name = printable(kind, 80) or "this model"
    return f"packed if {name} keeps the samples of a row apart, which the ranks test"


def may_pack(spec: RunSpec) -> bool:
    return not packing_text(spec).startswith("not packed")


def _packed(spec: RunSpec) -> str:
    return f"packed (several samples share a row of {spec.seq_length} tokens)"
