"""The backend unsloth: when a run uses it, and its import before transformers.

unsloth replaces classes of transformers and peft when it is imported, and requires an NVIDIA GPU. Tests run this module with a
stand-in for the package.
"""

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from trainer.common.errors import UserError, first_line
from trainer.config import RunSpec
from trainer.method import method_of
from trainer.strategy import plan_of

if TYPE_CHECKING:
    from trainer.distributed.world import World

PACKAGE = "unsloth"
# unsloth otherwise returns no logits while it trains, and reports each start to a server.
_ENVIRONMENT = {"UNSLOTH_RETURN_LOGITS": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}


def may_use(spec: RunSpec) -> bool:
    """Return whether this rank may use unsloth: the spec requests it, or permits it and the package is installed."""
    if spec.backend != "auto":
        return spec.backend == PACKAGE
    # Weights in float32, compiled models, completions during training and strategies with shards need peft.
    writes = spec.learns_from_prompts
    suits = spec.lora_r > 0 and spec.precision != "32-true" and not spec.torch_compile and not writes
    return suits and _permitted(spec) and importlib.util.find_spec(PACKAGE) is not None


def _permitted(spec: RunSpec) -> bool:
    try:
        with_unsloth = spec.model_copy(update={"backend": PACKAGE})
        method_of(spec).validate(with_unsloth)
        plan_of(spec).validate(with_unsloth)
    except ValueError:
        return False
    return True


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def import_early(spec: RunSpec) -> None:
    """Import unsloth if the spec may use it. Call it before transformers and peft are imported.

    Raises UserError: ``backend=unsloth`` on a host without an NVIDIA GPU, or without a working unsloth.
    """
    if not may_use(spec):
        return
    required = spec.backend == PACKAGE
    if not has_cuda():
        if required:
            raise UserError("backend: unsloth needs an NVIDIA GPU with CUDA, but this host has none: set backend=peft")
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        importlib.import_module(PACKAGE)
    except Exception as error:  # without a supported GPU it raises errors other than ImportError
        sys.modules.pop(PACKAGE, None)
        line = f"backend: unsloth is unavailable ({first_line(error)})"
        if required:
            raise UserError(f"{line}: run site.yml with python_flavour=unsloth, or set backend=peft") from None
        print(f"{line}: using peft")


def resolve_backend(spec: RunSpec, world: "World") -> RunSpec:
    """Return the spec with a backend in place of `auto`: unsloth if every rank imported it. Every rank calls it."""
    if spec.backend != "auto":
        return spec
    chosen = PACKAGE if all(world.gather(may_use(spec) and PACKAGE in sys.modules)) else "peft"
    if chosen == PACKAGE and world.rank == 0:
        print("backend: unsloth, because every rank has CUDA and the package")
    return spec.model_copy(update={"backend": chosen})
