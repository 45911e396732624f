"""The run spec: one class, off which everything else is read: flags, names for ``-e``, docs, checks on the controller.

Importable without torch, because the controller needs it too.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from trainer.errors import UserError, nearest

TINY = "tiny"
EMBEDDED_DATASET = "ansible-docs"
# What fits a model of a few million random weights; anything that a person sets wins over it.
PRESETS: dict[str, dict[str, Any]] = {
    TINY: {
        "seq_length": 256,
        "lr": 3e-3,
        "total_batch_size": 16,
        "eval_interval": 20,
        "checkpoint_interval": 10,
        # The head too: the base is random, so nothing below it can make words of what the adapters learn.
        "lora_targets": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
    },
}


def _words(value: Any) -> Any:
    """Take ``a,b`` as well as a list: flags and ``-e`` have only strings."""
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return value


def _field(
    default: Any, about: str, *, also: Sequence[str] = (), later: bool = False, unit: str = "", **limits: Any
) -> Any:
    """Declare a knob: default, meaning, unit, the other names it is known by, and if a resumed run may change it."""
    extra: dict[str, Any] = {"also": list(also), "later": later, "unit": unit}
    if isinstance(default, float):
        limits["allow_inf_nan"] = False
    # `run: 7` in YAML is a name too.
    if isinstance(default, str):
        limits["coerce_numbers_to_str"] = True
    return Field(default, description=about, json_schema_extra=extra, **limits)


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Logger = Literal["tensorboard", "wandb", "none"]
Wire = Annotated[Literal["32", "bf16"], BeforeValidator(lambda value: value if isinstance(value, bool) else str(value))]


# Strategies that take the model apart, and what cannot be taken apart.
SHARDED = ("fsdp", "deepspeed")
ONLY_DDP: dict[str, Any] = {
    "backend": "unsloth",
    "quantize": "nf4",
    "optimizer": "adamw8bit",
    "precision": "fp16-mixed",
    "torch_compile": True,
}


class RunSpec(BaseModel):
    """All that defines a training run; the same spec gives the same run on any number of nodes."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())

    run: str = _field(
        "",
        "name of the run and of its folder; empty: made of the model's name and a digest of the spec",
        also=["name", "run_name", "run_id", "output_dir"],
        later=True,
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$",
    )
    model: str = _field(
        TINY,
        "'tiny' (made here, no network), a local model folder, or a hub id (org/name)",
        also=["model_name", "model_name_or_path", "base_model", "model_id"],
        min_length=1,
    )
    backend: Literal["auto", "peft", "unsloth"] = _field(
        "auto", "who loads the model and adds LoRA; auto takes peft; unsloth needs CUDA", also=["model_backend"]
    )
    dataset: str = _field(
        EMBEDDED_DATASET,
        "'ansible-docs' (made here), a JSONL file, or a hub id (org/name, needs the hub extra)",
        also=["data", "dataset_name", "dataset_path", "data_path", "train_file", "datasets"],
        min_length=1,
    )
    dataset_split: str = _field("train", "split of a hub dataset", min_length=1)
    fake_data: bool = _field(False, "random tokens instead of the dataset, to measure speed", also=["dummy_data"])
    train_on: Literal["answer", "all"] = _field(
        "answer", "which tokens carry loss: only the assistant's, or every one", also=["train_on_inputs"]
    )
    seq_length: int = _field(
        1024,
        "longest row; longer samples are cut",
        unit="tokens",
        ge=8,
        le=1_048_576,
        also=["max_seq_length", "max_length", "sequence_length", "sequence_len", "block_size", "cutoff_len"],
    )
    packing: bool = _field(
        True, "put several samples in one row, kept apart by their positions", also=["sample_packing"]
    )
    epochs: int = _field(
        1, "times over the dataset", ge=1, le=100_000, also=["num_epochs", "num_train_epochs", "max_epochs"]
    )
    max_steps: int = _field(
        0,
        "stop after so many optimiser steps; 0: when the epochs are done",
        ge=0,
        unit="steps",
        also=["steps", "iters"],
    )
    batch_size: int = _field(
        4,
        "micro-batch: rows in one forward pass of one device",
        ge=1,
        le=65_536,
        unit="rows",
        also=["micro_batch_size", "per_device_train_batch_size", "per_device_batch_size", "device_batch_size"],
    )
    gradient_accumulation: int | None = _field(
        None,
        "micro-batches in one optimiser step, counted over all ranks; the other way to say total_batch_size",
        ge=1,
        also=["gradient_accumulation_steps", "grad_accum", "accumulation_steps", "accumulate_grad_batches"],
    )
    total_batch_size: int | None = _field(
        None,
        "rows in one optimiser step over all ranks, whatever their number; unset: 32",
        ge=1,
        unit="rows",
        also=["global_batch_size", "train_batch_size", "effective_batch_size"],
    )
    lr: float = _field(2e-4, "peak learning rate", gt=0, also=["learning_rate"])
    schedule: Literal["cosine", "linear", "constant"] = _field(
        "cosine", "how lr falls after the warmup", also=["lr_scheduler", "lr_scheduler_type", "scheduler"]
    )
    warmup: float = _field(
        0.03,
        "steps (1 and more) or share of all steps (below 1) in which lr rises",
        ge=0,
        also=["warmup_steps", "warmup_ratio"],
    )
    weight_decay: float = _field(0.0, "AdamW's, on matrices only", ge=0)
    max_grad_norm: float = _field(
        1.0, "gradients are clipped to this norm; 0: never", ge=0, also=["clip_grad_norm", "gradient_clip_val"]
    )
    lora_r: int = _field(
        16, "rank of the adapters; 0: full fine-tuning", ge=0, le=4096, also=["lora", "lora_rank", "r", "rank"]
    )
    lora_alpha: float = _field(32.0, "adapters are scaled by lora_alpha / lora_r", gt=0, also=["alpha"])
    quantize: Literal["none", "nf4"] = _field(
        "none",
        "nf4: the frozen base in 4 bits under LoRA (QLoRA); needs bitsandbytes, and is slow on a CPU",
        also=["load_in_4bit", "quantization", "bnb_4bit_quant_type"],
    )
    lora_dropout: float = _field(0.0, "dropout before the adapters", ge=0, lt=1, also=["dropout"])
    lora_targets: Words = _field(
        ("all-linear",),
        "layers that get an adapter, by name, or all-linear",
        also=["target_modules", "lora_target_modules"],
        min_length=1,
    )
    precision: Literal["32-true", "bf16-mixed", "fp16-mixed"] = _field(
        "32-true",
        "of the arithmetic; what is trained is kept in float32",
        also=["dtype", "bf16", "fp16", "mixed_precision"],
    )
    optimizer: Literal["adamw", "adamw8bit"] = _field(
        "adamw", "adamw8bit keeps its two moments in 8 bits; needs bitsandbytes", also=["optim"]
    )
    kernels: Literal["auto", "torch"] = _field(
        "auto",
        "auto: liger kernels and flash attention on CUDA where they are installed; torch: neither",
        also=["use_liger_kernel", "attn_implementation"],
    )
    gradient_checkpointing: bool = _field(
        False,
        "compute activations again in the backward pass instead of keeping them",
        also=["activation_checkpointing"],
    )
    torch_compile: bool = _field(False, "torch.compile the model; needs a C++ compiler on every node", also=["compile"])
    strategy: Literal["ddp", "fsdp", "deepspeed", "diloco", "averaging", "auto"] = _field(
        "ddp",
        "how ranks share the work: ddp: each has the whole model; fsdp, deepspeed: each keeps a part of it; "
        "diloco: hosts meet every local_steps steps; averaging: once, at the end; auto: what fits and talks least, said with the reason",
        also=["distributed_strategy", "parallelism"],
    )
    balance: Literal["auto", "even"] = _field(
        "auto",
        "auto shares rows by the measured speed of the ranks, even equally; with ddp the step is the same, with diloco "
        "fast replicas take more inner steps",
        later=True,
        also=["load_balancing"],
    )
    fsdp_shard: Literal["all", "host"] = _field(
        "all", "fsdp: share one model among all ranks, or within each host", also=["sharding_strategy", "fsdp"]
    )
    deepspeed_stage: int = _field(
        2,
        "what ZeRO shares out: 1: optimizer state; 2: gradients too; 3: weights too",
        ge=1,
        le=3,
        later=True,
        also=["zero_stage", "zero_optimization"],
    )
    deepspeed_offload: Literal["none", "optimizer", "all"] = _field(
        "none",
        "what ZeRO keeps in the host's memory: the optimizer's state, or with stage 3 all (weights too)",
        later=True,
        also=["offload", "cpu_offload", "offload_optimizer"],
    )
    local_steps: int = _field(
        10,
        "diloco: steps between two meetings of the replicas",
        ge=1,
        le=100_000,
        unit="steps",
        also=["inner_steps", "sync_every"],
    )
    outer_lr: float = _field(0.7, "diloco: learning rate of the outer step", gt=0, also=["outer_learning_rate"])
    outer_momentum: float = _field(0.9, "diloco: Nesterov momentum of the outer step, at its highest", ge=0, lt=1)
    diloco_wire: Wire = _field("bf16", "diloco: bits of what replicas send each other", also=["hivemind_compression"])
    diloco_members: Literal["fixed", "torchft"] = _field(
        "fixed",
        "diloco: fixed: all replicas from a start to its end; torchft: they may leave and come back (needs the torchft extra)",
        later=True,
        also=["fault_tolerance"],
    )
    replica_hosts: int = _field(
        1,
        "diloco, averaging: neighbouring hosts that make one replica",
        ge=1,
        le=4096,
        unit="hosts",
    )
    replica_strategy: Literal["ddp", "fsdp"] = _field(
        "ddp", "diloco: how the ranks of one replica share the work; fsdp: the model too"
    )
    gradient_wire: Wire = _field(
        "32", "bits of a gradient between ranks: bf16 halves the bytes and rounds what it sends", also=["ddp_comm_hook"]
    )
    seed: int = _field(1, "of order, dropout and fresh weights", ge=0, lt=2**32, also=["random_seed"])
    eval_split: float = _field(
        0.05,
        "share of the samples held out and never trained on; 0: none",
        ge=0,
        le=0.5,
        also=["val_set_size", "validation_split"],
    )
    eval_interval: int = _field(
        100,
        "steps between evaluations; 0: only at the end",
        ge=0,
        unit="steps",
        later=True,
        also=["eval_steps", "val_check_interval"],
    )
    checkpoint_interval: int = _field(
        25,
        "steps between checkpoints; 0: only at the end",
        ge=0,
        unit="steps",
        later=True,
        also=["save_steps", "save_interval"],
    )
    checkpoint_keep: int = _field(
        2, "newest checkpoints that stay", ge=1, later=True, also=["save_total_limit", "keep_latest_k"]
    )
    resume: Literal["auto", "never"] = _field(
        "auto", "auto goes on from the newest whole checkpoint; never refuses a run that has one", later=True,
        also=["resume_from_checkpoint"],
    )  # fmt: skip
    merge: bool = _field(
        False,
        "write base model and adapter as one model, too: merged/ on the head",
        later=True,
        also=["merge_adapter", "merge_lora", "merge_and_unload"],
    )
    loggers: Annotated[tuple[Logger, ...], BeforeValidator(_words)] = _field(
        ("tensorboard",), "tensorboard, wandb, none", later=True, also=["report_to", "logger", "log_with"], min_length=1
    )
    collective_timeout: float = _field(
        600.0,
        "a collective that takes longer fails the run",
        gt=0,
        unit="seconds",
        later=True,
        also=["ddp_timeout", "timeout"],
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # Python counts True as 1: `lr: yes` would be a learning rate of 1.
        if isinstance(value, bool) and FIELDS[str(info.field_name)].annotation is not bool:
            raise ValueError("true and false are for switches")
        return value

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        preset = dict(PRESETS.get(str(given.get("model", TINY)), {}))
        if given.get("gradient_accumulation") is not None:
            preset.pop("total_batch_size", None)
        return preset | given

    @model_validator(mode="after")
    def _agree(self) -> "RunSpec":
        if self.gradient_accumulation and self.total_batch_size:
            product = self.gradient_accumulation * self.batch_size
            if product != self.total_batch_size:
                raise ValueError(
                    f"gradient_accumulation {self.gradient_accumulation} x batch_size {self.batch_size} "
                    f"= {product} rows, but total_batch_size says {self.total_batch_size}: set one of the two"
                )
        if "none" in self.loggers and len(self.loggers) > 1:
            raise ValueError(f"loggers: 'none' goes with no other, got {','.join(self.loggers)}")
        if self.backend == "unsloth" and not self.lora_r:
            raise ValueError("backend: unsloth is for LoRA here, got lora_r 0: take backend=peft for full fine-tuning")
        if self.quantize != "none" and not self.lora_r:
            raise ValueError(f"quantize: {self.quantize} is for LoRA, got lora_r 0: 4-bit weights cannot be trained")
        if self.strategy in SHARDED and self.only_ddp:
            raise ValueError(f"{self.only_ddp} goes with strategy ddp, got strategy {self.strategy}")
        if self.strategy == "diloco" and self.replica_strategy == "fsdp":
            if self.only_ddp:
                raise ValueError(f"{self.only_ddp} goes with replica_strategy ddp, got replica_strategy fsdp")
            if self.diloco_members == "torchft":
                raise ValueError("diloco_members: torchft goes with replica_strategy ddp, got replica_strategy fsdp")
        if self.strategy == "deepspeed" and self.deepspeed_offload == "all" and self.deepspeed_stage < 3:
            raise ValueError(
                f"deepspeed_offload: all needs deepspeed_stage 3, got {self.deepspeed_stage}: take deepspeed_offload=optimizer"
            )
        return self

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimiser step over all ranks: a matter of the spec alone, never of the number of nodes."""
        if self.gradient_accumulation:
            return self.gradient_accumulation * self.batch_size
        return self.total_batch_size or 32

    @property
    def by_torchft(self) -> bool:
        """Whether every replica is a torchrun of its own, and torchft tells who is there."""
        return self.strategy == "diloco" and self.diloco_members == "torchft"

    @property
    def only_ddp(self) -> str:
        """What this spec wants that cannot be taken apart (``field: value``), or an empty string."""
        wanted = [f"{name}: {value}" for name, value in ONLY_DDP.items() if getattr(self, name) == value]
        return wanted[0].replace("True", "true") if wanted else ""

    @property
    def weights_in_parts(self) -> bool:
        """Whether no rank has the whole model on its device."""
        if self.strategy == "diloco":
            return self.replica_strategy == "fsdp"
        return self.strategy == "fsdp" or (self.strategy == "deepspeed" and self.deepspeed_stage == 3)

    @property
    def weights_as_kept(self) -> bool:
        """Whether the strategy reads its part of the weights alone, and so takes them as they are in the model's files."""
        return self.weights_in_parts and self.strategy != "deepspeed"

    def digest(self) -> str:
        """Return 6 hex digits that are equal for equal mathematics (what a resumed run may change is left out)."""
        fixed = {name: value for name, value in self.model_dump(mode="json").items() if name not in LATER}
        return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:6]

    def named(self) -> "RunSpec":
        """Return the spec with a run name, made of the model's name and the digest if it has none."""
        if self.run:
            return self
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(self.model).name).strip("-._")[:40] or "run"
        return self.model_copy(update={"run": f"{stem}-{self.digest()}"})

    def to_yaml(self) -> str:
        """Return the spec as the YAML that `read_spec` takes."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


FIELDS: dict[str, FieldInfo] = dict(RunSpec.model_fields)


def about(name: str) -> dict[str, Any]:
    """Return what `_field` was told of a knob: also, later, unit."""
    extra = FIELDS[name].json_schema_extra
    return extra if isinstance(extra, dict) else {}


LATER = frozenset(name for name in FIELDS if about(name)["later"])
ALSO: dict[str, str] = {other: name for name in FIELDS for other in about(name)["also"]}


def suggest(name: str, known: Sequence[str] = ()) -> str:
    """Return ``; did you mean 'x'?`` for the knob that `name` most likely meant, or an empty string."""
    plain = name.replace("-", "_").lower()
    if plain in FIELDS:
        return f"; did you mean {plain!r}?"
    if plain in ALSO:
        return f"; did you mean {ALSO[plain]!r}?"
    return nearest(plain, [*FIELDS, *known])


def takes(name: str) -> str:
    """Return in words what a knob takes, read off its type and limits."""
    field = FIELDS[name]
    kind = field.annotation
    options = [arg for arg in get_args(kind) if arg is not type(None)]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, options))
    if get_origin(kind) is tuple:
        inner = options[0]
        return "a list such as " + ",".join(map(str, field.default)) if inner is str else (
            "one or more of " + ", ".join(map(str, get_args(inner)))
        )  # fmt: skip
    if kind is bool:
        return "true or false"
    limits = []
    for limit in field.metadata:
        for word, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            if getattr(limit, word, None) is not None:
                limits.append(f"{sign} {getattr(limit, word)}")
    number = "a whole number" if kind is int or int in options else "a number" if kind is float else ""
    if not number:
        return "letters, digits, '.', '_' and '-', at most 64" if name == "run" else "some text"
    unit = f" of {about(name)['unit']}" if about(name)["unit"] else ""
    return number + unit + (" " + " and ".join(limits) if limits else "")


# What people know from OpenDiLoCo (https://github.com/PrimeIntellect-ai/OpenDiLoCo): our name for it, or why it is not needed.
OPENDILOCO: dict[str, str] = {"hv.local_steps": "local_steps", "hv.outer_lr": "outer_lr"}
NOT_NEEDED: dict[str, str] = {
    "hv.galaxy_size": "there are as many replicas as hosts (or groups of replica_hosts hosts)",
    "hv.world_rank": "a replica's rank is its host's place in the inventory",
    "hv.initial_peers": "the hosts of a run know each other from the inventory",
}


def from_opendiloco(
    values: Mapping[str, Any], below: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Turn OpenDiLoCo's names (``hv.local_steps``, or a mapping ``hv``) into ours; they stand for strategy diloco.

    Args:
        below: values that `values` will go over.

    Returns:
        The values with our names, and a line for each name on what became of it.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = value.items() if name == "hv" and isinstance(value, Mapping) else [(None, value)]
        flat |= {name if key is None else f"hv.{key}": one for key, one in inner}
    ours: dict[str, Any] = {}
    notes = []
    for name, value in flat.items():
        known = str(name).replace("-", "_")
        if known in OPENDILOCO:
            ours[OPENDILOCO[known]] = value
            notes.append(f"{name} is {OPENDILOCO[known]} here: {OPENDILOCO[known]}={value}")
        elif known in NOT_NEEDED:
            notes.append(f"{name} is not needed here: {NOT_NEEDED[known]}")
        else:
            ours[name] = value
    if notes and "strategy" not in {**ours, **(below or {})}:
        ours["strategy"] = "diloco"
        notes.append("hv names are OpenDiLoCo's: strategy=diloco")
    return ours, notes


def make_spec(values: Mapping[str, Any], where: str) -> RunSpec:
    """Build a spec from `values`; `where` names their source in errors.

    Raises:
        UserError: an unknown name (with the nearest known one) or a bad value (with what it got and takes).
    """
    values, _ = from_opendiloco(values)
    strange = [f"unknown name {name!r} in {where}{suggest(str(name))}" for name in values if name not in FIELDS]
    if strange:
        raise UserError(f"run spec: {', and '.join(strange)}")
    try:
        return RunSpec.model_validate(dict(values))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            if not problem["loc"]:
                lines.append(problem["msg"].removeprefix("Value error, "))
                continue
            name = str(problem["loc"][0])
            lines.append(f"{name}: got {values.get(name)!r}, takes {takes(name)}")
        raise UserError(f"run spec: {'; '.join(dict.fromkeys(lines))} ({where})") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a run's YAML file into a dict of names and values.

    Raises:
        UserError: no such file, not YAML (with the line), or not a mapping.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"run spec: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"run spec: {path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        why = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"run spec: {path}{line}: not YAML: {why}") from None
    except ValueError as error:  # 2024-99-99 looks like a date to YAML, and is none
        raise UserError(f"run spec: {path}: not YAML: {error}") from None
    except RecursionError:
        raise UserError(f"run spec: {path}: not YAML: nested too deep") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"run spec: {path}: holds a {type(values).__name__}, takes names and values (model: tiny)")
    return {str(name): value for name, value in values.items()}


def read_spec(path: Path | None, overrides: Mapping[str, Any], where: str) -> RunSpec:
    """Read a spec from a YAML file (or none) with `overrides` on top; `where` names the overrides' source."""
    values, _ = from_opendiloco(read_yaml(path) if path else {})
    if path:
        make_spec(values, str(path))
    over, _ = from_opendiloco(overrides, values)
    return make_spec({**values, **over}, where)


def changed_fields(before: RunSpec, now: RunSpec) -> list[str]:
    """Return ``name: was X, now Y`` for every field that differs and that a resumed run may not change."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    return [
        f"{name}: was {old[name]!r}, now {new[name]!r}"
        for name in FIELDS
        if name not in LATER and old[name] != new[name]
    ]


def parse_flags(argv: Sequence[str]) -> dict[str, str]:
    """Turn ``--lr 1e-3 --packing --no-packing --loggers=none`` into names and texts; the spec judges the values.

    Raises:
        UserError: an unknown flag, a stray word, or a flag without its value.
    """
    values: dict[str, str] = {}
    rest = list(argv)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise UserError(f"trainer: stray word {flag!r}; flags look like --lr 1e-3")
        name, has_value, value = flag[2:].partition("=")
        name = name.replace("-", "_")
        negated = name.removeprefix("no_")
        if name not in FIELDS and name.startswith("no_") and negated in FIELDS and FIELDS[negated].annotation is bool:
            values[negated] = "false"
            continue
        if name not in FIELDS and name not in OPENDILOCO and name not in NOT_NEEDED:
            raise UserError(f"run spec: unknown name {name!r} in the flags{suggest(name)}")
        if not has_value:
            if name in FIELDS and FIELDS[name].annotation is bool and (not rest or rest[0].startswith("--")):
                value = "true"
            elif not rest:
                ours = OPENDILOCO.get(name, name)
                raise UserError(
                    f"run spec: --{name} has no value; it takes {takes(ours) if ours in FIELDS else 'some text'}"
                )
            else:
                value = rest.pop(0)
        values[name] = value
    return values


def table() -> str:
    """Return the spec as a Markdown table: the one in docs/run-spec.md."""
    lines = ["| name | takes | default | what it is |", "| --- | --- | --- | --- |"]
    for name, field in FIELDS.items():
        default = field.default
        shown = ",".join(default) if isinstance(default, tuple) else "" if default in (None, "") else str(default)
        shown = shown.lower() if isinstance(default, bool) else shown
        later = " *" if name in LATER else ""
        lines.append(f"| `{name}`{later} | {takes(name)} | {f'`{shown}`' if shown else ''} | {field.description} |")
    return "\n".join(lines)
