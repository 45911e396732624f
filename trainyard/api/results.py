"""What the methods of the Python interface return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from trainyard.evaluate.scores import Score

T = TypeVar("T")


def pick(kind: type[T], values: Mapping[str, Any], /, **more: Any) -> T:
    """Return a dataclass from the values of its fields; other values are left out."""
    names = {each.name for each in fields(kind)} - set(more)  # type: ignore[arg-type]
    found = {name: values[name] for name in names if name in values}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}, **more)


@dataclass(frozen=True)
class Gpu:
    """A GPU of a host. `memory_mib` in MiB."""

    name: str
    memory_mib: int


@dataclass(frozen=True)
class HostInfo:
    """A host of the cluster, with its hardware. Without an answer, only its name and address are known."""

    name: str
    address: str  # the IP address at which the other hosts reach it
    answers: bool = False  # whether it has answered
    cpu: str = ""
    cores: int = 0
    memory_mib: int = 0  # RAM in MiB
    free_bytes: int = 0  # free space of the disk with its data directory
    gpus: tuple[Gpu, ...] = ()
    models: tuple[str, ...] | None = None  # names of the models of its Ollama, at most 100; None without Ollama


@dataclass(frozen=True)
class OllamaModel:
    """A model of Ollama servers, and the hosts or discovered machines that have it."""

    name: str
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """One machine.

    Attributes:
        trusted: whether it may join the cluster: it is a host of the inventory, or its SSH host key is accepted.
    """

    name: str  # the first entry of the inventory for it
    entries: tuple[str, ...]  # all entries for it
    addresses: tuple[str, ...]  # where it has been reached or discovered
    trusted: bool = True


@dataclass(frozen=True)
class Machines:
    """The different machines behind the entries of an inventory. Iteration yields them."""

    machines: tuple[Machine, ...]
    useful: bool  # whether distributed training on the trusted ones is useful
    verdict: str  # the reason, in one line
    warnings: tuple[str, ...] = ()  # clones, shared GPUs, and addresses of another machine

    def __iter__(self) -> Iterator[Machine]:
        return iter(self.machines)

    def __len__(self) -> int:
        return len(self.machines)


@dataclass(frozen=True)
class Event:
    """A line about a run, and where the run stood."""

    text: str  # the line that the program prints
    status: str = ""  # of rank 0, such as `starting` or `training`; empty before its first heartbeat
    step: int | None = None  # the last step of rank 0; None before the first one
    steps: int | None = None  # all steps
    loss: float | None = None  # mean training loss
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class Metric:
    """One step of a run. `loss`: mean training loss; `tokens`: those with loss in this step. A script may have none."""

    step: int
    loss: float | None = None
    tokens: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class RunResult:
    """How a run has ended: the fields of result.json that every run has.

    Attributes:
        eval_loss_first: mean loss on the held-out samples before the first step; None without `eval_start`.
        adapter, model: folder of the weights on the host of rank 0; one of them is None.
        adapter_sha256, model_sha256: its digest.
        values: all of result.json, with what a script has written.
    """

    run: str
    status: str  # finished or stopped
    step: int = 0  # the last step
    steps: int = 0
    world_size: int = 0
    tokens_per_second: float | None = None
    loss_first: float | None = None  # mean training loss of the first step
    loss_last: float | None = None  # that of the last step
    eval_loss_first: float | None = None
    eval_loss: float | None = None  # mean loss on the held-out samples at the end; None without such samples
    train_samples: int | None = None  # number of different samples that the run has trained on
    adapter: str | None = None
    model: str | None = None
    adapter_sha256: str | None = None
    model_sha256: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Answers:
    """The answers of a teacher."""

    teacher: str
    dataset: str  # the file of the samples on this machine
    count: int  # number of the samples
    asked: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the options of the distillation that gave them


@dataclass(frozen=True)
class SubjectScore(Score):
    """The score of a subject in one file of questions. `subject`: its name, as the caller gave it; `file`: name of the file."""

    file: str
    subject: str


@dataclass(frozen=True)
class SubjectChange:
    """The questions that a subject has right and the first subject wrong, and the reverse: places in `Evaluation.answers`."""

    subject: str
    gained: tuple[int, ...]
    lost: tuple[int, ...]
    p: float  # p-value of McNemar's exact test


@dataclass(frozen=True)
class Evaluation:
    """The scores and answers of several subjects to the same questions.

    Attributes:
        answers: for each question its `file`, `messages`, `answer`, and `answers` with what each subject answered.
    """

    scores: tuple[SubjectScore, ...]  # of every subject in every file
    changes: tuple[SubjectChange, ...]  # of every subject but the first
    answers: tuple[Mapping[str, Any], ...] = field(repr=False)


@dataclass(frozen=True)
class Merged:
    """A merged run, or votes."""

    name: str  # of the run
    method: str
    base_loss: float | None  # loss per token of the base on the held-out samples of the first part
    eval_loss: float | None  # that of the result
    parts: Mapping[str, float | None]  # the loss of each part, by run
    path: str  # the folder of the weights, or the file of the answers, on the host of the first part
    warnings: tuple[str, ...] = ()  # such as parts with equal weights


@dataclass(frozen=True)
class Deployed:
    """A deployed model. `hosts`: whether a host has just received it, or had it, by name."""

    name: str
    hosts: Mapping[str, bool]


@dataclass(frozen=True)
class Job:
    """A run of the queue, as it was when it was read. Times are seconds since the epoch; 0: unknown."""

    run: str
    job: int | None = None  # number of its job in Slurm
    priority: str = ""
    state: str = "unknown"  # waiting, held, running, ending, finished, failed, cancelled, stopped or unknown
    hosts: tuple[str, ...] = ()
    submitted: float = 0.0
    start: float = 0.0
    end: float = 0.0
    reason: str = ""  # why it waits, or how it ended
