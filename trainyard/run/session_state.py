"""What one step of a session leaves for the next one."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class SessionState:
    """What one step leaves for the next; plain data, so that it can be stored between processes.

    Attributes:
        prepared: the fields of PreparedRun.
        plan: the plan's entries, by node rank.
        phase: the phase of RunPlan, or `failed` if the first start failed and `follow` restarts it.
        port: rendezvous port.
        failure: message and details of a first start that failed.
        status: how the run ended: finished, stopped, or empty.
        token: token of this session's claims on the run.
        staged: hosts that have the large files.
        served: those of them that were the first host, and have all weights of the model.
        attempt: number of the last start that this session made or followed; 0 if there was none.
    """

    prepared: dict[str, Any] | None = None
    plan: list[dict[str, Any]] = field(default_factory=list)
    phase: str = "new"
    port: int = 0
    failure: dict[str, Any] | None = None
    status: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    staged: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    attempt: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)
