"""The training loop: from a spec to trained weights."""

import math
import shutil
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer import unsloth_backend
from trainer.adapter_folder import refuse_adapter
from trainer.base_digest import base_digest
from trainer.base_weights import embedding_rows
from trainer.checkpoint import Saver, find_checkpoint
from trainer.config import RunSpec
from trainer.data.corpus import Corpus, split
from trainer.data.encode import encoded_dataset
from trainer.data.mixture import describe_mixture
from trainer.data.order import Order, held_out
from trainer.data.packing import collate
from trainer.data.shares import micro_batches
from trainer.data.tiny import with_tiny_model
from trainer.data.token_ids import check_token_ids, usable_tokens
from trainer.distillation.loss import TopProbabilities
from trainer.distillation.on_policy import Writer, is_on_policy
from trainer.distillation.teacher import TeacherModel, isolates_samples, load_teacher
from trainer.distillation.teacher_client import RemoteTeacher
from trainer.distributed.world import World
from trainer.errors import NonFiniteError, UserError
from trainer.export import finalize, read_origin
from trainer.inputs import user_path
from trainer.model import TokenLoss, load_tokenizer, require_compiler
from trainer.optim import learning_rate
from trainer.packing_check import resolve_packing
from trainer.run_dir import StopRequest
from trainer.run_state import RunState
from trainer.step_metrics import Reduced, StepMetrics
from trainer.strategy import Batch, Stopped, Strategy, make_strategy, plan_of
from trainer.supervise.environment import LAYERS
from trainer.telemetry import Heartbeat, Recorder, drop_invalid_records, gpu_usage, replicate_metrics
from trainer.template_date import prints_date, run_date


@dataclass(frozen=True)
class Job:
    """What a run trains and on which data, loaded on this rank.

    `data`: the digest of the encoded dataset; `teacher`: the model that teaches, if the spec names one; `template_date`: the
    date that the chat template prints, empty if it prints none; `base`: the digest of the base model's files, empty if no host
    has all of them.
    """

    spec: RunSpec
    tokenizer: Any
    module: TokenLoss
    corpus: Corpus
    train_set: Corpus
    eval_set: Corpus
    data: str
    teacher: TeacherModel | RemoteTeacher | None = None
    template_date: str = ""
    base: str = ""

    @cached_property
    def order(self) -> Order:
        """The samples of every step. It depends on the resolved `packing`."""
        return Order.of(self.spec, self.train_set.lengths, self.train_set.sources)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The tokens of every training sample, int64 [samples]."""
        return self.train_set.lengths

    @cached_property
    def trained_counts(self) -> np.ndarray:
        """The tokens with loss of every training sample, int64 [samples]."""
        return self.train_set.trained_counts()

    def mixture(self, run_dir: Path) -> list[str]:
        """Return one line for each of several datasets: its part of an epoch."""
        sources = self.train_set.sources
        numbers = np.zeros(len(self.train_set), int) if sources is None else sources
        return describe_mixture(self.spec, numbers, read_origin(run_dir).get("dataset", ""))

    def count_tokens(self, rows: Sequence[Sequence[int]]) -> int:
        """Return the tokens with loss of `rows` (lists of sample indices)."""
        return int(self.trained_counts[[sample for row in rows for sample in row]].sum())

    @property
    def steps(self) -> int:
        """The number of steps of the run."""
        return min(self.order.steps, self.spec.max_steps) if self.spec.max_steps else self.order.steps


def load_job(spec: RunSpec, store: Path, world: World, heartbeat: Heartbeat, run_dir: Path) -> Job:
    """Load tokenizer, data and model. Every rank calls it.

    Args:
        run_dir: the run folder, with the checkpoints whose date the chat template prints again.

    Raises:
        UserError: one of them is unavailable or invalid, or the ranks have different data.
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
    date = run_date(spec, tokenizer, run_dir / "checkpoints", world)
    rows = embedding_rows(spec.model)
    corpus = world.once_per_host(lambda: encoded_dataset(spec, tokenizer, store, date, rows))
    if spec.fake_data:
        corpus = replace(corpus, tokens=corpus.tokens % usable_tokens(tokenizer, rows))
    corpus.report.loss.check(spec.allow_dropped)
    data = common_digest(corpus, world)
    check_token_ids(spec.model, tokenizer, corpus, rows)
    train_set, eval_set = split(corpus, held_out(spec, len(corpus), corpus.sources))
    teacher = load_teacher(spec, tokenizer, world.device, lambda note: heartbeat("starting", note=note))
    module = plan_of(spec).load_module(spec, world, run_dir, lambda: heartbeat("starting", note="loading the model"))
    shown_date = date.isoformat() if prints_date(tokenizer) else ""
    # A host of a pipeline may lack files: the first host that has all of them decides.
    base = next(filter(None, world.gather(base_digest(spec.model) if world.is_host_leader else "")), "")
    return Job(spec, tokenizer, module, corpus, train_set, eval_set, data, teacher, shown_date, base)


def with_packing(job: Job, strategy: Strategy, world: World, store: Path) -> Job:
    """Replace `packing: auto` by what suits the model. Every rank calls it.

    Raises:
        UserError: `packing: true`, but the model or its teacher mixes the samples of a packed row.
    """
    name = "this model"
    with strategy.autocast():
        vocabulary = usable_tokens(job.tokenizer, embedding_rows(job.spec.model))
        packing = resolve_packing(job.spec, job.module.model, vocabulary, world, store)
        if packing and job.teacher:
            name, packing = "the teacher", isolates_samples(job.spec, job.teacher, world, store)
    if job.spec.packing and not packing and world.rank == 0:
        print(f"packing: off, because {name} mixes the samples of a packed row")
    return replace(job, spec=job.spec.model_copy(update={"packing": packing}))


def common_digest(corpus: Corpus, world: World) -> str:
    """Return the digest of the data after checking that it is the same on every rank. Every rank calls it.

    Raises:
        UserError: the digests differ, so the ranks would disagree about the samples of a step.
    """
    digests = world.gather(corpus.digest())
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise UserError(
            f"dataset: the samples or the tokenizer of rank {other} differ from those of rank 0: "
            "use the same dataset and model on all hosts"
        )
    return digests[0]


class Batches:
    """Arranges rows of a corpus as micro-batches on the device of this rank."""

    def __init__(self, job: Job, world: World, strategy: Strategy, heartbeat: Heartbeat) -> None:
        self._job, self._world, self._pad = job, world, job.tokenizer.pad_token_id or 0
        self._strategy, self._heartbeat = strategy, heartbeat
        self._writer: Writer | None = None
        # A compiled model would be recompiled for every new length.
        self._length = job.spec.seq_length if job.spec.torch_compile else None

    def __call__(self, corpus: Corpus, rows: Sequence[Sequence[int]]) -> Batch:
        """Return the micro-batch of these rows (lists of sample indices): int64 [rows, T] each."""
        arrays = collate(corpus, rows, pad=self._pad, length=self._length)
        return Batch(*map(self._on_device, arrays))

    def taught(self, corpus: Corpus, rows: Sequence[Sequence[int]], step: int) -> Batch:
        """Return the micro-batch of these rows at `step` (from 0) with the teacher's probabilities, if the run has a
        teacher."""
        teacher, weights = self._job.teacher, None
        if is_on_policy(self._job.spec, step):
            corpus, rows, weights = self._write(corpus, rows, step)
        batch = self(corpus, rows)
        if teacher:
            with self._strategy.autocast():
                return batch._replace(teacher=teacher.judge(batch, weights))
        if corpus.targets is None:
            return batch
        arrays = corpus.targets.lay_out(rows, corpus.starts, batch.ids.shape[1])
        return batch._replace(teacher=TopProbabilities(*map(self._on_device, arrays)))

    def all_taught(self, corpus: Corpus, parts: Sequence[Sequence[Sequence[int]]], step: int) -> Iterator[Batch]:
        """Yield what `taught` returns for the rows of each micro-batch of an update.

        A teacher on another host receives the next micro-batch before the caller trains on this one.
        """
        ready: deque[Batch] = deque()
        for rows in parts:
            ready.append(self.taught(corpus, rows, step))
            if len(ready) > (self._job.teacher.ahead if self._job.teacher else 0):
                yield ready.popleft()
        yield from ready

    def _write(
        self, corpus: Corpus, rows: Sequence[Sequence[int]], step: int
    ) -> tuple[Corpus, list[list[int]], torch.Tensor]:
        """Let the student write the answers of these rows; see `Writer`."""
        module = self._strategy.plain
        if self._writer is None:
            self._writer = Writer(self._job.spec, self._job.tokenizer, module.model, self._world.device)
        module.eval()
        try:
            with self._strategy.autocast():
                return self._writer(corpus, rows, step, lambda: self._heartbeat("training", note="writing answers"))
        finally:
            module.train()

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._world.device, non_blocking=True)


class Evaluation:
    """Computes the loss on the held-out samples. `loss`: the newest result; `step`: the step it belongs to, or -1."""

    def __init__(self, job: Job, world: World, strategy: Strategy, batches: Batches, heartbeat: Heartbeat) -> None:
        self._job, self._world, self._strategy = job, world, strategy
        self._batches, self._heartbeat = batches, heartbeat
        self.loss: float | None = None
        self.step = -1

    def __call__(self) -> float | None:
        """Return the mean loss per token, the same on every rank; None without samples. Every rank calls it."""
        corpus, spec, strategy, world = self._job.eval_set, self._job.spec, self._strategy, self._world
        if not len(corpus):
            return None
        order = Order(
            corpus.lengths, seed=spec.seed, capacity=spec.seq_length, packing=bool(spec.packing), epochs=1, rows=1
        )
        rows = order.epoch(0)
        division = strategy.divide(rows)
        tokens = float(corpus.trained_counts()[[sample for row in division.mine for sample in row]].sum())
        module = strategy.plain
        module.eval()
        loss = 0.0
        with strategy.synchronized():
            for part in micro_batches(division.computed, spec.batch_size, strategy.rounds(len(rows))):
                self._heartbeat("evaluating")
                loss += float(strategy.loss(self._batches(corpus, part)))
        module.train()
        loss, tokens = world.sum([loss, tokens])
        return loss / max(1.0, tokens)

    def update(self, step: int) -> float | None:
        """Evaluate the model after `step` unless that was done; return and keep the loss. Every rank calls it.

        Raises:
            NonFiniteError: the loss is not finite, so the model is unusable.
        """
        if self.step != step:
            self.loss, self.step = self(), step
        if self.loss is not None and not math.isfinite(self.loss):
            raise NonFiniteError("evaluation loss is not a number", step, self._job.spec.lr)
        return self.loss


def train_step(
    job: Job, strategy: Strategy, batches: Batches, global_rank: int, step: int, metrics: StepMetrics
) -> list[list[int]]:
    """Train this rank's share of `step` (from 0) and add its metrics; return its rows (lists of sample indices).

    Raises:
        NonFiniteError: the gradient is not finite; the weights are unchanged.
    """
    spec = job.spec
    started = time.perf_counter()
    rows = strategy.local_rows(job.order.step(step))
    lr = learning_rate(spec, step, job.steps)
    loss, position, norm = torch.zeros((), dtype=torch.float64), 0, math.nan
    local: list[list[int]] = []
    for update in strategy.updates(step, rows):
        # Every rank knows all rows, so the token count of an update needs no communication.
        tokens = job.count_tokens(update.rows)
        parts = micro_batches(update.computed, spec.batch_size, strategy.rounds(len(update.rows)))
        remaining = len(parts)
        for batch in batches.all_taught(job.train_set, parts, step):
            # The seed for dropout depends only on the step, the rank and the position in the step, so that a resumed
            # run draws the same numbers as an uninterrupted one.
            torch.manual_seed(spec.seed + 1_000_003 * (step + 1) + 7919 * (global_rank + 1) + position)
            position, remaining = position + 1, remaining - 1
            loss += strategy.backward(batch, tokens, last=not remaining).double().cpu()
        try:
            norm = strategy.step(lr)
        except FloatingPointError:
            # The loss of another rank can be the cause.
            what = "gradient norm is not finite" if math.isfinite(loss) else "loss is not a number"
            raise NonFiniteError(what, step + 1, spec.lr) from None
        local += update.mine
    samples = [sample for row in local for sample in row]
    metrics.add(
        step + 1,
        job.steps,
        loss=float(loss),
        lr=lr,
        grad_norm=norm,
        counts={
            "tokens": int(job.lengths[samples].sum()),
            "trained_tokens": job.count_tokens(local),
            "samples": len(samples),
        },
        scheduled=sum(map(len, rows)),
        rows=strategy.rows,
        seconds=time.perf_counter() - started,
    )
    return local


def report(
    reduced: Reduced, state: RunState, recorder: Recorder, heartbeat: Heartbeat, usage: dict[str, float]
) -> None:
    """Add the steps up to a synchronization to the totals and the records, and report the newest one in the heartbeat.

    Args:
        usage: see gpu_usage.
    """
    comm: dict[str, Any] = (
        {"comm_share": [round(value, 4) for value in reduced.comm_share]} if reduced.comm_share else {}
    )
    for record in reduced.records:
        eta = state.add(record, reduced.seconds)
        record |= {"step_seconds": reduced.step_seconds} | comm | ({"gpu": usage} if usage else {})
        recorder.step(record, eta=eta, last=record["step"] == state.steps)
    newest = reduced.records[-1]
    heartbeat(
        "training",
        step=state.step,
        steps=state.steps,
        loss=newest["loss"],
        tokens_per_second=newest["tokens_per_second"],
        eta=eta,
        note="",
        step_seconds=[round(value, 4) for value in reduced.step_seconds],
        **comm,
        gpu=usage,
    )


def restore(checkpoints: Path, strategy: Strategy, state: RunState, spec: RunSpec, heartbeat: Heartbeat) -> None:
    """Load the newest checkpoint of the hosts, if there is one. Every rank calls it.

    Raises:
        UserError: no checkpoint is usable, or it is that of other data or another base model.
    """
    if newest := find_checkpoint(checkpoints, strategy.world, print, strategy.per_host_files):
        strategy.load(newest)
        state.restore(newest, spec)
        print(f"resuming from step {state.step} of {state.steps}")
        heartbeat("starting", force=True, resumed=state.step)


def is_due(interval: int, previous: int, step: int) -> bool:
    """Return whether a multiple of `interval` (0: never) lies after step `previous` and not after `step`."""
    return bool(interval) and step // interval > previous // interval


def open_records(job: Job, run_dir: Path, world: World, state: RunState) -> Recorder:
    """Remove invalid records, replicate the metrics to all hosts, and open the records. Every rank calls it."""
    if world.is_host_leader:
        drop_invalid_records(run_dir, state.history)
    world.barrier()
    replicate_metrics(run_dir, world, state.step)
    recorder = Recorder(job.spec, run_dir, world, state.history)
    if world.rank == 0:
        for line in job.mixture(run_dir):
            print(line)
        print(
            f"{len(job.train_set)} samples, {job.order.rows_per_epoch} rows per epoch, {job.steps} steps of "
            f"{job.spec.rows_per_step} rows on {world.size} ranks; {len(job.eval_set)} samples held out"
        )
        for line in job.corpus.report.lines("data: "):
            print(line)
        if job.teacher:
            print(f"teacher: {job.spec.teacher}; {job.spec.gkd_lambda:.0%} of the steps use answers of the student")
        if targets := job.corpus.targets:
            print(
                f"{targets.matched} samples have log-probabilities of a teacher; {targets.unmatched} train on the text alone, "
                "because the teacher splits their answers into other tokens"
            )
    return recorder


def train(spec: RunSpec, run_dir: Path, data_dir: Path, world: World, heartbeat: Heartbeat) -> dict[str, Any]:
    """Run the spec in `run_dir` to its end, from its newest checkpoint if there is one. Every rank calls it.

    Returns:
        The result as in result.json; its `status` is finished, or stopped after a request to stop.

    Raises:
        UserError: an error that a user can fix.
    """
    stop_request = StopRequest(run_dir)
    heartbeat("starting", note="loading the model")
    checkpoints = run_dir / "checkpoints"
    job = load_job(spec, data_dir / "store", world, heartbeat, run_dir)
    strategy = make_strategy(job.spec, world, job.module)
    job = with_packing(job, strategy, world, data_dir / "store")
    spec, steps = job.spec, job.steps
    strategy.count_tokens = job.count_tokens
    all_ranks, world = world, strategy.world
    batches = Batches(job, world, strategy, heartbeat)
    state = RunState(steps, world.size, job.data, bool(spec.packing), spec.backend, job.template_date, job.base)

    def waiting() -> bool:
        status, awaited = ("training", "slower ranks") if state.started else ("starting", "other replicas")
        heartbeat(status, note=f"waiting for {awaited}")
        return bool(stop_request)

    restore(checkpoints, strategy, state, spec, heartbeat)
    # Microseconds, because the strategy exchanges the name of the start as a float.
    here = {"start": f"{time.time_ns() // 1000:x}", "head": f"{socket.gethostname()}:{run_dir}"}
    start = world.gather(here)[0]
    try:
        if strategy.join(start["start"], steps, run_dir, state.checkpoint_state, waiting):
            restore(checkpoints, strategy, state, spec, heartbeat)
    except Stopped:
        if world.is_host_leader:
            stop_request.clear()
        return {"run": spec.run, "status": "stopped", "step": state.step, "steps": steps}
    state.begin(start)
    recorder = open_records(job, run_dir, world, state)
    saver = Saver(checkpoints, spec.checkpoint_keep, world, strategy)
    evaluation = Evaluation(job, world, strategy, batches, heartbeat)
    if spec.eval_start and not state.step:
        state.totals["eval_loss_first"] = evaluation.update(0)
    metrics, stopping = StepMetrics(), False
    while state.step < steps and not stopping:
        try:
            rows = train_step(job, strategy, batches, all_ranks.global_rank, state.step, metrics)
        except NonFiniteError:
            saver.finish()  # a pending checkpoint is finite, and all ranks that write it raise this error
            raise
        state.step += 1
        recorder.samples(state.step, rows)
        if not strategy.is_sync_step(state.step) and state.step < steps:
            heartbeat("training", step=state.step, steps=steps, note="", **metrics.local_loss())
            continue

        reduced = metrics.reduce(strategy, lambda: (bool(stop_request), saver.written()), waiting)
        previous, step, stopping = state.synced_step, state.step, reduced.stop
        state.history.add_sync(strategy.present, previous, step)
        report(reduced, state, recorder, heartbeat, gpu_usage(world.device))
        if not all(math.isfinite(record["loss"]) for record in reduced.records):
            raise NonFiniteError("loss is not a number", step, spec.lr)

        if len(job.eval_set) and is_due(spec.eval_interval, previous, step) and step < steps:
            recorder.evaluation(evaluation.update(step), step)
        if reduced.written:
            saver.finish()
        state.synced_step = step
        if is_due(spec.checkpoint_interval, previous, step) or stopping or step == steps:
            heartbeat("saving")
            recorder.flush()
            saver.save(state.checkpoint_state())
    saver.finish()

    finished = strategy.all_finished(state.step == steps, waiting)
    result = finalize(job, strategy, state, evaluation, recorder, heartbeat, run_dir, finished=finished)
    if not finished and world.is_host_leader:
        stop_request.clear()
    recorder.close()
    # No rank exits before all have written their files: a launcher that exits early would end the store of its peers.
    all_ranks.barrier()
    if finished and world.is_host_leader:
        shutil.rmtree(run_dir / LAYERS, ignore_errors=True)  # no start needs them any more
    if job.teacher:
        job.teacher.close()
    return result
