"""Errors of a run, for the steps of a session and for those who call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.common.errors import MAX_MESSAGE, TrainyardError
from trainer.common.formats import counted, printable


class RunError(TrainyardError):
    """A step of the run failed. The message is one line: what is wrong, where, what to do.

    `details`: further data for the caller, such as `lines` (evidence), `cause`, `lost` (hosts), `hosts` (how each
    host's part ended), `stop_wanted`. `retryable`: whether a restart may succeed without any change.
    """

    retryable = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(printable(message, MAX_MESSAGE))  # it may quote what a host sent
        self.details = details

    def as_dict(self) -> dict[str, Any]:
        """Return the message as `msg`, and the details."""
        return {"msg": str(self), **self.details}


def first_of(troubles: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the message for the first of several problems, and a line for each other one: each is printed once.

    Args:
        troubles: what is wrong, by host or run; at least one.
    """
    first, *others = [f"{place}: {why}" for place, why in troubles.items()]
    return f"{first} (and {counted(len(others), 'more problem')}, listed below)" if others else first, others


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
