"""The cluster of an inventory, for Python programs."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.common.utf8 import require_utf8
from trainyard import front_end
from trainyard.api.results import (
    Answers,
    Deployed,
    Evaluation,
    Gpu,
    HostInfo,
    Job,
    Machine,
    Machines,
    Merged,
    OllamaModel,
    SubjectChange,
    SubjectScore,
    pick,
)
from trainyard.api.run import EventLog, Run
from trainyard.cli.__main__ import set_locale
from trainyard.cli.command_flags import Arguments, from_values
from trainyard.cli.front import make_call, run_command
from trainyard.cli.output import Output
from trainyard.commands.call import Call
from trainyard.commands.groups import COMMON
from trainyard.commands.table import COMMANDS
from trainyard.project_folder import project_folder
from trainyard.run.follow.run_status import run_name

if TYPE_CHECKING:
    from trainyard.ansible_adapter import Inventory

Report = Callable[[str], None]
_LOGGER = logging.getLogger("trainyard")
# Names of the guides for options, with what they set.
GUIDE_NAMES = {
    "max_retries": "max_restarts",
    "retry_backoff": "restart_delay",
    "max_checkpoints": "checkpoint_keep",
    "num_students": "students",
    "gpu_memory_gb": "gpu_memory",
    "cpu_cores": "cores",
    "ram_gb": "memory",
}
FAILOVER = {"min_nodes": 1, "max_restarts": 3}  # what failover_enabled sets


class Cluster:
    """The hosts of an inventory.

    Every method that names options takes those of its command as keywords: fields of the run spec, launch options, and
    the command's own, see docs/your-code.md. A mistake, and a failure, is a TrainyardError. `queue`: the queue of the
    cluster.
    """

    def __init__(
        self,
        inventory: str | Path | Sequence[str | Path] = (),
        *,
        limit: str = "",
        variables: Mapping[str, Any] | None = None,
        report: Report = _LOGGER.info,
    ) -> None:
        """Read an inventory. No host is contacted. Raises InventoryError: the inventory cannot be read.

        Args:
            inventory: file, folder or host list, or several; empty for that of ansible.cfg.
            limit: the hosts that are used, as `--limit` takes it; empty for all of the group `cluster`.
            variables: further variables of all hosts, as `-e` sets them.
            report: receives the lines that the program prints while it works.
        """
        require_utf8()
        set_locale()
        self._top = project_folder()
        os.environ.setdefault("ANSIBLE_CONFIG", str(self._top / "ansible.cfg"))
        paths = [inventory] if isinstance(inventory, str | Path) else inventory
        self._sources, self._report = [str(path) for path in paths], report
        self._variables = [json.dumps(dict(variables))] if variables else []
        self._limit = limit
        self._inventories: dict[str, Inventory] = {}
        self._inventory = self._limited(limit)
        self._scan: tempfile.TemporaryDirectory[str] | None = None  # which has the options of a scan
        self.queue = Queue(self)

    def _limited(self, limit: str) -> Inventory:
        from trainyard.ansible_adapter import Inventory

        if limit not in self._inventories:
            self._inventories[limit] = Inventory(self._sources, limit, self._variables, empty=True)
        return self._inventories[limit]

    @classmethod
    def local(cls, **options: Any) -> Cluster:
        """Return this machine as two hosts, to try a run without a cluster."""
        return cls(project_folder() / "inventory/local.yml", **options)

    @classmethod
    def discover(
        cls,
        networks: Sequence[str] = ("auto",),
        *,
        inventory: Sequence[str | Path] = (),
        scan: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Cluster:
        """Scan networks for machines with Ollama, and return those that may join, merged with the hosts of `inventory`.

        Args:
            networks: in CIDR notation; auto: all private networks of this machine.
            scan: further options of the scan, as in inventory/ollama.yml, such as `hosts` or `ports`.
        """
        folder = tempfile.TemporaryDirectory()
        source = Path(folder.name) / "ollama.yml"
        options_of_scan = {"plugin": "ollama", "networks": list(networks), **(scan or {})}
        source.write_text(json.dumps(options_of_scan), encoding="utf-8")
        cluster = cls([*inventory, source], **options)
        cluster._scan = folder
        return cluster

    # The hosts ----------------------------------------------------------------------------------------------------------

    def hosts(self) -> list[HostInfo]:
        """Return the hosts of the cluster with their hardware."""
        hosts = self._inventory.hosts
        known = self.command("status")["hardware"] if hosts else {}
        found = []
        for host in hosts:
            about = known.get(host.name, {})
            gpus = tuple(pick(Gpu, gpu) for gpu in about.get("gpus", []))
            found.append(pick(HostInfo, about, name=host.name, address=host.address, answers=bool(about), gpus=gpus))
        return found

    def models(self) -> list[OllamaModel]:
        """Return the models of the Ollama servers of the hosts and of discovered machines, by name."""
        where: dict[str, list[str]] = {}
        for host in self.hosts():
            for model in host.models or ():
                where.setdefault(model, []).append(host.name)
        for name in self._discovered():
            for model in self._inventory.variables[name].get("discovered_models") or []:
                if name not in where.setdefault(str(model["name"]), []):
                    where[str(model["name"])].append(name)
        return [OllamaModel(name, tuple(where[name])) for name in sorted(where)]

    def machines(self) -> Machines:
        """Return which entries of the inventory are one machine, and whether distributed training on them is useful."""
        hosts = [host.name for host in self._inventory.hosts]
        found = self.command("identity") if hosts else {}
        drop: dict[str, Any] = found.get("drop", {})
        machines = []
        for name in (name for name in hosts if name not in drop):
            entries = (name, *(entry for entry, (kept, _) in drop.items() if kept == name))
            addresses = dict.fromkeys(address for entry in entries for address in self._addresses(entry))
            machines.append(Machine(name, entries, tuple(addresses)))
        for name in (name for name in self._discovered() if name not in hosts):
            machines.append(Machine(name, (name,), tuple(self._addresses(name)), trusted=False))
        verdict = found.get("verdict", "no machine could be reached")
        return Machines(tuple(machines), bool(found.get("useful")), verdict, tuple(found.get("warnings", ())))

    def _discovered(self) -> list[str]:
        return list(self._inventory.groups.get("discovered", []))

    def _addresses(self, name: str) -> list[str]:
        values = self._inventory.variables[name]
        listed = [
            *(values.get("discovered_addresses") or []),
            values.get("ansible_host"),
            values.get("cluster_address"),
        ]
        # A host without an address is reached by its name.
        return [str(address) for address in dict.fromkeys(listed) if address and address != name] or [name]

    # Runs ---------------------------------------------------------------------------------------------------------------

    def train(self, **options: Any) -> Run:
        """Start a run and return when its ranks have started; options of the command `train`.

        Raises UserError, InventoryError: a mistake, before a rank starts; RunError, RemoteError: the run cannot start.
        """
        log = EventLog()
        call = self.call("train", options, log.line)
        with front_end.serving_program():
            session = call.session(spec=call.spec(), watch=log.watch)
            session.start()

        def finish() -> Mapping[str, Any]:
            result = session.finish().get("result") or {"status": session.state.status or session.state.phase}
            return dict(result)

        return Run(self, session.run_name, call, finish, log)

    def run(self, name: str) -> Run:
        """Return a run that was started before, by any program. No host is contacted."""
        return Run(self, name, self.call("attach", {"run": name}))

    def runs(self) -> list[Run]:
        """Return all runs of the hosts."""
        found = self.command("status", all=True, hardware=False)["runs"]
        return [self.run(name) for name in dict.fromkeys(map(run_name, found)) if name]

    def teach(self, teacher: str, prompts: str | Path, **options: Any) -> Answers:
        """Let the Ollama servers of the cluster answer prompts; options of the command `distill`. Answers are kept: a second call
        asks for the missing ones only."""
        asked = {**options, "teacher": teacher, "prompts": prompts}
        found = self.command("distill", **asked, students=0)
        return Answers(teacher, found["dataset"], found["answers"], asked)

    def students(self, answers: Answers, *, model: str | Sequence[str], count: int = 1, **options: Any) -> list[Run]:
        """Train `count` students of each model on the answers, and return when they have finished.

        Options of the command `distill`, such as `student_data`. Raises RunError: a student failed.
        """
        given = {**answers.asked, "students": count, **options, "model": model}
        found = self.command("distill", **given)
        return [self.run(name) for name in found["students"]]

    def merge(self, runs: Sequence[Run | str], *, run: str = "merged", **options: Any) -> Merged:
        """Merge finished runs of one base into the run `run`, or let them vote; options of the command `merge`."""
        names = [_name(each) for each in runs]
        found = self.command("merge", runs=names, run=run, **options)
        result, parts = found["result"], found["result"].get("parts", [])
        warnings = tuple(line for line in found["lines"] if line.startswith("WARNING"))
        losses = {name: part["eval_loss"] for name, part in zip(names, parts, strict=False)}
        path = next((str(result[key]) for key in ("adapter", "model", "path") if result.get(key)), "")
        method = str(options.get("method", "cat"))
        return Merged(run, method, result.get("base_loss"), result.get("eval_loss"), losses, path, warnings)

    def evaluate(self, subjects: Sequence[Run | Merged | str], **options: Any) -> Evaluation:
        """Let runs, their base and models of servers answer the same questions; options of the command `evaluate`.

        Args:
            subjects: runs, or names as the command takes them. The others are compared with the first.
        """
        found = self.command("evaluate", subjects=[_name(each) for each in subjects], **options)["result"]
        scores = [pick(SubjectScore, row, file=file) for file, rows in found["scores"].items() for row in rows]
        changes = [pick(SubjectChange, row) for row in found["changes"]]
        return Evaluation(tuple(scores), tuple(changes), tuple(found["questions"]))

    def deploy(self, run: Run | Merged | str, name: str, **options: Any) -> Deployed:
        """Put a finished run into the Ollama server of every host, as the model `name`; options of the command `deploy`."""
        found = self.command("deploy", run=_name(run), deploy_name=name, **options)
        return Deployed(name, found["hosts"])

    # Commands -----------------------------------------------------------------------------------------------------------

    def command(self, name: str, **options: Any) -> dict[str, Any]:
        """Run any command of the program and return its result, which `--json` prints, such as `command("evaluate", ...)`."""
        with front_end.serving_program():
            arguments, inventory = self._arguments(name, options)
            # What playbooks print goes to stderr.
            return run_command(COMMANDS[name], arguments, self._top, Output(True, self._report), inventory) or {}

    def call(self, name: str, options: Mapping[str, Any], report: Report | None = None) -> Call:
        """Return the call of a command, for what follows it step by step."""
        with front_end.serving_program():
            arguments, inventory = self._arguments(name, options)
            return make_call(COMMANDS[name], arguments, self._top, Output(True, report or self._report), inventory)

    def _arguments(self, name: str, options: Mapping[str, Any]) -> tuple[Arguments, Inventory]:
        given, groups = guide_values(options), COMMANDS[name].all_groups
        limit = str(given.get("limit", self._limit))
        if limit and any(group.knows("limit") for group in groups):
            given["limit"] = limit  # for a playbook
        arguments = from_values(name, groups, given)
        arguments.of(COMMON).update(inventory=self._sources, extra_vars=self._variables)
        return arguments, self._limited(limit)


def _name(run: Run | Merged | str) -> str:
    return run if isinstance(run, str) else run.name


def guide_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by their own names, with paths as text and without those that are None."""
    given = {
        GUIDE_NAMES.get(name, name): str(value) if isinstance(value, Path) else value
        for name, value in options.items()
        if value is not None
    }
    failover = given.pop("failover_enabled", False)
    return (FAILOVER | given) if failover else given


class Queue:
    """The queue of a cluster, see docs/queue.md."""

    def __init__(self, cluster: Cluster) -> None:
        """Take the cluster. No host is contacted."""
        self._cluster = cluster

    def add(self, **options: Any) -> Job:
        """Add a run; options of the command `queue add`. Raises UserError if no host can satisfy the request."""
        (added, *_) = self._cluster.command("queue add", **options)["runs"]
        return self.job(added["run"])

    def jobs(self, *, ended: bool = False) -> list[Job]:
        """Return the runs that wait or run, in the order of their start; with `ended`, all."""
        found = self._cluster.command("queue history" if ended else "queue list")["runs"]
        return [pick(Job, run) for run in found]

    def job(self, run: str) -> Job:
        """Return one run of the queue. Raises UserError if there is none."""
        (found,) = self._cluster.command("queue history", run=run)["runs"]
        return pick(Job, found)

    def cancel(self, run: Job | str) -> None:
        """Take a run out of the queue; one that runs saves a checkpoint first."""
        self._change("cancel", run)

    def hold(self, run: Job | str) -> None:
        """Let a waiting run wait until it is released."""
        self._change("hold", run)

    def release(self, run: Job | str) -> None:
        """Let a held run start."""
        self._change("release", run)

    def priority(self, run: Job | str, priority: str) -> None:
        """Give a waiting run another priority: low, normal, high or critical."""
        self._change("priority", run, priority=priority)

    def again(self, run: Job | str) -> None:
        """Add a run again that has failed, or was cancelled or stopped."""
        self._change("again", run)

    def _change(self, verb: str, run: Job | str, **options: Any) -> None:
        name = run if isinstance(run, str) else run.run
        self._cluster.command(f"queue {verb}", run=name, **options)
