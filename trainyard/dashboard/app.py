"""The routes of the dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from trainer.common.errors import MAX_MESSAGE, UserError
from trainer.common.formats import printable
from trainyard.dashboard import prometheus
from trainyard.dashboard.actions import Actions
from trainyard.dashboard.log_streams import Key, RunLog
from trainyard.dashboard.model_questions import RefusedError
from trainyard.dashboard.project import Project
from trainyard.dashboard.records import RunRecords
from trainyard.dashboard.security import AuthMiddleware, SessionAuth
from trainyard.dashboard.start_form import FIRST, HOST, LAUNCH, NewRuns
from trainyard.dashboard.state import ClusterView, DashboardRun
from trainyard.dashboard.streams import HostStream
from trainyard.dashboard.timeline import SCALES
from trainyard.dashboard.views import OVERLAYS, Pages, spec_rows, spec_values
from trainyard.evaluate.kept_evaluations import NAME
from trainyard.queue.manage import CHANGES, check_verb
from trainyard.run.follow.artifacts import tensorboard_command
from trainyard.wire.connection import RemoteError

PAUSE = 0.4  # s between two messages to a browser
END = 1.5  # s for the last message when the server ends
IDLE = 15.0  # s after which a message without content is sent
PAGES = ("nodes", "runs", "events", "queue", "models", "evaluations", "start", "run")
RECENT = 32  # runs whose metrics stay in memory, and logs
UNFINISHED = ("stopped", "failed", "lost")  # states of a run that can be started again
BROWSERS = 64  # pages that receive messages at the same time
STATIC = Path(__file__).with_name("static")


class Dashboard:
    """What the routes share."""

    def __init__(
        self,
        cluster: ClusterView,
        streams: Mapping[str, HostStream],
        pages: Pages,
        actions: Actions,
        access: SessionAuth,
        project: Project,
    ) -> None:
        self.cluster, self.streams, self.pages, self.actions, self.access = cluster, streams, pages, actions, access
        # All browsers that show the same one share it.
        self.records = functools.lru_cache(RECENT)(RunRecords)
        self.logs = functools.lru_cache(RECENT)(RunLog)
        self.project = project
        self.listeners = 0

    def app(self) -> Starlette:
        routes = [
            Route("/login", self.access.login),
            Route("/", self._page("nodes")),
            Route("/runs", self.runs),
            Route("/events", self._page("events")),
            Route("/queue", self.queue),
            Route("/models", self._page("models")),
            Route("/start", self.form, methods=["GET"]),
            Route("/start", self.plan, methods=["POST"]),
            Route("/start/{plan}", self.start_new, methods=["POST"]),
            Route("/models/ask", self.ask, methods=["POST"]),
            Route("/evaluations", self.evaluations),
            Route("/queue/{run}/{verb}", self.change_queue, methods=["POST"]),
            Route("/runs/{run}", self.run),
            Route("/runs/{run}/series", self.series),
            Route("/runs/{run}/log", self.log),
            Route("/runs/{run}/stop", self.stop, methods=["POST"]),
            Route("/runs/{run}/start", self.start, methods=["POST"]),
            Route("/runs/{run}/deploy", self.deploy, methods=["POST"]),
            Route("/live/{page}", self.live),
            Route("/metrics", self.metrics),
            Route("/health", self.health),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            work = [
                self.pages.queue.run(),
                self.pages.evaluations.run(),
                *(each.run() for each in self.streams.values()),
            ]
            tasks = [asyncio.create_task(one) for one in work]
            yield
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        middleware = [Middleware(AuthMiddleware, access=self.access)]
        return Starlette(routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers={404: _not_found})

    def _run(self, request: Request) -> DashboardRun:
        name = request.path_params["run"]
        if name not in self.cluster.runs:
            raise HTTPException(404)
        return self.cluster.runs[name]

    def _page(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        """Return what shows a page without arguments."""

        async def show(request: Request) -> Response:
            return HTMLResponse(self.pages.page(name))

        return show

    async def runs(self, request: Request) -> Response:
        """Show the runs; `all=1` shows every ended one."""
        return HTMLResponse(self.pages.page("runs", "all" if request.query_params.get("all") == "1" else ""))

    async def queue(self, request: Request) -> Response:
        """Show the queue, and who had which host when: in the time `time`, a key of SCALES."""
        scale = request.query_params.get("time", "")
        arguments = [scale] if scale in SCALES else []
        return HTMLResponse(self.pages.page("queue", *arguments, queue=self.pages.queue))

    async def evaluations(self, request: Request) -> Response:
        """Show the results of evaluations, and of the one `name`, or of the newest one, all scores."""
        await self.pages.evaluations.update()
        name = request.query_params.get("name", "")
        return HTMLResponse(self.pages.page("evaluations", *([name] if NAME.fullmatch(name) else [])))

    async def run(self, request: Request) -> Response:
        """Show a run; `with` names runs to compare it with, separated by commas or given several times."""
        run = self._run(request)
        given = dict.fromkeys(",".join(request.query_params.getlist("with")).split(","))
        others = [name for name in given if name in self.cluster.runs and name != run.name][:OVERLAYS]
        found = {name: await self._describe(self.cluster.runs[name]) for name in (run.name, *others)}
        specs = {name: await asyncio.to_thread(_named_spec, one) for name, one in found.items()}
        names = sorted(self.cluster.runs.values(), key=lambda one: -one.started)
        # A log of another program than a rank has no label.
        labels = {(host, f"rank{rank}.log"): f"rank {rank}" for rank, (host, _) in run.ranks.items()}
        logs = [(host, file) for host, files in found[run.name]["logs"].items() for file in files]
        more: dict[str, Any] = {
            "run": run,
            "others": others,
            "names": [one.name for one in names if one.name != run.name][:200],
            "specs": specs,
            "rows": spec_rows(specs, differences=bool(others)),
            "tensorboard": self._tensorboard(run, specs[run.name]),
            "log_files": [(*log, labels.get(log, "")) for log in logs],
        }
        return HTMLResponse(self.pages.page("run", run.name, **more))

    def _tensorboard(self, run: DashboardRun, spec: dict[str, str]) -> str:
        """Return the command that shows a run in TensorBoard; empty if the run writes no event files."""
        if 0 not in run.ranks or spec.get("script") or "tensorboard" not in spec.get("loggers", "").split(", "):
            return ""
        name, _ = run.ranks[0]  # the rank that writes them
        return tensorboard_command(f"{run.parts[name].run_dir}/tensorboard", self.cluster.hosts[name].host)

    async def _describe(self, run: DashboardRun) -> dict[str, Any]:
        """Return `spec` and `origin` of the first host that answers, and `logs`, {host: {file: bytes}}."""
        hosts = [part.host for part in run.newest or run.parts.values() if self.cluster.hosts[part.host].connected]
        asked = (self.streams[host].ask("describe", run=run.name) for host in hosts)
        answers = dict(zip(hosts, await asyncio.gather(*asked, return_exceptions=True), strict=True))
        good = {host: answer for host, answer in answers.items() if isinstance(answer, dict)}
        first = next(iter(good.values()), {"spec": "", "origin": {}})
        return {**first, "logs": {host: answer["logs"] for host, answer in good.items()}}

    async def series(self, request: Request) -> Response:
        """Return the metrics of a run."""
        records = self.records(self._run(request).name)
        await records.update(self.cluster, self.streams)
        return JSONResponse(records.series())

    async def log(self, request: Request) -> Response:
        """Return the lines of a log of a run that contain the text `search`."""
        run, query = self._run(request), request.query_params
        host, file = query.get("host", ""), query.get("file", "")
        if host not in run.parts:
            raise HTTPException(404)
        try:
            answer = await self.streams[host].ask("search", run=run.name, file=file, text=query.get("search", "")[:200])
        except RemoteError as error:
            return JSONResponse({"error": str(error)}, 502)
        return JSONResponse({name: answer[name] for name in ("lines", "found", "skipped")})

    async def stop(self, request: Request) -> Response:
        """Stop a run."""
        return await self._act(request, lambda run, form: self.actions.stop(run.name, now=form.get("now") == "1"))

    async def start(self, request: Request) -> Response:
        """Restart a run that has ended."""
        return await self._act(request, lambda run, form: run.alive or self.actions.start(run.name))

    async def form(self, request: Request) -> Response:
        """Show the form of a new run; with `plan`, the values and the plan of a draft."""
        plan = request.query_params.get("plan", "")
        draft = self._new_runs().drafts.get(plan)
        return await self._form(draft.values if draft else {}, plan=plan if draft else "")

    async def _form(self, values: Mapping[str, str], error: str = "", plan: str = "") -> Response:
        new = self._new_runs()
        more: dict[str, Any] = {"fields": await asyncio.to_thread(new.fields), "first": FIRST, "launch": LAUNCH}
        more |= {"hosts": [host.name for host in new.hosts], "host_prefix": HOST, "values": values, "error": error}
        return HTMLResponse(self.pages.page("start", *([plan] if plan else []), **more), 400 if error else 200)

    def _new_runs(self) -> NewRuns:
        if self.pages.new_runs is None:
            raise HTTPException(404)
        return self.pages.new_runs

    async def plan(self, request: Request) -> Response:
        """Check the form of a new run, and plan the run; or show the form with what is wrong."""
        new, form = self._new_runs(), await self.access.read_form(request)
        try:
            draft = new.draft(form, await asyncio.to_thread(new.fields))
            plan = new.keep(draft)
        except UserError as error:
            return await self._form(form, printable(error, MAX_MESSAGE))
        self.actions.plan(draft)
        return RedirectResponse(f"/start?plan={plan}", 303)

    async def start_new(self, request: Request) -> Response:
        """Start the run of a plan."""
        plan = request.path_params["plan"]
        draft = self._new_runs().drafts.get(plan)
        if draft is None:
            raise HTTPException(404)
        await self.access.read_form(request)
        self.actions.start_new(draft)
        return RedirectResponse(f"/start?plan={plan}", 303)

    async def deploy(self, request: Request) -> Response:
        """Deploy a finished run as the model `name`, on the base `base` if that is not empty."""

        def act(run: DashboardRun, form: dict[str, str]) -> object:
            name, base = (form.get(field, "").strip() for field in ("name", "base"))
            return run.status != "finished" or self.actions.deploy(run.name, name, base)

        return await self._act(request, act)

    async def _act(self, request: Request, act: Callable[[DashboardRun, dict[str, str]], object]) -> Response:
        """Run the action of a form on a run's page, and show the page, which has the progress."""
        run = self._run(request)
        act(run, await self.access.read_form(request))
        return RedirectResponse(f"/runs/{run.name}", 303)

    async def change_queue(self, request: Request) -> Response:
        """Cancel, hold or release a run of the queue, add it again, or change its priority to the field `priority`."""
        run, verb = request.path_params["run"], request.path_params["verb"]
        view = self.pages.queue.view
        if verb not in CHANGES or not view or run not in view.names:
            raise HTTPException(404)
        form = await self.access.read_form(request)
        try:
            self.actions.change_queue(run, check_verb(verb), form.get("priority", ""))
        except UserError as error:
            return PlainTextResponse(f"400: {error}\n", 400)
        return RedirectResponse("/queue", 303)

    async def ask(self, request: Request) -> Response:
        """Ask the model `model` the `question`, and send its answer while it is generated, see `ModelQuestions.ask`."""
        form = await self.access.read_form(request)
        asked = form.get("model", ""), form.get("question", "")
        try:
            lines = await self.pages.questions.ask(*asked, lambda: self.access.in_session(request.scope))
        except RefusedError as error:
            return PlainTextResponse(f"{error.status}: {error}\n", error.status)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def metrics(self, request: Request) -> Response:
        """Return the state of the cluster for Prometheus."""
        return Response(prometheus.exposition(self.cluster), media_type=prometheus.CONTENT_TYPE)

    async def health(self, request: Request) -> Response:
        """Say that the dashboard answers, to anybody, and nothing else."""
        return PlainTextResponse("ok\n")

    async def live(self, request: Request) -> Response:
        """Send the regions of a page that change, and a run's new metrics, as server-sent events.

        For a run's page also the lines of a log: with `log=1` those of all ranks, or those of `file` on `host`.
        """
        page, query = request.path_params["page"], request.query_params
        argument, log = query.get("argument", ""), ("", "", "")
        if page not in PAGES or (page == "run" and argument not in self.cluster.runs):
            raise HTTPException(404)
        if page == "run" and query.get("log") == "1":
            log = (argument, query.get("host", ""), query.get("file", ""))
            if log[1] and log[1] not in self.cluster.runs[argument].parts:
                raise HTTPException(404)
        if self.listeners >= BROWSERS:
            return PlainTextResponse(f"503: {BROWSERS} pages are open: close one\n", 503)
        taken = page in ("run", "runs", "evaluations", "start") or (page == "queue" and argument in SCALES)
        arguments = [argument] if taken else []
        end = anyio.Event()  # of the server
        messages = self._messages(request, page, arguments, log, end)
        return EventSourceResponse(messages, ping=60, shutdown_event=end, shutdown_grace_period=END)

    async def _messages(
        self, request: Request, page: str, arguments: list[str], log: Key, end: anyio.Event
    ) -> AsyncIterator[dict[str, str]]:
        self.listeners += 1
        with contextlib.ExitStack() as stack:
            stack.callback(self._leave)
            stack.callback(asyncio.create_task(self._wake_at(end)).cancel)
            if page in ("queue", "events"):
                stack.enter_context(self.pages.queue.page())
            if page == "evaluations":
                stack.enter_context(self.pages.evaluations.page())
            sent: dict[str, str] = {}
            series, lines, asks_queue = None, None, False  # places in the metrics and in the log
            while not end.is_set() and self.access.in_session(request.scope):
                if page == "run" and arguments[0] not in self.cluster.runs:
                    return
                version = self.cluster.version
                if page == "run" and not asks_queue and self.cluster.runs[arguments[0]].status in UNFINISHED:
                    asks_queue = True  # which may have the run, and can add it again
                    stack.enter_context(self.pages.queue.page())
                groups = self.pages.regions(page, *arguments)
                now = {name: html for regions in groups.values() for name, html in regions.items()}
                changed = {name: html for name, html in now.items() if sent.get(name) != html}
                order = {group: list(regions) for group, regions in groups.items()}
                if changed or now.keys() != sent.keys():
                    yield {"event": "regions", "data": json.dumps({"order": order, "html": changed})}
                sent = now
                if page == "run":
                    news, series = await self.records(arguments[0]).news(series, self.cluster, self.streams)
                    if news:
                        yield {"event": "series", "data": json.dumps(news)}
                if log[0]:
                    news, lines = await self.logs(log).news(lines, self.cluster, self.streams)
                    if news:
                        yield {"event": "log", "data": json.dumps(news)}
                await asyncio.sleep(PAUSE)
                await self.cluster.wait(version, IDLE)

    async def _wake_at(self, end: anyio.Event) -> None:
        """Let the messages look whether the server ends."""
        await end.wait()
        self.cluster.change()

    def _leave(self) -> None:
        self.listeners -= 1


def _named_spec(found: dict[str, Any]) -> dict[str, str]:
    """Return the fields of a run's spec, with the names that the user gave to model and dataset."""
    values = spec_values(found["spec"])
    origin = {name: str(value) for name, value in found["origin"].items() if isinstance(value, str)}
    named = [name for name in ("model", "dataset", "teacher") if name in origin and name in values]
    return values | {name: origin[name] for name in named}


async def _not_found(request: Request, error: Exception) -> Response:
    return PlainTextResponse("404: there is no such page, or the run no longer exists. Go back to /runs.\n", 404)
