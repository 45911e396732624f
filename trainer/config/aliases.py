"""Other names of run spec fields: those of other tools, deprecated names, and names that a run does not need.

The names come from OpenDiLoCo, transformers, TRL, torchtune, axolotl and LLaMA-Factory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config.conversions import CONVERSIONS, Setting, is_off
from trainer.config.fields import in_quotes, is_switch, metadata, names_in
from trainer.config.run_spec import FIELDS
from trainer.errors import UserError, nearest
from trainer.formats import printable, quoted

MUTABLE = frozenset(name for name, field in FIELDS.items() if metadata(field)["mutable"])
ALIASES = names_in(FIELDS, "aliases")
SUGGESTED = names_in(FIELDS, "suggested_names")
DEPRECATED = names_in(FIELDS, "deprecated_names")
MAX_ROWS = 1_048_576  # of a step
GROUPS = ("hv", "ckpt")  # `hv: {local_steps: 5}` in a file is hv.local_steps
# Micro-batches of one rank. The field gradient_accumulation counts those of all ranks.
ACCUMULATION = frozenset(name for name, field in ALIASES.items() if field == "gradient_accumulation")

_INVENTORY = "the inventory lists the hosts, and a rank is the place of its host in it"
_EVERY_STEP = "metrics.jsonl has every step"
_LOADING = "the dataset is read once, before the first step"
_FOLDER = "checkpoints are in runs/RUN of the data directory on every host"
IGNORED: dict[str, str] = {
    "hv.galaxy_size": "there is one replica per host (or per replica_hosts hosts)",
    "hv.world_rank": "the rank of a replica is the place of its host in the inventory",
    "hv.initial_peers": "the inventory lists the hosts of a run",
    "hv.host_maddrs": "replicas listen on the cluster address of their host",
    "hv.announce_maddrs": "replicas listen on the cluster address of their host",
    "hv.matchmaking_time": "all replicas synchronize after the same step, without matchmaking",
    "hv.skip_load_from_peers": "all replicas start with the same weights",
    "ckpt.path": _FOLDER,
    "logging_dir": "logs are in runs/RUN of the data directory on every host",
    "logging_steps": _EVERY_STEP,
    "logging_strategy": _EVERY_STEP,
    "logging_first_step": _EVERY_STEP,
    "log_every_n_steps": _EVERY_STEP,
    "log_activations_steps": "a run does not log activations",
    "plot_loss": _EVERY_STEP,
    "num_workers": _LOADING,
    "dataloader_num_workers": _LOADING,
    "dataset_num_proc": _LOADING,
    "preprocessing_num_workers": _LOADING,
    "overwrite_cache": _LOADING,
    "overwrite_output_dir": "a run with the name of an earlier one resumes it; set another name with run=",
    "do_train": "train.yml and the trainer always train",
    "do_eval": "eval_split and eval_interval define the evaluation",
    "stage": "the trainer does supervised fine-tuning",
    "per_device_eval_batch_size": "evaluation uses batch_size",
    "ddp_find_unused_parameters": "DDP needs no search for unused parameters",
    "remove_unused_columns": "only the columns of a sample's format are read",
    "num_machines": _INVENTORY,
    "num_processes": _INVENTORY,
    "machine_rank": _INVENTORY,
    "main_process_ip": _INVENTORY,
    "local_rank": "torchrun sets it",
}
"""Names that have no effect, with the reason. A message reports each of them."""

_CODE = "code from a model's files does not run: use a model that transformers supports"
_OPTIMIZER = "the optimizer is AdamW with torch's defaults: omit it"
REFUSED: dict[str, str] = {
    "load_in_8bit": "weights in 8 bits are not supported: set quantize=nf4",
    "trust_remote_code": _CODE,
    "push_to_hub": "a run does not upload: collect the result with -e collect_to=FOLDER",
    "use_dora": "DoRA is not supported: omit it",
    "use_rslora": "rsLoRA is not supported: multiply lora_alpha by the square root of lora_r",
    "fsdp_config": "options of FSDP are not read: set strategy=fsdp and fsdp_shard",
    "accelerator_config": "options of accelerate are not read: omit it",
    "max_steps_per_epoch": "steps are limited over all epochs: set max_steps",
    "optimizer_type": _OPTIMIZER,
    "adam_beta1": _OPTIMIZER,
    "adam_beta2": _OPTIMIZER,
    "adam_epsilon": _OPTIMIZER,
    "neftune_noise_alpha": "noise in embeddings is not supported: omit it",
    "max_samples": "the number of samples is not limited: set max_steps, or shorten the dataset",
    "c4_tiny": "the dataset is not built in: set dataset to a file, or fake_data=true",
    "main_process_port": "set the launch option master_port",
    "group_by_length": "the seed defines the order of samples: set packing=auto, which needs no padding",
}
"""Names that a run cannot honour, with the reason and the remedy. The value false is accepted."""


@dataclass
class Resolved:
    """Values by field, and the messages about names that were replaced."""

    opendiloco: bool = False  # one of the names is an option hv.* of OpenDiLoCo
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)  # field -> the name that set it
    weak: dict[str, tuple[str, Any, list[str]]] = field(default_factory=dict)  # field -> name, value, notes

    def set(self, name: str, target: str, value: Any, where: str) -> None:
        """Set a field. Raises UserError if another name set it to a different value."""
        if target in self.values and not _equal(self.values[target], value):
            raise UserError(
                f"run spec: {printable(self.origin[target], 80)} and {printable(name, 80)} set {target} to different "
                f"values{where}: set only {target}"
            )
        self.values.setdefault(target, value)
        self.origin.setdefault(target, name)


def plain_name(name: object) -> str:
    """Return a name with underscores: flags and ``-e`` may have dashes."""
    return str(name).replace("-", "_")


def is_known(name: str) -> bool:
    """Return whether `name` is a field or another name that is understood."""
    return any(name in names for names in (FIELDS, ALIASES, DEPRECATED, IGNORED, REFUSED))


def takes_no_value(name: str) -> bool:
    """Return whether a flag of this name may have no value: it is a switch, or has no effect."""
    if name in FIELDS or name not in CONVERSIONS:
        target = field_of(name)
        return is_switch(FIELDS[target]) if target in FIELDS else name in IGNORED or name in REFUSED
    return CONVERSIONS[name].switch


def field_of(name: str) -> str:
    """Return the field of an accepted name, or the name itself."""
    return ALIASES.get(name) or DEPRECATED.get(name) or name


def resolve_aliases(
    values: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    *,
    source: str = "",
    ranks: int | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Replace other names (``learning_rate``, ``hv.local_steps``, a mapping ``hv``) by field names, and convert their values.

    Any of OpenDiLoCo's names ``hv.*`` implies ``strategy: diloco`` unless a strategy is set.

    Args:
        values: names and values of one source (a file, the flags).
        defaults: values that `values` override.
        source: the source, for error messages.
        ranks: number of ranks of the run, if it is known.

    Returns:
        The values with field names, and one note for each name whose meaning differs. Unknown names stay as they are.

    Raises:
        UserError: a value that cannot be converted, a name that a run cannot honour, or two names of one field with
            different values.
    """
    where = f" in {source}" if source else ""
    flat = _flatten(values)
    found = Resolved(opendiloco=any(plain_name(name).startswith("hv.") for name in flat))
    for name in sorted(flat, key=lambda name: plain_name(name) not in FIELDS):  # fields first
        _resolve(found, name, flat[name], where, ranks)
    for target, (name, value, notes) in found.weak.items():
        if target not in found.values:
            found.set(name, target, value, where)
            found.notes += notes
    _require_train_on(found, flat, where)
    if found.opendiloco:
        _opendiloco(found, flat, defaults or {})
    return found.values, found.notes


def _require_train_on(found: Resolved, flat: Mapping[str, Any], where: str) -> None:
    """Raises UserError if ``assistant_only_loss: false`` alone says what contributes to the loss: it depends on the dataset."""
    value = next((value for name, value in flat.items() if plain_name(name) == "assistant_only_loss"), None)
    if value is not None and "train_on" not in found.values:
        raise UserError(
            f"run spec: assistant_only_loss=false{where} trains all of a chat, but only the completion of a pair, in TRL: set "
            f"train_on=all or train_on=answer{where} instead"
        )


def _flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = value.items() if name in GROUPS and isinstance(value, Mapping) else [(None, value)]
        flat |= {name if key is None else f"{name}.{key}": item for key, item in nested}
    return flat


def _resolve(found: Resolved, name: str, value: Any, where: str, ranks: int | None) -> None:
    """Add one name and its value to `found`."""
    plain, shown = plain_name(name), f"{printable(name, 80)}={printable(value, 80)}"
    if plain in FIELDS:
        found.set(name, plain, value, where)
    elif plain in IGNORED:
        found.notes.append(f"{name} is ignored: {IGNORED[plain]}")
    elif plain in REFUSED:
        if not is_off(value):
            raise UserError(f"run spec: {name}{where}: {REFUSED[plain]}")
    elif plain in DEPRECATED:
        found.set(name, DEPRECATED[plain], value, where)
        found.notes.append(f"{name} is deprecated: use {DEPRECATED[plain]}")
    elif plain in ACCUMULATION:
        count = _accumulation(name, value, where, ranks)
        found.set(name, "gradient_accumulation", count, where)
        found.notes.append(f"{shown} is understood as gradient_accumulation={count}: the micro-batches of all ranks")
    elif plain in CONVERSIONS:
        setting = _convert(name, value, where)
        if plain == "sharding_strategy" and found.opendiloco and setting.values:
            setting = Setting({"replica_strategy": setting.values["strategy"]})
        notes = _note(name, value, setting)
        for target, converted in setting.values.items():
            if setting.weak:
                found.weak.setdefault(target, (name, converted, notes))
            else:
                found.set(name, target, converted, where)
        found.notes += [] if setting.weak else notes
    elif plain in ALIASES:
        if value is not None:
            found.set(name, ALIASES[plain], value, where)
    else:
        found.values[name] = value


def _convert(name: str, value: Any, where: str) -> Setting:
    if value is None:
        return Setting()
    try:
        return CONVERSIONS[plain_name(name)].convert(value)
    except ValueError as error:
        hint = in_quotes(value) if CONVERSIONS[plain_name(name)].is_text else ""
        raise UserError(f"run spec: {name}: expected {error}, got {quoted(value)}{hint}{where}") from None


def _note(name: str, value: Any, setting: Setting) -> list[str]:
    """Return the meaning of a converted name, if it differs from the name."""
    difference = CONVERSIONS[plain_name(name)].difference
    meaning = " ".join(f"{target}={_plain_value(converted)}" for target, converted in setting.values.items())
    if not difference and all(_equal(_plain_value(converted), value) for converted in setting.values.values()):
        return []
    return [
        f"{printable(name, 80)}={printable(value, 80)} is understood as {meaning or 'the default'}{f': {difference}' if difference else ''}"
    ]


def _plain_value(value: Any) -> str:
    words = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return printable(words.lower() if isinstance(value, bool) else words, 80)


def _accumulation(name: str, value: Any, where: str, ranks: int | None) -> int:
    """Return the micro-batches of all ranks for those of one rank. Raises UserError if the number of ranks is unknown."""
    count = _count(value)
    if not count:
        raise UserError(f"run spec: {name}: expected an integer >= 1, got {quoted(value)}{where}")
    if ranks is None:
        raise UserError(
            f"run spec: {name}{where} counts the micro-batches of one rank, and a step has the same rows on any number of "
            f"ranks: set total_batch_size to {count} x batch_size x ranks, or gradient_accumulation to {count} x ranks"
        )
    return count * ranks


def _count(value: Any) -> int:
    """Return a value as a number of rows or micro-batches, or 0 if it is not a number."""
    try:
        number = 0 if isinstance(value, bool) else int(value)
    except (ValueError, TypeError, OverflowError):
        return 0
    return number if 0 < number <= MAX_ROWS else 0


def _opendiloco(found: Resolved, flat: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Apply what OpenDiLoCo's options imply: the strategy, and the rows of all replicas."""
    plain = {plain_name(name): value for name, value in flat.items()}
    rows = found.values.get("total_batch_size")
    if "hv.galaxy_size" in plain and rows is not None:
        replicas, of_one = (_count(value) for value in (plain["hv.galaxy_size"], rows))
        if replicas and of_one:  # otherwise the check of the field reports it
            found.values["total_batch_size"] = replicas * of_one
            found.notes.append(
                f"with hv.galaxy_size={replicas}, total_batch_size={of_one} is that of a replica: it is understood as "
                f"total_batch_size={replicas * of_one}"
            )
    if "strategy" not in {**found.values, **defaults}:
        found.values["strategy"] = "diloco"
        found.notes.append("options of OpenDiLoCo imply strategy=diloco")


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values of a field are equal; values of flags and ``-e`` are texts."""
    if type(one) is type(other) and one == other:
        return True
    try:
        return float(one) == float(other)
    except (ValueError, TypeError, OverflowError):
        return printable(one, 10_000).lower() == printable(other, 10_000).lower()


def suggest(name: str, known: list[str] | tuple[str, ...] = ()) -> str:
    """Return ``; did you mean 'x'?`` for the field (or name in `known`) closest to `name`, or an empty string."""
    plain = plain_name(name).lower()
    if plain in FIELDS:
        return f"; did you mean {plain!r}?"
    if plain in SUGGESTED or plain in ALIASES:
        return f"; did you mean {SUGGESTED.get(plain) or ALIASES[plain]!r}?"
    return nearest(plain, [*FIELDS, *ALIASES, *known])
