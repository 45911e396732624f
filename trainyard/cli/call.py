"""One call of a command: its options, the inventory, and the values of `-e`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import RunSpec
from trainyard.cli.flags import COMMON, LAUNCH, Arguments, Group, SpecGroup
from trainyard.cli.output import Output
from trainyard.extra_vars import check_names, check_pairs, read_run_spec
from trainyard.run.options import ALIASES, LaunchOptions, make_options, options_from_variables
from trainyard.run.session import RunSession
from trainyard.service_records import ServiceRecords, service_records

if TYPE_CHECKING:
    from trainyard.ansible_adapter import Inventory

SOURCE = "the command line"


@dataclass(frozen=True)
class Call:
    """The arguments of a command, and the objects that they name.

    Attributes:
        command: its name.
        groups: its flags.
        arguments: the parsed words.
        top: the project's folder.
        check: change nothing.
        output: receives lines.
    """

    command: str
    groups: Sequence[Group]
    arguments: Arguments
    top: Path
    check: bool
    output: Output

    @property
    def sources(self) -> list[str]:
        """The inventory sources; empty for those of ansible.cfg."""
        return [str(source) for source in self.arguments.of(COMMON).get("inventory", [])]

    @property
    def extra_words(self) -> list[str]:
        """The words of `-e`."""
        return [str(word) for word in self.arguments.of(COMMON).get("extra_vars", [])]

    @functools.cached_property
    def launch_flags(self) -> dict[str, Any]:
        """The launch options that are given as flags, by name. Raises UserError for a bad value."""
        given = self.arguments.of(LAUNCH)
        make_options(given, SOURCE)
        return {ALIASES.get(name, name): value for name, value in given.items()}

    @functools.cached_property
    def inventory(self) -> Inventory:
        """The hosts. Raises InventoryError, and UserError for an unknown name of `-e`."""
        from trainyard.ansible_adapter import Inventory

        limit = self.launch_flags.get("limit", "")
        found = Inventory(self.sources, limit, self.extra_words)
        check_pairs(found.extra_vars)
        if not any(isinstance(group, SpecGroup) for group in self.groups):  # read_run_spec checks the names
            given = [name for name in found.extra_vars if not any(group.knows(name) for group in self.groups)]
            fields = [name for group in self.groups for name in group.fields]
            check_names(given, self.top, fields, of_run=False)
        return found

    @functools.cached_property
    def launch(self) -> LaunchOptions:
        """The launch options of the flags, `-e` and the inventory. Raises UserError for a bad value."""
        return self.launch_with({})

    def launch_with(self, values: Mapping[str, Any]) -> LaunchOptions:
        """Return the launch options with these values of one run on top. Raises UserError for a bad value."""
        first = self.inventory.variables[self.inventory.hosts[0].name]
        return options_from_variables(first, lambda value: value, self.launch_flags | dict(values))

    def own(self, group: Group) -> dict[str, Any]:
        """Return the values of the command's own options: those of `-e`, and the flags, which take precedence."""
        flags = self.arguments.of(group)
        given = {name: value for name, value in self.inventory.extra_vars.items() if group.knows(name)}
        return {group.field_name(name): value for values in (given, flags) for name, value in values.items()}

    def everything(self) -> dict[str, Any]:
        """Return what `-e` of a playbook would be: the extra variables, and the flags, which take precedence."""
        flags = [self.arguments.of(group) for group in self.groups if group is not COMMON]
        return functools.reduce(lambda all_values, values: all_values | values, flags, dict(self.inventory.extra_vars))

    def spec(self, own: Group | None = None) -> RunSpec:
        """Read the run spec. `own`: options of the command that are not of a run. Raises UserError."""
        values = {name: value for name, value in self.everything().items() if not (own and own.knows(name))}
        return read_run_spec(self.launch.spec, values, self.top, self.output.report, source=SOURCE)

    def service_records(self) -> ServiceRecords | None:
        """Return what sends records to the service of the dashboard; None without it."""
        inventory = self.inventory
        where = (inventory.groups, inventory.variable, inventory.connect_name)
        return service_records(*where, self.output.report, self.check)

    def session(self) -> RunSession:
        """Make the session of a run."""
        how: dict[str, Any] = {"home": self.top, "report": self.output.report, "check": self.check}
        spec, inventory, records = self.spec(), self.inventory, self.service_records()
        how["keep_record"] = records and records.keep
        return RunSession(inventory.hosts, inventory.connect, self.launch, spec=spec, **how)
