"""The part of a run on one host, and its latest status."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from trainyard.wire.reply_types.run_replies import HeartbeatReply, NodeReply, RunStatus

ENDED_WELL = ("finished", "stopped")


@dataclass
class HostRun:
    """One host's part of a run, and its latest status."""

    host: str
    run_dir: str
    node_rank: int = 0
    ranks: list[int] = field(default_factory=list)  # global ranks on this host, in the order of local ranks
    answer: RunStatus | None = None  # the latest status; None before the first one
    silent: float = 0.0  # seconds since the latest status
    error: str = ""  # why the latest request failed
    halted: float = 0.0  # seconds since its supervisor was last seen running

    @property
    def status(self) -> str:
        """State of the host's supervisor; `unknown` before the first status."""
        return self.answer["status"] if self.answer else "unknown"

    @property
    def node(self) -> NodeReply:
        """Contents of node.json on the host; empty if it has none."""
        return (self.answer and self.answer.get("node")) or cast("NodeReply", {})

    @property
    def states(self) -> dict[int, HeartbeatReply]:
        """Heartbeats of the host's ranks, by global rank."""
        found = (self.answer and self.answer.get("ranks")) or {}
        return {int(rank): state for rank, state in found.items()}

    def state(self, rank: int) -> HeartbeatReply:
        """Return the heartbeat of a rank; empty before the first one."""
        return self.states.get(rank, HeartbeatReply())

    def name_of(self, rank: int) -> str:
        """Return what messages call a rank of this host."""
        return f"rank {rank} on {self.host}"


def killed_ranks(part: HostRun) -> list[int]:
    """Return the ranks of a stopped part that did not exit by themselves with a checkpoint."""
    if part.status != "stopped":
        return []
    return [rank for rank, state in sorted(part.states.items()) if state.get("status") not in (*ENDED_WELL, "failed")]


def last_step(parts: Iterable[HostRun]) -> int:
    """Return the last step that a rank has reported; 0 without one."""
    return max((state.get("step") or 0 for part in parts for state in part.states.values()), default=0)
