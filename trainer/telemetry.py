"""What a run tells the world: heartbeats, one line of metrics a step, the samples it used, TensorBoard or wandb, and the log."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trainer.config import RunSpec
from trainer.errors import DiskError, UserError

if TYPE_CHECKING:  # a heartbeat is written before torch is imported
    from trainer.distributed.world import World

_BEAT = 0.2  # seconds between heartbeats while nothing but the step changes
_BALLAST = 64 * 1024  # bytes kept free for the last words of a rank whose disk is full
_LINE = 1.0  # seconds between progress lines in the log


class Heartbeat:
    """`state/rank<R>.json`: what this rank is doing now. Written from the first moment, before torch is there."""

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
        self._ballast = self._path.with_suffix(".ballast")
        self._written_once = False

    def __call__(self, status: str, *, force: bool = False, **news: Any) -> None:
        """Say what this rank is at; written at once if the status changed, else a few times a second."""
        now = time.time()
        if not force and status == self._state["status"] and now - self._written < _BEAT:
            self._state.update(news)
            return
        self._state.update(news, status=status, time=now)
        self._written = now
        # Renamed but not fsynced: it is worth nothing after a power cut, and it is written several times a second.
        try:
            self._replace()
        except OSError:
            # The disk is full. Whoever writes something that matters fails, and what it says must still find a place.
            with contextlib.suppress(OSError):
                self._ballast.unlink(missing_ok=True)
                self._replace()

    def _replace(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._written_once:
            self._ballast.write_bytes(b"\0" * _BALLAST)
            self._written_once = True
        aside = self._path.with_suffix(".tmp")
        try:
            aside.write_text(json.dumps(self._state))
            aside.replace(self._path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise


@dataclass(frozen=True)
class Past:
    """The starts of a run so far, as its newest checkpoint tells, and this one: what of the records still holds.

    A start that broke leaves records of steps that another start does again, maybe on other hosts. A record names its
    start, and holds up to the step from which the next one in this list went on; of a start that is not in it, none does.
    """

    starts: list[
        dict[str, Any]
    ]  # each `start` (a name of its own), `step` (it goes on from) and `head` (rank 0's place)

    def holds(self, record: dict[str, Any]) -> bool:
        """Tell whether the record's step is part of the run as it is now."""
        for this, following in pairwise(self.starts):
            if record.get("start") == this["start"]:
                return bool(record["step"] <= this.get("until", following["step"]))
        return False

    def met(self, present: Iterable[str], before: int, now: int) -> None:
        """Note which starts were at the meeting of step `now`, the one before being that of step `before`.

        Replicas that leave and come back have starts of their own, side by side: each holds `until` its last meeting.
        """
        known = {entry["start"]: entry for entry in self.starts}
        for start in present:
            if start not in known:
                known[start] = {"start": start, "step": before, "head": ""}
                self.starts.insert(len(self.starts) - 1, known[start])
            known[start]["until"] = now

    @property
    def step(self) -> int:
        return int(self.starts[-1]["step"])

    @property
    def start(self) -> str:
        return str(self.starts[-1]["start"])

    @property
    def moved(self) -> bool:
        """Whether rank 0 is somewhere else than it was."""
        return len(self.starts) > 1 and self.starts[-1]["head"] != self.starts[-2]["head"]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            return  # a line that was being written when the process died
        yield record


def cut_back(run_dir: Path, past: Past) -> None:
    """Drop what does not hold of this host's records: once on a host, before any rank opens them.

    Those of every rank that ever was here: the steps of one that has left come again on another.
    """
    try:
        for path in [run_dir / "metrics.jsonl", *(run_dir / "samples").glob("rank*.jsonl")]:
            if path.exists():
                kept = [json.dumps(record) + "\n" for record in _records(path) if past.holds(record)]
                aside = path.with_suffix(f".tmp-{os.getpid()}")
                aside.write_text("".join(kept))
                aside.replace(path)
    except OSError as error:
        raise _unwritable(run_dir, error) from None


def share_metrics(run_dir: Path, world: "World", step: int) -> None:
    """Give metrics.jsonl to the hosts whose own is not whole up to `step`, from one whose is. Every rank calls it."""
    path = run_dir / "metrics.jsonl"
    whole = sum(1 for _ in _records(path)) == step
    everyone = world.gather(whole)
    if all(everyone) or not any(everyone):
        return
    owner = everyone.index(True)
    text = world.gather(path.read_text() if world.rank == owner else "")[owner]
    if world.first_here and not whole:
        try:
            path.write_text(text)
        except OSError as error:
            raise _unwritable(run_dir, error) from None


def _unwritable(run_dir: Path, error: OSError) -> DiskError:
    return DiskError(f"run folder: cannot write to {run_dir}: {error.strerror}: make room or mend its rights")


def clock(seconds: float) -> str:
    """Return seconds as 0:42 or 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Report:
    """All of a rank's records of a run but its heartbeat.

    Every host keeps the metrics, so that they outlive the head; loggers and the log's lines are rank 0's.
    """

    def __init__(self, spec: RunSpec, run_dir: Path, world: "World", past: Past) -> None:
        self._start, self._head = past.start, world.rank == 0
        self._lined = 0.0
        try:
            (run_dir / "samples").mkdir(parents=True, exist_ok=True)
            self._samples = (run_dir / "samples" / f"rank{world.global_rank}.jsonl").open("a")
            self._metrics: TextIO | None = None
            self._board: Any = None
            self._wandb: Any = None
            if world.first_here:
                self._metrics = (run_dir / "metrics.jsonl").open("a")
            if past.moved:  # what another head has written is in its folder, and what is here may be a part of it
                shutil.rmtree(run_dir / "tensorboard", ignore_errors=True)
        except OSError as error:
            raise _unwritable(run_dir, error) from None
        if not self._head:
            return
        if "tensorboard" in spec.loggers:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=None if past.moved else past.step + 1)
            for record in _records(run_dir / "metrics.jsonl") if past.moved else []:
                self.scalars(scalars_of(record), record["step"])
        if "wandb" in spec.loggers and world.global_rank == 0:
            self._wandb = _start_wandb(spec, run_dir)

    def used(self, step: int, rows: list[list[int]]) -> None:
        """Note which samples this rank takes in `step`, row by row; before the ranks meet, so that no checkpoint knows more."""
        self._write(self._samples, {"step": step, "start": self._start, "rows": rows})

    def step(self, record: dict[str, Any], *, eta: float, last: bool) -> None:
        """Record one step: a line of metrics; on rank 0 scalars, and now and then a line in the log."""
        if self._metrics:
            self._write(self._metrics, record | {"start": self._start})
        if not self._head:
            return
        self.scalars(scalars_of(record), record["step"])
        if last or time.monotonic() - self._lined >= _LINE:
            self._lined = time.monotonic()
            print(
                f"step {record['step']}/{record['steps']}  loss {record['loss']:.4f}  "
                f"{record['tokens_per_second']:.0f} tokens/s  ETA {clock(eta)}"
            )

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Send values to the loggers that the spec names."""
        if self._board:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log(values, step=step)

    def flush(self) -> None:
        """Bring all that was recorded to the disk: called before a checkpoint, which must not know more than the records."""
        self._samples.flush()
        if self._metrics:
            self._metrics.flush()
        if self._board:
            self._board.flush()

    def close(self) -> None:
        """End the records."""
        self.flush()
        if self._board:
            self._board.close()
        if self._wandb:
            self._wandb.finish()

    @staticmethod
    def _write(file: TextIO, record: dict[str, Any]) -> None:
        try:
            file.write(json.dumps(record) + "\n")
            file.flush()
        except OSError as error:
            raise DiskError(
                f"run folder: cannot write {file.name}: {error.strerror}: make room and start the run again"
            ) from None


def scalars_of(record: dict[str, Any]) -> dict[str, float]:
    """Return what the loggers get of a line of metrics."""
    scalars = {name: record[name] for name in ("loss", "lr", "grad_norm", "tokens_per_second")}
    scalars = {name: value for name, value in scalars.items() if value is not None}
    scalars |= {f"step_seconds/rank{rank}": value for rank, value in enumerate(record["step_seconds"])}
    scalars |= {f"rows/rank{rank}": value for rank, value in enumerate(record.get("rows", []))}
    return scalars | {f"gpu/{name}": value for name, value in record.get("gpu", {}).items()}


def _start_wandb(spec: RunSpec, run_dir: Path) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError(
            "loggers: wandb is not installed here: pip install 'trainyard[wandb]', or loggers=tensorboard"
        ) from None
    return wandb.init(
        project="trainyard",
        name=spec.run,
        id=spec.run,
        dir=str(run_dir),
        resume="allow",
        config=spec.model_dump(mode="json"),
    )
