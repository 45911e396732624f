"""The request of a queued run to the cluster. The controller writes it to `request.json` in the folder of the run on
the queue host.

This is the only place that declares an option of the queue. Names for ``-e``, flags, checks, defaults and the table in the
documentation are read off `QueueOptions`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic.fields import FieldInfo

from trainer.config.fields import Words, declare
from trainyard.playbook_options import PlaybookOptions

RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
MAX_MINUTES = 30 * 24 * 60
MAX_RUNS = 1000  # that a run may wait for, and in one batch
Priority = Literal["low", "normal", "high", "critical"]
_Gpus = Annotated[int | None, BeforeValidator(lambda value: None if value == "" else value)]


class QueueOptions(PlaybookOptions):
    """The request of a run to the queue: neither its training (run spec) nor its supervision (launch options)."""

    priority: Priority = declare(
        "normal", "runs of a higher priority start first, and may preempt those of `queue_preempt`"
    )
    nodes: int = declare(1, "hosts that the run trains on", ge=1, le=10_000)
    gpus: _Gpus = declare(
        None,
        "GPUs of each host; empty: the whole host, if `cores` is 0 as well",
        ge=0,
        le=64,
        expected="an integer >= 0 and <= 64",
    )
    gpu_memory: int = declare(0, "minimum memory of each GPU, as its vendor states it", unit="GB", ge=0, le=10_000)
    cores: int = declare(0, "cores of each host; 0: all of a whole host, else one for each GPU", ge=0, le=65_533)
    memory: int = declare(
        0, "memory of each host; 0: all of a whole host, else the share of its cores", unit="GB", ge=0, le=1_000_000
    )
    after: Words = declare((), "runs, or grids of runs, that must finish before this one starts", max_length=MAX_RUNS)
    time_limit: int = declare(
        0, "time after which the run is stopped; 0: twice the plan's estimate", unit="minutes", ge=0, le=MAX_MINUTES
    )

    @property
    def whole_host(self) -> bool:
        """Whether the run has each of its hosts for itself."""
        return self.gpus is None and self.cores == 0


OPTIONS: dict[str, FieldInfo] = dict(QueueOptions.model_fields)


class Request(QueueOptions):
    """A queued run, as in `request.json`.

    Attributes:
        grid: name of the grid to which it belongs; empty for none.
        max_restarts: the launch option: consecutive restarts without progress after which the run has failed.
        time_limit: minutes; 0 is no limit.
        submitted: seconds since the epoch, by the clock of the queue host.
        user: who added it, on the controller; empty if unknown.
        hosts: hosts that it may use, as in the inventory; empty for all of the queue.
    """

    run: Annotated[str, Field(pattern=RUN_NAME)]  # its name, which is that of its folder
    grid: Annotated[str, Field(pattern=RUN_NAME.replace("^", "^(").replace("$", ")?$"))] = ""
    max_restarts: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    submitted: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    user: Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?$")] = ""
    hosts: Annotated[tuple[str, ...], Field(max_length=10_000)] = ()

    @field_validator("after")
    @classmethod
    def _are_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [name for name in value if not is_run_name(name)]:
            raise ValueError(f"{wrong[0]} is not the name of a run")
        return value


def is_run_name(text: str) -> bool:
    """Return whether a run, and its folder, may have this name."""
    return re.fullmatch(RUN_NAME.strip("^$"), text) is not None


def slurm_options(request: Request, excluded: Sequence[str] = ()) -> list[str]:
    """Return sbatch's arguments for a request without `after`, which needs ids; `excluded`: hosts that it must not use."""
    words = [f"--job-name={request.run}", f"--partition={request.priority}", f"--nodes={request.nodes}"]
    # One task on a host, so that the cores of a task are those of the host.
    words += [f"--ntasks={request.nodes}", "--ntasks-per-node=1"]
    if request.whole_host:
        words += ["--exclusive"]
    else:
        words += [f"--cpus-per-task={host_cores(request)}"]
    if gres := _gres(request):
        words += [f"--gres={gres}"]
    if request.memory:
        words += [f"--mem={request.memory}G"]
    elif request.whole_host:
        words += ["--mem=0"]
    if request.time_limit:
        words += [f"--time={request.time_limit}"]
    if excluded:
        words += [f"--exclude={','.join(excluded)}"]
    return words


def host_cores(request: QueueOptions) -> int:
    """Return the cores that the run needs on each host, at least."""
    return request.cores or max(1, request.gpus or 0)


def host_gpus(request: QueueOptions) -> int:
    """Return the GPUs that the run needs on each host, at least."""
    return request.gpus if request.gpus is not None else int(request.gpu_memory > 0)


def _gres(request: Request) -> str:
    count = host_gpus(request)
    words = [f"gpu:{count}"] if count else []
    return ",".join([*words, *([f"vram:{request.gpu_memory}"] if request.gpu_memory else [])])
