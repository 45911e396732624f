"""How ranks share the work in the files of other tools: accelerate, FSDP and DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.config import RunSpec
from trainer.config.fields import as_text
from trainer.strategy.deepspeed_file import AUTO, FREE, LOSS_SCALE, derived_fields, leaves, owned
from trainer.strategy.plan import UNSHARDABLE
from trainyard.import_file.config_file import find_file, read_names
from trainyard.import_file.translation import Rows, Translation, accumulation


def _fsdp_rows() -> Rows:
    from trainyard.import_file.tables import rows_of  # whose rows name functions of this module

    return rows_of("fsdp")


def fsdp_words(found: Translation, key: str, value: Any) -> None:
    """Handle the words of `fsdp`, such as ``full_shard auto_wrap offload``."""
    words = " ".join(map(str, value)).split() if isinstance(value, list) else str(value).split()
    if "offload" in words:
        found.set("fsdp_offload", True, key, value)
    sharding = [word for word in words if word not in ("offload", "auto_wrap")]
    if len(sharding) > 1:
        found.refuse(key, value, "expected one of full_shard, shard_grad_op, hybrid_shard and no_shard")
    elif sharding or "auto_wrap" in words:
        found.apply(_fsdp_rows()["sharding_strategy"], key, (sharding or ["full_shard"])[0])


def fsdp_config(found: Translation, key: str, value: Any) -> None:
    """Handle the options of FSDP, or the path of a file with them. They imply strategy=fsdp."""
    options = _named_file(found, key, value) if isinstance(value, str) else value
    if not isinstance(options, Mapping):
        if not isinstance(value, str):
            found.refuse(key, value, "expected names and values")
        return
    found.read(options, _fsdp_rows(), f"{key}.")
    if "strategy" not in found.values:
        found.set("strategy", "fsdp", key, "fsdp")


def reshard(found: Translation, key: str, value: Any) -> None:
    """Handle what happens to the gathered weights after the forward pass: a switch, or a word of FSDP 1."""
    words = {"true": "full_shard", "false": "shard_grad_op"}
    found.apply(_fsdp_rows()["sharding_strategy"], key, words.get(as_text(value), value))


def _named_file(found: Translation, key: str, text: str) -> Mapping[str, Any] | None:
    """Return the names in a file that another file names. None if it cannot be read, which is a refusal."""
    file = find_file(found, text)
    if file is None:
        found.refuse(key, text, "the file is not here: import it, too, as a further argument")
        return None
    try:
        return read_names(file)
    except UserError as error:
        found.refuse(key, text, str(error))
        return None


def deepspeed(found: Translation, key: str, value: Any) -> None:
    """Handle the options of DeepSpeed, or the path of a file with them."""
    options = (
        value if isinstance(value, Mapping) else _named_file(found, key, value) if isinstance(value, str) else None
    )
    if options is not None:
        if isinstance(value, str):
            found.set("strategy", "deepspeed", key, value)
        else:
            found.weak.append(("strategy", key, "deepspeed", "deepspeed"))
        keep_deepspeed(found, options, key)
    elif not isinstance(value, str):
        found.refuse(key, value, "expected options of DeepSpeed, or the path of a file with them")


def keep_deepspeed(found: Translation, options: Mapping[str, Any], key: str) -> None:
    """Keep the options of DeepSpeed until all fields are known. Raises UserError if there are others already."""
    if found.deepspeed[0] and found.deepspeed[0] != options:
        raise UserError(
            f"import: {printable(found.where)}: the options of DeepSpeed are given twice: keep one file of them"
        )
    found.deepspeed = options, key


def settle_deepspeed(found: Translation) -> None:
    """Turn the options of DeepSpeed into fields, and those that no field has into `deepspeed_config`."""
    options, key = found.deepspeed
    if not options:
        return
    try:
        derived = derived_fields(options, {}, found.ranks or 1)
        named = list(leaves(_marked(options)))
    except ValueError as error:
        raise UserError(f"import: {printable(found.where)}: {error}") from None
    fields = {option: (field, value) for field, (value, option) in derived.items() if field != "gradient_accumulation"}
    kept: dict[str, Any] = {}
    rest = []
    for name, value in named:
        shown = f"{key}.{name}" if key else name
        if value is None:
            found.unset.append(printable(shown))
        elif value == AUTO:
            found.ignore(shown, value, "it follows the other names")
        elif name == "gradient_accumulation_steps":
            accumulation(found, shown, value)
        elif name in fields:
            found.set(fields[name][0], fields[name][1], shown, value)
        elif name in FREE:
            _place(kept, name, value)
            found.note("deepspeed_config", shown, value)
        elif name in LOSS_SCALE:
            found.ignore(shown, value, "the factor of the loss is that of the trainer")
        else:
            rest.append((name, shown, value))
    if kept:
        found.values["deepspeed_config"] = kept
    _compare(found, rest)


def _marked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested options with None for an empty mapping, in which no option would name it."""
    return {name: (_marked(value) or None) if isinstance(value, Mapping) else value for name, value in options.items()}


def _place(config: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config[last] = int(value) if isinstance(value, float) and value.is_integer() else value


def _compare(found: Translation, options: list[tuple[str, str, Any]]) -> None:
    """Handle options that no field takes: those whose value is the one of the run have no effect."""
    try:
        run = owned(RunSpec.model_validate(found.values))
    except ValidationError:
        run = {}
    for name, shown, value in options:
        if name in run and value in (run[name][0] if isinstance(run[name][0], tuple) else (run[name][0],)):
            found.ignore(shown, value, "a run has this value")
        else:
            found.refuse(shown, value, "strategy=deepspeed does not take it")


# Fields of `UNSHARDABLE` that a config may set, and that these strategies do not have.
_IMPOSSIBLE = {"fsdp": ("optimizer",), "deepspeed": ("optimizer", "torch_compile")}


def settle_strategy(found: Translation) -> None:
    """Take back what cannot be combined: DeepSpeed does not divide 4-bit weights, and full weights are not in 4 bits."""
    values = found.values
    if values.get("quantize") == "nf4" and values.get("lora_r") == 0:
        found.drop("quantize", "weights in 4 bits cannot be trained: set lora_r")
    if values.get("strategy") not in _IMPOSSIBLE:
        return
    quantized = values.get("quantize") == "nf4"
    if quantized and values["strategy"] == "deepspeed":
        for name in ("strategy", "deepspeed_config", "deepspeed_stage", "deepspeed_offload"):
            found.drop(name, "deepspeed does not divide weights in 4 bits: every rank holds them (strategy=ddp)")
        return
    if quantized and values.get("torch_compile"):
        found.drop("torch_compile", "strategy=fsdp does not compile layers in 4 bits")
    for name in _IMPOSSIBLE[values["strategy"]]:
        if values.get(name) == UNSHARDABLE[name]:
            found.drop(name, f"strategy={values['strategy']} does not have it")
