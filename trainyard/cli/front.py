"""A command as the program runs it: with flags, and the inventory outside of any play."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainyard.cli.flags import Arguments
from trainyard.cli.output import Output
from trainyard.cli.playbooks import run_playbook
from trainyard.cluster import Cluster
from trainyard.commands.call import Call, own_groups
from trainyard.commands.groups import LAUNCH
from trainyard.commands.table import Command
from trainyard.connection import Host, HostConnection
from trainyard.run.options import ALIASES, make_options


def run_command(command: Command, arguments: Arguments, top: Path, output: Output) -> dict[str, Any] | None:
    """Run a command, and return its result.

    Args:
        top: the project's folder.

    Raises:
        UserError: a mistake of the user.
        InventoryError: the inventory cannot be read, or a host is not described completely.
        RunError, RemoteError: the command failed.
        PlaybookError: a playbook failed.
    """
    launch = {ALIASES.get(name, name): value for name, value in arguments.of(LAUNCH).items()}
    make_options(arguments.of(LAUNCH), "the command line")
    if command.run is None or command.by_playbook:
        run_playbook(command, arguments, launch, top, output)
        return {"playbook": command.playbook, "lines": []}
    if not command.on_hosts:
        return command.run(_call_without_hosts(command, arguments, top, output))
    call = _call(command, arguments, launch, top, output)
    call.check_names()
    return command.run(call)


def _call(command: Command, arguments: Arguments, launch: dict[str, Any], top: Path, output: Output) -> Call:
    from trainyard.ansible_adapter import Inventory

    inventory = Inventory(arguments.inventory, launch.get("limit", ""), arguments.extra_vars)
    extra_vars, given, flags = inventory.extra_vars, dict[str, Any](), dict[str, Any]()
    for group in own_groups(command.groups):
        known = {name: value for name, value in extra_vars.items() if group.knows(name)} | arguments.of(group)
        given |= {group.field_name(name): value for name, value in known.items()}
    for group in command.groups:
        flags |= arguments.of(group)
    return Call(
        command=command.name,
        groups=command.all_groups,
        given=given,
        extra_vars=extra_vars,
        values=extra_vars | flags,
        cluster=inventory.cluster(launch),
        top=top,
        report=output.report,
        check=arguments.switch("check"),
        as_json=output.as_json,
        play=lambda values: run_playbook(command, arguments, launch, top, output, values),
    )


def _call_without_hosts(command: Command, arguments: Arguments, top: Path, output: Output) -> Call:
    """Return the call of a command that reads no inventory. Raises UserError for flags that need one."""
    if arguments.inventory or arguments.extra_vars:
        raise UserError(f"{command.name}: it concerns no hosts: omit --inventory and --extra-vars")
    given = {name: value for group in command.groups for name, value in arguments.of(group).items()}
    cluster = Cluster([], {}, {}, connect=_no_host, launch_of=make_options)
    how: dict[str, Any] = {"check": arguments.switch("check"), "as_json": output.as_json}
    return Call(command.name, command.all_groups, given, {}, given, cluster, top, output.report, **how)


def _no_host(host: Host | str) -> HostConnection:
    raise AssertionError(host)
