"""The names of other tools that set fields: those in the commands and files of the guides. `trainyard import` knows the others."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from trainer.common.errors import UserError, nearest
from trainer.common.formats import printable, quoted
from trainer.config.automatic import without_state
from trainer.config.fields import is_off, is_switch, meant_word, metadata, names_in
from trainer.config.removed_fields import REMOVED_FIELDS, removed, replacement
from trainer.config.run_spec import FIELDS

Fields = Mapping[str, Any]  # values by field
MUTABLE = frozenset(name for name, field in FIELDS.items() if metadata(field)["mutable"])
SUGGESTED = names_in(FIELDS, "suggested_names")
REMOVED = removed(REMOVED_FIELDS, FIELDS)
ACCUMULATION = "gradient_accumulation_steps"  # of one rank; the field gradient_accumulation counts those of all
_SHARDING = {
    "no_shard": {"strategy": "ddp"},
    "full_shard": {"strategy": "fsdp", "fsdp_shard": "all"},
    "shard_grad_op": {"strategy": "fsdp", "fsdp_shard": "gradients"},
    "hybrid_shard": {"strategy": "fsdp", "fsdp_shard": "host"},
}
_PRECISION = {
    **{word: {"precision": "32-true"} for word in ("no", "fp32", "float32")},
    **{word: {"precision": "bf16-mixed"} for word in ("bf16", "bfloat16")},
    **{word: {"precision": "fp16-mixed"} for word in ("fp16", "float16")},
}


@dataclasses.dataclass(frozen=True)
class Alias:
    """Another name of a field. `words`: the fields that each of its values sets; none: the values are those of the field."""

    field: str
    words: Mapping[str, Fields] = dataclasses.field(default_factory=dict)


ALIASES = {
    "run_name": Alias("run"),  # torchrun takes --run for an abbreviation of a flag of its own
    "path_model": Alias("model"),
    "per_device_train_batch_size": Alias("batch_size"),
    ACCUMULATION: Alias("gradient_accumulation"),
    "zero_stage": Alias("deepspeed_stage"),
    "deepspeed": Alias("deepspeed_config"),
    "fsdp_config": Alias("strategy"),
    "report_to": Alias("loggers"),
    "hv.local_steps": Alias("local_steps"),
    "hv.outer_lr": Alias("outer_lr"),
    "metric_logger_type": Alias("loggers", {"wandb": {"loggers": "wandb"}, "dummy": {"loggers": "none"}}),
    "sharding_strategy": Alias("strategy", _SHARDING),
    "mixed_precision": Alias("precision", _PRECISION),
    "bf16": Alias("precision", {"true": {"precision": "bf16-mixed"}, "false": {}}),
    "use_deepspeed": Alias("strategy", {"true": {"strategy": "deepspeed"}, "false": {}}),
    "use_fsdp": Alias("strategy", {"true": {"strategy": "fsdp"}, "false": {}}),
}
_FSDP_OPTIONS: dict[str, Mapping[str, Fields]] = {
    "sharding_strategy": _SHARDING,
    "mixed_precision": _PRECISION,
    "offload_params": {"true": {"fsdp_offload": True}, "false": {}},
    "activation_checkpointing": {"true": {"gradient_checkpointing": True}, "false": {}},
}
FSDP_IMPLIED = [
    "version",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "min_num_params",
    "state_dict_type",
    "cpu_ram_efficient_loading",
    "sync_module_states",
    "use_orig_params",
    "backward_prefetch",
    "backward_prefetch_policy",
    "forward_prefetch",
]


def expected_words(words: Collection[str]) -> str:
    """Return which of `words` are expected, for a message."""
    return "true or false" if set(words) == {"true", "false"} else f"one of {', '.join(words)}"


def is_of_a_run(names: Collection[str]) -> bool:
    """Return whether these are the names in the file of a run, which has all fields: it was not written by hand."""
    return len(names) > 0.8 * len(FIELDS)


def plain_name(name: object) -> str:
    """Return a name with underscores: flags and ``-e`` may have dashes."""
    return str(name).replace("-", "_")


def is_known(name: str) -> bool:
    return name in FIELDS or name in ALIASES or name in REMOVED


def field_of(name: str) -> str:
    return ALIASES[name].field if name in ALIASES else name


def takes_no_value(name: str) -> bool:
    """Return whether a flag of this name may have no value: it is a switch."""
    if name in ALIASES:
        return set(ALIASES[name].words) == {"true", "false"}
    return name in FIELDS and is_switch(FIELDS[name])


def resolve_aliases(
    values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, *, source: str = "", ranks: int | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Replace other names (``path_model``, ``hv.local_steps``) by field names, and convert their values.

    Any of OpenDiLoCo's names ``hv.*`` implies ``strategy: diloco`` unless a strategy is set. Returns the values with
    field names, and a note for what a name implies. Unknown names stay as they are. Raises UserError: a value that
    cannot be converted, a removed field, or two names of one field with different values.

    Args:
        values: names and values of one source (a file, the flags).
        defaults: values that `values` override.
        source: the source, for error messages.
        ranks: number of ranks of the run, if it is known.
    """
    if values.keys() <= FIELDS.keys():
        return dict(values), []
    if is_of_a_run(values):
        values = without_state(values)
    where = f" in {source}" if source else ""
    found: dict[str, Any] = {}
    origin: dict[str, str] = {}
    notes: list[str] = []
    opendiloco = any(plain_name(name).startswith("hv.") for name in values)
    for name in sorted(values, key=lambda name: plain_name(name) not in FIELDS):  # fields first
        for target, value in _fields(name, values[name], where, ranks, opendiloco).items():
            if target in found and not _equal(found[target], value):
                raise UserError(
                    f"run spec: {printable(origin[target], 80)} and {printable(name, 80)} set {target} to different "
                    f"values{where}: set only {target}"
                )
            found.setdefault(target, value)
            origin.setdefault(target, name)
            if plain_name(name) == ACCUMULATION:
                shown = f"{printable(name, 80)}={printable(values[name], 80)}"
                notes.append(f"{shown} is understood as {target}={value}: the micro-batches of all ranks")
    if opendiloco and "strategy" not in {**found, **(defaults or {})}:
        found["strategy"] = "diloco"
        notes.append("options of OpenDiLoCo imply strategy=diloco")
    return found, notes


def _fields(name: str, value: Any, where: str, ranks: int | None, opendiloco: bool) -> Fields:
    """Return the fields that one name sets, or the name itself if it is not known."""
    plain = plain_name(name)
    if plain in REMOVED:
        if reason := replacement(value, REMOVED[plain]):
            raise UserError(f"run spec: {name}{where} {reason}")
        return {}
    if plain not in ALIASES:
        return {plain if plain in FIELDS else name: value}
    if value is None or (plain in ("deepspeed", "fsdp_config") and is_off(value)):
        return {}
    alias = ALIASES[plain]
    if plain == ACCUMULATION:
        return {alias.field: _accumulation(name, value, where, ranks)}
    if plain == "fsdp_config":
        return _fsdp_fields(name, value, where)
    if not alias.words:
        return {alias.field: value}
    fields = _convert(name, value, alias.words, where)
    if plain == "sharding_strategy" and opendiloco:
        return {"replica_strategy": fields["strategy"]}
    return fields


def _convert(name: str, value: Any, words: Mapping[str, Fields], where: str) -> Fields:
    word = meant_word(value, words)
    if word not in words:
        raise UserError(f"run spec: {name}: expected {expected_words(words)}, got {quoted(value)}{where}")
    return words[word]


def _fsdp_fields(name: str, options: Any, where: str) -> Fields:
    """Return the fields that options of FSDP set, with or without the prefix ``fsdp_``."""
    if not isinstance(options, Mapping):
        raise UserError(f"run spec: {name}: expected options, or the path of a JSON file, got {quoted(options)}{where}")
    found: dict[str, Any] = {"strategy": "fsdp"}
    for key, option in options.items():
        word = str(key).lower().removeprefix("fsdp_")
        if word in _FSDP_OPTIONS:
            found |= _convert(f"{name}.{printable(key, 40)}", option, _FSDP_OPTIONS[word], where)
        elif word not in FSDP_IMPLIED and not is_off(option):
            raise UserError(f"run spec: fsdp_config: FSDP2 does not have {printable(key, 40)}: omit it{where}")
    return found


def _accumulation(name: str, value: Any, where: str, ranks: int | None) -> int:
    """Return the micro-batches of all ranks for those of one rank. Raises UserError if the number of ranks is unknown."""
    try:
        count = 0 if isinstance(value, bool) else int(value)
    except (ValueError, TypeError, OverflowError):
        count = 0
    if not 0 < count <= 1_048_576:
        raise UserError(f"run spec: {name}: expected an integer >= 1, got {quoted(value)}{where}")
    if ranks is None:
        raise UserError(
            f"run spec: {name}{where} counts the micro-batches of one rank, and a step has the same rows on any number of "
            f"ranks: set total_batch_size to {count} x batch_size x ranks, or gradient_accumulation to {count} x ranks"
        )
    return count * ranks


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values of a field are equal; values of flags and ``-e`` are texts."""
    if type(one) is type(other) and one == other:
        return True
    try:
        return float(one) == float(other)
    except (ValueError, TypeError, OverflowError):
        return printable(one, 10_000).lower() == printable(other, 10_000).lower()


def suggest(name: str, known: Iterable[str] = ()) -> str:
    """Return ``; did you mean 'x'?`` for the field (or name in `known`) closest to `name`, or an empty string."""
    plain = plain_name(name).lower()
    if plain in FIELDS or plain in SUGGESTED:
        return f"; did you mean {SUGGESTED.get(plain, plain)!r}?"
    return nearest(plain, [*FIELDS, *ALIASES, *known])
