"""What a run trains and on which data, as this rank loads it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trainer.common.errors import UserError
from trainer.common.inputs import user_path
from trainer.config import RunSpec
from trainer.config.reward_source import check_columns
from trainer.data.corpus import Corpus, select
from trainer.data.encode import encoded_dataset
from trainer.data.mixture import describe_mixture
from trainer.data.order import Order, held_out, training_samples
from trainer.data.tiny import with_tiny_model
from trainer.data.token_ids import usable_tokens
from trainer.distillation.teacher import TeacherModel, load_teacher
from trainer.distributed.world import World
from trainer.loop import unsloth_backend
from trainer.loop.final_export import read_origin
from trainer.loop.template_date import ends_with_epochs, prints_date, run_date
from trainer.method import METHODS, method_of
from trainer.method.module_with_loss import ModelWithLoss
from trainer.model_files.adapter_folder import refuse_adapter
from trainer.model_files.base_digest import base_digest
from trainer.model_files.base_weights import embedding_rows
from trainer.models.model import load_tokenizer, require_compiler
from trainer.models.packing_check import resolve_packing
from trainer.models.tokenizer_output import untrained_end
from trainer.records.telemetry import Heartbeat
from trainer.rewards.reward_file import check_reward_file
from trainer.strategy import Strategy, plan_of

Settle = Callable[[RunSpec, int], RunSpec]  # decides what is still automatic, from the number of steps, about


def as_it_is(spec: RunSpec, steps: int) -> RunSpec:
    """Return the spec with what is automatic in it: a run whose fields are all decided needs no more."""
    return spec


@dataclass(frozen=True)
class TrainingInputs:
    """What a run trains and on which data, loaded on this rank.

    `data`: the digest of the encoded dataset; `train_samples`: the number of different training samples; `teacher`: the
    model that teaches, if the spec names one; `template_date`: the date that the chat template prints, empty if it prints
    none; `base`: the digest of the base model's files, empty if no host has all of them; `repeats`: whether
    `max_steps` repeats the data, see `Order`.
    """

    spec: RunSpec
    tokenizer: Any
    module: ModelWithLoss
    corpus: Corpus
    train_set: Corpus
    eval_set: Corpus
    data: str
    train_samples: int
    teacher: TeacherModel | None = None
    template_date: str = ""
    base: str = ""
    repeats: bool = True

    @cached_property
    def order(self) -> Order:
        """The samples of every step. It depends on the resolved `packing`."""
        return Order.of(self.spec, self.train_set.lengths, self.train_set.sources, repeats=self.repeats)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The tokens of every training sample, int64 [samples]."""
        return self.train_set.lengths

    @cached_property
    def trained_counts(self) -> np.ndarray:
        """The tokens with loss of every training sample, int64 [samples]."""
        return self.train_set.trained_counts()

    @cached_property
    def weights(self) -> np.ndarray:
        """The weight of every training sample in the mean loss, int64 [samples]."""
        return method_of(self.spec).weights(self.train_set)

    def mixture(self, run_dir: Path) -> list[str]:
        """Return one line for each of several datasets: its part of an epoch."""
        sources = self.train_set.sources
        numbers = np.zeros(len(self.train_set), int) if sources is None else sources
        return describe_mixture(self.spec, numbers, read_origin(run_dir).get("dataset", ""))

    def weigh(self, rows: Sequence[Sequence[int]]) -> int:
        """Return the weight of `rows` (lists of sample indices) in the mean loss."""
        return int(self.weights[[sample for row in rows for sample in row]].sum())

    @property
    def steps(self) -> int:
        return self.order.steps


def load_inputs(
    spec: RunSpec, store: Path, world: World, heartbeat: Heartbeat, run_dir: Path, settle: Settle
) -> TrainingInputs:
    """Load tokenizer, data and model. Every rank calls it.

    `run_dir`: the run folder, with the checkpoints whose date the chat template prints again. `settle`: called before
    the model is loaded. Raises UserError: one of them is unavailable or invalid, or the ranks have different data.
    """
    paths = [source.path for source in spec.sources]
    spec = spec.with_dataset_paths([str(user_path(p, "dataset")) if p.startswith("~") else p for p in paths])
    spec = unsloth_backend.resolve_backend(spec, world)
    requested = spec
    spec = world.once_per_host(lambda: with_tiny_model(requested, store))
    if spec.torch_compile:
        require_compiler(world.device)
    refuse_adapter(spec.model)
    tokenizer = load_tokenizer(spec.model)
    date = run_date(run_dir / "checkpoints", world)
    rows = embedding_rows(spec.model)
    corpus = world.once_per_host(lambda: encoded_dataset(spec, tokenizer, run_dir, date, rows))
    if spec.fake_data:
        corpus = replace(corpus, tokens=corpus.tokens % usable_tokens(tokenizer, rows))
    corpus.report.loss.check(spec.allows_dropped)
    if corpus.records:
        for file in spec.reward_files:
            check_reward_file(file)
        notes = check_columns(spec.reward, [record["columns"] for record in corpus.records])
        for note in notes if world.rank == 0 else ():
            print(note)
    digests = world.gather(corpus.digest())
    if other := next((rank for rank, digest in enumerate(digests) if digest != digests[0]), 0):
        raise UserError(
            f"dataset: the samples or the tokenizer of rank {other} differ from those of rank 0: "
            "use the same dataset and model on all hosts"
        )
    out = held_out(spec, len(corpus), corpus.sources)
    chosen = training_samples(spec, len(corpus), out)
    train_set, eval_set = select(corpus, chosen), select(corpus, sorted(out))
    teacher = load_teacher(spec, tokenizer, world.device)
    if spec.automatic:
        tokens = float(np.minimum(train_set.lengths, spec.seq_length).sum())  # packed rows are full
        steps = max(1, round(spec.epochs * tokens / spec.seq_length / spec.rows_per_step))
        spec = settle(spec, spec.max_steps or steps)
    heartbeat("starting", note="loading the model")
    module = plan_of(spec).load_module(spec, world)
    for line in filter(None, notes_of(spec, module, tokenizer) if world.rank == 0 else ()):
        print(line)
    shown_date = date.isoformat() if prints_date(tokenizer) else ""
    base = next(filter(None, world.gather(base_digest(spec.model) if world.is_host_leader else "")), "")
    repeats = not ends_with_epochs(spec, run_dir / "checkpoints", world)
    return TrainingInputs(
        spec,
        tokenizer,
        module,
        corpus,
        train_set,
        eval_set,
        digests[0],
        len(set(chosen)),
        teacher,
        shown_date,
        base,
        repeats,
    )


def notes_of(spec: RunSpec, module: ModelWithLoss, tokenizer: Any) -> list[str]:
    """Return lines about what a run does not train as the files of its model, or its spec, may suggest; empty ones among them."""
    model: Any = module.model
    base = model.get_base_model() if spec.lora_r else model
    lost = module.router_loss.left_out
    dropout = spec.lora_dropout if spec.lora_r and not module.method.keeps_dropout else 0
    stays = f"lora_dropout: {dropout:g} stays on with method={spec.method}, unlike in TRL: set 0 for its losses"
    return [
        getattr(model, "left_out", ""),
        lost and f"{lost} of the model's config: no such loss is trained, as transformers computes none for this model",
        stays if dropout else "",
        untrained_end(spec, base, tokenizer),
    ]


def with_packing(inputs: TrainingInputs, strategy: Strategy, world: World) -> TrainingInputs:
    """Replace `packing: auto` by what suits the model. Every rank calls it.

    Raises UserError: `packing: true`, but the model or its teacher mixes the samples of a packed row.
    """
    name = "this model"
    if not METHODS[inputs.spec.method].packs:
        return replace(inputs, spec=inputs.spec.model_copy(update={"packing": False}))
    with strategy.autocast():
        vocabulary = usable_tokens(inputs.tokenizer, embedding_rows(inputs.spec.model))
        packing = resolve_packing(inputs.spec, inputs.module.model, vocabulary, world)
        if packing and (teacher := inputs.teacher):
            name = "the teacher"
            packing = resolve_packing(inputs.spec, teacher.model, teacher.vocabulary, world, name)
    if inputs.spec.packing and not packing and world.rank == 0:
        print(f"packing: off, because {name} mixes the samples of a packed row")
    return replace(inputs, spec=inputs.spec.model_copy(update={"packing": packing}))
