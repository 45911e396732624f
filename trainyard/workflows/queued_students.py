"""Students as runs of the queue: this machine collects the answers, and the queue host trains the students."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainyard import front_end
from trainyard.inventory import Cluster
from trainyard.queue.manage import open_queue
from trainyard.queue.new_runs import NewRun, make_run
from trainyard.queue.queue_client import QueueState
from trainyard.queue.queue_tables import ENDED, describe, list_queue, run_state
from trainyard.queue.request import QueueOptions
from trainyard.queue.requests import Site, add_runs, check_runs, read_on_hosts
from trainyard.run.follow.artifacts import parse_result
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.types import Report
from trainyard.workflows.students import StudentRun, student_table


@dataclass(frozen=True)
class StudentQueue:
    """The queue to which students are added.

    Attributes:
        site: the queue to which they are added.
        options: the request of each of them.
        launch: how each of them is kept alive.
        again: whether students that have failed, or were cancelled or stopped, are added again.
    """

    site: Site
    options: QueueOptions
    launch: LaunchOptions
    again: bool = False

    def check(self, specs: Sequence[RunSpec]) -> None:
        """Check that the queue can run the students, before prompts are sent. Raises as `add`."""
        check_runs(self._runs(specs), self.site)

    def add(self, specs: Sequence[RunSpec]) -> dict[str, Any]:
        """Add the students that the queue does not have yet; with `again`, also those that have failed.

        Returns:
            `changed`; `runs`, as `do=list` returns them; `students`, the result.json of those that have finished, by run;
            `failed`, why others have failed, by run; `lines`, readable text.

        Raises:
            UserError, RunError: as add_runs.
        """
        added = add_runs(self._runs(specs), self.site, again=self.again)
        by_run = {answer["run"]: spec for answer, spec in zip(added["runs"], specs, strict=True)}
        queue = self.site.queue.state()
        listed = list_queue(queue, list(by_run))
        ended = self._ended(by_run, queue)
        lines = list(added["lines"])
        if listed["runs"]:
            lines += [*listed["lines"], *_how_to_follow(listed["runs"])]
        if ended:
            lines += student_table(ended)
        failed = {run.run: run.error for run in ended if run.error}
        if failed:
            lines.append(
                f"add failed students again with {front_end.option('retry_failed')}: they continue from their checkpoints"
            )
        students = {run.run: run.result for run in ended if run.result}
        answer = {"changed": added["changed"], "runs": listed["runs"], "students": students, "failed": failed}
        return answer | {"lines": lines}

    def _runs(self, specs: Sequence[RunSpec]) -> list[NewRun]:
        return [make_run(self.options, spec, self.launch) for spec in specs]

    def _ended(self, by_run: Mapping[str, RunSpec], queue: QueueState) -> list[StudentRun]:
        """Return the students that have ended: with the result that the first of their hosts has, or why they failed."""
        about = {
            run: describe(run, queue) for run in by_run if run in queue.requests and run_state(run, queue) in ENDED
        }
        finished = [run for run in about if about[run]["state"] == "finished"]
        texts = read_on_hosts(self.site, finished, "result.json") if finished else {}
        found = []
        for run, known in about.items():
            hosts, state = list(known["hosts"]), str(known["state"])
            there = {name: texts[run][name] for name in hosts if texts.get(run, {}).get(name)}
            result = parse_result(*next(iter(there.items()))) if there else None
            error = "" if result else f"{', '.join(hosts) or 'no host'}: has no result.json"
            if state != "finished":
                error = str(known["reason"]) or ("see its logs" if state == "failed" else f"it was {state}")
            found.append(StudentRun(by_run[run], run, hosts, dict(result or {}), error))
        return found


def student_queue(
    values: Mapping[str, Any],
    hybrid: bool,
    cluster: Cluster,
    launch: LaunchOptions,
    top: Path,
    report: Report,
    check: bool,
    again: bool = False,
) -> StudentQueue:
    """Return the queue for the students of a call of playbooks/distill.yml. No host is contacted.

    Args:
        values: values of ``-e``, among them the options of the queue.
        hybrid: each student trains on several hosts: two, if `nodes` is not set and there are two.
        again: see StudentQueue.

    Raises:
        UserError: a bad value, or the inventory has no cluster.
        InventoryError: a host is not described completely.
    """
    options = QueueOptions.from_variables(values, "distill")
    if hybrid and "nodes" not in values:
        options = options.model_copy(update={"nodes": min(2, len(cluster.hosts))})
    elif hybrid and options.nodes == 1:
        raise UserError("distill: hybrid=true trains each student on several hosts: set nodes to 2 or more")
    return StudentQueue(open_queue(cluster, top, report, check), options, launch, again)


def _how_to_follow(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how a user follows the first of these runs."""
    return [
        f"follow them with: {front_end.command('queue list')}; {front_end.command('attach', runs[0]['run'])} follows a run that "
        "has started",
        "repeat this command once they have finished: it shows their loss",
    ]
