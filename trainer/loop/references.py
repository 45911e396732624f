"""Log-probabilities of the untrained model for methods that compare with it, computed before the first step and kept in the run folder."""

import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainer.common.files import write_atomic
from trainer.data.corpus import Corpus
from trainer.data.shares import micro_batches
from trainer.loop.training_inputs import TrainingInputs
from trainer.method import Rank, Work, method_of
from trainer.strategy import Strategy

_FORMAT = 1  # version of the files: increment it when the values of a sample change


def with_references(
    inputs: TrainingInputs, strategy: Strategy, run_dir: Path, rank: Rank, waiting: Callable[[], object]
) -> TrainingInputs:
    """Add the log-probabilities of the reference to the samples, if the method needs them. Every rank calls it before a checkpoint is loaded.

    `run_dir`: the run folder, where a host keeps them for later starts. `waiting`: called between micro-batches.
    """
    plan = method_of(inputs.spec)
    # A pipeline has no pass in which the adapter is switched off.
    if not plan.precomputes(inputs.spec) and not (plan.has_reference and strategy.staged):
        return inputs
    found = []
    for corpus in (inputs.train_set, inputs.eval_set):
        values = _kept(inputs, corpus, strategy, run_dir)
        if values is None:
            values = _computed(inputs, corpus, strategy, rank, waiting)
            _keep(inputs, corpus, values, strategy, run_dir)
        found.append(replace(corpus, references=values))
    return replace(inputs, train_set=found[0], eval_set=found[1])


def _file(inputs: TrainingInputs, corpus: Corpus, run_dir: Path) -> Path | None:
    """Return where the values of these samples are kept; None if it is unknown which model computes them."""
    if not inputs.base:
        return None
    spec = inputs.spec
    parts = [_FORMAT, inputs.base, corpus.digest(), spec.method, spec.seq_length, spec.precision, spec.quantize]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return run_dir / "cache" / f"references-{digest[:40]}.npy"


def _kept(inputs: TrainingInputs, corpus: Corpus, strategy: Strategy, run_dir: Path) -> np.ndarray | None:
    """Return the values that an earlier start kept on the first host; None if it kept none. Every rank calls it."""
    if not len(corpus):
        return np.zeros((0, 2))
    world, content = strategy.world, b""
    file = _file(inputs, corpus, run_dir)
    if world.rank == 0 and file and (values := _read(file, len(corpus))) is not None:
        content = values.tobytes()
    content = world.gather_bytes(content)[0]
    return np.frombuffer(content).reshape(-1, 2) if content else None


def _read(file: Path, samples: int) -> np.ndarray | None:
    try:
        values: np.ndarray = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    fits = values.dtype == np.float64 and values.shape == (samples, 2) and bool(np.isfinite(values).all())
    return values if fits else None


def _computed(
    inputs: TrainingInputs, corpus: Corpus, strategy: Strategy, rank: Rank, waiting: Callable[[], object]
) -> np.ndarray:
    """Compute the values of all samples, float64 [samples, 2]: every rank those of its part."""
    rows = [[sample] for sample in range(len(corpus))]
    division = strategy.divide(rows)
    parts = micro_batches(division.computed, inputs.spec.batch_size, strategy.rounds(len(rows)))
    work = Work(corpus, rows, parts, 1.0, 0.0, -1)
    module = strategy.plain
    training, module = module.training, module.eval()
    mine: list[np.ndarray] = []
    for part in parts:
        waiting()
        values = module.method.reference_values(work, part, rank)
        mine.append(np.column_stack([np.array(part, np.float64).reshape(-1, 1)[: len(values)], values]))
    module.train(training)
    gathered = strategy.world.gather_bytes(np.concatenate(mine).tobytes())
    found = np.concatenate([np.frombuffer(content).reshape(-1, 3) for content in gathered])
    result = np.full((len(corpus), 2), np.nan)
    result[found[:, 0].astype(np.int64)] = found[:, 1:]
    return result


def _keep(inputs: TrainingInputs, corpus: Corpus, values: np.ndarray, strategy: Strategy, run_dir: Path) -> None:
    file = _file(inputs, corpus, run_dir)
    if file and strategy.world.is_host_leader:
        buffer = io.BytesIO()
        np.save(buffer, values, allow_pickle=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, buffer.getvalue(), 0o600)
