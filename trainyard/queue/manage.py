"""The verbs of playbooks/queue.yml and `trainyard queue`."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic.fields import FieldInfo

from trainer.common.errors import UserError, nearest
from trainer.common.formats import counted, quoted
from trainer.config.fields import Words, declare
from trainyard import front_end
from trainyard.inventory import ClusterHosts
from trainyard.playbook_options import PlaybookOptions
from trainyard.queue.new_runs import read_runs
from trainyard.queue.queue_client import QueueClient, QueueState, SlurmJob, queue_host
from trainyard.queue.queue_tables import ENDED, list_history, list_queue, run_state, state_words
from trainyard.queue.reasons import refusal
from trainyard.queue.request import Priority, is_run_name
from trainyard.queue.requests import Site, add_runs
from trainyard.queue.sweep import in_order
from trainyard.run.types import Report
from trainyard.wire.run_errors import RunError

Verb = Literal["add", "list", "cancel", "hold", "release", "priority", "again", "history"]
VERBS: tuple[str, ...] = get_args(Verb)
CHANGES = ("cancel", "hold", "release", "priority", "again")
_DONE = {"cancel": "cancelled", "hold": "held", "release": "released", "priority": "changed"}


class ChangeOptions(PlaybookOptions):
    """Which runs of the queue are changed."""

    run: Words = declare((), "names of runs", max_length=1000)
    priority: Priority | Literal[""] = declare(
        "", "for `priority`: the new one", expected="one of low, normal, high, critical"
    )


FILE = FieldInfo.from_annotated_attribute(str, declare("", "YAML file of several runs, or of a grid of values"))
CHANGE_OPTIONS: dict[str, FieldInfo] = dict(ChangeOptions.model_fields)


def check_verb(value: Any) -> Verb:
    """Return a verb of the queue. Raises UserError."""
    word = str(value or "")
    if word not in VERBS:
        said = f"unknown verb {quoted(word)}{nearest(word, VERBS)}" if word else "say what to do"
        raise UserError(f"queue: {said}: do={'|'.join(VERBS)}")
    return word  # type: ignore[return-value]


def change_options(verb: Verb, values: Mapping[str, Any]) -> ChangeOptions:
    """Return the options of a verb that lists or changes runs. Raises UserError."""
    options = ChangeOptions.from_variables(values, "queue")
    if verb in CHANGES and not options.run:
        how, listed = front_end.queue_verb(verb, "NAME"), front_end.queue_verb("list")
        raise UserError(f"queue: name the runs, as in {how}; {listed} lists them")
    if wrong := [name for name in options.run if not is_run_name(name)]:
        raise UserError(f"run: {quoted(wrong[0])} is not the name of a run: {front_end.queue_verb('list')} lists them")
    if bool(options.priority) != (verb == "priority"):
        if verb == "priority":
            raise UserError("priority: set the new one with priority=low|normal|high|critical")
        raise UserError(f"priority: {front_end.queue_verb('priority')} changes it")
    return options


def change_runs(client: QueueClient, verb: Verb, options: ChangeOptions, *, check: bool = False) -> dict[str, Any]:
    """Cancel, hold or release runs, give them another priority, or add runs that have ended again.

    Returns `changed`; `runs`, the state of each before; `lines`, readable text. Raises UserError: a run is not in the
    queue, or is not in a state in which that is possible; RunError: Slurm refuses.
    """
    queue = client.state()
    if verb == "again":
        return _add_again(client, queue, list(dict.fromkeys(options.run)), check)
    jobs = {name: _job(name, verb, queue) for name in dict.fromkeys(options.run)}
    states = {name: run_state(name, queue) for name in jobs}
    done_as = {"cancel": "ending", "hold": "held", "release": "waiting"}.get(verb)
    of_priority = [name for name, job in jobs.items() if verb == "priority" and job.priority == options.priority]
    wanted = [name for name in jobs if states[name] != done_as and name not in of_priority]
    if not check and wanted:
        refused = client.change(verb, [jobs[name].number for name in wanted], options.priority)
        troubles = {name: refused[job.number] for name, job in jobs.items() if job.number in refused}
        if troubles:
            name, why = next(iter(troubles.items()))
            raise RunError(f"run {name}: {why}", troubles=troubles)
    to = f" to {options.priority}" if verb == "priority" else ""
    said = f"would be {_DONE[verb]}" if check else _DONE[verb]
    lines = [f"run {name}, which is {states[name]}, {said}{to}" for name in wanted]
    lines += [f"run {name} is {states[name]}: nothing to do" for name in jobs if name not in wanted]
    ending = [name for name in wanted if states[name] == "running"] if verb == "cancel" and not check else []
    if ending:
        does = "saves a checkpoint and ends" if len(ending) == 1 else "save a checkpoint and end"
        lines.append(f"{counted(len(ending), 'run')} {does}: {front_end.queue_verb('list')} shows when")
    return {"changed": bool(wanted), "runs": states, "lines": lines}


def _add_again(client: QueueClient, queue: QueueState, names: Sequence[str], check: bool) -> dict[str, Any]:
    """Submit new jobs for runs that have failed, or were cancelled or stopped."""
    states = {name: _known(name, queue) for name in names}
    ended = [name for name in names if states[name] != "finished"]
    waits = {name: _runs_before(name, states[name], queue, ended) for name in ended}
    jobs = {name: job.number for name, job in queue.jobs.items()}
    lines = [f"run {name} is finished: nothing to do" for name in names if name not in waits]
    for name in in_order({name: tuple(after) for name, after in waits.items()}):
        if not check:
            jobs[name] = client.again(name, [jobs[after] for after in waits[name]])
        job = "" if check else f" (job {jobs[name]})"
        was = "had failed" if states[name] == "failed" else f"was {states[name]}"
        lines.append(f"run {name}, which {was}, {'would be ' if check else ''}added again{job}")
    return {"changed": bool(waits), "runs": states, "lines": lines}


def _runs_before(name: str, state: str, queue: QueueState, anew: Collection[str]) -> list[str]:
    """Return the runs for which a run that is added again, as those of `anew`, must wait. Raises UserError if it cannot start."""
    request = queue.requests[name]
    if name in queue.jobs or state not in ENDED:
        raise UserError(f"run {name} is {state}: only a run that has ended can be added again")
    if why := refusal(request, queue.nodes):
        raise UserError(f"run {name}: {why}")
    left = [after for after in request.after if run_state(after, queue) != "finished"]
    if gone := [after for after in left if after not in queue.jobs and after not in anew]:
        what = state_words(run_state(gone[0], queue))
        raise UserError(f"run {name} waits for run {gone[0]}, which {what}: add that one again, too")
    return left


def _known(name: str, queue: QueueState) -> str:
    """Return the state of a run of the queue. Raises UserError for another one."""
    if name not in queue.requests:
        near, listed = nearest(name, sorted(queue.requests)), front_end.queue_verb("list")
        raise UserError(f"run: the queue has no run {name}{near}: {listed} lists them")
    return run_state(name, queue)


def _job(name: str, verb: Verb, queue: QueueState) -> SlurmJob:
    """Return the job of a run. Raises UserError."""
    state = _known(name, queue)
    if name not in queue.jobs:
        able = "waits or runs" if verb == "cancel" else "waits"
        raise UserError(f"run {name} is {state}: only a run that {able} can be {_DONE[verb]}")
    if verb != "cancel" and state in ("running", "ending"):
        cancel = front_end.queue_verb("cancel")
        raise UserError(f"run {name} is {state}: only a run that waits can be {_DONE[verb]}; {cancel} stops it")
    return queue.jobs[name]


def show_runs(client: QueueClient, verb: Verb, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the runs that wait or run (`list`), or all (`history`): `runs` as data, `lines` as a table.

    `names`: names of the runs that are shown; empty for all. Raises UserError: there is no such run.
    """
    queue = client.state()
    for name in names:
        if name not in queue.requests:
            raise UserError(f"run: the queue has no run {quoted(name)}{nearest(name, sorted(queue.requests))}")
    found = list_history(queue, names) if verb == "history" else list_queue(queue, names)
    return {"changed": False, **found}


def manage_queue(
    values: Mapping[str, Any], cluster: ClusterHosts, top: Path, report: Report, check: bool
) -> dict[str, Any]:
    """Run the operation that the values of ``-e`` specify: `do`, and the names of runs or the options of new ones.

    Returns `changed`; `runs`; `lines`. `check`: change nothing. Raises UserError: a mistake in the values. No host has
    received a request yet, unless only the queue host can check it; RunError: the queue host or Slurm refuses the
    request, or fails; InventoryError: a host is not described completely.
    """
    verb = check_verb(values.get("do"))
    given = {name: value for name, value in values.items() if name != "do"}
    runs = read_runs(given, cluster.launch_of, top, report) if verb == "add" else []
    options = ChangeOptions() if verb == "add" else change_options(verb, given)
    host = queue_host(cluster.groups)
    for member in cluster.hosts:
        member.check()
    limited = len(cluster.hosts) < len(cluster.groups["cluster"])
    client, token = QueueClient(cluster.connect(host)), secrets.token_hex(8)
    site = Site(cluster.hosts, limited, client, cluster.connect, top, report, token, check)
    if verb in ("list", "history"):
        return show_runs(site.queue, verb, options.run)
    if verb != "add":
        return change_runs(site.queue, verb, options, check=check)
    return add_runs(runs, site)
