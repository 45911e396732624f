"""One call of a command, from the program or from a task of a playbook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainer.config import RunSpec, resolve_aliases
from trainyard.commands.groups import COMMON, LAUNCH, Group, SpecGroup
from trainyard.extra_vars import check_names, check_pairs, read_run_spec
from trainyard.inventory import ClusterHosts
from trainyard.ollama.rollout_hosts import with_rollout_servers
from trainyard.ollama.teachers import Candidate, candidates
from trainyard.playbook_options import PlaybookOptions
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.session import RunSession
from trainyard.workflows.push_run import FinalPush, check_push

Options = TypeVar("Options", bound=PlaybookOptions)
# Names of -e that a playbook takes, for another command: queue.yml, remove_host.yml, preflight.yml.
_OF_PLAYBOOKS = ("do", "priority", "host", "json")


def own_groups(groups: Sequence[Group]) -> list[Group]:
    """Return the groups of a command's own options: neither of the run spec, nor launch options, nor of every command."""
    shared = (LAUNCH.title, COMMON.title)
    return [group for group in groups if not isinstance(group, SpecGroup) and group.title not in shared]


@dataclass(frozen=True)
class Call:
    """One call of a command. `play`: runs the command's playbook with these values of `-e`; None in a task."""

    command: str  # its name
    groups: Sequence[Group]  # its options
    given: Mapping[str, Any]  # the command's own options, by name: flags, options of the task, or variables
    extra_vars: Mapping[str, Any]  # the values of `-e`
    values: Mapping[str, Any]  # `extra_vars`, and flags, which take precedence
    cluster: ClusterHosts  # the inventory
    top: Path  # the project's folder
    report: Callable[[str], None]  # receives lines while the command runs
    check: bool = False  # change nothing
    as_json: bool = False  # whether the front end prints the result as JSON
    play: Callable[[Mapping[str, Any]], None] | None = None

    @property
    def work(self) -> Path:
        """Folder of created files and records."""
        return self.top / ".trainyard"

    @property
    def launch(self) -> LaunchOptions:
        """The launch options. Raises UserError for a bad value."""
        return self.cluster.launch_of({})

    @property
    def source(self) -> str:
        """The origin of the values, for messages."""
        return "the command line" if self.play else "-e"

    def check_names(self) -> None:
        """Check the names of `-e`, unless `spec` does. Fields of the run spec may stand beside those of a playbook. Raises UserError."""
        check_pairs(self.extra_vars)
        if any(isinstance(group, SpecGroup) for group in self.groups):
            return
        given = self.extra_vars if self.play else resolve_aliases(self.extra_vars, source="-e")[0]
        others = [name for name in given if not any(group.knows(name) for group in self.groups)]
        fields = [name for group in self.groups for name in group.fields]
        check_names(others, self.top, [*fields, *(() if self.play else _OF_PLAYBOOKS)], of_run=not self.play)

    def options(self, kind: type[Options]) -> Options:
        """Return the command's own options. Raises UserError for a bad value."""
        return kind.from_variables(self.given, self.command)

    def spec(self) -> RunSpec:
        """Read the run spec, in which the command's own options have no place. Raises UserError."""
        own = own_groups(self.groups)
        values = {name: value for name, value in self.values.items() if not any(group.knows(name) for group in own)}
        return read_run_spec(self.launch.spec, values, self.top, self.report, source=self.source)

    def machines(self) -> list[Candidate]:
        """Return the machines of the inventory that may run Ollama."""
        groups = self.cluster.groups
        return candidates(groups["cluster"], groups.get("discovered", []), self.cluster.variables)

    def session(self, **start: Any) -> RunSession:
        """Make the session of a run, with its `spec` or its `state`. Raises UserError."""
        launch, hosts, connect = self.launch, self.cluster.hosts, self.cluster.connect
        if spec := start.get("spec"):
            start["spec"] = with_rollout_servers(spec, self.machines, self.report)
            start["servers_found"] = start["spec"].rollout_servers != spec.rollout_servers
        if launch.push:
            push = start["push"] = FinalPush(hosts, connect, launch, self.top, self.report)
            if spec:  # before a host is contacted; the later steps have a state
                check_push(push.options("run"))
        start |= {"home": self.top, "report": self.report, "check": self.check}
        return RunSession(hosts, connect, launch, **start)
