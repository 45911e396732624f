"""The training loop, from a spec to an adapter; reads straight down."""

import contextlib
import json
import math
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainer import __version__
from trainer.checkpoint import Saver, agree
from trainer.config.run_spec import RunSpec, changed_fields, read_spec
from trainer.data.encode import Corpus, encoded_dataset, split
from trainer.data.order import Order, held_out, micro_batches, share
from trainer.data.packing import collate
from trainer.data.tiny import with_tiny_model
from trainer.distributed.world import World
from trainer.errors import UserError
from trainer.export import merge_adapter, write_card
from trainer.files import sha256_file, sha256_tree, whole_folder, write_atomic
from trainer.model import TokenLoss, isolates_packed_samples, load_model, load_tokenizer, require_compiler
from trainer.optim import learning_rate
from trainer.strategy import Batch, Stopped, Strategy, make_strategy
from trainer.telemetry import Heartbeat, Past, Report, cut_back, share_metrics

_COUNTS = ("loss", "tokens", "trained_tokens", "samples")  # of a step, over its ranks


class StopAsked:
    """Whether somebody wants this run to stop after the step it is at: SIGTERM, Ctrl-C, or a file `stop` in its folder."""

    def __init__(self, run_dir: Path) -> None:
        self._file, self._signalled = run_dir / "stop", False
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, _: object) -> None:
        self._signalled = True
        if number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            # A second Ctrl-C means now. Under torchrun one Ctrl-C comes twice: from the terminal and from the launcher.
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def done(self) -> None:
        """Take the file away: the next start is not meant by it."""
        self._file.unlink(missing_ok=True)

    def __bool__(self) -> bool:
        return self._signalled or self._file.exists()


def finished(run_dir: Path) -> dict[str, Any] | None:
    """Return the result of a run that has ended well in this folder, or None."""
    try:
        result = json.loads((run_dir / "result.json").read_text())
    except (OSError, ValueError):
        return None
    return result if result.get("status") == "finished" else None


def claim(spec: RunSpec, run_dir: Path) -> None:
    """Make the run folder this spec's, or find that it belongs to another one.

    Raises:
        UserError: the folder holds a run of a different spec, or one that `resume: never` forbids to go on.
    """
    kept = run_dir / "spec.yml"
    started = (run_dir / "checkpoints").is_dir()
    if kept.exists() and started:
        different = changed_fields(read_spec(kept, {}, str(kept)), spec)
        if different:
            raise UserError(
                f"run {spec.run} exists with another spec ({'; '.join(different)}): take another name with run="
            )
        if spec.resume == "never":
            raise UserError(
                f"run {spec.run} has checkpoints in {run_dir} and resume is never: take another name with run="
            )
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomic(kept, spec.to_yaml())


class Batches:
    """Lays rows of a corpus out as micro-batches on this rank's device."""

    def __init__(self, spec: RunSpec, world: World, pad: int) -> None:
        self._world, self._pad = world, pad
        # A compiled model would be compiled again for every new length.
        self._length = spec.seq_length if spec.torch_compile else None

    def __call__(self, corpus: Corpus, rows: Sequence[Sequence[int]]) -> Batch:
        arrays = collate(corpus, rows, pad=self._pad, length=self._length)
        return Batch(*(torch.from_numpy(array).to(self._world.device, non_blocking=True) for array in arrays))


def evaluate(
    spec: RunSpec, world: World, strategy: Strategy, corpus: Corpus, batches: Batches, beat: Heartbeat
) -> float | None:
    """Return the mean loss over the tokens of the held-out samples, the same on every rank; None if there are none."""
    if not len(corpus):
        return None
    order = Order(corpus.lengths, seed=spec.seed, capacity=spec.seq_length, packing=spec.packing, epochs=1, rows=1)
    rows = order.epoch(0)
    mine = rows[share(len(rows), strategy.shares(len(rows)), world.rank)]
    module = strategy.plain
    module.eval()
    loss = tokens = 0.0
    for part in micro_batches(mine, spec.batch_size, strategy.rounds(len(rows))):
        beat("evaluating")
        batch = batches(corpus, part)
        loss += float(strategy.loss(batch))
        tokens += int((batch.labels[:, 1:] != -100).sum())
    module.train()
    loss, tokens = world.sum([loss, tokens])
    return loss / max(1.0, tokens)


def due(interval: int, before: int, now: int) -> bool:
    """Tell whether something that comes every `interval` steps (0: never) came after step `before`, up to `now`."""
    return bool(interval) and now // interval > before // interval


def gpu_use(device: torch.device) -> dict[str, float]:
    """Return the GPU's utilisation (percent, if NVML is there) and peak memory (GB), or nothing on a CPU."""
    if device.type != "cuda":
        return {}
    use = {"memory_peak_gb": torch.cuda.max_memory_allocated(device) / 1e9}
    with contextlib.suppress(Exception):  # pynvml is not installed or the driver refuses: memory alone then
        use["utilisation_percent"] = float(torch.cuda.utilization(device))
    return use


def save_trained(
    spec: RunSpec, module: TokenLoss, whole: dict[str, torch.Tensor] | None, tokenizer: Any, run_dir: Path
) -> dict[str, Any]:
    """Write the adapter (or the whole model) in the form that transformers and peft read; return its path and digest.

    `whole`: the weights by name, if the module itself has only parts of them.
    """
    kind = "adapter" if spec.lora_r else "model"
    final = run_dir / kind
    with whole_folder(final, kind) as aside:
        # peft would ask the hub whether the vocabulary has grown; it never does here.
        how: dict[str, Any] = {"save_embedding_layers": False} if spec.lora_r else {}
        how |= {"state_dict": whole} if whole else {}
        # transformers would write on rank 0 alone, as if all hosts shared a disk.
        module.model.should_save_on_this_rank = lambda _: True  # type: ignore[assignment]
        module.model.save_pretrained(aside, **how)  # type: ignore[operator]
        tokenizer.save_pretrained(aside)
    weights = sorted(file.name for file in final.glob("*.safetensors"))
    digest = sha256_file(final / weights[0]) if len(weights) == 1 else sha256_tree(final)
    return {kind: str(final), f"{kind}_sha256": digest}


def same_data(corpus: Corpus, world: World) -> str:
    """Return the digest of the data, which is the same on every rank.

    Raises:
        UserError: it is not: the ranks would take other samples than they agreed on.
    """
    everyone = world.gather(corpus.digest())
    other = next((rank for rank, digest in enumerate(everyone) if digest != everyone[0]), None)
    if other is not None:
        raise UserError(f"dataset: rank {other} has other samples or another tokenizer than rank 0: make them equal")
    return everyone[0]


def train(spec: RunSpec, run_dir: Path, data_dir: Path, world: World, beat: Heartbeat) -> dict[str, Any]:
    """Run the spec in `run_dir` to its end, from its newest checkpoint if it has one. Every rank calls it.

    Returns:
        The result, as in result.json: `status` is finished, or stopped if somebody asked for that.

    Raises:
        UserError: anything that a person can mend.
    """
    stop_asked, store = StopAsked(run_dir), data_dir / "store"
    beat("starting", note="loading the model")
    if spec.dataset.startswith("~"):
        spec = spec.model_copy(update={"dataset": str(Path(spec.dataset).expanduser())})
    tiny_spec = spec
    spec = world.once_here(lambda: with_tiny_model(tiny_spec, store))
    if spec.torch_compile:
        require_compiler(world.device)
    tokenizer = load_tokenizer(spec.model)
    corpus = world.once_here(lambda: encoded_dataset(spec, tokenizer, store))
    data = same_data(corpus, world)
    train_set, eval_set = split(corpus, held_out(spec, len(corpus)))
    model = load_model(spec, world.device)
    module = TokenLoss(model, compiled=spec.torch_compile)
    strategy = make_strategy(spec, world, module)
    with strategy.autocast():
        if spec.packing and not isolates_packed_samples(model, len(tokenizer)):
            raise UserError("packing: this model mixes the samples of a packed row: set packing=false")
    every, world = world, strategy.world
    batches = Batches(spec, world, tokenizer.pad_token_id or 0)
    order = Order(
        train_set.lengths,
        seed=spec.seed,
        capacity=spec.seq_length,
        packing=spec.packing,
        epochs=spec.epochs,
        rows=spec.rows_per_step,
    )
    steps = min(order.steps, spec.max_steps) if spec.max_steps else order.steps
    lengths, trained_counts = train_set.lengths, train_set.trained_counts()

    totals: dict[str, Any] = {
        "tokens": 0,
        "trained_tokens": 0,
        "samples": 0,
        "missed_samples": 0,  # of those that were to be trained on
        "seconds": 0.0,
        "loss_first": None,
        "loss_last": None,
    }
    step = 0
    starts: list[dict[str, Any]] = []
    checkpoints = run_dir / "checkpoints"

    def restore() -> None:
        nonlocal step, starts
        newest = agree(checkpoints, world, print, strategy.per_host_files)
        if not newest:
            return
        strategy.load(newest)
        kept = json.loads((newest / "state.json").read_text())
        if kept.get("data") != data:
            raise UserError(
                f"dataset: {spec.dataset} or its encoding is not what run {spec.run} began with: "
                "put the old one back, or take another name with run="
            )
        step, starts = kept["step"], kept.get("starts", [])
        totals.update(kept["totals"])
        print(f"going on from step {step} of {steps}")

    def checkpoint_state() -> dict[str, Any]:
        about = {"totals": dict(totals), "world_size": world.size, "data": data}
        return {"step": met, "starts": past.starts if past else starts, **about}

    def waiting() -> bool:
        beat(
            "training" if past else "starting",
            note="waiting for slower ranks" if past else "waiting for other replicas",
        )
        return bool(stop_asked)

    restore()
    met = step
    past: Past | None = None
    # Microseconds, so that a float can carry it.
    here_now: dict[str, Any] = {"start": f"{time.time_ns() // 1000:x}", "head": f"{socket.gethostname()}:{run_dir}"}
    here_now = world.gather(here_now)[0]
    try:
        if strategy.join(here_now["start"], steps, run_dir, checkpoint_state, waiting):
            restore()
    except Stopped:
        if world.first_here:
            stop_asked.done()
        return {"run": spec.run, "status": "stopped", "step": step, "steps": steps}
    past = Past([*starts, {**here_now, "step": step}])
    if world.first_here:
        cut_back(run_dir, past)
    world.barrier()
    share_metrics(run_dir, world, step)
    report = Report(spec, run_dir, world, past)
    if world.rank == 0:
        print(
            f"{len(train_set)} samples, {order.rows_per_epoch} rows an epoch, {steps} steps of {spec.rows_per_step} rows on "
            f"{world.size} ranks; held out {len(eval_set)}, dropped {corpus.dropped} without a trained token, cut {corpus.cut}"
        )

    saver = Saver(checkpoints, spec.checkpoint_keep, world, strategy)
    eval_loss: float | None = None
    evaluated = -1
    met = step
    walked: list[dict[str, Any]] = []  # the steps since the ranks met

    stopping = False
    while step < steps and not stopping:
        started = time.perf_counter()
        rows = strategy.local_rows(order.step(step))
        loss, place, norm = torch.zeros((), dtype=torch.float64), 0, math.nan
        taken: list[list[int]] = []
        for update in strategy.updates(step, rows):
            # Every rank knows all rows, so the tokens of an update need no message.
            tokens = int(trained_counts[[sample for row in update.rows for sample in row]].sum())
            parts = micro_batches(update.mine, spec.batch_size, strategy.rounds(len(update.rows)))
            for part in parts:
                # A function of the step and the place in it, so that a resumed run draws what a straight one draws: the
                # adapters' dropout and the model's own.
                torch.manual_seed(spec.seed + 1_000_003 * (step + 1) + 7919 * (every.global_rank + 1) + place)
                place += 1
                loss += strategy.backward(batches(train_set, part), tokens, last=part is parts[-1]).double().cpu()
            norm = strategy.step(learning_rate(spec, step, steps))
            taken += update.mine
        step += 1
        report.used(step, taken)
        here = [sample for row in taken for sample in row]
        walked.append(
            {
                "step": step,
                "steps": steps,
                "loss": float(loss),
                "lr": learning_rate(spec, step - 1, steps),
                # fp16's scaler steps over overflows; JSON knows no infinity.
                "grad_norm": norm if math.isfinite(norm) else None,
                # This rank's, until the ranks meet.
                "tokens": int(lengths[here].sum()),
                "trained_tokens": int(trained_counts[here].sum()),
                "samples": len(here),
                "due": sum(map(len, rows)),
                "rows": list(strategy.rows),
                "seconds": time.perf_counter() - started,
            }
        )
        if not strategy.is_sync_step(step) and step < steps:
            own = walked[-1]["trained_tokens"]
            news: dict[str, Any] = {"loss": float(loss) / own} if own else {}
            beat("training", step=step, steps=steps, note="", **news)
            continue

        meeting = time.perf_counter()
        counts = [float(record[name]) for record in walked for name in _COUNTS]
        strategy.sync(waiting, [float(bool(stop_asked)), float(saver.written()), *counts])
        past.met(strategy.present, met, step)
        busy, whole, spent = [0.0] * world.size, [0.0] * world.size, [0.0] * world.size
        busy[world.rank] = sum(record.pop("seconds") for record in walked) / len(walked)
        whole[world.rank] = busy[world.rank] + (time.perf_counter() - meeting) / len(walked)
        spent[world.rank] = strategy.rank_seconds()
        flags = [float(bool(stop_asked)), float(saver.written())]
        told = strategy.sum([*flags, *counts, *busy, *whole, *spent])
        stopping, written, told, times = (
            told[0] > 0,
            told[1] == world.size,
            told[2 : 2 + len(counts)],
            told[2 + len(counts) :],
        )
        busy, whole, spent = (times[place * world.size :][: world.size] for place in range(3))
        strategy.update_shares(spent)
        # The slowest rank's, so that every host's checkpoint says the same.
        seconds = max(whole)
        use = gpu_use(world.device)
        for place, record in enumerate(walked):
            record |= {name: told[place * len(_COUNTS) + number] for number, name in enumerate(_COUNTS)}
            record |= {name: int(record[name]) for name in _COUNTS if name != "loss"}
            mean_loss = record["loss"] / max(1, record["trained_tokens"])
            speed = record["tokens"] / seconds
            totals["missed_samples"] += record.pop("due") - record["samples"]
            for name in ("tokens", "trained_tokens", "samples"):
                totals[name] += record[name]
            totals["seconds"] += seconds
            if record["trained_tokens"]:
                totals |= {"loss_last": mean_loss, "loss_first": totals["loss_first"] or mean_loss}
            eta = totals["seconds"] / record["step"] * (steps - record["step"])
            record |= {"loss": mean_loss, "tokens_per_second": speed, "step_seconds": busy} | (
                {"gpu": use} if use else {}
            )
            report.step(record, eta=eta, last=record["step"] == steps)
        walked.clear()
        beat(
            "training",
            step=step,
            steps=steps,
            loss=mean_loss,
            tokens_per_second=speed,
            eta=eta,
            note="",
            step_seconds=[round(value, 4) for value in busy],
            gpu=use,
        )
        if mean_loss != mean_loss:
            raise UserError(
                f"loss is not a number at step {step}: lower lr (now {spec.lr}), or take precision=32-true or bf16-mixed"
            )

        if len(eval_set) and due(spec.eval_interval, met, step) and step < steps:
            eval_loss, evaluated = evaluate(spec, world, strategy, eval_set, batches, beat), step
            report.scalars({"eval_loss": eval_loss or 0.0}, step)
        if written:
            saver.finish()
        if due(spec.checkpoint_interval, met, step) or stopping or step == steps:
            beat("saving")
            report.flush()
            met = step
            saver.save(step, {name: value for name, value in checkpoint_state().items() if name != "step"})
        met = step
    saver.finish()

    result: dict[str, Any] = {
        "run": spec.run,
        "status": "finished" if strategy.all_finished(step == steps, waiting) else "stopped",
        "world_size": world.size,
        "strategy": spec.strategy,
        "step": step,
        "steps": steps,
        "tokens_per_second": totals["tokens"] / totals["seconds"] if totals["seconds"] else 0.0,
        **totals,
        "eval_loss": eval_loss,
        "dropped_samples": corpus.dropped,
        "cut_samples": corpus.cut,
        "adapter": None,
        "tensorboard": str(run_dir / "tensorboard") if "tensorboard" in spec.loggers else None,
        "trainer": __version__,
        "torch": torch.__version__,
    }
    if result["status"] == "finished":
        if evaluated != step:
            eval_loss = evaluate(spec, world, strategy, eval_set, batches, beat)
        result["eval_loss"] = eval_loss
        result |= strategy.merge_replicas(
            totals, eval_loss, lambda: evaluate(spec, world, strategy, eval_set, batches, beat)
        )
        if result["eval_loss"] is not None:
            report.scalars({"eval_loss": result["eval_loss"]}, step)
        beat("saving")
        hosts = world.gather(socket.gethostname())
        gathered = strategy.weights()
        if world.first_here:
            result |= save_trained(spec, module, gathered, tokenizer, run_dir)
            if spec.merge and spec.lora_r and world.rank == 0:
                result["merged"] = str(merge_adapter(spec, run_dir))
            write_card(run_dir / ("adapter" if spec.lora_r else "model"), spec, result, hosts, data)
            write_atomic(run_dir / "result.json", json.dumps(result, indent=1))
    elif world.first_here:
        stop_asked.done()
    report.close()
    # No rank leaves before all have written: a launcher that ends early must not take its peers' store away.
    every.barrier()
    return result
