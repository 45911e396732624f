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
    return kind(**{name: _frozen(values[name]) for name in names if name in values}, **more)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Gpu:
    """A GPU of a host. `memory_mib` in MiB."""

    name: str
    memory_mib: int


@dataclass(frozen=True)
class HostInfo:
    """A host of the cluster, with its hardware. Without an answer, only its name and address are known.

    Attributes:
        address: the IP address at which the other hosts reach it.
        answers: whether it has answered.
        memory_mib: RAM in MiB.
        free_bytes: free space of the disk with its data directory.
        models: names of the models of its Ollama, at most 100; None without Ollama.
    """

    name: str
    address: str
    answers: bool = False
    cpu: str = ""
    cores: int = 0
    memory_mib: int = 0
    free_bytes: int = 0
    gpus: tuple[Gpu, ...] = ()
    models: tuple[str, ...] | None = None


@dataclass(frozen=True)
class OllamaModel:
    """A model of Ollama servers, and the hosts or discovered machines that have it."""

    name: str
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """One machine.

    Attributes:
        name: the first entry of the inventory for it.
        entries: all entries for it.
        addresses: where it has been reached or discovered.
        trusted: whether it may join the cluster: it is a host of the inventory, or its SSH host key is accepted.
    """

    name: str
    entries: tuple[str, ...]
    addresses: tuple[str, ...]
    trusted: bool = True


@dataclass(frozen=True)
class Machines:
    """The different machines behind the entries of an inventory. Iteration yields them.

    Attributes:
        useful: whether distributed training on the trusted ones is useful.
        verdict: the reason, in one line.
        warnings: clones, shared GPUs, and addresses of another machine.
    """

    machines: tuple[Machine, ...]
    useful: bool
    verdict: str
    warnings: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Machine]:
        return iter(self.machines)

    def __len__(self) -> int:
        return len(self.machines)


@dataclass(frozen=True)
class Event:
    """A line about a run, and where the run stood.

    Attributes:
        text: the line that the program prints.
        status: of rank 0, such as `starting` or `training`; empty before its first heartbeat.
        step: the last step of rank 0; None before the first one.
        steps: all steps.
        loss: mean training loss.
    """

    text: str
    status: str = ""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
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
        status: finished or stopped.
        step: the last step.
        loss_first: mean training loss of the first step.
        loss_last: that of the last step.
        eval_loss_first: mean loss on the held-out samples before the first step; None without `eval_start`.
        eval_loss: the same at the end; None without held-out samples.
        train_samples: number of different samples that the run has trained on.
        adapter, model: folder of the weights on the host of rank 0; one of them is None.
        adapter_sha256, model_sha256: its digest.
        values: all of result.json, with what a script has written.
    """

    run: str
    status: str
    step: int = 0
    steps: int = 0
    world_size: int = 0
    tokens_per_second: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    eval_loss_first: float | None = None
    eval_loss: float | None = None
    train_samples: int | None = None
    adapter: str | None = None
    model: str | None = None
    adapter_sha256: str | None = None
    model_sha256: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Answers:
    """The answers of a teacher.

    Attributes:
        dataset: the file of the samples on this machine.
        count: number of the samples.
        asked: the options of the distillation that gave them.
    """

    teacher: str
    dataset: str
    count: int
    asked: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class SubjectScore(Score):
    """The score of a subject in one file of questions. `subject`: its name, as the caller gave it; `file`: name of the file."""

    file: str
    subject: str


@dataclass(frozen=True)
class SubjectChange:
    """The questions that a subject has right and the first subject wrong, and the reverse: places in `Evaluation.answers`.

    Attributes:
        p: p-value of McNemar's exact test.
    """

    subject: str
    gained: tuple[int, ...]
    lost: tuple[int, ...]
    p: float


@dataclass(frozen=True)
class Evaluation:
    """The scores and answers of several subjects to the same questions.

    Attributes:
        scores: of every subject in every file.
        changes: of every subject but the first.
        answers: for each question its `file`, `messages`, `answer`, and `answers` with what each subject answered.
    """

    scores: tuple[SubjectScore, ...]
    changes: tuple[SubjectChange, ...]
    answers: tuple[Mapping[str, Any], ...] = field(repr=False)


@dataclass(frozen=True)
class Merged:
    """A merged run, or votes.

    Attributes:
        name: of the run.
        base_loss: loss per token of the base on the held-out samples of the first part.
        eval_loss: that of the result.
        parts: the loss of each part, by run.
        path: the folder of the weights, or the file of the answers, on the host of the first part.
        warnings: such as parts with equal weights.
    """

    name: str
    method: str
    base_loss: float | None
    eval_loss: float | None
    parts: Mapping[str, float | None]
    path: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Deployed:
    """A deployed model. `hosts`: whether a host has just received it, or had it, by name."""

    name: str
    hosts: Mapping[str, bool]


@dataclass(frozen=True)
class Job:
    """A run of the queue, as it was when it was read. Times are seconds since the epoch; 0: unknown.

    Attributes:
        job: number of its job in Slurm.
        state: waiting, held, running, ending, finished, failed, cancelled, stopped or unknown.
        reason: why it waits, or how it ended.
    """

    run: str
    job: int | None = None
    priority: str = ""
    state: str = "unknown"
    hosts: tuple[str, ...] = ()
    submitted: float = 0.0
    start: float = 0.0
    end: float = 0.0
    reason: str = ""
