"""Imports before the start that needs them: on hosts that have no standby process, while the other hosts stop or train.

A supervisor that was killed has taken its standby process with it, and a host that has returned has none. Their next start waits
for the imports of torch, which take longer than all the rest of a restart.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from trainyard.connection import FanOut
from trainyard.run.gather import Connect
from trainyard.run.launch import standby_seconds, start_request
from trainyard.run.options import LaunchOptions
from trainyard.run.types import PlanEntry

RETURN_LIMIT = 1800.0  # s for which a host that has returned waits to take part again; the session ends the wait before


class EarlyImports:
    """Asks the hosts of a run for standby processes that wait for its next start.

    Args:
        connect: makes the connection to a host by its name; called in the thread of the caller.
        options: how the run is started.
    """

    def __init__(self, connect: Connect, options: LaunchOptions) -> None:
        self.requested: dict[str, PlanEntry] = {}  # the plan entries of the hosts that were asked
        self._connect, self._options = connect, options
        self._entries: dict[str, PlanEntry] = {}

    def note_start(self, entries: Iterable[PlanEntry]) -> None:
        """Take note of the plan of a start, whose settings the next start has, too."""
        self._entries |= {entry.host: entry for entry in entries if not entry.teaches}

    def begin(self, names: Iterable[str]) -> None:
        """Ask these hosts, and do not wait for their answers: a host that has no standby process imports in its next start."""
        seconds = standby_seconds(self._options)
        found = {name: self._entries[name] for name in names if name in self._entries}
        if not found or not seconds or self._options.launcher != "ssh":
            return
        self.requested |= found
        settings = (self._options.unit_properties, max(seconds, RETURN_LIMIT))
        FanOut(
            {
                name: functools.partial(
                    self._connect(name).start_run, start_request(entry, list(self._entries), *settings), "prepare"
                )
                for name, entry in found.items()
            }
        )

    def begin_after(self, failure: dict[str, Any]) -> None:
        """Ask the hosts that lost their supervisor in a failure, and those that took no part in the start that failed."""
        ends, lost = failure.get("hosts") or {}, failure.get("lost") or []
        if ends:
            waiting = [name for name, end in ends.items() if end["status"] != "lost"]
            self.begin(name for name in self._entries if name not in {*lost, *waiting})
