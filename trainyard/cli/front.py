"""A command as the program runs it: with flags, and the inventory outside of any play."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.common.errors import UserError
from trainyard.cli.command_flags import Arguments
from trainyard.cli.output import Output
from trainyard.cli.playbooks import run_playbook
from trainyard.commands.call import Call, own_groups
from trainyard.commands.groups import LAUNCH
from trainyard.commands.table import Command
from trainyard.inventory import ClusterHosts
from trainyard.run.launch_options import ALIASES, make_options
from trainyard.wire.connection import Host, HostConnection

if TYPE_CHECKING:
    from trainyard.ansible_adapter import Inventory


def run_command(
    command: Command, arguments: Arguments, top: Path, output: Output, inventory: Inventory | None = None
) -> dict[str, Any] | None:
    """Run a command, and return its result. `top`: the project's folder.

    Raises:
        UserError: a mistake of the user.
        InventoryError: the inventory cannot be read, or a host is not described completely.
        RunError, RemoteError: the command failed.
        PlaybookError: a playbook failed.
    """
    if command.run is None or command.by_playbook:
        run_playbook(command, arguments, _launch_options(arguments), top, output)
        return {"playbook": command.playbook, "lines": []}
    return command.run(make_call(command, arguments, top, output, inventory))


def make_call(
    command: Command, arguments: Arguments, top: Path, output: Output, inventory: Inventory | None = None
) -> Call:
    """Return the call of a command with the inventory that the arguments name, unless it is given. Raises as `run_command`."""
    from trainyard.ansible_adapter import Inventory

    launch = _launch_options(arguments)
    if command.on_hosts:
        inventory = inventory or Inventory(arguments.inventory, launch.get("limit", ""), arguments.extra_vars)
        cluster, extra_vars = inventory.cluster(launch), inventory.extra_vars
    elif arguments.inventory or arguments.extra_vars:
        raise UserError(f"{command.name}: it concerns no hosts: omit --inventory and --extra-vars")
    else:
        cluster, extra_vars = ClusterHosts([], {}, {}, _no_host, make_options), {}
    given, flags = dict[str, Any](), dict[str, Any]()
    for group in own_groups(command.groups):
        known = {name: value for name, value in extra_vars.items() if group.knows(name)} | arguments.of(group)
        given |= {group.field_name(name): value for name, value in known.items()}
    for group in command.groups:
        flags |= arguments.of(group)
    call = Call(
        command=command.name,
        groups=command.all_groups,
        given=given,
        extra_vars=extra_vars,
        values=extra_vars | flags,
        cluster=cluster,
        top=top,
        report=output.report,
        check=arguments.switch("check"),
        as_json=output.as_json,
        play=lambda values: run_playbook(command, arguments, launch, top, output, values),
    )
    call.check_names()
    return call


def _launch_options(arguments: Arguments) -> dict[str, Any]:
    """Return the launch options by their names. Raises UserError for a bad value."""
    make_options(arguments.of(LAUNCH), "the command line")
    return {ALIASES.get(name, name): value for name, value in arguments.of(LAUNCH).items()}


def _no_host(host: Host | str) -> HostConnection:
    raise AssertionError(f"{host}: the command concerns no hosts")
