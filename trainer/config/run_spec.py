"""The schema of a run. Flags, names for ``-e``, documentation and validation derive from it.

Importable without torch: the controller also validates specs.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from trainer.config.automatic import AUTOMATIC, with_automatic
from trainer.config.dataset_source import DatasetSource, resolve, with_paths
from trainer.config.fields import MAX_COUNT, MAX_NUMBER, MAX_SECONDS, MAX_TEXT, Words, check_input, declare, split_words
from trainer.config.method_fields import MethodFields
from trainer.config.methods import METHODS
from trainer.config.presets import preset_of
from trainer.config.removed_fields import REMOVED_FIELDS, replacement
from trainer.config.reward_source import with_reward_paths
from trainer.config.run_name import default_name, spec_digest
from trainer.config.strategies import AUTO, DEFAULT_STRATEGY, STRATEGIES
from trainer.config.tool_files import DeepSpeedOptions

if TYPE_CHECKING:
    StrategyName = str
    AutomaticName = str
else:
    StrategyName = Literal[(*STRATEGIES, AUTO)]
    AutomaticName = Literal[AUTOMATIC]
Logger = Literal["tensorboard", "wandb", "trackio", "mlflow", "none"]
Interval = Annotated[int, Field(ge=0, le=MAX_COUNT)] | Literal["epoch"]
_INTERVAL = f"a number of steps from 0 to {MAX_COUNT}, or epoch"
DROPPED = "dropped"  # in `keep_going`
_WORD = BeforeValidator(lambda value: value if isinstance(value, bool) else str(value))


_lora = functools.partial(declare, needs="lora_r")
_fsdp = functools.partial(declare, needs="strategy=fsdp")
_deepspeed = functools.partial(declare, needs="strategy=deepspeed")
_diloco = functools.partial(declare, needs="strategy=diloco")


class RunSpec(MethodFields):
    """Everything that defines a training run. The same spec gives the same run on any number of hosts."""

    lora_r: int = declare(
        16, "rank of the LoRA adapters; 0: full fine-tuning", ge=0, le=4096, suggested_names=["lora", "r", "rank"]
    )
    lora_alpha: float = _lora(
        32.0, "scaling of the adapters: lora_alpha / lora_r", gt=0, le=MAX_NUMBER, suggested_names=["alpha"]
    )
    quantize: Literal["none", "nf4"] = declare(
        "none",
        "nf4: frozen base weights in 4 bits under LoRA (QLoRA); requires bitsandbytes, slow on a CPU; auto: nf4 where the model does not fit otherwise",
        automatic=True,
    )
    lora_dropout: float = _lora(
        0.0,
        "dropout before the adapters; its masks depend on the number of ranks",
        ge=0,
        lt=1,
        suggested_names=["dropout"],
    )
    lora_targets: Words = _lora(
        ("all-linear",),
        "names of layers that get an adapter, or all-linear",
        min_length=1,
        max_length=1000,
    )
    precision: Literal["32-true", "bf16-mixed", "fp16-mixed"] = declare(
        "32-true",
        "precision of the computation; trained weights stay in float32; auto: bf16-mixed on GPUs that compute in it and on CPUs with amx_bf16, fp16-mixed on older GPUs, else 32-true",
        automatic=True,
    )
    optimizer: Literal["adamw", "adamw8bit"] = declare(
        "adamw", "adamw8bit keeps both moments in 8 bits; requires bitsandbytes"
    )
    kernels: Literal["auto", "torch"] = declare(
        "auto", "auto: Liger kernels and FlashAttention on CUDA if installed; torch: neither"
    )
    gradient_checkpointing: bool = declare(
        False,
        "recompute activations in the backward pass instead of storing them; auto: where they do not fit",
        automatic=True,
    )
    torch_compile: bool = declare(
        False,
        "compile the model with torch.compile; requires a C++ compiler on every host; auto: on GPUs in a run of 2,000 steps or more",
        automatic=True,
    )
    strategy: StrategyName = declare(
        DEFAULT_STRATEGY,
        f"how ranks share the work; {AUTO}: the fastest strategy that fits in memory, with the reason; unset: {DEFAULT_STRATEGY}, or as {AUTO} where the model does not fit with it",
    )
    balance: Literal["auto", "even"] = declare(
        "auto",
        "rows of a rank: auto: by measured speed; even: equal. A ddp step without dropout does not depend on it. With diloco, fast "
        "replicas take more inner steps; with pipeline, fast ranks hold more layers",
        mutable=True,
    )
    fsdp_shard: Literal["all", "gradients", "host"] = _fsdp(
        "all",
        "fsdp: shard over all ranks; gradients: the same, but layers stay gathered until the backward pass; host: one model per host, over its ranks",
    )
    fsdp_offload: bool = _fsdp(
        False,
        "fsdp: keep weights, gradients and optimizer state in host memory",
        mutable=True,
    )
    deepspeed_stage: int = _deepspeed(
        2,
        "deepspeed: ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also weights",
        ge=1,
        le=3,
        mutable=True,
        suggested_names=["zero_optimization"],
    )
    deepspeed_offload: Literal["none", "optimizer", "all"] = _deepspeed(
        "none",
        "deepspeed: what ZeRO offloads to host memory: optimizer state, or with stage 3 all (also weights)",
        mutable=True,
    )
    deepspeed_config: DeepSpeedOptions = _deepspeed(
        {},
        "deepspeed: options that no field has, such as bucket sizes",
        mutable=True,
        expected="the path of a JSON file, or options of DeepSpeed as a mapping",
    )
    local_steps: int = _diloco(
        10, "diloco: inner steps between two synchronizations of the replicas", ge=1, le=100_000, unit="steps"
    )
    outer_lr: float = _diloco(0.7, "diloco: learning rate of the outer optimizer", gt=0, le=MAX_NUMBER)
    outer_momentum: float = _diloco(0.9, "diloco: maximum Nesterov momentum of the outer optimizer", ge=0, lt=1)
    replica_hosts: int = declare(
        1,
        "diloco, averaging: number of consecutive hosts that form one replica",
        ge=1,
        le=4096,
        unit="hosts",
        needs="strategy=diloco|averaging",
    )
    averaging_rank: int = declare(
        0,
        "averaging: rank of the averaged adapter; 0: exact, the sum of the workers' ranks; less: the best approximation",
        ge=0,
        le=4096,
        needs="strategy=averaging lora_r",
    )
    replica_strategy: Literal["ddp", "fsdp", "pipeline"] = _diloco(
        "ddp", "diloco: strategy within a replica; fsdp shards the model, pipeline divides its layers"
    )
    comm_dtype: Annotated[Literal["auto", "32", "bf16"], _WORD] = declare(
        "auto",
        "data type in transit between ranks: bf16 halves the bytes and rounds the values; auto: bf16 for diloco, else 32",
    )
    pipeline_layers: str = declare(
        "",
        "pipeline: layers of every rank; empty: by measured speed and memory",
        mutable=True,
        max_length=MAX_TEXT,
        pattern=r"^([0-9]{1,4}(,[0-9]{1,4})*)?$",
        expected="numbers separated by commas, such as 10,6",
        needs="strategy=pipeline",
    )
    automatic: Annotated[tuple[AutomaticName, ...], BeforeValidator(split_words)] = declare(
        AUTOMATIC, "the fields that are auto, until the hosts have decided them", mutable=True
    )
    seed: int = declare(1, "random seed of sample order, dropout and new weights", ge=0, lt=2**32)
    shared_seed: int | None = declare(
        None,
        "seed of what compared or merged runs share: held-out samples, parts of data_part, weights of model=tiny; unset: seed",
        ge=0,
        lt=2**32,
    )
    data_part: str = declare(
        "",
        "training samples; empty: all; shard:2/4: the second of 4 disjoint parts; bootstrap: as many, drawn with replacement",
        pattern=r"^(shard:[0-9]{1,4}/[0-9]{1,4}|bootstrap)?$",
        expected="shard:2/4, bootstrap, or nothing",
    )
    eval_split: float = declare(0.05, "fraction of the samples held out for evaluation; 0: none", ge=0, le=0.5)
    eval_interval: Interval = declare(
        100,
        "steps between evaluations; epoch: after each epoch; 0: only at the end",
        expected=_INTERVAL,
        mutable=True,
        needs="eval_split",
    )
    eval_start: bool = declare(
        False,
        "also evaluate before the first step: the loss of the untrained model",
        mutable=True,
        needs="eval_split",
    )
    checkpoint_interval: Interval = declare(
        25, "steps between checkpoints; epoch: after each epoch; 0: only at the end", expected=_INTERVAL, mutable=True
    )
    checkpoint_keep: int = declare(
        2, "number of checkpoints to keep; -1: all", ge=1, minus_one=MAX_COUNT, le=MAX_COUNT, mutable=True
    )
    resume: Literal["auto", "never"] = declare(
        "auto", "auto: resume from the newest complete checkpoint; never: fail if the run has one", mutable=True
    )
    merge: bool = _lora(False, "also write base model and adapter as one model: merged/ on the head", mutable=True)
    loggers: Annotated[tuple[Logger, ...], BeforeValidator(split_words)] = declare(
        ("tensorboard",), "metric loggers", mutable=True, min_length=1
    )
    collective_timeout: float = declare(
        600.0,
        "timeout of a collective; the run fails when it expires",
        ge=0.001,
        le=MAX_SECONDS,
        unit="seconds",
        mutable=True,
        suggested_names=["timeout"],
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_input(cls, value: Any, info: ValidationInfo) -> Any:
        return check_input(value, cls.model_fields[str(info.field_name)])

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {name: value for name, value in given.items() if name in cls.model_fields or name not in REMOVED_FIELDS}
        for name in given.keys() - known.keys():  # of a queued run that an earlier version has prepared
            if reason := replacement(given[name], REMOVED_FIELDS[name]):
                raise ValueError(f"{name} {reason}")
        if known.get("seq_length") == "auto":
            del known["seq_length"]
        return preset_of(known) | with_automatic(known)

    @property
    def sources(self) -> tuple[DatasetSource, ...]:
        """The datasets of the run, at least one, each with its own split, configuration and columns."""
        return resolve(
            self.dataset,
            split=self.dataset_split,
            config=self.dataset_config,
            columns=self.columns,
            ignore_keys=tuple(name for name in self.keep_going if name != DROPPED),
        )

    @property
    def allows_dropped(self) -> bool:
        """Whether the run trains although more than half of its samples are dropped."""
        return DROPPED in self.keep_going

    @property
    def common_seed(self) -> int:
        """The seed of what this run shares with others, see `shared_seed`."""
        return self.seed if self.shared_seed is None else self.shared_seed

    @property
    def shard(self) -> tuple[int, int] | None:
        """The number of the part of the samples, from 1, and the number of all parts; None without `data_part=shard:...`."""
        kind, _, numbers = self.data_part.partition(":")
        part, _, parts = numbers.partition("/")
        return (int(part), int(parts)) if kind == "shard" else None

    @property
    def dataset_name(self) -> str:
        return ", ".join(source.path for source in self.sources)

    @property
    def reward_files(self) -> list[str]:
        return [reward.use for reward in self.reward if reward.is_file]

    def with_reward_files(self, paths: Sequence[str]) -> "RunSpec":
        return self.model_copy(update={"reward": with_reward_paths(self.reward, paths)}) if paths else self

    def with_dataset_paths(self, paths: Sequence[str]) -> "RunSpec":
        return self.model_copy(update={"dataset": with_paths(self.dataset, paths)})

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step over all ranks. Depends on the spec alone, never on the number of hosts."""
        accumulated = (self.gradient_accumulation or 0) * self.batch_size
        return accumulated or self.total_batch_size or 32

    @property
    def learns_from_prompts(self) -> bool:
        """Whether the samples are prompts, and the model writes `grpo_group_size` completions of each, one a row."""
        return METHODS[self.method].data == "prompts"

    @property
    def samples_per_step(self) -> int:
        """Rows of a step as the order of the samples has them: prompts, if the model writes several completions of each."""
        return self.rows_per_step // (self.grpo_group_size if self.learns_from_prompts else 1)

    @property
    def completion_length(self) -> int:
        """Maximum number of tokens of a completion."""
        return self.grpo_max_tokens or self.seq_length // 2

    @property
    def prompt_length(self) -> int:
        """Maximum number of tokens of a prompt for completions."""
        return self.seq_length - self.completion_length

    @property
    def fake_rows(self) -> int:
        """Number of rows that `fake_data` makes: those of all steps, or of a few steps without `max_steps`."""
        return self.rows_per_step * (self.max_steps or 32)

    @property
    def fake_tokens(self) -> int:
        """Number of random tokens that `fake_data` makes."""
        return self.fake_rows * self.seq_length

    def digest(self) -> str:
        """Return 6 hex digits that identify all fields that a resumed run must not change."""
        return spec_digest(self)

    def named(self) -> "RunSpec":
        """Return the spec with a run name. The default name is the model's name and the digest."""
        return self if self.run else self.model_copy(update={"run": default_name(self)})

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.values(), sort_keys=False)

    def values(self) -> dict[str, Any]:
        """Return the fields as plain data, as a user would write them: `auto` for those that the hosts decide."""
        values = self.model_dump(mode="json", exclude={"automatic"})
        return {
            name: "auto" if name in self.automatic else value
            for name, value in values.items()
            if name != "strategy" or name not in self.automatic
        }


FIELDS: dict[str, FieldInfo] = {name: field for name, field in RunSpec.model_fields.items() if name != "automatic"}
"""What a user sets. `automatic` is the state of a decision: which of them have the value auto."""
