"""The request of `start`, and the command line that passes it to the supervisor."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trainer.supervise.files import SupervisorError
from trainer.supervise.link_free import LinkFreePath, run_folder


@dataclass
class StartRequest:
    """One host's part of a run."""

    run_dir: str
    command: list[str]  # torchrun and its arguments
    node_rank: int = 0
    ranks: list[int] = field(default_factory=lambda: [0])  # the ranks of this host, by local rank
    hosts: list[str] = field(default_factory=list)  # all hosts of the run, by node rank
    attempt: int = 0  # number of the attempt; 0: the last one plus 1
    backend: str = "auto"  # auto, systemd, process or slurm
    properties: list[str] = field(default_factory=list)  # of the systemd unit, such as MemoryMax=20G
    reachable: list[str] = field(default_factory=list)  # addresses to which the unit is limited; empty for no limit
    hold: bool = False  # start torchrun only when the folder `state/go` exists, so that all hosts begin together
    replica: int | None = None  # the replica of this host, if every replica has its own torchrun
    restarts: int = 0  # maximum consecutive restarts of torchrun without progress
    lighthouse: str = ""  # HOST:PORT of the run's lighthouse, on the host that runs it
    teaches: bool = False  # the command is the run's teacher and not torchrun; its only "rank" is its number
    writable: list[str] = field(
        default_factory=list
    )  # paths of variables of the ranks; folders stay writable in the unit
    reads: list[str] = field(default_factory=list)  # paths that the spec names, which the unit shows
    devices: list[str] = field(default_factory=list)  # UUIDs of the GPUs of the ranks; empty without a GPU
    claim: str = ""  # token of the controller's claim on the run folder; empty: the files were staged before
    stop_seen: bool = (
        True  # whether a user had stopped the run when this start was planned; else such a stop refuses it
    )
    lease: str = ""  # file that the step of a Slurm job locks while the run may use this host; empty without a queue
    standby: float = 0.0  # seconds for which a standby process waits for the next start; 0 for none
    settings: str = ""  # digest of the unit's settings but for `reachable`, set by `start`
    script: str = ""  # batch script of Slurm that starts the ranks, with the backend slurm
    unit: str = ""  # the systemd unit, set by `start`
    data_dir: Path = Path()  # set by `start`

    @classmethod
    def from_json(cls, request: dict[str, Any]) -> StartRequest:
        """Return the request. Raises SupervisorError for a field that is missing or unknown."""
        known = {entry.name for entry in fields(cls)} - {"unit", "settings", "data_dir"}
        if wrong := sorted({"run_dir", "command"} - set(request)) or sorted(set(request) - known):
            raise SupervisorError(f"start: the field {wrong[0]} is missing or unknown")
        return cls(**{name: value for name, value in request.items() if value is not None})

    def resolve(self) -> LinkFreePath:
        """Replace links in the path of the folder of runs, and set `data_dir`; return the run folder."""
        run_dir, self.data_dir = run_folder(self.run_dir).resolved(), Path(self.run_dir).parents[1].resolve()
        self.run_dir = str(run_dir)
        return run_dir

    def flags(self) -> list[str]:
        """Return the supervisor's arguments for this request."""
        words = ["--run-dir", self.run_dir, "--node-rank", str(self.node_rank), "--ranks", _join(self.ranks)]
        words += ["--attempt", str(self.attempt), "--hosts", _join(self.hosts), "--restarts", str(self.restarts)]
        words += ["--unit", self.unit] if self.unit else []
        words += ["--devices", _join(self.devices)] if self.devices else []
        words += ["--hold"] if self.hold else []
        words += ["--teaches"] if self.teaches else []
        words += ["--replica", str(self.replica)] if self.replica is not None else []
        words += ["--lighthouse", self.lighthouse] if self.lighthouse else []
        words += ["--lease", self.lease] if self.lease else []
        words += ["--standby", f"{self.standby:g}"] if self.standby else []
        words += ["--settings", self.settings] if self.settings else []
        words += ["--reachable", _join(self.reachable)] if self.reachable else []
        return [*words, "--", *self.command]


def parse_flags(arguments: list[str]) -> StartRequest:
    """Return the request that `StartRequest.flags` has written."""
    parser = argparse.ArgumentParser(prog="trainer.supervise run", allow_abbrev=False)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--ranks", default="0", help="the ranks of this host, by local rank: 0,1")
    parser.add_argument("--hosts", default="", help="all hosts of the run, by node rank: a,b")
    parser.add_argument("--devices", default="", help="UUIDs of the GPUs of the ranks")
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--hold", action="store_true", help="start torchrun when the folder state/go exists")
    parser.add_argument("--teaches", action="store_true", help="the command is the run's teacher and not torchrun")
    parser.add_argument("--replica", type=int, help="the replica of this host, if each has its own torchrun")
    parser.add_argument("--restarts", type=int, default=0, help="maximum consecutive restarts without progress")
    parser.add_argument("--lighthouse", default="", help="HOST:PORT at which to run the lighthouse")
    parser.add_argument("--lease", default="", help="file whose lock permits the run to use this host")
    parser.add_argument("--standby", type=float, default=0.0, help="seconds to wait for the next start")
    parser.add_argument("--settings", default="", help="digest of the settings of the unit")
    parser.add_argument("--reachable", default="", help="addresses to which the unit is limited")
    parser.add_argument("--unit", default="", help="the systemd unit of this process")
    parser.add_argument("command", nargs="+")
    values = vars(parser.parse_args(arguments))
    ranks = [int(rank) for rank in values.pop("ranks").split(",")]
    words = {name: text.split(",") if (text := values.pop(name)) else [] for name in ("hosts", "devices", "reachable")}
    return StartRequest(**values, ranks=ranks, **words)


def _join(values: list[Any]) -> str:
    return ",".join(map(str, values))
