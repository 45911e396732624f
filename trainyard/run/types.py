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
from trainyard.wire.reply_types.run_replies import HeartbeatReply, NodeReply

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
        modes: by relative name, where the file is not on the controller.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    kind: str
    src: str  # path on the controller; empty if only hosts have it
    dest: Below  # path below the data directory of a host
    sha256: dict[Below, Digest]  # by relative name; the name of a file is empty
    digest: Digest  # of all of it
    bytes: Annotated[int, Field(ge=0)]  # to copy
    sizes: dict[str, Annotated[int, Field(ge=0)]] = field(default_factory=dict)  # in bytes, by relative name
    modes: dict[str, Annotated[int, Field(ge=0, le=0o777)]] = field(default_factory=dict)
    source: Annotated[int, Field(ge=0)] = 0  # place of a dataset, or of a file with rewards, among those of the spec
    on_hosts: str = ""  # path on the hosts of what they have already, to which the store has a link
    fetched_by: str = ""  # the host that fetched it from the hub
    config: str = ""  # text of a model's config.json, where the controller does not have the folder

    @classmethod
    def of(cls, source: Path, target: str, digests: dict[str, str], kind: str) -> StagedFile:
        """Return a file of the controller, or the files of a folder. Raises UserError: a file cannot be read.

        `target`: below the data directory of a host. `digests`: {relative name: SHA-256}; the name of a file is empty.
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
            files: those of the folder to copy; by default all but code of Python, which never runs.
        """
        if files is None:
            files = [
                file for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix not in (".py", ".pyc")
            ]
        contents = {str(file.relative_to(folder)): digests.of(file) for file in files}
        return cls.of(folder, f"{target}-{tree_digest(contents)[:12]}", contents, kind)


Files = list[StagedFile]


@dataclass(frozen=True)
class PreparedRun:
    """A run spec with a name, and the files that every host needs.

    Attributes:
        data: the totals of the samples; None if only the hosts can count them, or if there are none.
        servers_found: whether `rollout_servers` are those that the controller has found, which another start may not find.
    """

    spec: StoredSpec
    files: Files
    origin: dict[str, str]  # names of model and dataset in the spec, and their checksums, for the model card
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
        peers: addresses of all hosts of the run; empty if its unit limits no connection.
        isolated: whether its unit permits connections from and to these addresses only, and to those of `servers`.
        servers: addresses of the servers that write completions of the run, on the first host; else empty.
        devices: UUIDs of the GPUs of the ranks, in the order of local ranks; empty without a GPU.
    """

    host: str
    node_rank: int = 0  # place of the host in the run
    ranks: list[int] = field(default_factory=list)  # global ranks on this host, in the order of local ranks
    address: str = ""
    interface: str = ""
    threads: int = 0  # CPU threads per rank
    run_dir: str = ""
    data_dir: str = ""
    command: list[str] = field(default_factory=list)  # argument list of the launcher, interpreter first
    backend: str = "auto"
    properties: list[str] = field(default_factory=list)
    attempt: int = 0  # number of this start of the run; 0 if unknown
    allocator: str = ""  # path of a library to load instead of the C library's malloc
    elastic: bool = False  # whether torchrun restarts its ranks itself
    stale: bool = False  # whether ranks of an earlier start still run there and must be stopped first
    peers: list[str] = field(default_factory=list)
    isolated: bool = False
    exposed: bool = False  # whether nothing keeps other machines from its ports
    servers: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    gpu_numbers: list[int] = field(default_factory=list)  # their numbers in the order of nvidia-smi
    hide_gpus: bool = False  # whether the ranks use the CPU of a host with GPUs
    shared_gpus: bool = False  # whether ranks of two hosts of the run, which are one machine, use the same GPU
    lease: str = ""  # under the queue, the file on the host that is locked while the run may use it; else empty
    versions: dict[str, str] = field(default_factory=dict)  # of the packages on the host, by name
    gpus: list[str] = field(default_factory=list)  # names of the GPUs of the ranks
    memory_mib: int = 0  # of the smallest of these GPUs; of the host without one
    link_mbit: float = 0.0  # speed of the network device as its driver states it; 0 if unknown
    previous: list[Any] | None = None  # attempt and time of the latest start on the host; None if there was none
    stop_wanted: bool = True  # whether a user has stopped that start
    claim: str = ""  # token of the controller that has claimed the run
    reads: list[str] = field(default_factory=list)  # absolute paths of the spec on the host
    writable: list[str] = field(default_factory=list)  # absolute paths in the variables of the ranks


@dataclass(frozen=True)
class RunPlan:
    """What a session does next."""

    entries: list[PlanEntry]  # by node rank
    phase: Phase  # `new` to stage and launch, `running` to follow, `finished`, or `stopped` by a user before a restart
    port: int  # rendezvous port; 0 for a run that is already running
    lines: list[str]  # the plan as readable text
    spec: RunSpec  # of this start, with the strategy that was chosen, and with the paths of the prepared run


@dataclass(frozen=True)
class PreviousStart:
    """The previous start of the run in this session."""

    begun: bool = False  # whether the ranks started
    attempt: int = 0  # its number; 0 if there was none
    lost: Collection[str] = field(default_factory=list)  # hosts that did not answer
    barred: Collection[str] = ()  # hosts with which the next start just failed: it is made without them


class FailureCause(TypedDict):
    """Why a run failed; `rank` is None if the cause is not one rank. See monitor.Cause."""

    host: str
    rank: int | None
    kind: str
    blocked_by: str


class PartEnd(TypedDict):
    """How a host's part of a run ended."""

    status: str
    node: NodeReply
    ranks: dict[int, HeartbeatReply]


class RunFailure(TypedDict, total=False):
    """Message and details of a RunError. A run that did not start has no `cause` and no `hosts`."""

    msg: str
    lines: list[str]  # evidence
    cause: FailureCause
    lost: list[str]  # hosts that did not answer
    stop_wanted: bool  # whether a user has stopped the run
    hosts: dict[str, PartEnd]  # how each host's part ended
    troubles: dict[str, str]  # why hosts did not start, by name


@dataclass
class SessionState:
    """What one step of a session leaves for the next one."""

    prepared: PreparedRun | None = None
    plan: list[PlanEntry] = field(default_factory=list)  # the plan's entries, by node rank
    spec: StoredSpec | None = None  # of the plan; None before it
    phase: Phase = "new"  # the phase of RunPlan, or `failed` if the first start failed and `follow` restarts it
    port: int = 0  # rendezvous port
    failure: SkipValidation[RunFailure | None] = None  # message and details of a first start that failed
    status: str = ""  # how the run ended: finished, stopped, or empty
    token: str = field(default_factory=lambda: secrets.token_hex(8))  # token of this session's claims on the run
    staged: list[str] = field(default_factory=list)  # hosts that have the large files
    attempt: int = 0  # number of the last start that this session made or followed; 0 if there was none


@dataclass(frozen=True)
class StartRecord:
    """How a run was started.

    Attributes:
        variables: names of the environment variables of `run_env`, whose values are not kept.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="ignore")  # of earlier versions

    spec: StoredSpec  # spec of the run, with its name
    launch: dict[str, Any]  # the launch options that differ from the defaults, without secrets
    hosts: list[str] = field(default_factory=list)  # their names
    folder: str = ""  # the current folder of the start, to which relative paths of the spec belong
    variables: list[str] = field(default_factory=list)
