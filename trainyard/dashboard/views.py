"""The pages: each has regions, which the server sends again when they change.

A region is a piece of HTML with an id. `Pages.regions` renders those of a page; the browser replaces the ones that differ.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from trainer.common.formats import printable
from trainer.config.yaml_text import YamlError, parse_yaml
from trainyard.dashboard.allocation import Allocation
from trainyard.dashboard.evaluation_watch import EvaluationWatch
from trainyard.dashboard.model_questions import QUESTION, ModelQuestions
from trainyard.dashboard.page_formats import FILTERS
from trainyard.dashboard.queue_watch import QueueWatch
from trainyard.dashboard.state import ClusterView, DashboardRun
from trainyard.dashboard.timeline import SCALES
from trainyard.queue.slurm_conf import PRIORITIES

if TYPE_CHECKING:
    from trainyard.dashboard.start_form import NewRuns

LATEST = 100  # ended runs on the page of runs
EVENTS = 300  # events on their page
PIECES = 30_000  # regions that are kept
SPEC = 32 << 10  # characters of a spec
FIELDS = 500  # of it
SHOWN = 2000  # characters of a value
NOTABLE = 1.1  # times the time of most ranks from which one is called the slowest
OVERLAYS = 5  # runs that a run's page shows beside it
Regions = dict[str, str]


@dataclass
class Action:
    """An action that was started on a run's page, or on that of the queue: its progress."""

    title: str
    lines: list[str] = field(default_factory=list)  # the newest lines of its progress and its result
    error: str = ""  # why it failed
    state: str = "running"  # running; following, if others may begin while it watches the run; done; or failed
    began: float = field(default_factory=time.time)  # in seconds since the epoch
    earlier: list[Action] = field(default_factory=list)  # the actions on the run before this one, the newest first


class Pages:
    """Renders pages from the state of the cluster."""

    def __init__(
        self,
        cluster: ClusterView,
        csrf: str,
        queue: QueueWatch,
        evaluations: EvaluationWatch,
        can_start: Callable[[str], bool] = lambda run: False,
    ) -> None:
        """Take the data of the pages.

        `csrf`: the token of every form. `can_start`: returns whether it is known how a run was started.
        """
        self.cluster, self.queue, self.evaluations, self._can_start = cluster, queue, evaluations, can_start
        self.new_runs: NewRuns | None = None  # None where no run can be started
        self._allocation = Allocation(cluster)
        self.questions = ModelQuestions(cluster)
        self.actions: dict[str, Action] = {}
        loader = jinja2.FileSystemLoader(Path(__file__).with_name("templates"))
        how: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
        how["auto_reload"] = False  # which reads the time of the file for every region
        self._templates = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, **how)
        self._templates.filters |= FILTERS
        self._templates.globals |= {"csrf": csrf, "max_question": QUESTION}
        self._pieces: dict[str, tuple[Any, str]] = {}  # {id of a region: (version of its contents, HTML)}
        self._cache: dict[tuple[str, ...], tuple[int, dict[str, Regions]]] = {}

    def page(self, name: str, *arguments: str, **more: Any) -> str:
        """Render a page with its regions."""
        groups = self.regions(name, *arguments)
        more |= {"groups": groups, "cluster": self.cluster, "can_start": bool(self.new_runs)}
        return self._templates.get_template(f"{name}.html").render(page=name, arguments=arguments, **more)

    def regions(self, name: str, *arguments: str) -> dict[str, Regions]:
        """Return {id of a group of regions: {id of a region: HTML}} of a page; equal requests share the work."""
        key = (name, *arguments)
        version, groups = self._cache.get(key, (-1, {}))
        if version != self.cluster.version:
            groups = getattr(self, f"_{name}")(*arguments)
            if len(self._cache) > 64:
                self._cache.clear()
            self._cache[key] = (self.cluster.version, groups)
        return groups

    def _render(self, template: str, **values: Any) -> str:
        return self._templates.get_template(f"regions/{template}.html").render(**values)

    def _region(self, template: str, **values: Any) -> Regions:
        """Return a group of one region, whose id is the name of its template."""
        return {template.replace("_", "-"): self._render(template, **values)}

    def _nodes(self) -> dict[str, Regions]:
        cluster = self.cluster
        busy: dict[str, list[str]] = {}
        for run in cluster.runs.values():
            for part in run.newest if run.alive else []:
                busy.setdefault(part.host, []).append(run.name)
        cards = {}
        for number, (name, host) in enumerate(cluster.hosts.items()):
            runs = sorted(busy.get(name, []))
            id = f"host-{number}"
            cards[id] = self._piece(id, (host.version, runs), "host", host=host, runs=runs)
        return {"summary": self._region("nodes_summary", cluster=cluster), "hosts": cards}

    def _runs(self, every: str = "") -> dict[str, Regions]:
        runs = sorted(self.cluster.runs.values(), key=lambda run: (not run.alive, -run.started, run.name))
        alive = [run for run in runs if run.alive]
        shown = runs if every else runs[: len(alive) + LATEST]
        rows = {f"run-{run.name}": self._piece(f"run-{run.name}", run.version, "run_row", run=run) for run in shown}
        return {"summary": self._region("runs_summary", runs=runs, shown=shown, alive=alive), "runs": rows}

    def _piece(self, id: str, version: Any, template: str, **values: Any) -> str:
        """Return a region, rendered again only when its `version` or the day has changed: there may be thousands of them."""
        key = (version, time.localtime().tm_yday)  # a time of another day has its date
        known, html = self._pieces.get(id, (None, ""))
        if known != key:
            html = self._render(template, id=id, **values)
            if len(self._pieces) > PIECES:
                self._pieces.clear()
            self._pieces[id] = (key, html)
        return html

    def _queue(self, scale: str = "") -> dict[str, Regions]:
        queue, view = self.queue, self.queue.view
        scale = scale or next(iter(SCALES))
        key, timeline = self._allocation.timeline(scale, view.state if view else None, view.at if view else 0.0)
        known = self.cluster.runs
        how = {"timeline": timeline, "scale": scale, "scales": list(SCALES), "known": known}
        more = {"actions": self.actions, "known": known, "now": view.at if view else 0.0, "priorities": PRIORITIES}

        def rows(prefix: str, runs: list[dict[str, Any]]) -> Regions:
            ids = {f"{prefix}-{run['run']}": run for run in runs}
            return {id: self._render("queue_row", id=id, run=run, **more) for id, run in ids.items()}

        return {
            "summary": self._region("queue_summary", queue=queue),
            "live": rows("queued", view.live if view else []),
            "ended": rows("ended", view.ended if view else []),
            "timeline": {"queue-timeline": self._piece(f"timeline {scale}", key, "queue_timeline", **how)},
        }

    def _models(self) -> dict[str, Regions]:
        models: dict[str, tuple[list[str], list[str]]] = {}
        for name, host in self.cluster.hosts.items():
            ollama: dict[str, list[str]] = host.sample.get("ollama", {}) if host.connected else {}
            for model in ollama.get("deployed", []):
                hosts, loaded = models.setdefault(model, ([], []))
                hosts.append(name)
                if model in ollama["loaded"]:
                    loaded.append(name)
        return {
            "ask": self._region("ask_models", models=self.questions.models()),
            "deployed": self._region("deployed_models", models=dict(sorted(models.items()))),
        }

    def _evaluations(self, name: str = "") -> dict[str, Regions]:
        found = self.evaluations.found
        chosen = name if name in found else next(iter(found), "")
        return {
            "evaluations": self._region("evaluation_list", evaluations=found, chosen=chosen),
            "evaluation": self._region("evaluation", one=found.get(chosen)),
        }

    def _start(self, plan: str = "") -> dict[str, Regions]:
        draft = self.new_runs.drafts.get(plan) if self.new_runs else None
        return {"draft": self._region("start_draft", plan=plan, draft=draft, known=self.cluster.runs)}

    def _events(self) -> dict[str, Regions]:
        events = sorted(self.cluster.events.items(), key=lambda item: -item[1].time)[:EVENTS]
        rows = {}
        for key, event in events:
            name = f"event-{abs(hash(key)):x}"
            known = event.run in self.cluster.runs
            version = (event.time, event.kind, event.text, known)
            rows[name] = self._piece(name, version, "event", event=event, known=known)
        return {"summary": self._region("events_summary", events=events), "events": rows}

    def _run(self, name: str) -> dict[str, Regions]:
        run = self.cluster.runs[name]
        view = self.queue.view
        can = {
            "can_start": not run.alive and self._can_start(name),
            "queued": bool(view and not run.alive and view.can_start(name)),
            "has_job": bool(view and name in view.state.jobs),
        }
        return {
            "head": self._region("run_head", run=run),
            "action": self._region("run_action", run=run, action=self.actions.get(name), **can),
            "ranks": self._region("run_ranks", run=run, slowest=_slowest(run)),
            "checkpoints": self._region("run_checkpoints", run=run, checkpoints=_checkpoints(run)),
        }


def _checkpoints(run: DashboardRun) -> list[tuple[int, list[str], float, float]]:
    """Return step, hosts, size on one host and time of the checkpoints, the newest first."""
    found: dict[int, tuple[dict[str, None], float, float]] = {}
    for host, kept in sorted(run.checkpoints.items()):
        for one in kept:
            hosts, size, at = found.get(one["step"], ({}, 0.0, 0.0))
            found[one["step"]] = hosts | {host: None}, max(size, one["bytes"]), max(at, one["time"])
    return [(step, list(hosts), size, at) for step, (hosts, size, at) in sorted(found.items(), reverse=True)]


def _slowest(run: DashboardRun) -> int | None:
    """Return the rank whose share of a step takes longest, if it takes notably longer than that of most ranks."""
    seconds = run.first.get("step_seconds") or []
    slow = len(seconds) > 1 and max(seconds) > NOTABLE * statistics.median_low(seconds)
    return seconds.index(max(seconds)) if slow else None


def spec_values(text: str) -> dict[str, str]:
    """Return the fields of a spec as text, by name; none for a text that is not a spec."""
    try:
        value = parse_yaml(text) if len(text) <= SPEC else None  # a host must not keep the dashboard busy
    except YamlError:
        return {}
    found = list(value.items())[:FIELDS] if isinstance(value, dict) else []
    return {printable(str(name), 100): _shown(item)[:SHOWN] for name, item in found}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return "" if value is None else str(value)


def spec_rows(specs: dict[str, dict[str, str]], *, differences: bool) -> list[tuple[str, list[str]]]:
    """Return rows of field and its value in every run; with `differences`, only those whose values differ."""
    names = dict.fromkeys(name for values in specs.values() for name in values)
    rows = [(name, [values.get(name, "") for values in specs.values()]) for name in names]
    return [row for row in rows if len(set(row[1])) > 1 or not differences]
