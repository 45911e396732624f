"""One run from its spec to its result: plan, preflight, stage, launch, follow, collect.

Everything that starts a run uses RunSession: the action plugin behind train.yml, and Python programs:

    session = RunSession(hosts, connect, options, spec=spec)
    session.run()
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from trainer.common.formats import printable
from trainer.config import RunSpec
from trainer.distributed import COPY_STAGES
from trainer.supervise.start import STOPPED
from trainyard.run.follow.absent_hosts import watch_absent
from trainyard.run.follow.announce import Announcer
from trainyard.run.follow.artifacts import collect_artifacts
from trainyard.run.follow.follower import follow_parts
from trainyard.run.follow.monitor import Watch
from trainyard.run.follow.rejoin import Rejoin, Speeds
from trainyard.run.follow.restart_policy import RestartPolicy
from trainyard.run.follow.run_status import planned_parts, run_parts
from trainyard.run.launch.launch_scripts import write_scripts
from trainyard.run.launch.start_ranks import paths_in, start_ranks, stop_parts
from trainyard.run.launch.start_record import keep_start
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.plan.gather_facts import describe
from trainyard.run.plan.make_plan import check_plan_mesh, plan_run, stopped_line
from trainyard.run.prepare.host_files import HostAccess
from trainyard.run.prepare.model_files import fetch_models_again
from trainyard.run.prepare.spec_files import prepare
from trainyard.run.stage.stage_files import release_claims, stage_files
from trainyard.run.types import (
    PlanEntry,
    PreparedRun,
    PreviousStart,
    Report,
    RunFailure,
    RunPlan,
    SessionState,
    StepResult,
)
from trainyard.wire.connection import Host, HostConnection, alone
from trainyard.wire.run_errors import (
    LaunchError,
    LostSourceError,
    PartlyActiveError,
    PlanError,
    RunClaimedError,
    RunError,
)

CLAIM_POLL = 0.5  # s between two attempts to claim the run
PARTLY_LIMIT = 5.0  # s for a run that another controller starts, or that ends, to be the same on all hosts
PLAN_AHEAD = 2.0  # s before a restart at which it is planned: a user may stop the run until then
CLAIM_WAIT = 60.0  # s to wait for another controller that starts the same run
LINE_LIMIT = 2000  # characters of a reported line
END_LIMIT = 10.0  # s for a host to end what is left of a run; a connection that was lost takes most of it
ALONE_LIMIT = 3.0  # s for a host that counts as lost to do so over a connection of its own: most such hosts are off
_SKIPPED: StepResult = {"skipped": True}


class RunSession:
    """Starts, monitors, restarts and collects one run.

    Every step returns a dict: `changed`; `lines`, readable text; `skipped` if there was nothing to do; and the
    return value of the step's function. A step that fails raises RunError, or UserError for a mistake in the spec.

    Args:
        hosts: the hosts of the run in inventory order; the place is the rank.
        connect: makes the connection to a host; called in the main thread.
        options: how the run is started and supervised.
        spec: what the run trains; not needed if `state` holds a prepared run or a plan.
        home: folder on the controller for created datasets, models and scripts.
        report: receives lines while a step runs.
        check: change nothing; report what would change.
        state: results of earlier steps.
        veto: returns why a run that failed must not be restarted, or an empty string.
        watch: receives each heartbeat of the first rank while the run is followed.
        push: puts a run that has finished into a repository, by its name; returns readable lines.
        servers_found: see PreparedRun.
    """

    def __init__(
        self,
        hosts: Iterable[Host],
        connect: Callable[[Host], HostConnection],
        options: LaunchOptions,
        *,
        spec: RunSpec | None = None,
        home: Path | None = None,
        report: Report = print,
        check: bool = False,
        state: SessionState | None = None,
        veto: Callable[[RunFailure], str] = lambda failure: "",
        watch: Watch = lambda state: None,
        push: Callable[[str], list[str]] | None = None,
        servers_found: bool = False,
    ) -> None:
        self.hosts = {host.name: host for host in hosts}
        self.connect_host = connect
        self.options = options
        self.spec = spec
        self.home = home or Path.cwd()
        self.report = lambda line: report(printable(line, LINE_LIMIT))
        self.check = check
        self.veto, self.watch = veto, watch
        self.push, self.servers_found = push, servers_found
        self.state = state or SessionState()
        self.announce = Announcer(options, self.report)
        self._result: StepResult = {}  # of `follow`
        self._speeds = Speeds()
        self._failed_at: float | None = None  # when the start before the next one failed

    def connect(self, name: str) -> HostConnection:
        """Make the connection to a host by its name."""
        return self.connect_host(self.hosts[name])

    @property
    def prepared(self) -> PreparedRun:
        """The named run and its files. Raises RunError before `prepare`."""
        if self.state.prepared is None:
            raise RunError("the run has no spec: prepare it first")
        return self.state.prepared

    @property
    def plan_spec(self) -> RunSpec:
        """The spec of the plan. Raises RunError before `plan`."""
        if self.state.spec is None:
            raise RunError("the run has no plan: plan it first")
        return self.state.spec

    def spec_on(self, entry: PlanEntry) -> RunSpec:
        """Return the spec of the plan with the paths on a host. Raises RunError before `plan`."""
        return self.prepared.spec_on(entry.data_dir, self.plan_spec)

    def plan_rows(self) -> list[dict[str, Any]]:
        """Return the entries of the plan as plain data, each with the spec on its host. Raises RunError before `plan`."""
        return [
            asdict(entry) | {"spec": self.spec_on(entry).model_dump(mode="json", exclude={"automatic"})}
            for entry in self.state.plan
        ]

    @property
    def run_name(self) -> str:
        """Name of the run."""
        return self.prepared.run if self.state.prepared else Path(self.state.plan[0].run_dir).name

    def run(self) -> StepResult:
        """Do all steps; return the result of `collect`. Reports the lines of each step. A run that is prepared stays so."""
        self.start()
        return self.finish()

    def start(self) -> None:
        """Do the steps up to `launch`."""
        self._do(self.plan, self.preflight, self.stage, self.launch)

    def finish(self) -> StepResult:
        """Do the steps after `launch`; return the result of `collect`."""
        return self._do(self.follow, self.collect)

    def _do(self, *steps: Callable[[], StepResult]) -> StepResult:
        result: StepResult = {}
        for step in steps:
            result = step()
            for line in result.get("lines", [result["msg"]] if "msg" in result else []):
                self.report(line)
        return result

    def prepare(self) -> StepResult:
        """Check the spec, the dataset and the model. No host is contacted unless the spec names files of the hosts.

        Raises UserError: a mistake in the spec, or a file is missing or damaged; HostUnreachableError: no host answers.
        """
        if self.spec is None:
            raise RunError("the run has no spec")
        with contextlib.ExitStack() as stack:
            self.announce.check()
            work = self.home / ".trainyard"
            if self.check:
                work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            prepared = prepare(self.spec, work, self.report, self._access(self.hosts.values()))
            self.state.prepared = replace(prepared, servers_found=self.servers_found)
        return {"changed": False}

    def plan(self, preview: bool = False) -> StepResult:
        """Plan ranks, devices and ports over the hosts. This changes nothing. `preview`: no other step follows."""
        if self.state.prepared is None:
            self.prepare()
        try:
            plan = self._make_plan(preview=preview)
        except PlanError as error:
            return self._postpone(error, start=not preview)
        return {"changed": False, "lines": plan.lines}

    def preflight(self) -> StepResult:
        """Check that every host reaches every other one, and that no two hosts share a data directory."""
        state = self.state
        if state.phase != "new" or self.options.render_only or len(state.plan) < 2:
            return _SKIPPED
        lines = check_plan_mesh(state.plan, self.hosts, state.port, self.connect, write=not self.check)
        return {"changed": False, "lines": lines}

    def stage(self) -> StepResult:
        """Copy to every host what differs: trainer, spec, dataset, model."""
        if self.state.phase != "new":
            return _SKIPPED
        try:
            files = self._stage()
        except RunError as error:
            return self._postpone(error)
        if self.state.phase == "running":
            return {"changed": False, "lines": [f"run {self.run_name} is already running: following it"]}
        return {"changed": any(files.values()), "files": files}

    def launch(self) -> StepResult:
        """Start all ranks at once, or write the scripts that start them."""
        state = self.state
        if self.options.render_only:
            return self._render() if state.phase in ("new", "finished") else _SKIPPED
        if state.phase != "new":
            return _SKIPPED
        where = f"on {', '.join(entry.host for entry in state.plan)}"
        if self.check:
            return {"changed": True, "msg": f"would start {self.run_name} {where}"}
        try:
            launched = {"changed": True} | self._launch()
            self.announce("started", self.run_name, where)
            return launched
        except RunError as error:
            return self._postpone(error)

    def follow(self) -> StepResult:
        """Monitor the run to its end, and restart it when it fails, as the launch options allow."""
        try:
            result = self._follow()
        except RunError as error:
            self.announce("failed", self.run_name, "\n".join([str(error), *error.details.get("lines", [])]))
            raise
        if result.get("status") == "stopped":
            self.announce("stopped", self.run_name)
        return result

    def _follow(self) -> StepResult:
        state = self.state
        if self.check or state.phase == "finished" or self.options.render_only:
            return _SKIPPED
        if not self.options.follow and state.phase == "running":
            line = f"run {self.run_name} continues: the same command without follow=false follows it"
            return {"changed": False, "lines": [line]}
        policy = RestartPolicy(self.options.max_restarts, self.options.min_nodes, self.options.restart_delay)
        failure = state.failure
        begun = failure is None
        barred: list[str] = []  # hosts with which the start has just failed
        while True:
            if failure is None:
                failure = self._attempt(self._monitor)
                if failure is None and not self._result.get("returning"):
                    return self._result
                self._failed_at = self._failed_at or time.monotonic()
                for name in failure.get("lost", []) if failure else ():
                    self._speeds.losses[name] = self._speeds.losses.get(name, 0) + 1
                if failure is None:  # stopped for hosts that return
                    policy.note_progress(self._result)
                    failure = self._restart_with(self._result["returning"])
                    barred = self._result["returning"] if failure else []
                    if state.phase == "stopped":
                        return self._result
            while failure is not None:
                # The hosts that the run may have, not those of the last start: a lost host may have returned.
                if why := policy.record(failure, len(self.hosts)) or self.veto(failure):
                    # Code of a run may have halted every process of the login user, the SSH session of this one included.
                    silent = {name: alone(self.hosts[name]) for name in failure.get("lost", [])}
                    anew = lambda name, hosts=silent: self.connect_host(hosts[name])  # noqa: E731
                    stop_parts(run_parts(silent.values(), self.run_name), anew, {"now": True}, ALONE_LIMIT)
                    raise policy.error(failure, why)
                for line in policy.lines(failure):
                    self.report(line)
                # A run is stopped and planned again in this time.
                due = policy.wait() + ((self._failed_at if "cause" in failure else None) or time.monotonic())
                self.announce("restarting", self.run_name, failure["msg"])
                # A start without progress may lack a file, and a host that lost power may lack what was not yet on its disk.
                lost = failure.get("lost", [])
                state.staged = [name for name in state.staged if name not in lost] if policy.failures == 1 else []
                if "cause" not in failure:  # the plan itself failed, or the start: the hosts may need the time
                    _sleep_until(due)
                previous = PreviousStart(begun, state.attempt, lost, barred)
                failure = self._attempt(functools.partial(self._restart, previous, due), lost=previous.lost)
                begun, barred = begun or failure is None, []
            if state.phase == "stopped":
                return self._result

    def collect(self) -> StepResult:
        """Gather logs and artifacts of a run that has ended, and summarize it."""
        state = self.state
        # A stopped run has a checkpoint, but no result.
        left = state.phase == "running" and not state.status  # not followed
        if self.check or self.options.render_only or left or state.status == "stopped" or state.phase == "failed":
            return _SKIPPED
        base_model = self.prepared.base_model if state.prepared else ""
        collected = collect_artifacts(state.plan, self.connect, self.options.collect_to, base_model, state.spec)
        if state.phase == "finished":
            collected["lines"].insert(0, f"run {self.run_name} is finished: nothing to do")
        if self.push:
            collected["lines"] += self.push(self.run_name)
        if state.phase != "finished":
            self.announce("finished", self.run_name, "\n".join(collected["lines"]))
        return collected

    def _access(self, hosts: Iterable[Host]) -> HostAccess:
        return HostAccess(list(hosts), self.connect, self.options.run_env, self.check)

    # What a first start and a restart share ---------------------------------------------------------------------------

    def _make_plan(self, previous: PreviousStart | None = None, preview: bool = False) -> RunPlan:
        deadline = time.monotonic() + PARTLY_LIMIT
        while True:
            hosts = [describe(host) for host in self.hosts.values()]
            try:
                plan = plan_run(hosts, self.connect, self.prepared, self.options, previous, preview)
                break
            except PartlyActiveError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(CLAIM_POLL)
        self.state.plan, self.state.phase, self.state.port = plan.entries, plan.phase, plan.port
        self.state.spec = plan.spec
        for entry in plan.entries:
            shows = {*self.options.run_shows, *self.hosts[entry.host].shows}
            entry.reads = sorted(paths_in(self.spec_on(entry).model_dump(mode="json")) | shows)
        if plan.phase == "running":
            self.state.attempt = self._planned_attempt()
        return plan

    def _stage(self, previous: PreviousStart | None = None) -> dict[str, list[str]]:
        """Copy what differs. If another controller starts the run, plan again; then `phase` is no longer `new`.

        Raises:
            RunClaimedError: the other controller neither starts the run nor gives up.
            PlanError: it starts the run with another spec.
        """
        state, deadline, waiting, fetched = self.state, time.monotonic() + CLAIM_WAIT, False, False
        while True:
            # Hosts of a pipeline copy their stages of a checkpoint where the run may continue with fewer hosts.
            fewer = self.options.max_restarts and 0 < self.options.min_nodes < len(self.hosts)
            copies = {COPY_STAGES: "1"} if fewer else {}
            variables = {name: {**copies, **host.env, **self.options.run_env} for name, host in self.hosts.items()}
            try:
                done = stage_files(
                    *(state.plan, self.plan_spec, self.prepared, self.connect, variables, state.token),
                    check=self.check,
                    transfer=self.options.transfer,
                    report=self.report,
                    staged=state.staged,
                )
                if not self.check:
                    state.staged = sorted({*state.staged, *(entry.host for entry in state.plan)})
                return done
            except LostSourceError:
                hosts = [self.hosts[entry.host] for entry in state.plan]
                files = fetch_models_again(self.prepared.files, self.prepared.spec, self._access(hosts), self.report)
                if fetched or files == self.prepared.files:
                    raise
                fetched, state.prepared = True, replace(self.prepared, files=files)
                continue
            except RunClaimedError as error:
                if time.monotonic() > deadline:
                    raise
                if not waiting:
                    self.report(f"waiting up to {CLAIM_WAIT:.0f} s for another controller: {error}")
                waiting = True
                time.sleep(CLAIM_POLL)
            if self._make_plan(previous).phase != "new":
                return {}

    def _launch(self) -> StepResult:
        try:
            self.state.attempt = self._planned_attempt()
            started = start_ranks(self.state.plan, self.connect, self.report, self.options.unit_properties)
        except RunError:
            release_claims(self.state.plan, self.connect, self.state.token)
            raise
        self.state.phase = "running"
        if self.state.prepared:
            keep_start(self.home, self.prepared, self.options, self.hosts)
        return started

    def _render(self) -> StepResult:
        if not self.check:  # the scripts are started by hand, without this session
            release_claims(self.state.plan, self.connect, self.state.token)
        folder = Path(self.options.render_to or self.home / "runs" / self.run_name / "scripts").expanduser()
        return write_scripts(self.state.plan, folder, self.check)

    def _monitor(self) -> None:
        parts = planned_parts(self.state.plan)
        rejoin = self._rejoin() if self.state.prepared else None
        ended = follow_parts(
            *(self.run_name, parts, self.connect, self.options, self.report),
            rejoin=rejoin,
            watch=self.watch,
            failed=self._note_failure,
        )
        returning = rejoin.returning if rejoin and ended["status"] == "stopped" else []
        if returning:
            ended.pop("lines", None)
        else:
            self.state.status = ended["status"]
            # On lost hosts that have returned, ranks of earlier starts may wait for peers that ended meanwhile.
            absent = [self.hosts[name] for name in rejoin.absent] if rejoin else []
            stop_parts(run_parts(absent, self.run_name), self.connect, {"now": True}, END_LIMIT)
        self._result = {"changed": True, "returning": returning} | ended

    def _note_failure(self) -> None:
        self._failed_at = time.monotonic()

    def _rejoin(self) -> Rejoin | None:
        """Return what watches the hosts without which this start continues; None if it may not be restarted for them."""
        failed_at, self._failed_at = self._failed_at, None
        run = (self.state.plan, self.plan_spec, self.hosts, self.connect, self.prepared, self.options)
        return watch_absent(*run, self._speeds, failed_at)

    # Restarts ---------------------------------------------------------------------------------------------------------

    def _restart(self, previous: PreviousStart, due: float) -> None:
        """Plan, stage from the monotonic time `due` on, and launch again. A start that runs, or that a user stopped, is not changed."""
        _sleep_until(due - PLAN_AHEAD)
        plan = self._make_plan(previous)
        if plan.phase != "stopped":
            for line in plan.lines:
                self.report(line)
        if plan.phase in ("new", "finished"):
            _sleep_until(due)
            self._stage(previous)
            if self.state.phase in ("new", "finished"):
                try:
                    self._launch()
                except LaunchError as error:
                    if STOPPED not in error.details.get("troubles", {}).values():
                        raise
                    self.state.phase = "stopped"
        if self.state.phase == "stopped":
            self.state.status = "stopped"
            self._result = {"changed": True, "status": "stopped", "lines": [stopped_line(self.run_name)]}

    def _restart_with(self, returning: list[str]) -> RunFailure | None:
        """Start again with hosts that return; return the failure, or None.

        A host with which the run did not start counts as lost, so that it does not stop the run again and again.
        """
        failure = self._attempt(functools.partial(self._restart, PreviousStart(True, self.state.attempt), 0.0))
        present = {entry.host for entry in self.state.plan}
        for name in returning:
            if failure or name not in present:
                self._speeds.losses[name] = self._speeds.losses.get(name, 0) + 1
        return failure

    def _postpone(self, error: RunError, start: bool = True) -> StepResult:
        """Leave a failed first start (`start`: not only a plan) to `follow`, if a restart may succeed and is allowed; else raise the error."""
        if not (error.retryable and self.options.max_restarts) or self.options.render_only:
            if start and not self.check:
                self.announce("failed", self.run_name, str(error))
            raise error
        self.state.phase = "failed"
        self.state.failure = _failure(error) | {"lost": list(error.details.get("troubles", []))}
        return {"changed": False}

    def _attempt(self, step: Callable[[], None], lost: Iterable[str] = ()) -> RunFailure | None:
        """Do a step; return message and details of its failure, or None."""
        try:
            step()
        except PlanError as error:
            return {"lost": list(lost)} | _failure(error)
        except RunError as error:
            return _failure(error)
        except Exception as error:  # a defect: this start failed, the next one may not
            return {"msg": f"{type(error).__name__}: {error}"}
        return None

    def _planned_attempt(self) -> int:
        return max((entry.attempt for entry in self.state.plan), default=0)


def _failure(error: RunError) -> RunFailure:
    return cast("RunFailure", error.as_dict())


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
