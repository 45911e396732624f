"""What a logged-in user can do: actions on runs, by the classes that the playbooks use, one at a time for each run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from trainer.common.errors import MAX_MESSAGE, UserError
from trainer.common.formats import printable
from trainyard.dashboard.project import Project
from trainyard.dashboard.start_form import Draft
from trainyard.dashboard.views import Action, Pages
from trainyard.deploy.deploy_options import make_deploy_options
from trainyard.deploy.deployment import Deployment
from trainyard.ollama.servers import host_urls
from trainyard.queue.manage import Verb, change_options, change_runs
from trainyard.queue.queue_client import QueueClient
from trainyard.run.follow.manage_runs import stop_run
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.session import RunSession
from trainyard.run.types import SessionState
from trainyard.wire.connection import Host, HostConnection, InventoryError, RemoteError
from trainyard.wire.run_errors import RunError

LINES = 200  # of an action, the newest
EARLIER = 5  # actions of a run that its page lists besides the newest
CONNECT_LIMIT = 60.0  # s for the inventory to make a connection


Work = Callable[["ActionProgress"], dict[str, Any]]
"""Does an action in a thread; returns its `lines`."""


class ActionProgress:
    """What the thread of an action reports to the event loop, and the connections that it uses."""

    def __init__(self, action: Action, pages: Pages, connect: Callable[[Host], HostConnection]) -> None:
        self._action, self._pages, self._connect = action, pages, connect
        self._loop = asyncio.get_running_loop()

    def report(self, line: str) -> None:
        """Show a line."""
        self._tell(lambda: setattr(self._action, "lines", [*self._action.lines, line][-LINES:]))

    def follow(self) -> None:
        """From now on, the action only follows the run: other actions on it may begin."""
        self._tell(lambda: setattr(self._action, "state", "following"))

    def connect(self, host: Host) -> HostConnection:
        """Make a connection of the action's own in the main thread, which the inventory requires."""

        async def make() -> HostConnection:
            return self._connect(host)

        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(CONNECT_LIMIT)

    def _tell(self, change: Callable[[], None]) -> None:
        def apply() -> None:
            change()
            self._pages.cluster.change()

        with contextlib.suppress(RuntimeError):  # the dashboard has ended
            self._loop.call_soon_threadsafe(apply)


class Actions:
    """Carries out actions, each in a thread, and shows their progress on the page of the run and in its row of the queue."""

    def __init__(
        self,
        hosts: Sequence[Host],
        connect: Callable[[Host], HostConnection],
        options: LaunchOptions,
        pages: Pages,
        project: Project,
    ) -> None:
        """Prepare for actions on these hosts; see `server.serve`."""
        self._hosts, self._connect, self._options, self._pages = list(hosts), connect, options, pages
        self._project = project
        self._tasks: set[asyncio.Task[None]] = set()

    def stop(self, run: str, now: bool) -> bool:
        """Stop a run, after a checkpoint or `now`. Returns False if an action on the run is in progress."""

        def work(progress: ActionProgress) -> dict[str, Any]:
            return stop_run(run, self._hosts, self._by_name(progress), self._options, now=now)

        return self._begin(run, "Kill the ranks" if now else "Stop after a checkpoint", work)

    def start(self, run: str) -> bool:
        """Start a run again with its spec, so that it resumes, and follow it to its end. As `stop`."""

        def work(progress: ActionProgress) -> dict[str, Any]:
            how = self._hosts, progress.connect, self._options, progress.report
            return _run(self._project.session_of(run, *how), progress)

        return self._begin(run, "Start again", work)

    def plan(self, draft: Draft) -> None:
        """Plan a new run; nothing starts."""

        def work(progress: ActionProgress) -> dict[str, Any]:
            session = self._new_session(draft, progress, spec=draft.spec)
            planned = session.plan(preview=True)
            if failure := session.state.failure:  # max_restarts leaves it to `follow`
                raise RunError(failure["msg"])
            if session.state.phase == "new":
                draft.prepared = session.prepared
            return planned

        self._perform(draft.action, work)

    def start_new(self, draft: Draft) -> bool:
        """Start a run that was planned, and follow it to its end. As `stop`; also False if it has no plan, or was started."""
        prepared = draft.prepared
        if not prepared or draft.start:
            return False

        def work(progress: ActionProgress) -> dict[str, Any]:
            return _run(self._new_session(draft, progress, state=SessionState(prepared=prepared)), progress)

        begun = self._begin(prepared.run, "Start", work)
        if begun:
            draft.start = self._pages.actions[prepared.run]
        return begun

    def _new_session(self, draft: Draft, progress: ActionProgress, **what: Any) -> RunSession:
        what |= {"home": self._project.home, "report": progress.report}
        return RunSession(draft.hosts, progress.connect, draft.options, **what)

    def deploy(self, run: str, name: str, base: str) -> bool:
        """Put a finished run into every host's Ollama as the model `name`; `base`: of an adapter, empty to search. As `stop`."""

        def work(progress: ActionProgress) -> dict[str, Any]:
            options = make_deploy_options({"run": run, "deploy_name": name, "deploy_base": base or None})
            more: dict[str, Any] = {"work": self._project.work, "report": progress.report}
            urls = {host.name: host_urls(host) for host in self._hosts}
            return Deployment(self._hosts, progress.connect, urls, options, **more).deploy()

        return self._begin(run, f"Deploy as {printable(name, 80) or 'a model without a name'}", work)

    def change_queue(self, run: str, verb: Verb, priority: str) -> bool:
        """Change a run of the queue, see `change_runs`. As `stop`. Raises UserError for a wrong priority."""
        options = change_options(verb, {"run": run, "priority": priority})

        def work(progress: ActionProgress) -> dict[str, Any]:
            return change_runs(QueueClient(self._by_name(progress)(self._pages.queue.host)), verb, options)

        titles = {"priority": f"Change the priority to {priority}", "again": "Add to the queue again"}
        return self._begin(run, titles.get(verb, verb.capitalize()), work)

    def _by_name(self, progress: ActionProgress) -> Callable[[str], HostConnection]:
        hosts = {host.name: host for host in self._hosts}
        return lambda name: progress.connect(hosts[name])

    def _begin(self, run: str, title: str, work: Work) -> bool:
        known = self._pages.actions.get(run)
        if known and known.state == "running":
            return False
        action = self._pages.actions[run] = Action(title)
        action.earlier = [known, *known.earlier][:EARLIER] if known else []
        if known:
            known.earlier = []
        self._pages.cluster.add_event("action", f"run {run}: {title[0].lower()}{title[1:]}, on the dashboard", run=run)
        self._perform(action, work)
        return True

    def _perform(self, action: Action, work: Work) -> None:
        self._pages.cluster.change()
        task = asyncio.get_running_loop().create_task(self._carry_out(action, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, action: Action, work: Work) -> None:
        progress = ActionProgress(action, self._pages, self._connect)
        done: Future[dict[str, Any]] = Future()
        done.set_running_or_notify_cancel()  # the end of the server does not cancel it

        def run() -> None:
            try:
                done.set_result(work(progress))
            except Exception as error:
                done.set_exception(error)

        # The thread ends with the process: it may follow a run for days.
        threading.Thread(target=run, name="action", daemon=True).start()
        try:
            result = await asyncio.wrap_future(done)
            lines, action.state = [str(line) for line in result.get("lines", [])], "done"
        except Exception as error:
            # An unexpected error does not name what to do: its type helps.
            expected = isinstance(error, RunError | RemoteError | UserError | InventoryError)
            message = str(error) if expected else f"{type(error).__name__}: {error}"
            action.error, action.state = printable(message, MAX_MESSAGE), "failed"
            lines = [str(line) for line in getattr(error, "details", {}).get("lines", [])]
        action.lines = [*action.lines, *lines][-LINES:]
        self._pages.queue.update_soon()
        self._pages.cluster.change()


def _run(session: RunSession, progress: ActionProgress) -> dict[str, Any]:
    for step in (session.plan, session.preflight, session.stage, session.launch):
        _show(step(), progress)
    progress.follow()
    _show(session.follow(), progress)
    return session.collect()


def _show(done: dict[str, Any], progress: ActionProgress) -> None:
    for line in done.get("lines", []):
        progress.report(str(line))
