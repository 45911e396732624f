"""What a logged-in user can do: actions on runs, by the classes that the playbooks use, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer.errors import UserError
from trainyard.connection import Host, HostConnection, RemoteError
from trainyard.dashboard.views import Action, Pages
from trainyard.queue.client import QueueClient
from trainyard.queue.manage import Verb, change_options, change_runs
from trainyard.run.errors import RunError
from trainyard.run.options import LaunchOptions
from trainyard.run.runs import stop_run


class Actions:
    """Carries out actions in a thread, and shows their progress on the page of the run and in its row of the queue."""

    def __init__(
        self, hosts: list[Host], connections: Mapping[str, HostConnection], options: LaunchOptions, pages: Pages
    ) -> None:
        """Take connections of its own: one thread at a time uses a connection."""
        self._hosts, self._connections, self._options, self._pages = hosts, connections, options, pages
        self._thread = ThreadPoolExecutor(1, "action")
        self._tasks: set[asyncio.Task[None]] = set()

    def stop(self, run: str, now: bool) -> bool:
        """Stop a run, after a checkpoint or `now`. Returns False if an action on the run is in progress."""
        title = "Kill the ranks" if now else "Stop after a checkpoint"
        return self._begin(run, title, lambda: stop_run(run, self._hosts, self._connect, self._options, now=now))

    def change_queue(self, run: str, verb: Verb, priority: str) -> bool:
        """Cancel, hold or release a run of the queue, or give it another priority. As `stop`.

        Raises UserError for a wrong priority.
        """
        options = change_options(verb, {"run": run, "priority": priority})
        client = QueueClient(self._connections[self._pages.queue.host])
        title = f"Change the priority to {priority}" if verb == "priority" else verb.capitalize()
        return self._begin(run, title, lambda: change_runs(client, verb, options))

    def _connect(self, name: str) -> HostConnection:
        return self._connections[name]

    def _begin(self, run: str, title: str, work: Callable[[], dict[str, Any]]) -> bool:
        known = self._pages.actions.get(run)
        if known and known.state == "running":
            return False
        action = self._pages.actions[run] = Action(title)
        self._pages.cluster.add_event("action", f"run {run}: {title.lower()}, on the dashboard", run=run)
        self._pages.cluster.change()
        task = asyncio.get_running_loop().create_task(self._carry_out(action, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _carry_out(self, action: Action, work: Callable[[], dict[str, Any]]) -> None:
        try:
            done = await asyncio.get_running_loop().run_in_executor(self._thread, work)
            action.lines, action.state = [str(line) for line in done.get("lines", [])], "done"
        except (RunError, RemoteError, UserError) as error:
            action.lines, action.state = [str(error)], "failed"
        self._pages.queue.ask_soon()
        self._pages.cluster.change()
