"""Where the adapters of a model with experts go. peft alone leaves out dense layers and shared experts of some models, the stacked weights
of the experts of others, and adapts routers that return tuples."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from peft import LoraConfig
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn

from trainer.config import RunSpec

_FUSED = {"gate_up_proj": ({"gate_proj", "up_proj"}, {"w1", "w3"}), "down_proj": ({"w2"},)}  # names in transformers 4
Matrices = Mapping[str, tuple[nn.Module, nn.Parameter]]


def matrices(model: Any) -> Matrices:
    """Return the matrices between embedding and head, and the stacks of them that experts have, by the names of the parameters."""
    head = model.get_output_embeddings()
    return {
        f"{place}.{leaf}": (module, parameter)
        for place, module in model.named_modules()
        if module is not head and not isinstance(module, nn.Embedding | nn.modules.conv._ConvNd)
        for leaf, parameter in module.named_parameters(recurse=False)
        if (parameter.dim() > 1 and min(parameter.shape) > 1 and "bias" not in leaf)
        or (leaf == "weight" and isinstance(module, nn.Linear))
    }


def is_router(module: nn.Module) -> bool:
    """Return whether a linear layer returns more than a product, so that it cannot have an adapter."""
    kind = type(module)
    own = kind.__module__.startswith("transformers.models.") and kind.forward is not nn.Linear.forward
    if not isinstance(module, nn.Linear) or not own:
        return False
    # A class of transformers may write the product of its own (Falcon's layers): what it returns decides. A router may draw noise.
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            found = module(module.weight.new_zeros(1, module.in_features))
        except (RuntimeError, ValueError, IndexError):
            return True
    return not isinstance(found, torch.Tensor) or found.shape != (1, module.out_features)


def add_parameters(spec: RunSpec, every: Matrices, model: Any, config: LoraConfig) -> set[str]:
    """Add to a configuration of peft the parameters that it would leave out; return the targets of the spec that name them.

    An adapter of a parameter has no dropout, and a quantized weight cannot have one.
    """
    read = copy.deepcopy(config)
    try:
        convert_peft_config_for_transformers(read, model, None)
    except ValueError:  # get_peft_model raises it, too
        return set()
    mapped = read.target_parameters is not None  # to stacks, also from layers with the same names
    found: dict[str, set[str]] = {}
    for name, (module, parameter) in every.items():
        place, leaf = name.rpartition(".")[::2]
        linear = isinstance(module, nn.Linear) and place not in (config.exclude_modules or ())  # routers among them
        lost = (
            linear and not matches(place, read.target_modules)
            if mapped
            else parameter.dim() == 3 and not spec.lora_dropout
        )
        if lost and parameter.is_floating_point():
            found[name] = _targets_of(spec, place, leaf)
    config.target_parameters = [name for name, targets in found.items() if targets] or None
    return set().union(*found.values())


def left_out(spec: RunSpec, every: Matrices, adapted: Iterable[str]) -> str:
    """Return a line about the matrices that `lora_targets` names, or all without names, which have no adapter; empty if all have one.

    `every`: those of the model before it had adapters. `adapted`: names of the layers and the parameters with an
    adapter.
    """
    have, names, lost, total = set(adapted), set(), 0, 0
    for name, (module, parameter) in every.items():
        place, leaf = name.rpartition(".")[::2]
        size = module.in_features * module.out_features if isinstance(module, nn.Linear) else parameter.numel()
        total += size
        if not {name, place} & have and _targets_of(spec, place, leaf):
            lost += size
            names.add(".".join(name.removesuffix(".weight").split(".")[-2:]))
    share = f"{100 * lost / max(1, total):.2g} % of the matrix weights stay as they are"
    return f"lora_targets: no adapter in {', '.join(sorted(names))}: {share}" if names else ""


def _targets_of(spec: RunSpec, place: str, leaf: str) -> set[str]:
    """Return the targets of the spec that name a parameter, its layer, or all layers that it is fused from."""
    wanted = set(spec.lora_targets)
    if wanted == {"all-linear"}:
        return wanted
    parts = [each for each in _FUSED.get(leaf, ()) if wanted >= each]
    return {each for each in wanted if matches(place, [each]) or matches(f"{place}.{leaf}", [each])}.union(*parts)


def matches(name: str, targets: Any) -> bool:
    """Return whether the name of a module ends with one of the targets, as peft reads them."""
    return any(f".{name}".endswith(f".{target}") for target in targets or ())
