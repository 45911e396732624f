"""The request of `start`, which the supervisor gets as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trainer.supervise.link_free import LinkFreePath, run_folder
from trainer.supervise.run_files import SupervisorError

# Fields that the supervisor does not need.
_OF_THE_START = {"backend", "properties", "writable", "reads", "claim", "stop_seen", "data_dir", "named"}


@dataclass
class StartRequest:
    """One host's part of a run."""

    run_dir: str
    command: list[str]  # torchrun and its arguments
    node_rank: int = 0
    ranks: list[int] = field(default_factory=lambda: [0])  # the ranks of this host, by local rank
    hosts: list[str] = field(default_factory=list)  # all hosts of the run, by node rank
    attempt: int = 0  # number of the attempt; 0: the last one plus 1
    backend: str = "auto"  # auto, systemd or process
    properties: list[str] = field(default_factory=list)  # of the systemd unit, such as MemoryMax=20G
    reachable: list[str] = field(default_factory=list)  # addresses to which the unit is limited; empty for no limit
    hold: bool = False  # start torchrun only when the folder `state/go` exists, so that all hosts begin together
    writable: list[str] = field(default_factory=list)  # paths of variables of the ranks: folders stay writable
    reads: list[str] = field(default_factory=list)  # paths that the spec names, which the unit shows
    devices: list[str] = field(default_factory=list)  # UUIDs of the GPUs of the ranks; empty without a GPU
    claim: str = ""  # token of the controller's claim on the run folder; empty: the files were staged before
    stop_seen: bool = True  # a user had stopped the run when this start was planned; else such a stop refuses it
    lease: str = ""  # file that the step of a Slurm job locks while the run may use this host; empty without a queue
    unit: str = ""  # the systemd unit, set by `start`
    data_dir: Path = Path()  # set by `start`
    named: str = ""  # the run folder as the command names it, set by `start`

    @classmethod
    def from_json(cls, request: dict[str, Any]) -> StartRequest:
        """Return the request. Raises SupervisorError for a field that is missing or unknown."""
        known = {entry.name for entry in fields(cls)} - {"unit", "data_dir", "named"}
        if wrong := sorted({"run_dir", "command"} - set(request)) or sorted(set(request) - known):
            raise SupervisorError(f"start: the field {wrong[0]} is missing or unknown")
        return cls(**{name: value for name, value in request.items() if value is not None})

    def resolve(self) -> LinkFreePath:
        """Replace links in the path of the folder of runs, and set `data_dir` and `named`; return the run folder."""
        self.named = self.run_dir
        run_dir, self.data_dir = run_folder(self.run_dir).resolved(), Path(self.run_dir).parents[1].resolve()
        self.run_dir = str(run_dir)
        return run_dir

    def to_json(self) -> str:
        """Return what the supervisor needs of this request, which `read` takes."""
        return json.dumps({name: value for name, value in vars(self).items() if name not in _OF_THE_START})

    @classmethod
    def read(cls, text: str | bytes) -> StartRequest:
        """Return the request that `to_json` has written. Raises SupervisorError for any other text."""
        try:
            return cls(**json.loads(text))
        except (RecursionError, TypeError, ValueError):
            raise SupervisorError("the request of the start is damaged") from None
