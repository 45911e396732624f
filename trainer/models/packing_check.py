"""Whether a model keeps the samples of a packed row apart, which decides `packing=auto`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.common.errors import UserError
from trainer.models.model import isolates_packed_samples

if TYPE_CHECKING:
    from torch import nn

    from trainer.config import RunSpec
    from trainer.distributed.world import World


def resolve_packing(spec: RunSpec, model: nn.Module, vocabulary: int, world: World, name: str = "this model") -> bool:
    """Return whether rows are packed. Every rank calls it, in the precision of the run, after the model is distributed.

    `vocabulary`: number of tokens of the tokenizer. `name`: name of the model in a message. Raises UserError: `packing:
    true`, but the model mixes the samples of a packed row.
    """
    if spec.packing is False:
        return False
    # A rank may hold only a part of the layers.
    isolated = all(world.gather(isolates_packed_samples(model, vocabulary)))
    if not isolated and spec.packing is True:
        raise UserError(f"packing: {name} mixes the samples of a packed row: set packing=auto or packing=false")
    return isolated
