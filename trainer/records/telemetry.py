"""Telemetry of a run: heartbeats, metrics and samples per step, values for the loggers, and progress lines in the log."""

import contextlib
import json
import os
import resource
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trainer.common.errors import DiskError
from trainer.common.files import to_json, write_atomic
from trainer.common.formats import clock, quoted
from trainer.config import RunSpec
from trainer.records.gpu_use import gpu_use, gpu_uuid
from trainer.records.loggers import Logger, open_loggers
from trainer.records.run_state import RunHistory

if TYPE_CHECKING:  # the first heartbeat is written before torch is imported
    import torch

    from trainer.distributed.world import World

EXAMPLES = "completions.jsonl"
_SHOWN = 200  # characters of an example in the log
_HEARTBEAT_INTERVAL = 0.2  # seconds between heartbeats while the status stays the same
_RESERVE = 64 * 1024  # bytes that are freed for the error message of a rank whose disk is full
_LOG_INTERVAL = 1.0  # seconds between progress lines in the log


class Heartbeat:
    """Writes `state/rank<R>.json`: the current activity of this rank. It starts before torch is imported."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = run_dir / "state" / f"rank{rank}.json"
        self._state: dict[str, Any] = {
            "rank": rank,
            "pid": os.getpid(),
            "status": "starting",
            "time": 0.0,
            "step": 0,
            "steps": 0,
            "loss": None,
            "tokens_per_second": None,
            "eta": None,
            "note": "",
            "error": None,
        }
        self._written = 0.0
        self._reserve = self._path.with_suffix(".ballast")
        self._has_reserve = False

    def __call__(self, status: str, *, force: bool = False, **fields: Any) -> None:
        """Update the status of this rank; write it immediately if `status` changed or `force` is set, else at intervals."""
        now = time.time()
        if not force and status == self._state["status"] and now - self._written < _HEARTBEAT_INTERVAL:
            self._state.update(fields)
            return
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        self._state.update(fields, status=status, time=now, memory_peak_gb=round(peak, 3))
        self._written = now
        try:
            self._write()
        except OSError:
            # The disk is full. The write that matters fails elsewhere, and its error message needs space.
            with contextlib.suppress(OSError):
                self._reserve.unlink(missing_ok=True)
                self._write()

    def move(self, run_dir: Path, rank: int) -> None:
        path = run_dir / "state" / f"rank{rank}.json"
        if path != self._path:
            for left in (self._path, self._reserve):
                left.unlink(missing_ok=True)
        self._path, self._reserve, self._has_reserve = path, path.with_suffix(".ballast"), False
        self._state["rank"] = rank

    def _write(self) -> None:
        # Renamed but not fsynced: heartbeats are frequent, and worthless after a power failure.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._has_reserve:
            self._reserve.write_bytes(b"\0" * _RESERVE)
            self._has_reserve = True
        aside = self._path.with_suffix(".tmp")
        try:
            aside.write_text(to_json(self._state), encoding="utf-8")
            aside.replace(self._path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise


def gpu_usage(device: "torch.device") -> dict[str, float]:
    """Return the peak memory (GB) of this process on the GPU and the GPU's use (see gpu_use); nothing on a CPU."""
    if device.type != "cuda":
        return {}
    import torch

    return {"memory_peak_gb": torch.cuda.max_memory_allocated(device) / 1e9} | gpu_use(gpu_uuid(device))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            return  # the process died while it wrote this line
        yield record


def drop_invalid_records(run_dir: Path, history: RunHistory) -> None:
    """Remove the records on this host that are no longer valid. One rank of a host calls it before any rank adds records.

    This includes the records of ranks that ran here before: other ranks repeat their steps. Raises DiskError: a file
    cannot be written.
    """
    try:
        names = ("metrics.jsonl", "evals.jsonl", EXAMPLES)
        for path in [*(run_dir / name for name in names), *(run_dir / "samples").glob("rank*.jsonl")]:
            if path.exists():
                valid = [to_json(record) + "\n" for record in _records(path) if history.is_valid(record)]
                write_atomic(path, "".join(valid))
    except OSError as error:
        raise _not_writable(run_dir, error) from None


def replicate_metrics(run_dir: Path, world: "World", step: int) -> None:
    """Copy metrics.jsonl to the hosts where it is incomplete up to `step`, from one where it is complete. Every rank calls it.

    Raises DiskError: the file cannot be written.
    """
    path = run_dir / "metrics.jsonl"
    complete = sum(1 for _ in _records(path)) == step
    all_complete = world.gather(complete)
    if all(all_complete) or not any(all_complete):
        return
    owner = all_complete.index(True)
    text = world.gather(path.read_text(encoding="utf-8") if world.rank == owner else "")[owner]
    if world.is_host_leader and not complete:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise _not_writable(run_dir, error) from None


def _not_writable(run_dir: Path, error: OSError) -> DiskError:
    return DiskError(f"run folder: cannot write to {run_dir}: {error.strerror}: free disk space or fix its permissions")


class Recorder:
    """Records the steps of a run: its samples and metrics, and on rank 0 the loggers and progress lines.

    Every host keeps the metrics, so that they survive the loss of the head.
    """

    def __init__(self, spec: RunSpec, run_dir: Path, world: "World", history: RunHistory) -> None:
        """Open the files of this rank. Raises DiskError if that fails, and UserError if a logger is not installed."""
        self._start, self._is_head, self._run_dir = history.start, world.rank == 0, run_dir
        self._logged = 0.0
        try:
            (run_dir / "samples").mkdir(parents=True, exist_ok=True)
            self._samples = (run_dir / "samples" / f"rank{world.global_rank}.jsonl").open("a", encoding="utf-8")
            self._metrics: TextIO | None = None
            self._evals: TextIO | None = None
            self._loggers: list[Logger] = []
            if world.is_host_leader:
                self._metrics = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
                self._evals = (run_dir / "evals.jsonl").open("a", encoding="utf-8")
            if history.head_moved:  # to another host: the event files here may be incomplete
                shutil.rmtree(run_dir / "tensorboard", ignore_errors=True)
        except OSError as error:
            raise _not_writable(run_dir, error) from None
        if not self._is_head:
            return
        purge_step = None if history.head_moved else history.step + 1
        self._loggers = open_loggers(spec, run_dir, world.global_rank == 0, purge_step)
        if history.head_moved and "tensorboard" in spec.loggers:  # whose files are new on this host
            for record in _records(run_dir / "metrics.jsonl"):
                self._loggers[0].log(_scalars(record), record["step"])

    def samples(self, step: int, rows: list[list[int]]) -> None:
        """Record the samples of this rank in `step`, row by row; before ranks synchronize, so that no checkpoint is newer.

        Raises DiskError: the disk is full or not writable.
        """
        self._write(self._samples, {"step": step, "start": self._start, "rows": rows})

    def examples(self, step: int, examples: list[dict[str, Any]]) -> None:
        """Record examples of what the model writes, for a person to read; at intervals, print the first one.

        Raises DiskError: the disk is full or not writable.
        """
        if examples:
            try:
                with (self._run_dir / EXAMPLES).open("a", encoding="utf-8") as file:
                    for example in examples:
                        self._write(file, {"step": step, "start": self._start, **example})
            except OSError as error:
                raise _not_writable(self._run_dir, error) from None
            if self._is_head and time.monotonic() - self._logged >= _LOG_INTERVAL:
                print(f"step {step} wrote {quoted(examples[0]['completion'], _SHOWN)} for {examples[0]['reward']}")

    def step(self, record: dict[str, Any], *, eta: float, last: bool) -> None:
        """Record the metrics of one step; on rank 0 also scalars and, at intervals or if it is the `last`, a progress line.

        Raises DiskError: the disk is full or not writable.
        """
        if self._metrics:
            self._write(self._metrics, record | {"start": self._start})
        if not self._is_head:
            return
        self.scalars(_scalars(record), record["step"])
        if last or time.monotonic() - self._logged >= _LOG_INTERVAL:
            self._logged = time.monotonic()
            reward = record.get("metrics", {}).get("reward")
            shown = "" if reward is None else f"reward {reward:.4f}  "
            print(
                f"step {record['step']}/{record['steps']}  loss {record['loss']:.4f}  {shown}"
                f"{record['tokens_per_second']:.0f} tokens/s  ETA {clock(eta)}"
            )

    def evaluation(self, loss: float | None, step: int, metrics: Mapping[str, float]) -> None:
        """Record the loss on the held-out samples after `step`, None where it is unknown, and the metrics of the method.

        Raises DiskError: the disk is full or not writable.
        """
        if self._evals and loss is not None:
            found = {"metrics": metrics} if metrics else {}
            self._write(self._evals, {"step": step, "eval_loss": loss, "start": self._start} | found)
        self.scalars({"eval_loss": loss or 0.0} | {f"eval_{name}": value for name, value in metrics.items()}, step)

    def scalars(self, values: dict[str, float], step: int) -> None:
        for logger in self._loggers:
            logger.log(values, step)

    def flush(self) -> None:
        """Flush all records: a checkpoint must never be newer than the records."""
        self._samples.flush()
        if self._metrics:
            self._metrics.flush()
        for logger in self._loggers:
            logger.flush()

    def close(self) -> None:
        self.flush()
        for logger in self._loggers:
            logger.close()

    @staticmethod
    def _write(file: TextIO, record: dict[str, Any]) -> None:
        try:
            file.write(to_json(record) + "\n")
            file.flush()
        except OSError as error:
            raise DiskError(
                f"run folder: cannot write {file.name}: {error.strerror}: free disk space and start the run again"
            ) from None


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    scalars = {name: record[name] for name in ("loss", "lr", "grad_norm", "tokens_per_second")}
    scalars = {name: value for name, value in scalars.items() if value is not None}
    scalars |= record.get("metrics", {})
    scalars |= {f"step_seconds/rank{rank}": value for rank, value in enumerate(record["step_seconds"])}
    scalars |= {f"rows/rank{rank}": value for rank, value in enumerate(record.get("rows", []))}
    scalars |= {f"mfu/rank{rank}": value for rank, value in enumerate(record.get("mfu", []))}
    gpus = enumerate(record.get("gpus", []))
    return scalars | {f"gpu_{name}/rank{rank}": value for rank, gpu in gpus for name, value in gpu.items()}
