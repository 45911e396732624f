"""Errors of a run, for the steps of a session and for those who call them."""

from __future__ import annotations

from typing import Any

from trainer.errors import MAX_MESSAGE
from trainer.formats import printable


class RunError(Exception):
    """A step of the run failed. The message is one line: what is wrong, where, what to do.

    Attributes:
        details: further data for the caller, such as `lines` (evidence), `cause`, `lost` (hosts),
            `hosts` (how each host's part ended), `stop_wanted`.
        retryable: whether a restart may succeed without any change.
    """

    retryable = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(printable(message, MAX_MESSAGE))  # it may quote what a host sent
        self.details = details

    def as_dict(self) -> dict[str, Any]:
        """Return the message as `msg`, and the details."""
        return {"msg": str(self), **self.details}


class PlanError(RunError):
    """These hosts cannot run this spec together."""


class HostUnreachableError(PlanError):
    """A host does not answer. It may answer at the next attempt."""

    retryable = True


class PartlyActiveError(PlanError):
    """The run is active on some of its hosts only, as while another controller starts it."""


class StageError(RunError):
    """A file did not reach a host."""

    retryable = True


class LostSourceError(StageError):
    """The only host that has a file, which it fetched from the hub, does not take part."""


class RunClaimedError(RunError):
    """Another controller is starting the run, or has started it since it was planned."""


class LaunchError(RunError):
    """A host refused to start its ranks."""

    retryable = True


class RunFailedError(RunError):
    """The run started and failed. `details` name the cause."""
