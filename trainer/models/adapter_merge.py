"""Merge an adapter into its base model: the one way for merged/, `python -m trainer merge`, deployments and pipelines.

Every layer is merged in float32 and rounded once. The logits of the finished model are held against those of the base with the
adapter: what a merge gets wrong is an error, not a model.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.common.errors import UserError

if TYPE_CHECKING:
    from trainer.config import RunSpec

_ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
_LOGIT_LIMIT = 1e-4  # of float32 logits, relative: roundings of 6e-8 grow to 1e-6 in 2 layers, and to 1e-5 in 80
_NOISE_LIMIT = 4.0  # of 16-bit logits: times what roundings of the adapted layers' outputs do to them
_PROBES = 16  # tokens
_FACTOR = re.compile(r"\.lora_\w+(\.|$)|\.original_module\.")
_SAVED = re.compile(r"\.modules_to_save\.[^.]+")


def merged_dtype(spec: RunSpec) -> torch.dtype:
    """Return the data type of the merged weights of a run."""
    return torch.float32 if spec.precision == "32-true" else torch.bfloat16


def adapted_model(spec: RunSpec, adapter: Path, dtype: torch.dtype | str = torch.float32) -> Any:
    """Return the base model of a run with its adapter, as peft loads both, on the CPU.

    `adapter`: folder of the adapter. `dtype`: of the base; with "auto" that of its files. Where both are equal, weights
    stay on the disk until they are read. Raises UserError: the base model cannot be loaded.
    """
    from peft import PeftModel

    from trainer.model_files.base_weights import load_causal_model

    base = load_causal_model(spec.model, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*tie_word_embeddings"
        )  # peft's merge does not untie; this module does
        return PeftModel.from_pretrained(base, str(adapter)).eval()


def merge_into_base(adapted: Any) -> Any:
    """Return the model with its adapter merged into the weights, checked; `adapted` is used up. Raises UserError."""
    check = LogitCheck(adapted, adapted.get_base_model().dtype)
    for layer in _untied_layers(adapted).values():
        merge_layer(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the layers are merged already
        merged = adapted.merge_and_unload()
    _declare_untied(merged)
    check(merged)
    return merged


def merged_weights(adapted: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the merged weights by their names in the base model, one at a time in memory; `adapted` is used up.

    `dtype`: of what has the model's data type; a parameter that is kept in another one keeps it. Raises UserError: the
    adapter changes what is no layer.
    """
    model = adapted.get_base_model()
    own, layers = model.dtype, _untied_layers(adapted)
    parameters = [(name, value) for name, value in model.named_parameters() if not _FACTOR.search(name)]
    known = dict(model.named_parameters(remove_duplicate=False))
    buffers = [(name, value) for name, value in model.state_dict().items() if name not in known]
    for name, value in [*parameters, *((name, value) for name, value in buffers if not _FACTOR.search(name))]:
        module, wrapped, leaf = name.partition(".base_layer.")
        final = dtype if value.dtype == own else value.dtype
        if wrapped and not layers[module].merged:
            merge_layer(layers[module], final)
        plain = _SAVED.sub("", f"{module}.{leaf.replace('base_layer.', '')}" if wrapped else name)
        yield plain, value.detach().to(final if value.is_floating_point() else value.dtype).contiguous()
        if wrapped:
            value.data = value.data.new_empty(0)


def weightless(adapted: Any, dtype: torch.dtype) -> Any:
    """Return the base model without memory for weights and without adapters, from which the merged model is saved."""
    from transformers import AutoModelForCausalLM

    base = adapted.get_base_model()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(base.config, dtype=dtype, trust_remote_code=False)
    model.generation_config = base.generation_config
    return model


def _untied_layers(adapted: Any) -> dict[str, Any]:
    """Return the adapted layers; those that share weights with others have their own. Raises UserError.

    Wrappers of several parameters of one module (stacks of experts) lie in one another: only the outermost is returned.
    """
    layers = adapted_layers(adapted)
    outer = {name: layer for name, layer in layers.items() if not _is_inner(name, layers)}
    for name, layer in outer.items():
        weights = [
            getattr(each.get_base_layer(), str(getattr(each, "parameter_name", "weight")), None)
            for each in _chain(layer)
        ]
        if ".base_layer" in name or any(weight is None or not weight.is_floating_point() for weight in weights):
            raise UserError(
                f"merge: the adapter of {name} ({type(layer.get_base_layer()).__name__}) cannot be merged: use the adapter itself, and "
                "set merge=false"
            )
    plain = [layer.get_base_layer() for layer in outer.values()]
    untie(adapted.get_base_model(), [module for module in plain if hasattr(module, "weight")])
    return outer


def _is_inner(name: str, layers: Mapping[str, Any]) -> bool:
    """Return whether an adapted layer is inside of a wrapper around the same module."""
    outer, inner = re.fullmatch(r"(.*?)((?:\.base_layer)*)", name).groups()  # type: ignore[union-attr]
    return bool(inner) and outer in layers and any(each is layers[name] for each in _chain(layers[outer]))


def _chain(layer: Any) -> list[Any]:
    """Return the adapted layers around one module, from the outside: more than one for several parameters of it."""
    found = [layer]
    while hasattr(layer, "parameter_name") and hasattr(layer.base_layer, "parameter_name"):
        found.append(layer := layer.base_layer)
    return found


def adapted_layers(adapted: Any) -> dict[str, Any]:
    """Return the layers of peft with an adapter, by the names of the base model's modules."""
    from peft.tuners.lora import LoraLayer

    found = adapted.get_base_model().named_modules()
    return {name: layer for name, layer in found if isinstance(layer, LoraLayer)}


def untie(model: Any, changed: Iterable[nn.Module]) -> None:
    """Give each module of `changed` a weight of its own, and say so in the configuration of the model.

    Raises UserError: modules other than the embedding and the head share a weight; no configuration expresses that they do not.
    """
    ends = [_plain(module) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module]
    for module in changed:
        weight: Any = module.weight
        places = [name for name, other in model.named_parameters(remove_duplicate=False) if other is weight]
        if len(places) < 2:
            continue
        if len(places) > 2 or not any(module is end for end in ends):
            raise UserError(
                f"merge: {' and '.join(places)} share one weight, which an adapter of one of them changes: set merge=false, or "
                "leave them out of lora_targets"
            )
        module.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    _declare_untied(model)


def untie_different(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Untie the embedding and the head of a model that is to take weights, by name, in which they differ."""
    embedding = model.get_input_embeddings()
    places = [name for name, value in model.named_parameters(remove_duplicate=False) if value is embedding.weight]
    if any(not torch.equal(weights[place], weights[places[0]]) for place in places[1:]):
        untie(model, [embedding])


def _plain(module: Any) -> Any:
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def _declare_untied(model: Any) -> None:
    """Set ``tie_word_embeddings=false`` if the embedding and the head have weights of their own."""
    inner, outer = _plain(model.get_input_embeddings()), _plain(model.get_output_embeddings())
    if inner is None or outer is None or inner.weight is outer.weight:
        return
    for config in (model.config, model.config.get_text_config(decoder=True)):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False


def merge_layer(layer: Any, dtype: torch.dtype | None = None) -> None:
    """Add the update of a layer of peft to its weights, in float32, rounded once. `dtype`: of the result; None for that of the weights."""
    base = layer.get_base_layer()
    dtypes = {leaf: dtype or parameter.dtype for leaf, parameter in base.named_parameters(recurse=False)}
    _cast(base, dict.fromkeys(dtypes, torch.float32))
    with torch.no_grad():
        for each in _chain(layer):
            each.merge()
    _cast(base, dtypes)


def _cast(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    for leaf, dtype in dtypes.items():
        parameter = getattr(module, leaf)
        parameter.data = parameter.data.to(dtype)


# The finished model -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def probe_logits(model: Any) -> torch.Tensor:
    """Return the logits of a few tokens, float32 [tokens, V]."""
    count = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(_PROBES) * max(1, count // _PROBES) + 1) % count
    logits: torch.Tensor = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0]
    return logits.float().cpu()


class LogitCheck:
    """The logits of a base model with its adapter, which the merged model must have."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """Compute the logits.

        `model`: the base with its adapter, which is not merged yet, or a model that will be saved. `dtype`: of the
        merged weights.
        """
        self._expected, self._limit = probe_logits(model), _LOGIT_LIMIT
        rounding = max(_ROUNDING[dtype], _ROUNDING[model.get_input_embeddings().weight.dtype])
        if rounding > _ROUNDING[torch.float32]:
            self._limit = _NOISE_LIMIT * self._error(_rounded_logits(model, rounding))

    def __call__(self, model: Any) -> None:
        """Raises UserError if the logits of the merged model differ by more than rounding."""
        error = self._error(probe_logits(model))
        if not error <= self._limit:
            raise UserError(
                f"merge: a logit of the merged model differs from the base model with the adapter by {error:.1e}, at most "
                f"{self._limit:.1e} is rounding: use the adapter itself, and set merge=false"
            )

    def _error(self, logits: torch.Tensor) -> float:
        """Return the relative difference of a token's logits: of the median token, as a router may choose other experts for some."""
        differences = (logits - self._expected).norm(dim=-1) / self._expected.norm(dim=-1).clamp_min(1e-12)
        return float(differences.median())


def _rounded_logits(model: Any, rounding: float) -> torch.Tensor:
    """Return the logits where the output of every layer varies as much as a rounding of its weights and of itself may change it."""
    generator = torch.Generator().manual_seed(2)

    def vary(_: nn.Module, __: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        noise = torch.randn(output.shape, generator=generator).to(output.device)
        return (output + noise * rounding * output.float().square().mean().sqrt()).to(output.dtype)

    leaves = [module for module in model.modules() if not list(module.children())]
    hooks = [module.register_forward_hook(vary) for module in leaves]
    try:
        return probe_logits(model)
    finally:
        for hook in hooks:
            hook.remove()


def saved_model(folder: Path) -> Any:
    """Return a saved model. Raises UserError if its configuration says that embedding and head are tied, but they differ."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False).eval()
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    if model.config.tie_word_embeddings and outer is not None and not torch.equal(inner.weight, outer.weight):
        # transformers 5 reads such a model correctly; other programs would use the embedding as the head.
        raise UserError("merge: config.json of the merged model says that embedding and head are tied, but they differ")
    return model
