"""The fields of a run spec that every run uses: the model, the data, and how a step trains on it."""

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from trainer.config.dataset_source import EXPECTED, Columns, Datasets
from trainer.config.fields import MAX_COUNT, MAX_NUMBER, Words, declare
from trainer.config.methods import DEFAULT_METHOD, METHODS
from trainer.config.presets import OBSERVATORY, TINY

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[(*METHODS,)]


class BasicFields(BaseModel):
    """These fields, in the order of the documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())

    run: str = declare(
        "",
        "name of the run and of its folder; empty: the model's name and a digest of the spec",
        suggested_names=["name"],
        mutable=True,
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$",
    )
    method: MethodName = declare(
        DEFAULT_METHOD, "what the model learns from the data; see docs/preferences.md and docs/rewards.md"
    )
    model: str = declare(
        TINY,
        "tiny (generated locally), smollm2 (a real chat model), a local folder, host:/folder of every host, or a hub id (org/name)",
        min_length=1,
    )
    script: str = declare("", "Python file that every rank runs in place of the trainer; see docs/your-code.md")
    backend: Literal["auto", "peft", "unsloth"] = declare(
        "auto",
        "library that loads the model and adds LoRA; auto: unsloth if all hosts have it and CUDA and the spec permits it (LoRA, 16-bit precision, whole models), otherwise peft",
    )
    dataset: Datasets = declare(
        OBSERVATORY,
        "observatory (part of trainyard), a file (JSONL, JSON, CSV, Parquet, Arrow), a folder, a hub id, host:/path of every host, "
        "or a list with weights; see docs/datasets.md",
        expected=EXPECTED["dataset"],
    )
    dataset_split: str = declare("train", "split of a hub dataset or a folder", min_length=1)
    dataset_config: str = declare("", "configuration (subset) of a hub dataset")
    columns: Columns = declare(
        {},
        "names of the columns of a dataset, if they differ from those of the shapes",
        expected=EXPECTED["columns"],
    )
    keep_going: Words = declare(
        (),
        "what is ignored instead of refused: keys of records and messages, such as score; dropped: that more than half of the "
        "samples, or of a teacher's answers, are dropped",
    )
    system: Literal["keep", "prepend"] = declare(
        "keep",
        "system message of a chat: keep leaves it to the chat template; prepend joins it to the first user message, for templates "
        "without a system role",
        expected="keep or prepend (the system message of a distillation is system_message)",
    )
    fake_data: bool = declare(False, "train on random tokens instead of the dataset, to measure speed")
    train_on: Literal["answer", "all"] = declare(
        "answer",
        "tokens that contribute to the loss: the assistant's answers, or all",
        needs="method=sft",
    )
    seq_length: int = declare(
        1024,
        "maximum length of a row; longer samples are truncated; unset or auto: at most the positions of the model",
        unit="tokens",
        ge=8,
        le=1_048_576,
    )
    packing: Literal["auto"] | bool = declare(
        "auto", "pack several samples into one row, separated by their positions; auto: if the model keeps them apart"
    )
    epochs: int = declare(1, "number of passes over the dataset", ge=1, le=100_000)
    max_steps: int = declare(
        0,
        "number of optimizer steps, in place of epochs; repeats the data; 0 or -1: all epochs",
        ge=0,
        minus_one=0,
        le=MAX_COUNT,
        unit="steps",
    )
    batch_size: int = declare(
        4,
        "rows of a micro-batch, the input of one forward pass; auto: as many as fit, up to 16,384 tokens on a GPU and 4 rows on a CPU",
        ge=1,
        le=65_536,
        unit="rows",
        automatic=True,
    )
    gradient_accumulation: int | None = declare(
        None,
        "micro-batches of one optimizer step over all ranks; an alternative to total_batch_size",
        ge=1,
        le=1_048_576,
    )
    total_batch_size: int | None = declare(
        None,
        "rows of one optimizer step over all ranks; unset: 32",
        ge=1,
        le=1_048_576,
        unit="rows",
        suggested_names=["train_batch_size"],
    )
    lr: float = declare(2e-4, "peak learning rate", gt=0, le=MAX_NUMBER, suggested_names=["learning_rate"])
    schedule: Literal["cosine", "linear", "constant"] = declare("cosine", "learning rate schedule after the warmup")
    warmup: float = declare(
        0.03,
        "linear warmup: a number of steps (1 or more), or a fraction of all steps (below 1)",
        ge=0,
        le=MAX_COUNT,
    )
    weight_decay: float = declare(0.0, "weight decay of AdamW; applies to matrices only", ge=0, le=MAX_NUMBER)
    max_grad_norm: float = declare(
        1.0, "maximum gradient norm; 0 or -1 disables clipping", ge=0, minus_one=0, le=MAX_NUMBER
    )
