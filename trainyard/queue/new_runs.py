"""The runs that a user adds to the queue, read from the values of ``-e`` or from a file of several runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError, nearest
from trainer.common.formats import printable
from trainer.common.inputs import user_path
from trainer.config import FIELDS, RunSpec, is_known
from trainer.config.rollout_fields import require_addresses
from trainyard import front_end
from trainyard.extra_vars import check_pairs, read_run_spec
from trainyard.queue.request import MAX_RUNS, OPTIONS, QueueOptions, Request
from trainyard.queue.sweep import SweepRun, grids_of, in_order, read_sweep, without_grids
from trainyard.run import launch_options
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.types import Report

OWN_NAMES = ("do", "file")
# Options that make no sense where this machine neither starts nor follows the run.
_EXCLUDED = {
    "render_only": "the queue host starts the run",
    "follow": "the queue host follows the run",
    "render_to": "the queue host starts the run",
    "push": "push the run when it has finished: {push}",
    "push_as": "push the run when it has finished: {push}",
    "hook": "this machine does not follow the run: use notify",
    "collect_to": "the queue host follows the run, not this machine: once it has finished, call {train} with the same "
    "options, which copies its result",
}


@dataclass(frozen=True)
class NewRun:
    """A run to add. `spec.run` may be empty until it is prepared. `grid`: to which it belongs; empty for none."""

    options: QueueOptions
    spec: RunSpec
    launch: LaunchOptions
    grid: str = ""

    def request(self, hosts: Sequence[str] = (), **more: Any) -> Request:
        """Return its request. Its name is that of the spec, or `run`."""
        fields = self.options.model_dump() | {"run": self.spec.run or "run", "hosts": tuple(hosts), "grid": self.grid}
        return Request.model_validate(fields | {"max_restarts": self.launch.max_restarts} | more)

    def waiting_for(self, grids: Mapping[str, Sequence[str]], runs: Sequence[str]) -> NewRun:
        """Return the run with the runs of a grid in place of its name in `after`.

        `grids`: names of the runs of each grid. `runs`: known names of runs: such a name is not a grid. Raises
        UserError: it would wait for itself, or for more than MAX_RUNS runs.
        """
        after = without_grids(self.options.after, grids, runs)
        if self.spec.run and self.spec.run in after:
            why = "" if self.spec.run in self.options.after else f": it belongs to the grid {self.grid}"
            raise UserError(f"after: run {self.spec.run} cannot wait for itself{why}")
        if len(after) > MAX_RUNS:
            raise UserError(f"after: the grids have {len(after)} runs, and a run may wait for at most {MAX_RUNS}")
        return dataclasses.replace(self, options=self.options.model_copy(update={"after": after}))


def read_runs(
    values: Mapping[str, Any], launch_of: Callable[[Mapping[str, Any]], LaunchOptions], top: Path, report: Report
) -> list[NewRun]:
    """Return the runs that the values of ``-e`` describe: one, or those of `file`, each after those that it waits for.

    `launch_of`: returns the launch options with these values on top of the inventory's. `top`: the project's folder.
    Raises UserError: an unknown name, or a bad value.
    """
    check_pairs(values)
    given = {name: value for name, value in values.items() if name not in OWN_NAMES}
    listed = [SweepRun(given)]
    if file := str(values.get("file") or ""):
        listed = read_sweep(user_path(file, "file"), given)
        for name in dict.fromkeys(name for entry in listed for name in entry.values if name not in given):
            if launch_options.ALIASES.get(name, name) == "limit":
                raise UserError(f"{file}: {name} selects hosts for all runs of a call: give --limit")
            if not (name in OPTIONS or is_known(name) or name in launch_options.names()):
                known = [*OPTIONS, *FIELDS, *launch_options.names()]
                from trainyard.import_file.hints import meaning  # only a mistake needs the tables

                raise UserError(f"{file}: unknown name {printable(name, 80)}{meaning(name) or nearest(name, known)}")
    quiet: list[str] = []
    runs = [_new_run(entry, launch_of, top, quiet.append, file) for entry in listed]
    for line in dict.fromkeys(quiet):
        report(line)
    grids, names = grids_of((run.spec.run, run.grid) for run in runs), [run.spec.run for run in runs]
    runs = [run.waiting_for(grids, names) for run in runs]
    order = in_order({run.spec.run: run.options.after for run in runs if run.spec.run})
    return sorted(runs, key=lambda run: order.index(run.spec.run) if run.spec.run else -1)


def _new_run(
    entry: SweepRun, launch_of: Callable[[Mapping[str, Any]], LaunchOptions], top: Path, report: Report, file: str
) -> NewRun:
    source = f"run {entry.values['run']} of {file}" if file else "-e"
    options = QueueOptions.from_variables(entry.values, source if file else "queue")
    of_run = {name: value for name, value in entry.values.items() if name not in OPTIONS}
    of_launch = {name: value for name, value in of_run.items() if name in launch_options.names()}
    launch = launch_of({launch_options.ALIASES.get(name, name): value for name, value in of_launch.items()})
    spec = read_run_spec(launch.spec, of_run, top, report, source=source, more=OPTIONS)
    require_addresses(spec)
    for name, why in _EXCLUDED.items():
        if getattr(launch, name) != launch_options.OPTIONS[name].default:
            said = why.format(train=front_end.playbook("train"), push=front_end.playbook("push"))
            raise UserError(f"{name}: cannot be set for the queue: {said}")
    run = NewRun(options, spec, launch, entry.grid)
    try:
        run.request()
    except ValueError as error:
        raise UserError(f"queue: {printable(error)}") from None
    return run
