"""The table of the commands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from trainer.config.removed_fields import REMOVED_DASHBOARD_OPTIONS
from trainyard.commands import functions
from trainyard.commands.call import Call
from trainyard.commands.command_options import (
    CompletionOptions,
    DataOptions,
    InitOptions,
    LogsOptions,
    RunOptions,
    StatusOptions,
    StopOptions,
)
from trainyard.commands.groups import COMMON, LAUNCH, LAUNCH_OPTIONS, SPEC, Group, SpecGroup
from trainyard.dashboard.dashboard_options import DashboardOptions
from trainyard.deploy.deploy_options import DeployOptions
from trainyard.evaluate.side_by_side import OPTIONS as EVALUATE_OPTIONS
from trainyard.front_end import playbook_of
from trainyard.import_file.import_options import ImportOptions
from trainyard.ollama.distill_options import OPTIONS as DISTILL_OPTIONS
from trainyard.queue.manage import CHANGE_OPTIONS, FILE
from trainyard.queue.request import OPTIONS as QUEUE_OPTIONS
from trainyard.workflows.merge_runs import OPTIONS as MERGE_OPTIONS
from trainyard.workflows.push_run import OPTIONS as PUSH_OPTIONS


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        run: does it; returns the result, whose `lines` are printed, or None if it has printed its result. None for a
            command of which only roles do all.
    """

    name: str  # of two words for a verb of the queue
    summary: str  # one line
    run: Callable[[Call], dict[str, Any] | None] | None
    groups: tuple[Group, ...]  # the options, without those of every command
    positional: str = ""  # the option that words without a flag set
    same_as: str = ""  # what does the same, if that is not the playbook of the command's name
    by_playbook: bool = False  # whether the program runs the playbook, because roles do a part
    on_hosts: bool = True  # whether it concerns the hosts of an inventory. No playbook does what other commands do.

    @property
    def all_groups(self) -> tuple[Group, ...]:
        """The options with those of every command."""
        return (*self.groups, COMMON)

    @property
    def playbook(self) -> str:
        """The playbook, or the command of the trainer, that does the same; empty if none does."""
        return (self.same_as or playbook_of(self.name)) if self.on_hosts else ""


def _launch(*names: str) -> Group:
    """Return some of the launch options."""
    return Group(LAUNCH.title, {name: LAUNCH_OPTIONS[name] for name in names})


def _own(fields: Any, title: str = "command options", removed: Collection[str] = ()) -> Group:
    """Return the options of a class, or of a table of fields, and names that it declared once."""
    return Group(title, getattr(fields, "model_fields", fields), removed)


def _by_roles(name: str, summary: str, run: Callable[[Call], dict[str, Any]] | None = None) -> Command:
    """Return a command that runs its playbook. Words after `--` go to ansible-playbook."""
    return Command(name, summary, run, (LIMIT,), by_playbook=True)


def _queue(verb: str, summary: str, groups: tuple[Group, ...], positional: str = "run") -> Command:
    run = functools.partial(functions.queue, verb=verb)
    return Command(f"queue {verb}", summary, run, groups, positional)


LIMIT, LIMITS = _launch("limit"), _launch("limit", "lost_limit")
QUEUED_RUNS = (_own({"run": CHANGE_OPTIONS["run"]}), LIMIT)
COMPLETION = _own(CompletionOptions)
_ADD = _own({"file": FILE, **QUEUE_OPTIONS}, "queue options")
_DISTILL = (_own(DISTILL_OPTIONS), SpecGroup(DISTILL_OPTIONS), LAUNCH)
_FOLLOW = _launch("limit", "lost_limit", "progress_interval", "stall_limit")
_TABLE = (
    Command("train", "start a run, follow it, and collect its result", functions.train, (SPEC, LAUNCH), "spec"),
    Command(
        "plan",
        "plan ranks, devices and ports of a run, and start nothing",
        *(functions.plan, (SPEC, LAUNCH), "spec", "train.yml --tags plan"),
    ),
    Command(
        "data",
        "show the text that a run trains on, with the trained parts marked, and what it drops",
        *(functions.data, (_own(DataOptions), SPEC, _launch("spec")), "spec", "python -m trainer data"),
    ),
    Command(
        "import",
        "turn configuration files of axolotl, LLaMA-Factory, TRL, transformers, accelerate or DeepSpeed into a run spec",
        *(functions.import_config, (_own(ImportOptions),), "files"),
        on_hosts=False,
    ),
    Command(
        "init",
        "make a folder with a configuration, an inventory and playbooks, in which the commands work as in a checkout",
        *(functions.init, (_own(InitOptions),), "folder"),
        on_hosts=False,
    ),
    Command(
        "status",
        "list the hardware of every host, and the runs",
        *(functions.status, (_own(StatusOptions), LIMITS), "run"),
    ),
    Command("attach", "follow a run that is already running", functions.attach, (_own(RunOptions), _FOLLOW), "run"),
    Command("identity", "find entries of the inventory that are one machine", functions.identity, (LIMIT,)),
    Command("logs", "copy the logs of a run from all its hosts", functions.logs, (_own(LogsOptions), LIMIT), "run"),
    Command("stop", "stop a run after a checkpoint", functions.stop, (_own(StopOptions), LIMITS), "run"),
    Command(
        "distill", "let Ollama servers answer prompts, and train students on the answers", functions.distill, _DISTILL
    ),
    Command("merge", "merge finished runs, or let them vote", functions.merge, (_own(MERGE_OPTIONS), LIMITS), "runs"),
    Command(
        "evaluate",
        "let models answer questions, side by side: runs, their base, models of servers",
        *(functions.evaluate, (_own(EVALUATE_OPTIONS), LIMITS), "subjects"),
    ),
    Command(
        "push",
        "put the result of a run into a repository of the Hugging Face Hub, with a model card",
        *(functions.push, (_own(PUSH_OPTIONS), LIMIT), "run"),
    ),
    Command(
        "deploy",
        "put a finished run into the Ollama server of every host",
        *(functions.deploy, (_own(DeployOptions), LIMIT), "run"),
    ),
    Command(
        "undeploy",
        "remove a deployed model from every host",
        *(functions.undeploy, (_own({"deploy_name": DeployOptions.model_fields["deploy_name"]}), LIMIT), "deploy_name"),
    ),
    Command(
        "preflight",
        "check all hosts before a run",
        *(functions.preflight, (_own(RunOptions), _launch("limit", "master_port"))),
    ),
    _queue("add", "add runs to the queue", (_ADD, SPEC, LAUNCH), "spec"),
    _queue("list", "list the runs that wait or run, with the reason", QUEUED_RUNS),
    _queue("history", "list all runs of the queue, with those that have ended", QUEUED_RUNS),
    _queue("cancel", "take runs out of the queue; those that run save a checkpoint first", QUEUED_RUNS),
    _queue("hold", "let waiting runs wait until they are released", QUEUED_RUNS),
    _queue("release", "let held runs start", QUEUED_RUNS),
    _queue("priority", "give waiting runs another priority", (_own(CHANGE_OPTIONS), LIMIT)),
    _queue("again", "add runs again that have failed, or were cancelled or stopped", QUEUED_RUNS),
    Command(
        "dashboard",
        "serve a web page with the hosts, the runs and their curves",
        *(functions.dashboard, (_own(DashboardOptions, removed=REMOVED_DASHBOARD_OPTIONS), LIMITS)),
    ),
    _by_roles("site", "provision the hosts"),
    _by_roles("add-host", "add a host to a running cluster"),
    _by_roles("remove-host", "remove a host from a cluster"),
    _by_roles("check-training", "let every host train alone, and compare them", functions.check_training),
    _by_roles("reset", "undo site.yml"),
)
COMMANDS: dict[str, Command] = {command.name: command for command in _TABLE}
