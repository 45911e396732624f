"""The training loop: from a spec to trained weights."""

import functools
import math
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.common.errors import NonFiniteError
from trainer.config import RunSpec
from trainer.config.run_spec import Interval
from trainer.costs.packing_forecast import step_lines
from trainer.data.order import Order
from trainer.data.shares import micro_batches
from trainer.distributed.world import World
from trainer.loop.final_export import finalize
from trainer.loop.references import with_references
from trainer.loop.run_dir import StopRequest
from trainer.loop.training_inputs import Settle, TrainingInputs, as_it_is, load_inputs, with_packing
from trainer.method import AheadContext, Method, Rows, RunContext, Work, method_of
from trainer.models.optim import learning_rate
from trainer.models.peak import Utilisation
from trainer.records.checkpoint import Saver, complete_checkpoints, find_checkpoint
from trainer.records.run_state import RunState
from trainer.records.step_metrics import Reduced, StepMetrics
from trainer.records.telemetry import Heartbeat, Recorder, drop_invalid_records, gpu_usage, replicate_metrics
from trainer.spec import changed_since, fixed_values
from trainer.strategy import Batch, Strategy, Update, make_strategy


class Batches:
    """Arranges rows of a corpus as micro-batches on the device of this rank."""

    def __init__(self, inputs: TrainingInputs, world: World, strategy: Strategy, heartbeat: Heartbeat) -> None:
        self._inputs, self._world, self._pad = inputs, world, inputs.tokenizer.pad_token_id or 0
        self._strategy, self._heartbeat, self._method = strategy, heartbeat, inputs.module.method
        # A compiled model would be recompiled for every new length.
        self._length = inputs.spec.seq_length if inputs.spec.torch_compile else None

    def batch(self, work: Work, rows: Rows) -> Batch:
        """Return the micro-batch of these rows (lists of sample indices): int64 [rows, T] each."""
        return self._method.batch(work, rows, self._pad, self._length, self._on_device)

    @property
    def group(self) -> World:
        return self._strategy.update_group

    def score(self, batch: Batch) -> float:
        return float(self._strategy.loss(batch))

    def sum(self, values: list[float]) -> list[float]:
        return self._strategy.update_group.sum(values)

    def waiting(self, note: str) -> None:
        self._heartbeat("training", note=note)

    def prepare(self, update: Update, step: int) -> Work:
        """Return the work of an update of `step` (from 0), with what its method needs before the first micro-batch.

        Every rank knows all rows, so the weight of an update needs no communication.
        """
        inputs, strategy = self._inputs, self._strategy
        parts = micro_batches(update.computed, inputs.spec.batch_size, strategy.rounds(len(update.rows)))
        work = Work(inputs.train_set, update.rows, parts, inputs.weigh(update.rows), inputs.weigh(update.mine), step)
        return self._method.prepare(work, self)

    def with_teacher_targets(self, work: Work, rows: Rows) -> Batch:
        """Return the micro-batch of these rows, with the probabilities of the run's teacher if it has one."""
        batch = self.batch(work, rows)
        if not (teacher := self._inputs.teacher):
            return batch
        with self._strategy.autocast():
            return batch._replace(extra=teacher.judge(batch))

    def take_metrics(self) -> list[float]:
        """Return the sums of the method's metrics on this rank since the last call, in the order of `MethodPlan.sums`."""
        return self._method.take_metrics(self._method.measures(method_of(self._inputs.spec)).sums)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._world.device.type == "cuda":
            # The device would wait for a copy from memory that can be paged out.
            tensor = tensor.pin_memory()
        return tensor.to(self._world.device, non_blocking=True)


class Evaluator:
    """Computes the loss on the held-out samples.

    `loss`, `metrics`: the newest results, those of the method by name; `step`: the step they belong to, or -1.
    """

    def __init__(
        self, inputs: TrainingInputs, world: World, strategy: Strategy, batches: Batches, heartbeat: Heartbeat
    ) -> None:
        self._inputs, self._world, self._strategy = inputs, world, strategy
        self._batches, self._heartbeat = batches, heartbeat
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}
        self.step = -1

    def __call__(self) -> float | None:
        """Return the mean loss, the same on every rank; None without samples. Every rank calls it."""
        corpus, spec, strategy = self._inputs.eval_set, self._inputs.spec, self._strategy
        if not len(corpus):
            return None
        order = Order(
            corpus.lengths, seed=spec.seed, capacity=spec.seq_length, packing=bool(spec.packing), epochs=1, rows=1
        )
        rows = order.epoch(0)
        division = strategy.divide(rows)
        plan, module = method_of(spec), strategy.plain
        measures = module.method.measures(plan)
        weights = plan.weights(corpus)
        parts = micro_batches(division.computed, spec.batch_size, strategy.rounds(len(rows)))
        mine = float(weights[[sample for row in division.mine for sample in row]].sum())
        module.eval()
        loss = 0.0
        work = module.method.prepare(Work(corpus, rows, parts, float(weights.sum()), mine, -1), self)
        for part in work.parts:
            self.waiting("")
            loss += self.score(self.batch(work, part))
        module.train()
        loss, weight, *sums = self.sum([loss, work.weight, *module.method.take_metrics(measures.sums)])
        self.metrics = measures.means(dict(zip(measures.sums, sums, strict=True)))
        return loss / max(1.0, weight)

    def batch(self, work: Work, rows: Rows) -> Batch:
        """Return the micro-batch of these rows."""
        return self._batches.batch(work, rows)

    @property
    def group(self) -> World:
        return self._world

    def score(self, batch: Batch) -> float:
        return float(self._strategy.loss(batch))

    def sum(self, values: list[float]) -> list[float]:
        return self._world.sum(values)

    def waiting(self, note: str) -> None:
        self._heartbeat("evaluating", note=note)

    def update(self, step: int) -> float | None:
        """Evaluate the model after `step` unless that was done; return and keep the loss. Every rank calls it.

        Raises NonFiniteError: the loss is not finite, so the model is unusable.
        """
        if self.step != step:
            self.loss, self.step = self(), step
        if self.loss is not None and not math.isfinite(self.loss):
            raise NonFiniteError("evaluation loss is not a number", step, self._inputs.spec.lr)
        return self.loss


def train_step(
    inputs: TrainingInputs, strategy: Strategy, batches: Batches, global_rank: int, step: int, metrics: StepMetrics
) -> list[list[int]]:
    """Train this rank's share of `step` (from 0) and add its metrics; return its rows (lists of sample indices).

    Raises NonFiniteError: the gradient is not finite; the weights are unchanged.
    """
    spec = inputs.spec
    started = time.perf_counter()
    rows = strategy.local_rows(inputs.order.step(step))
    lr = learning_rate(spec, step, inputs.steps)
    loss, position, norm = torch.zeros((), dtype=torch.float64, device=strategy.world.device), 0, math.nan
    local: list[list[int]] = []
    weight = 0.0
    written: Counter[str] = Counter()
    for update in strategy.updates(step, rows):
        work = batches.prepare(update, step)
        for _ in range(inputs.module.method.iterations):
            remaining, weight = len(work.parts), weight + work.weight
            inputs.module.part = work.weight / max(1, remaining)
            for part in work.parts:
                batch = batches.with_teacher_targets(work, part)
                # The seed for dropout depends only on the step, the rank and the position in the step, so that a resumed
                # run draws the same numbers as an uninterrupted one.
                torch.manual_seed(spec.seed + 1_000_003 * (step + 1) + 7919 * (global_rank + 1) + position)
                position, remaining = position + 1, remaining - 1
                loss += strategy.backward(batch, work.total, last=not remaining).double()  # read at the end of the step
            try:
                norm = strategy.step(lr)
            except FloatingPointError:
                # The loss of another rank can be the cause.
                what = "gradient norm is not finite" if math.isfinite(loss) else "loss is not a number"
                raise NonFiniteError(what, step + 1, spec.lr) from None
        local += update.mine
        written.update(work.counts)
    samples = [sample for row in local for sample in row]
    metrics.add(
        step + 1,
        inputs.steps,
        loss=float(loss),
        lr=lr,
        grad_norm=norm,
        counts={
            "tokens": int(inputs.lengths[samples].sum()),
            "trained_tokens": int(inputs.trained_counts[samples].sum()),
            "samples": len(samples),
            "weight": weight,
            **written,
        },
        sums=batches.take_metrics(),
        rows=strategy.rows,
        seconds=time.perf_counter() - started,
    )
    return local


def report(
    reduced: Reduced, state: RunState, recorder: Recorder, heartbeat: Heartbeat, usage: dict[str, float], lr: float
) -> None:
    """Add the steps up to a synchronization to the totals and the records, and report the newest one in the heartbeat.

    `usage`: see gpu_usage. `lr`: the peak learning rate, for the error. Raises NonFiniteError: a loss is not finite.
    """
    shares = {"comm_share": reduced.comm_share, "mfu": reduced.mfu}
    comm: dict[str, Any] = {name: [round(value, 4) for value in found] for name, found in shares.items() if found}
    for record in reduced.records:
        record |= {"step_seconds": reduced.step_seconds} | comm | ({"gpus": reduced.gpus} if any(reduced.gpus) else {})
        eta = state.add(record, reduced.seconds)
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
        **({"reward": reward} if (reward := newest.get("metrics", {}).get("reward")) is not None else {}),
        step_seconds=[round(value, 4) for value in reduced.step_seconds],
        **comm,
        gpu=usage,
    )
    if not all(math.isfinite(record["loss"]) for record in reduced.records):
        raise NonFiniteError("loss is not a number", state.step, lr)


def begin(strategy: Strategy, state: RunState, spec: RunSpec, run_dir: Path, heartbeat: Heartbeat) -> None:
    """Load the newest checkpoint of the hosts, if there is one, and record the start in `state`. Every rank calls it.

    Raises UserError: no checkpoint is usable, or it is of another spec, other data or another base model.
    """
    files, differences = strategy.per_host_files, functools.partial(changed_since, now=state.spec)
    if newest := find_checkpoint(run_dir / "checkpoints", strategy.world, print, files, differences):
        strategy.load(newest)
        state.restore(newest, spec)
        print(f"resuming from step {state.step} of {state.steps}")
        heartbeat("starting", force=True, resumed=state.step)
    here = {"start": f"{time.time_ns() // 1000:x}", "head": f"{socket.gethostname()}:{run_dir}"}
    state.begin(strategy.world.gather(here)[0])


def is_due(interval: Interval, previous: int, step: int, order: Order) -> bool:
    """Return whether a multiple of `interval` (0: never), or the end of an epoch, lies after step `previous` and not after `step`."""
    if interval == "epoch":
        return order.epochs(step) > order.epochs(previous)
    return bool(interval) and step // interval > previous // interval


def open_records(inputs: TrainingInputs, run_dir: Path, world: World, state: RunState) -> Recorder:
    """Remove invalid records, replicate the metrics to all hosts, and open the records. Every rank calls it."""
    if world.is_host_leader:
        drop_invalid_records(run_dir, state.history)
    world.barrier()
    replicate_metrics(run_dir, world, state.step)
    recorder = Recorder(inputs.spec, run_dir, world, state.history)
    if world.rank == 0:
        for line in inputs.mixture(run_dir):
            print(line)
        print(
            f"{len(inputs.train_set)} samples, {inputs.order.rows_per_epoch} rows per epoch, {inputs.steps} steps of "
            f"{inputs.spec.rows_per_step} rows on {world.size} ranks; {len(inputs.eval_set)} samples held out"
        )
        for line in inputs.corpus.report.lines("data: "):
            print(line)
        if inputs.repeats:
            print(*step_lines(inputs.spec, len(inputs.train_set), inputs.order.rows_per_epoch), sep="\n")
    return recorder


def compare_untrained(inputs: TrainingInputs, strategy: Strategy, folder: Path, heartbeat: Heartbeat) -> TrainingInputs:
    """Add the log-probabilities of the untrained model, if the method compares with them. Every rank calls it."""
    note = "computing the log-probabilities of the reference"
    untrained = Batches(inputs, strategy.world, strategy, heartbeat)
    return with_references(inputs, strategy, folder, untrained, lambda: heartbeat("starting", note=note))


def begin_method(inputs: TrainingInputs, strategy: Strategy, run_dir: Path) -> Method:
    """Give the method of the run what it may use, and return it."""
    method, checkpoints = inputs.module.method, run_dir / "checkpoints"
    columns = sorted({name for record in inputs.corpus.records or () for name in record["columns"]})
    ahead = AheadContext(
        inputs.train_set,
        run_dir,
        lambda step: [sample for row in strategy.local_rows(inputs.order.step(step)) for sample in row],
        lambda: complete_checkpoints(checkpoints, verify=False),
    )
    method.begin(RunContext(inputs.tokenizer, strategy.plain, strategy.autocast, inputs.steps, columns, ahead))
    return method


def train(
    spec: RunSpec, run_dir: Path, data_dir: Path, world: World, heartbeat: Heartbeat, settle: Settle = as_it_is
) -> dict[str, Any]:
    """Run the spec in `run_dir` to its end, from its newest checkpoint if there is one. Every rank calls it.

    Returns the result as in result.json; its `status` is finished, or stopped after a request to stop. Raises
    UserError: an error that a user can fix.
    """
    stop_request = StopRequest(run_dir)
    heartbeat("starting", note="loading the model")
    inputs = load_inputs(spec, data_dir / "store", world, heartbeat, run_dir, settle)
    strategy = make_strategy(inputs.spec, world, inputs.module)
    inputs = with_packing(inputs, strategy, world)
    fixed = fixed_values(spec.model_copy(update={"torch_compile": inputs.spec.torch_compile}))
    spec, steps = inputs.spec, inputs.steps
    all_ranks, world = world, strategy.world
    inputs = compare_untrained(inputs, strategy, run_dir, heartbeat)
    strategy.weigh = inputs.weigh
    batches = Batches(inputs, world, strategy, heartbeat)
    packed = bool(spec.packing)
    known = (inputs.template_date, inputs.base, fixed, inputs.repeats)
    state = RunState(steps, world.size, inputs.data, packed, spec.backend, *known)

    def waiting() -> bool:
        heartbeat("training", note="waiting for slower ranks")
        return bool(stop_request)

    strategy.steps = steps
    begin(strategy, state, spec, run_dir, heartbeat)
    recorder = open_records(inputs, run_dir, world, state)
    saver = Saver(run_dir / "checkpoints", spec.checkpoint_keep, world, strategy)
    evaluation = Evaluator(inputs, world, strategy, batches, heartbeat)
    method = begin_method(inputs, strategy, run_dir)
    if spec.eval_start and not state.step:
        state.totals["eval_loss_first"] = evaluation.update(0)
    utilisation = Utilisation.of(spec, world.device) if method_of(spec).computes_tokens_only else None
    stopping = False
    metrics = StepMetrics(method.measures(method_of(spec)), utilisation.seconds if utilisation else None)
    while state.step < steps and not stopping:
        try:
            rows = train_step(inputs, strategy, batches, all_ranks.global_rank, state.step, metrics)
        except NonFiniteError:
            saver.finish()  # a pending checkpoint is finite, and all ranks that write it raise this error
            raise
        state.step += 1
        recorder.samples(state.step, rows)
        recorder.examples(state.step, method.take_examples())
        if not strategy.is_sync_step(state.step) and state.step < steps:
            heartbeat("training", step=state.step, steps=steps, note="", **metrics.local_loss())
            continue

        usage = gpu_usage(world.device)
        reduced = metrics.reduce(strategy, lambda: (bool(stop_request), saver.written()), waiting, usage)
        previous, step, stopping = state.synced_step, state.step, reduced.stop
        report(reduced, state, recorder, heartbeat, usage, spec.lr)
        if len(inputs.eval_set) and is_due(spec.eval_interval, previous, step, inputs.order) and step < steps:
            recorder.evaluation(evaluation.update(step), step, evaluation.metrics)
        if reduced.written:
            saver.finish()
        state.synced_step = step
        if is_due(spec.checkpoint_interval, previous, step, inputs.order) or stopping or step == steps:
            heartbeat("saving")
            recorder.flush()
            saver.save(state.checkpoint_state())
    saver.finish()

    finished = strategy.all_finished(state.step == steps, waiting)
    result = finalize(inputs, strategy, state, evaluation, recorder, heartbeat, run_dir, metrics, finished=finished)
    recorder.close()
    clean_up(world, all_ranks, stop_request, finished)
    inputs.module.method.end()
    return result


def clean_up(world: World, all_ranks: World, stop_request: StopRequest, finished: bool) -> None:
    """Remove what no start needs any more, when all ranks have written their files. Every rank calls it."""
    if not finished and world.is_host_leader:
        stop_request.clear()
    # No rank exits before all have written their files: a launcher that exits early would end the store of its peers.
    all_ranks.barrier()
