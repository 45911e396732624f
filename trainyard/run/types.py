"""The types that the steps of a run hand on: its files, its plan, and what one step leaves for the next one.

`plain` writes each of them as JSON, and `read` builds them again: between the tasks of a playbook, and in the folder of a queued run.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, SkipValidation, TypeAdapter
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from trainer.common.errors import UserError
from trainer.config import OBSERVATORY, RunSpec
from trainer.data.data_report import DataReport
from trainer.data.dataset_files import is_hub_id
from trainyard.remote.digests import Digests
from trainyard.remote.local_files import tree_digest
from trainyard.wire.reply_fields import Digest
from trainyard.wire.reply_types.run_replies import Heartbeat, Node

Report = Callable[[str], None]
"""Receives a line for a user."""

StepResult = dict[str, Any]
"""What a step of a session or a command returns, as the front ends print it in JSON. `changed`; `lines` or `msg`, readable text; `skipped` if
there was nothing to do; and what the function names.
"""

Phase = Literal["new", "running", "finished", "stopped", "failed"]
T = TypeVar("T")

MODELS = ("model", "teacher")
HUB_MODE = 0o644  # of a file that a host fetched from the hub, which is public or was fetched for this run


def plain(value: Any) -> Any:
    """Return a value of one of these types as plain data, which JSON can hold."""
    return TypeAdapter(type(value)).dump_python(value, mode="json")


def read(kind: type[T], values: object) -> T:
    """Return the value that `plain` wrote. Raises pydantic.ValidationError, which is a ValueError."""
    return TypeAdapter(kind).validate_python(values)


def _known_fields(values: object) -> object:
    """Return the fields of a spec. Versions before this one wrote `rows_per_step`, too."""
    return {name: values[name] for name in values if name != "rows_per_step"} if isinstance(values, Mapping) else values


StoredSpec = Annotated[RunSpec, BeforeValidator(_known_fields)]


def _is_below(name: str) -> str:
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\0" in name or len(name) > 4096:
        raise ValueError("it leaves its folder")
    return name


Below = Annotated[str, AfterValidator(_is_below)]


@dataclass(frozen=True)
class StagedFile:
    """A file or folder that hosts of a run need.

    Attributes:
        kind: dataset, model, teacher, script, reward, trainer; prompts, eval_prompts and converter for the further steps of a queued run.
        src: path on the controller; empty if only hosts have it.
        dest: path below the data directory of a host.
        sha256: by relative name; the name of a file is empty.
        digest: of all of it.
        bytes: to copy.
        sizes: in bytes, by relative name.
        modes: by relative name, where the file is not on the controller.
        source: place of a dataset, or of a file with rewards, among those of the spec.
        on_hosts: path on the hosts of what they have already, to which the store has a link.
        fetched_by: the host that fetched it from the hub.
        config: text of a model's config.json, where the controller does not have the folder.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    kind: str
    src: str
    dest: Below
    sha256: dict[Below, Digest]
    digest: Digest
    bytes: Annotated[int, Field(ge=0)]
    sizes: dict[str, Annotated[int, Field(ge=0)]] = field(default_factory=dict)
    modes: dict[str, Annotated[int, Field(ge=0, le=0o777)]] = field(default_factory=dict)
    source: Annotated[int, Field(ge=0)] = 0
    on_hosts: str = ""
    fetched_by: str = ""
    config: str = ""

    @classmethod
    def of(cls, source: Path, target: str, digests: dict[str, str], kind: str) -> StagedFile:
        """Return a file of the controller, or the files of a folder. Raises UserError: a file cannot be read.

        Args:
            target: below the data directory of a host.
            digests: {relative name: SHA-256}; the name of a file is empty.
        """
        if unread := [name for name, digest in digests.items() if not digest]:
            raise UserError(f"{kind}: cannot read {source / unread[0]}: let this user read it")
        sizes = {name: (source / name if name else source).stat().st_size for name in digests}
        return cls(kind, str(source), target, digests, tree_digest(digests), sum(sizes.values()), sizes)

    @classmethod
    def of_folder(
        cls, folder: Path, target: str, digests: Digests, kind: str, files: Iterable[Path] | None = None
    ) -> StagedFile:
        """Return a folder of the controller; its digest is appended to `target`.

        Args:
            files: those of the folder to copy; by default all.
        """
        chosen = [file for file in sorted(folder.rglob("*")) if file.is_file()] if files is None else files
        contents = {str(file.relative_to(folder)): digests.of(file) for file in chosen}
        return cls.of(folder, f"{target}-{tree_digest(contents)[:12]}", contents, kind)


Files = list[StagedFile]


@dataclass(frozen=True)
class PreparedRun:
    """A run spec with a name, and the files that every host needs.

    Attributes:
        origin: names of model and dataset in the spec, and their checksums, for the model card.
        data: the totals of the samples; None if only the hosts can count them, or if there are none.
        servers_found: whether `rollout_servers` are those that the controller has found, which another start may not find.
    """

    spec: StoredSpec
    files: Files
    origin: dict[str, str]
    data: Annotated[DataReport | None, BeforeValidator(lambda totals: totals or None)] = None
    servers_found: bool = False

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.spec.run

    @property
    def base_model(self) -> str:
        """What loads the model on the controller: its hub id, or its folder; empty if only the hosts have it."""
        name = self.origin.get("model", "")
        if is_hub_id(name):
            return name
        return next((file.src for file in self.files if file.kind == "model"), "")

    @property
    def has_dataset(self) -> bool:
        """Whether the hosts find every dataset in their store; otherwise each host fetches one from the hub."""
        if self.spec.script and self.spec.dataset == OBSERVATORY:
            return True  # a script reads a dataset only if one is set
        return sum(file.kind == "dataset" for file in self.files) == len(self.spec.sources)

    def spec_on(self, data_dir: str, spec: RunSpec | None = None) -> RunSpec:
        """Return the spec with the paths of the models and datasets on a host.

        Args:
            spec: that of a plan, whose strategy may be another one than `auto`.
        """
        spec = spec or self.spec
        changed, datasets, rewards = {}, [source.path for source in spec.sources], spec.reward_files
        for file in self.files:
            path = f"{data_dir}/{file.dest}"
            if file.kind in (*MODELS, "script"):
                changed[file.kind] = path
            elif file.kind == "dataset":
                datasets[file.source] = path
            elif file.kind == "reward":
                rewards[file.source] = path
        return spec.model_copy(update=changed).with_dataset_paths(datasets).with_reward_files(rewards)


@dataclass
class PlanEntry:
    """One host's part of a run.

    Attributes:
        node_rank: place of the host in the run.
        ranks: global ranks on this host, in the order of local ranks.
        threads: CPU threads per rank.
        command: argument list of the launcher, interpreter first.
        attempt: number of this start of the run; 0 if unknown.
        allocator: path of a library to load instead of the C library's malloc.
        elastic: whether torchrun restarts its ranks itself.
        stale: whether ranks of an earlier start still run there and must be stopped first.
        peers: addresses of all hosts of the run; empty if its unit limits no connection.
        isolated: whether its unit permits connections from and to these addresses only, and to those of `servers`.
        exposed: whether nothing keeps other machines from its ports.
        servers: addresses of the servers that write completions of the run, on the first host; else empty.
        devices: UUIDs of the GPUs of the ranks, in the order of local ranks; empty without a GPU.
        gpu_numbers: their numbers in the order of nvidia-smi.
        hide_gpus: whether the ranks use the CPU of a host with GPUs.
        shared_gpus: whether ranks of two hosts of the run, which are one machine, use the same GPU.
        lease: under the queue, the file on the host that is locked while the run may use it; else empty.
        versions: of the packages on the host, by name.
        gpus: names of the GPUs of the ranks.
        memory_mib: of the smallest of these GPUs; of the host without one.
        link_mbit: speed of the network device as its driver states it; 0 if unknown.
        previous: attempt and time of the latest start on the host; None if there was none.
        stop_wanted: whether a user has stopped that start.
        claim: token of the controller that has claimed the run.
        reads: absolute paths of the spec on the host.
        writable: absolute paths in the variables of the ranks.
    """

    host: str
    node_rank: int = 0
    ranks: list[int] = field(default_factory=list)
    address: str = ""
    interface: str = ""
    threads: int = 0
    run_dir: str = ""
    data_dir: str = ""
    command: list[str] = field(default_factory=list)
    backend: str = "auto"
    properties: list[str] = field(default_factory=list)
    attempt: int = 0
    allocator: str = ""
    elastic: bool = False
    stale: bool = False
    peers: list[str] = field(default_factory=list)
    isolated: bool = False
    exposed: bool = False
    servers: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    gpu_numbers: list[int] = field(default_factory=list)
    hide_gpus: bool = False
    shared_gpus: bool = False
    lease: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)
    memory_mib: int = 0
    link_mbit: float = 0.0
    previous: list[Any] | None = None
    stop_wanted: bool = True
    claim: str = ""
    reads: list[str] = field(default_factory=list)
    writable: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RunPlan:
    """What a session does next.

    Attributes:
        entries: by node rank.
        phase: `new` to stage and launch, `running` to follow, `finished`, or `stopped` by a user before a restart.
        port: rendezvous port; 0 for a run that is already running.
        lines: the plan as readable text.
        spec: of this start, with the strategy that was chosen, and with the paths of the prepared run.
    """

    entries: list[PlanEntry]
    phase: Phase
    port: int
    lines: list[str]
    spec: RunSpec


@dataclass(frozen=True)
class PreviousStart:
    """The previous start of the run in this session.

    Attributes:
        begun: whether the ranks started.
        attempt: its number; 0 if there was none.
        lost: hosts that did not answer.
        barred: hosts with which the next start just failed: it is made without them.
    """

    begun: bool = False
    attempt: int = 0
    lost: Collection[str] = field(default_factory=list)
    barred: Collection[str] = ()


class FailureCause(TypedDict):
    """Why a run failed; `rank` is None if the cause is not one rank. See monitor.Cause."""

    host: str
    rank: int | None
    kind: str
    blocked_by: str


class PartEnd(TypedDict):
    """How a host's part of a run ended."""

    status: str
    node: Node
    ranks: dict[int, Heartbeat]


class RunFailure(TypedDict, total=False):
    """Message and details of a RunError. A run that did not start has no `cause` and no `hosts`.

    Attributes:
        lines: evidence.
        lost: hosts that did not answer.
        stop_wanted: whether a user has stopped the run.
        hosts: how each host's part ended.
        troubles: why hosts did not start, by name.
    """

    msg: str
    lines: list[str]
    cause: FailureCause
    lost: list[str]
    stop_wanted: bool
    hosts: dict[str, PartEnd]
    troubles: dict[str, str]


@dataclass
class SessionState:
    """What one step of a session leaves for the next one.

    Attributes:
        plan: the plan's entries, by node rank.
        spec: of the plan; None before it.
        phase: the phase of RunPlan, or `failed` if the first start failed and `follow` restarts it.
        port: rendezvous port.
        failure: message and details of a first start that failed.
        status: how the run ended: finished, stopped, or empty.
        token: token of this session's claims on the run.
        staged: hosts that have the large files.
        attempt: number of the last start that this session made or followed; 0 if there was none.
    """

    prepared: PreparedRun | None = None
    plan: list[PlanEntry] = field(default_factory=list)
    spec: StoredSpec | None = None
    phase: Phase = "new"
    port: int = 0
    failure: SkipValidation[RunFailure | None] = None
    status: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    staged: list[str] = field(default_factory=list)
    attempt: int = 0


@dataclass(frozen=True)
class StartRecord:
    """How a run was started.

    Attributes:
        spec: spec of the run, with its name.
        launch: the launch options that differ from the defaults, without secrets.
        hosts: their names.
        folder: the current folder of the start, to which relative paths of the spec belong.
        variables: names of the environment variables of `run_env`, whose values are not kept.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="ignore")  # of earlier versions

    spec: StoredSpec
    launch: dict[str, Any]
    hosts: list[str] = field(default_factory=list)
    folder: str = ""
    variables: list[str] = field(default_factory=list)
