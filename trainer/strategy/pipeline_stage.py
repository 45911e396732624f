"""One rank's stage of a pipeline: the model without the layers of other ranks, with its own weights."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from trainer.common.errors import UserError, first_line, model_errors
from trainer.config import RunSpec
from trainer.costs.cost import half_hidden
from trainer.distributed.pipelines import Pipelines
from trainer.distributed.world import World
from trainer.method import Method, method_of
from trainer.method.module_with_loss import ModelWithLoss
from trainer.model_files.adapter_folder import refuse_adapter
from trainer.model_files.base_weights import WeightDifferences, unexpected_names
from trainer.model_files.model_shape import shape_of
from trainer.models.model import add_lora, base_dtype
from trainer.models.quantized import Quantizer
from trainer.strategy.base import Batch
from trainer.strategy.pipeline_split import PIPELINE_KINDS, check_ranks
from trainer.strategy.pipeline_weights import WeightFiles, read_own


@dataclass(frozen=True)
class Parts:
    """Names of the parts of a model in transformers. `first_only`: modules that only the first stage applies to its input."""

    decoder: str
    embedding: str
    layers: str
    norm: str
    head: str = "lm_head"
    first_only: tuple[str, ...] = ()


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of weights that are not quantized
_LLAMA = Parts("model", "embed_tokens", "layers", "norm")
# Decoders whose embedding, layers and norm are applied one after the other, without a factor in between.
PARTS: dict[str, Parts] = {
    **dict.fromkeys(PIPELINE_KINDS, _LLAMA),
    "gpt2": Parts("transformer", "wte", "h", "ln_f", first_only=("wpe", "drop")),
}


def parts_of(spec: RunSpec, kind: str) -> Parts:
    """Return the names of the parts of a model type. Raises UserError if a pipeline does not support it."""
    if kind not in PARTS:
        raise UserError(
            f"strategy: pipeline does not support the model type {kind} of {spec.model}: it supports {', '.join(PARTS)}; "
            "set another strategy"
        )
    return PARTS[kind]


class Skipped(nn.Module):
    """A layer of another rank: it returns its input."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


class NoPositions(nn.Module):
    """Learned positions, which only the first rank adds."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=positions.device)


class Received(nn.Module):
    """The embedding on all ranks but the first: it returns the hidden states of the rank before.

    Without them, as in a check of this part of the model alone, it makes some from the tokens.
    """

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.value: torch.Tensor | None = None
        self._hidden, self._dtype = hidden, dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.value is None:
            return torch.sin(ids[..., None] * torch.arange(1, self._hidden + 1, device=ids.device)).to(self._dtype)
        return self.value.view(*ids.shape, -1)


@dataclass(frozen=True)
class Division:
    """Which rank holds what. `layers`: number of decoder layers of every rank, in rank order; `rank`: this rank."""

    layers: tuple[int, ...]
    rank: int

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether this rank holds the final norm and the head."""
        return self.rank == len(self.layers) - 1

    def owner(self, layer: int) -> int:
        return next(rank for rank, end in enumerate(accumulate(self.layers)) if layer < end)

    def describe(self) -> str:
        ends = list(accumulate(self.layers))
        shown = (f"{end - count}-{end - 1}" for count, end in zip(self.layers, ends, strict=True))
        return ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(shown))


@dataclass(frozen=True)
class TrainedWeight:
    """A trained weight of the whole model. `owner`: the stage that writes it; `holders`: all stages that hold it."""

    owner: int
    holders: tuple[int, ...]
    shape: torch.Size


class StageLoss(ModelWithLoss):
    """The part of a model that this rank holds: decoder layers, with the embedding on the first and the loss on the last rank.

    `trained`: all trained weights of the whole model, in the order of its parameters; `held`: those of this rank. A head that
    is tied to the embedding has the name of the embedding on both ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        division: Division,
        parts: Parts,
        trained: dict[str, TrainedWeight],
        held: dict[str, nn.Parameter],
        method: Method,
    ) -> None:
        super().__init__(model, method=method)
        self.division, self.trained_weights, self.held = division, trained, held
        self.pipelines: Pipelines | None = None  # set once the model is loaded
        self._parts = parts

    @property
    def _decoder(self) -> Any:
        model: Any = self.model
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        return getattr(base, self._parts.decoder)

    @property
    def hidden_size(self) -> int:
        """The numbers of one token between two ranks."""
        return int(self._decoder.config.hidden_size)

    def run_stage(self, hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """Return the output of this rank: hidden states [rows, T, hidden], or on the last rank the summed loss.

        `hidden`: the output of the rank before; None on the first rank.
        """
        received = getattr(self._decoder, self._parts.embedding)
        if not self.division.first:
            received.value = hidden
        try:
            if self.division.last:
                loss: torch.Tensor = self(*batch)
                return loss
            with self.placed(batch.positions) as places:
                output = self._decoder(input_ids=batch.ids, position_ids=places, use_cache=False)
            state: torch.Tensor = output.last_hidden_state
            return state
        finally:
            if not self.division.first:
                received.value = None


def empty_model(spec: RunSpec) -> tuple[Any, Parts]:
    """Return the spec's model without memory for its weights, and the names of its parts.

    Raises UserError: its configuration cannot be loaded, it is an adapter, or a pipeline does not support it.
    """
    refuse_adapter(spec.model)
    try:
        config = AutoConfig.from_pretrained(spec.model, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"model: cannot load {spec.model}: {first_line(error)}") from None
    parts = parts_of(spec, str(config.model_type))
    if getattr(config, "quantization_config", None):  # its tensors have scales, which a stage would ignore
        raise UserError(
            f"model: {spec.model} is quantized already, which strategy=pipeline cannot load: set another strategy"
        )
    with model_errors(spec.model), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=base_dtype(spec), trust_remote_code=False)
    model.tie_weights()  # the context above makes a parameter of its own for the head
    with contextlib.suppress(OSError):  # a model may have none
        model.generation_config = GenerationConfig.from_pretrained(spec.model)
    return model, parts


def load_stage(spec: RunSpec, division: Division, world: World) -> StageLoss:
    """Load this rank's part of the model on its device. Every rank of `world` calls it.

    Only its tensors are read from the model's files. Adapters are drawn as for a complete model: those of all ranks
    together are the adapters of strategy=ddp. Raises UserError: the model cannot be loaded, has fewer layers than the
    run has ranks, or a tensor has a data type of quantized weights, whose scales are other tensors.
    """
    torch.manual_seed(spec.seed)
    model, parts = empty_model(spec)
    layers = getattr(getattr(model, parts.decoder), parts.layers)
    check_ranks(len(division.layers), len(layers))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    check = file_check(spec, model, parts)  # before layers are replaced by quantized ones of another shape
    quantizer = Quantizer(spec, model) if spec.quantize == "nf4" else None
    wanted, places = stored_names(model, parts, _mine(model, parts, division))
    dtype = base_dtype(spec)
    for name, value in read_own(spec.model, world, shapes, check, wanted):
        if value.dtype not in _DTYPES:
            raise UserError(f"model: {name} of {spec.model} has the data type {value.dtype}, expected 16 to 64 bits")
        value = value.to(dtype, copy=True)
        fresh = quantizer.parameter(model, name, value, world.device) if quantizer else nn.Parameter(value)
        for module, leaf in places[name]:
            setattr(module, leaf, fresh)
    if quantizer:
        model = quantizer.finish(model)
    if spec.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    whole = add_lora(spec, model) if spec.lora_r else model
    trained, held = _trained_weights(whole, model, parts, division)
    _drop_others(model, parts, division, hidden_dtype(spec))
    whole.to(world.device).train()
    return StageLoss(whole, division, parts, trained, held, method_of(spec).create(spec))


def hidden_dtype(spec: RunSpec) -> torch.dtype:
    """Return the data type of the hidden states between two layers."""
    return torch.bfloat16 if half_hidden(spec, shape_of(spec)) else torch.float32


def whole_model(spec: RunSpec) -> nn.Module:
    """Return the complete model with adapters, without memory for the weights, from which a state dict is saved."""
    model, _ = empty_model(spec)
    return add_lora(spec, model) if spec.lora_r else model


def _mine(model: Any, parts: Parts, division: Division) -> list[nn.Module]:
    decoder = getattr(model, parts.decoder)
    layers = getattr(decoder, parts.layers)
    found = [layer for number, layer in enumerate(layers) if division.owner(number) == division.rank]
    if division.first:
        found += [getattr(decoder, name) for name in (parts.embedding, *parts.first_only)]
    if division.last:
        found += [getattr(decoder, parts.norm), getattr(model, parts.head)]
    return found


def stored_names(
    model: Any, parts: Parts, modules: Iterable[nn.Module]
) -> tuple[dict[str, list[str]], dict[str, list[tuple[nn.Module, str]]]]:
    """Return for each parameter of modules, by its first name in the model: its names in the model's files, and its places."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for root in modules:
        for module in root.modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                places.setdefault(id(parameter), []).append((module, leaf))
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    # Some models on the hub have the names of the decoder alone.
    wanted = {
        names[key][0]: [alias for name in names[key] for alias in (name, name.removeprefix(f"{parts.decoder}."))]
        for key in places
    }
    return wanted, {names[key][0]: found for key, found in places.items()}


def file_check(spec: RunSpec, model: Any, parts: Parts) -> Callable[[WeightFiles], None]:
    """Return a function that checks that files have all tensors of a model, and no others. It raises UserError if not.

    It reads only headers, and the tensors that are stored twice. `model`: complete, without memory for its weights, and
    not yet quantized.
    """
    names = stored_names(model, parts, [model])[0]
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    known = {*model.state_dict()}.union(*names.values())

    def check(files: WeightFiles) -> None:
        stored = files.shapes()
        missing, untied = [], []
        reshaped: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
        for name, aliases in names.items():
            found = [alias for alias in dict.fromkeys(aliases) if alias in stored]
            missing += [] if found else [name]
            reshaped |= {alias: (stored[alias], shapes[name]) for alias in found if stored[alias] != shapes[name]}
            if len(found) > 1 and not reshaped.keys() & {*found}:
                first = files.tensor(found[0])
                untied += [alias for alias in found[1:] if not torch.equal(first, files.tensor(alias))]
        unexpected = unexpected_names(model, stored.keys() - known)
        differences = WeightDifferences(missing, reshaped, unexpected, untied)
        if differences.describe():
            raise differences.error("model", spec.model)

    return check


def _trained_weights(
    whole: nn.Module, model: Any, parts: Parts, division: Division
) -> tuple[dict[str, TrainedWeight], dict[str, nn.Parameter]]:
    """Return all trained weights of the model by name, and those of this rank. See `StageLoss`."""
    decoder = getattr(model, parts.decoder)
    last = len(division.layers) - 1
    owners: dict[int, set[int]] = {}

    def own(module: nn.Module, rank: int) -> None:
        for parameter in module.parameters():
            owners.setdefault(id(parameter), set()).add(rank)

    for number, layer in enumerate(getattr(decoder, parts.layers)):
        own(layer, division.owner(number))
    for name in (parts.embedding, *parts.first_only):
        own(getattr(decoder, name), 0)
    own(getattr(decoder, parts.norm), last)
    own(getattr(model, parts.head), last)
    # Where weights are tied, the embedding or the head of this rank is no longer the parameter of the other one.
    head_name, embedding_name = (
        _names_of(whole, getattr(model, parts.head)),
        _names_of(whole, getattr(decoder, parts.embedding)),
    )
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    alias = dict(zip(head_name, embedding_name, strict=False)) if tied else {}
    trained: dict[str, TrainedWeight] = {}
    held: dict[str, nn.Parameter] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        ranks, canonical = owners[id(parameter)], alias.get(name, name)
        ranks |= set(trained[canonical].holders) if canonical in trained else set()
        if tied and name in (*head_name, *embedding_name):
            ranks |= {0, last}
        trained[canonical] = TrainedWeight(min(ranks), tuple(sorted(ranks)), parameter.shape)
        if parameter.device.type != "meta":
            held[canonical] = parameter
    return trained, held


def _names_of(whole: nn.Module, module: nn.Module) -> list[str]:
    place = next((name for name, found in whole.named_modules(remove_duplicate=False) if found is module), None)
    return [f"{place}.{leaf}" for leaf, _ in module.named_parameters() if leaf == "weight"]


def _drop_others(model: Any, parts: Parts, division: Division, dtype: torch.dtype) -> None:
    """Replace the modules of other ranks, so that the model runs on the hidden states of the rank before."""
    decoder = getattr(model, parts.decoder)
    layers = getattr(decoder, parts.layers)
    for number in range(len(layers)):
        if division.owner(number) != division.rank:
            layers[number] = Skipped()
    if not division.first:
        setattr(decoder, parts.embedding, Received(model.config.hidden_size, dtype))
        for name in parts.first_only:
            setattr(decoder, name, NoPositions() if name == "wpe" else nn.Identity())
    if not division.last:
        setattr(decoder, parts.norm, nn.Identity())
        setattr(model, parts.head, nn.Identity())
