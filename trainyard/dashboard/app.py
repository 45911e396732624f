"""The routes of the dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from trainer.errors import UserError
from trainyard.connection import RemoteError
from trainyard.dashboard import prometheus
from trainyard.dashboard.actions import Actions
from trainyard.dashboard.records import RecordStore
from trainyard.dashboard.security import NOT_OUR_FORM, Access, Guard, LoginForm
from trainyard.dashboard.state import Cluster, RunState
from trainyard.dashboard.streams import HostStream
from trainyard.dashboard.views import OVERLAYS, Pages, spec_rows, spec_values
from trainyard.queue.manage import CHANGES, check_verb

PAUSE = 0.4  # s between two messages to a browser
IDLE = 15.0  # s after which a message without content is sent
BROWSERS = 64  # pages that receive messages at the same time
LOG_LINES = 300  # lines of a log that a page shows at first
STATIC = Path(__file__).with_name("static")


class Dashboard:
    """What the routes share."""

    def __init__(
        self,
        cluster: Cluster,
        streams: Mapping[str, HostStream],
        pages: Pages,
        actions: Actions,
        access: Access,
    ) -> None:
        self.cluster, self.streams, self.pages, self.actions, self.access = cluster, streams, pages, actions, access
        self.records = RecordStore(cluster, streams)
        self.listeners = 0

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/login", self.login, methods=["GET", "POST"]),
            Route("/logout", self.logout, methods=["POST"]),
            Route("/", self.nodes),
            Route("/runs", self.runs),
            Route("/events", self.events),
            Route("/queue", self.queue),
            Route("/queue/{run}/{verb}", self.change_queue, methods=["POST"]),
            Route("/runs/{run}", self.run),
            Route("/runs/{run}/series", self.series),
            Route("/runs/{run}/log", self.log),
            Route("/runs/{run}/stop", self.stop, methods=["POST"]),
            Route("/live/{page}", self.live),
            Route("/metrics", self.metrics),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        middleware = [Middleware(Guard, access=self.access)]
        return Starlette(
            routes=routes, middleware=middleware, lifespan=self._lifespan, exception_handlers={404: _not_found}
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(stream.run()) for stream in self.streams.values()]
        tasks.append(asyncio.create_task(self.pages.queue.run()))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, request: Request) -> RunState:
        name = request.path_params["run"]
        if name not in self.cluster.runs:
            raise HTTPException(404)
        return self.cluster.runs[name]

    async def login(self, request: Request) -> Response:
        """Log in, by the URL that was printed or with the password."""
        answer = await self.access.login(request)
        if isinstance(answer, LoginForm):
            return HTMLResponse(self.pages.login(answer.message), answer.status)
        return answer

    async def logout(self, request: Request) -> Response:
        """End the session."""
        if await self.access.read_form(request) is None:
            return PlainTextResponse(NOT_OUR_FORM, 403)
        return self.access.end_session(request)

    async def nodes(self, request: Request) -> Response:
        """Show the hosts."""
        return HTMLResponse(self.pages.page("nodes"))

    async def runs(self, request: Request) -> Response:
        """Show the runs; `all=1` shows every ended one."""
        return HTMLResponse(self.pages.page("runs", "all" if request.query_params.get("all") == "1" else ""))

    async def events(self, request: Request) -> Response:
        """Show the events."""
        return HTMLResponse(self.pages.page("events"))

    async def queue(self, request: Request) -> Response:
        """Show the queue, and who had which host when."""
        return HTMLResponse(self.pages.page("queue", queue=self.pages.queue))

    async def run(self, request: Request) -> Response:
        """Show a run; `with` names runs to compare it with, separated by commas or given several times."""
        run = self._run(request)
        given = ",".join(request.query_params.getlist("with")).split(",")
        others = [name for name in dict.fromkeys(given) if name in self.cluster.runs and name != run.name][:OVERLAYS]
        found = {name: await self._describe(self.cluster.runs[name]) for name in (run.name, *others)}
        specs = {name: _named_spec(one) for name, one in found.items()}
        names = sorted(self.cluster.runs.values(), key=lambda one: -one.started)
        more: dict[str, Any] = {
            "run": run,
            "others": others,
            "names": [one.name for one in names if one.name != run.name][:200],
            "specs": specs,
            "rows": spec_rows(specs, differences=bool(others)),
            "log_files": [(host, file) for host, files in found[run.name]["logs"].items() for file in files],
        }
        return HTMLResponse(self.pages.page("run", run.name, **more))

    async def _describe(self, run: RunState) -> dict[str, Any]:
        """Return `spec` and `origin` of the first host that answers, and `logs`, {host: {file: bytes}}."""
        hosts = [part.host for part in run.newest or run.parts.values() if self.cluster.hosts[part.host].connected]
        asked = (self.streams[host].ask("describe", run=run.name) for host in hosts)
        answers = dict(zip(hosts, await asyncio.gather(*asked, return_exceptions=True), strict=True))
        good = {host: answer for host, answer in answers.items() if isinstance(answer, dict)}
        first = next(iter(good.values()), {"spec": "", "origin": {}})
        return {**first, "logs": {host: answer["logs"] for host, answer in good.items()}}

    async def series(self, request: Request) -> Response:
        """Return the metrics of a run."""
        records = await self.records.read(self._run(request).name)
        return JSONResponse(records.series())

    async def log(self, request: Request) -> Response:
        """Return lines of a log of a run: from byte `since` on, or those that contain the text `search`."""
        run, query = self._run(request), request.query_params
        host, file, text = query.get("host", ""), query.get("file", ""), query.get("search", "")
        if host not in run.parts:
            raise HTTPException(404)
        since = query.get("since", "")
        asked: dict[str, Any] = (
            {"text": text[:200]} if text else {"since": int(since) if since.isdecimal() else -LOG_LINES}
        )
        try:
            answer = await self.streams[host].ask("search" if text else "log", run=run.name, file=file, **asked)
        except RemoteError as error:
            return JSONResponse({"error": str(error)}, 502)
        return JSONResponse({name: answer[name] for name in ("lines", "offset", "found", "skipped") if name in answer})

    async def stop(self, request: Request) -> Response:
        """Stop a run."""
        run = self._run(request)
        form = await self.access.read_form(request)
        if form is None:
            return PlainTextResponse(NOT_OUR_FORM, 403)
        self.actions.stop(run.name, now=form.get("now") == "1")
        return RedirectResponse(f"/runs/{run.name}", 303)

    async def change_queue(self, request: Request) -> Response:
        """Cancel, hold or release a run of the queue, or change its priority to the field `priority`."""
        run, verb = request.path_params["run"], request.path_params["verb"]
        view = self.pages.queue.view
        if verb not in CHANGES or not view or run not in view.names:
            raise HTTPException(404)
        form = await self.access.read_form(request)
        if form is None:
            return PlainTextResponse(NOT_OUR_FORM, 403)
        try:
            self.actions.change_queue(run, check_verb(verb), form.get("priority", ""))
        except UserError as error:
            return PlainTextResponse(f"400: {error}\n", 400)
        return RedirectResponse("/queue", 303)

    async def metrics(self, request: Request) -> Response:
        """Return the state of the cluster for Prometheus."""
        return Response(prometheus.exposition(self.cluster), media_type=prometheus.CONTENT_TYPE)

    async def live(self, request: Request) -> Response:
        """Send the regions of a page that change, and a run's new metrics, as server-sent events."""
        page, argument = request.path_params["page"], request.query_params.get("argument", "")
        if page not in ("nodes", "runs", "events", "queue", "run") or (
            page == "run" and argument not in self.cluster.runs
        ):
            raise HTTPException(404)
        if self.listeners >= BROWSERS:
            return PlainTextResponse(f"503: {BROWSERS} pages are open: close one\n", 503)
        arguments = [argument] if page in ("run", "runs") else []
        return EventSourceResponse(self._messages(request, page, arguments), ping=60)

    async def _messages(self, request: Request, page: str, arguments: list[str]) -> AsyncIterator[dict[str, str]]:
        self.listeners += 1
        with contextlib.ExitStack() as stack:
            stack.callback(self._leave)
            if page == "queue":
                stack.enter_context(self.pages.queue.page())
            sent: dict[str, str] = {}
            place = (-1, 0, 0)  # generation, and numbers of metrics and evaluations that were sent
            while self.access.in_session(request.scope) and (page != "run" or arguments[0] in self.cluster.runs):
                version = self.cluster.version
                groups = self.pages.regions(page, *arguments)
                now = {name: html for regions in groups.values() for name, html in regions.items()}
                changed = {name: html for name, html in now.items() if sent.get(name) != html}
                order = {group: list(regions) for group, regions in groups.items()}
                if changed or now.keys() != sent.keys():
                    yield {"event": "regions", "data": json.dumps({"order": order, "html": changed})}
                sent = now
                if page == "run":
                    records = await self.records.read(arguments[0])
                    series = records.series(place[1] if place[0] == records.generation else 0)
                    there = (records.generation, series["count"], len(records.evals))
                    if there != place:
                        yield {"event": "series", "data": json.dumps(series)}
                    place = there
                await asyncio.sleep(PAUSE)
                await self.cluster.wait(version, IDLE)

    def _leave(self) -> None:
        self.listeners -= 1


def _named_spec(found: dict[str, Any]) -> dict[str, str]:
    """Return the fields of a run's spec, with the names that the user gave to model and dataset."""
    values = spec_values(found["spec"])
    origin = {name: str(value) for name, value in found["origin"].items() if isinstance(value, str)}
    return values | {
        name: origin[name] for name in ("model", "dataset", "teacher") if name in origin and name in values
    }


async def _not_found(request: Request, error: Exception) -> Response:
    return PlainTextResponse("404: there is no such page, or the run is gone. Go back to /runs.\n", 404)
