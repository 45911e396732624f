"""The adapter between trainyard and Ansible, and the only module of the package that imports it.

It reads hosts and their logins from the inventory, and is the base of the action plugins. Ansible decrypts vault values and resolves templates of the variables that are read here. Commands run as the
user of the connection: the supervisor uses sudo itself where it has to.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.parsing.plugin_docs import read_docstring
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import connection_loader
from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars

from trainer.common.errors import MAX_MESSAGE, memory_failure
from trainer.common.formats import printable, quoted
from trainer.distributed.worker_process import die_with_launcher
from trainer.supervise.processes import descendants, send_signal
from trainyard.extra_vars import plain_data
from trainyard.host_variables import make_host
from trainyard.inventory import ClusterHosts
from trainyard.run.launch_options import ALIASES, options_from_variables
from trainyard.wire.connection import FanOut, Host, HostConnection, InventoryError, Login, last_line
from trainyard.wire.openssh import open_connection
from trainyard.wire.worker_output import end_between_writes

# Keys of a documented option that an argument spec also has.
SPEC_KEYS = ("type", "elements", "default", "choices", "required", "aliases")
ANSWER_LIMIT = 0.5  # s for pending answers: after the loss of a host, they delay the report of it
KILL_LIMIT = 0.5  # s for the threads of requests whose clients were killed
LIMIT_NAMES = ("limit", *(old for old, new in ALIASES.items() if new == "limit"))  # names of that launch option


class ClusterAction(ActionBase):
    """An action that runs on the controller, once for all hosts of the play."""

    BYPASS_HOST_LOOP = True
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_async = False

    def __init_subclass__(cls) -> None:
        """Make one line of two errors that any action can have: refused arguments, and a lack of memory."""
        super().__init_subclass__()
        action = cls.run

        @functools.wraps(action)
        def run(self: ClusterAction, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
            try:
                return action(self, tmp, task_vars)
            except AnsibleActionFail as error:
                return failure(printable(" ".join(str(error).split()), MAX_MESSAGE))
            except MemoryError as error:
                return failure(memory_failure(error))

        cls.run = run  # type: ignore[method-assign]

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Tie the life of the worker process to ansible-playbook's, and start the action.

        Ansible's workers run in separate sessions. Without this, a worker that monitors a run would survive a
        closed terminal or a killed ansible-playbook, and restart the run beside the next one that monitors it.
        """
        die_with_launcher()
        end_between_writes(Display()._final_q)
        result: dict[str, Any] = super().run(tmp, task_vars)
        return result

    def cleanup(self, force: bool = False) -> None:
        """End the requests that are still pending; Ansible calls this when the action has returned or failed."""
        end_requests()
        super().cleanup(force)

    def resolve(self, value: Any) -> Any:
        """Return a value of a variable as plain data, with its templates resolved."""
        return plain_data(self._templar.template(value))

    def extra_vars(self) -> dict[str, Any]:
        """Return the values of `-e`. Raises UserError."""
        found: dict[str, Any] = plain_data(load_extra_vars(self._loader))
        return found

    def cluster(self, variables: Mapping[str, Any], launch: Mapping[str, Any]) -> ClusterHosts:
        """Return the cluster of the play, with the hosts that failed before, and these launch options on top of its variables.

        Raises InventoryError.
        """
        hostvars = variables["hostvars"]
        launch_of = lambda values: options_from_variables(variables, self.resolve, {**launch, **values})  # noqa: E731
        hosts = [self._host(name, hostvars[name]) for name in variables["ansible_play_hosts_all"]]
        connect = lambda host: open_connection(self._host(host, hostvars[host]) if isinstance(host, str) else host)  # noqa: E731
        return ClusterHosts(hosts, variables["groups"], hostvars, connect, launch_of)

    def _host(self, name: str, variables: Any) -> Host:
        """Return the description of a host of the inventory. Raises InventoryError."""
        login = make_login(name, variables, self._play_context.copy(), self._templar, self._task)
        return make_host(name, variables, login)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the task, validated against the DOCUMENTATION of the module of this name.

        Raises AnsibleError if an argument is missing, unknown or of the wrong type.
        """
        modules = self._shared_loader_obj.module_loader
        path = modules.find_plugin(self._task.action, collection_list=self._task.collections)
        options = read_docstring(path)["doc"]["options"]
        spec = {name: {key: option[key] for key in SPEC_KEYS if key in option} for name, option in options.items()}
        arguments: dict[str, Any] = plain_data(self.validate_argument_spec(spec)[1])
        return arguments


def end_requests() -> None:
    """Return when no thread of a request is left, so that none outlives its task."""
    left = FanOut.join_all(ANSWER_LIMIT)
    for thread in left:  # of hosts that do not answer
        kill_clients(thread.native_id)
    if left:
        FanOut.join_all(KILL_LIMIT)


def kill_clients(thread: int | None) -> None:
    """Kill the processes that a thread of this process has started, such as ssh, and those below them.

    Args:
        thread: the kernel's number of the thread.
    """
    try:
        children = [int(pid) for pid in Path(f"/proc/self/task/{thread}/children").read_text(encoding="utf-8").split()]
    except OSError:  # the thread has ended
        return
    for pid in [below for child in children for below in (*descendants(child), child)]:
        with contextlib.suppress(PermissionError):
            send_signal(pid, signal.SIGKILL)


def _load_inventory(sources: Sequence[str], extra_vars: Sequence[str] = ()) -> tuple[Any, Any, Any]:
    """Return Ansible's loader, inventory and variable manager for inventory sources and values of `-e`."""
    from ansible import context
    from ansible.constants import CONFIG_FILE
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader
    from ansible.utils.context_objects import CLIArgs
    from ansible.vars.manager import VariableManager

    loader = DataLoader()
    loader.set_vault_secrets(_vault_secrets())
    before = context.CLIARGS
    vars(load_extra_vars).pop("extra_vars", None)  # Ansible keeps them once per process
    context.CLIARGS = CLIArgs({"extra_vars": tuple(extra_vars)})  # paths in them are relative to the current folder
    try:
        load_extra_vars(loader)
    finally:
        context.CLIARGS = before
    if CONFIG_FILE:  # the project's group_vars are beside its ansible.cfg
        loader.set_basedir(str(Path(CONFIG_FILE).parent))
    inventory = InventoryManager(loader=loader, sources=list(sources))
    return loader, inventory, VariableManager(loader=loader, inventory=inventory)


def check_sources(sources: Sequence[str]) -> None:
    """Check that the files of the inventory exist. Raises InventoryError."""
    for source in sources:
        if "," not in source and not Path(source).exists():
            example = "; copy inventory/hosts.example.yml to it, and name your machines in it"
            hint = example if Path(source).name == "hosts.yml" else ": correct the path, or write HOST, with a comma"
            raise InventoryError(f"-i {printable(source)}: no such file{hint}")


class Inventory:
    """The hosts of an inventory and their variables, as a play with the role `cluster` sees them, outside of any play.

    Attributes:
        hosts: those of the group `cluster` that match the limit, in inventory order.
        groups: the names of the hosts of every group.
        variables: the variables of every host by name, with templates resolved and vault values decrypted.
        extra_vars: the values of `-e`.
    """

    def __init__(
        self, sources: Sequence[str] = (), limit: str = "", extra_vars: Sequence[str] = (), *, empty: bool = False
    ) -> None:
        """Read the inventory.

        Args:
            sources: as `ansible-playbook -i` takes them; empty for those of ansible.cfg.
            limit: as `--limit` takes it; empty for the launch option `limit` of `extra_vars`, or every host of the cluster.
            extra_vars: as `-e` takes them: `NAME=VALUE`, JSON or YAML, `@FILE`.
            empty: whether the cluster may have no host; then only `cluster` needs one.

        Raises:
            InventoryError: a source or a value of `-e` cannot be read, a host is not described completely, or no host
                matches.
        """
        from ansible.constants import DEFAULT_HOST_LIST
        from ansible.playbook.play import Play
        from ansible.vars.hostvars import HostVars

        check_sources(sources)
        try:
            self._loader, inventory, manager = _load_inventory(list(sources) or DEFAULT_HOST_LIST, extra_vars)
            HostVars(inventory=inventory, variable_manager=manager, loader=self._loader)  # for templates
            self.groups: dict[str, list[str]] = inventory.get_groups_dict()
            self.extra_vars: dict[str, Any] = plain_data(manager.extra_vars)
            play = Play.load({"hosts": "all", "roles": ["cluster"]}, variable_manager=manager, loader=self._loader)
            self.variables = {
                host.name: HostVariables(host.name, manager.get_vars(play=play, host=host), self._loader)
                for host in inventory.get_hosts("all")
            }
            limit = limit or next((str(self.extra_vars[name]) for name in LIMIT_NAMES if self.extra_vars.get(name)), "")
            inventory.subset(limit or None)
            names = [host.name for host in inventory.get_hosts("cluster")] if "cluster" in self.groups else []
        except AnsibleError as error:
            raise InventoryError(last_line(str(error))) from error
        self._limit, self._lock = limit, threading.RLock()
        if not names and not empty:
            raise InventoryError(self._no_host())
        self.hosts = [self._host(name) for name in names]

    def _no_host(self) -> str:
        known = ", ".join(self.groups["all"]) or "(none)"
        if "cluster" in self.groups:
            return f"no host matches {self._limit or 'cluster'}: the hosts of the inventory are {known}"
        remedy = f"add its hosts ({known}) to one, as in inventory/hosts.example.yml, or name another inventory with -i"
        return f"the inventory has no group cluster: {remedy}"

    def cluster(self, launch: Mapping[str, Any]) -> ClusterHosts:
        """Return the cluster, with these launch options on top of the inventory's. Raises InventoryError without hosts."""
        if not self.hosts:
            raise InventoryError(self._no_host())
        first = self.variables[self.hosts[0].name]
        launch_of = lambda values: options_from_variables(first, lambda value: value, {**launch, **values})  # noqa: E731
        return ClusterHosts(self.hosts, self.groups, self.variables, self.connect, launch_of)

    def connect(self, host: Host | str) -> HostConnection:
        """Make the connection to a host. Its name finds any host of the inventory, regardless of the limit."""
        with self._lock:  # it resolves templates
            return open_connection(self._host(host) if isinstance(host, str) else host)

    def _host(self, name: str) -> Host:
        from ansible.playbook.play_context import PlayContext

        variables = self.variables[name]
        return make_host(name, variables, make_login(name, variables, PlayContext(), variables.templar))


class HostVariables(Mapping[str, Any]):
    """The variables of a host, with templates resolved when one is read. Raises InventoryError for a wrong template."""

    def __init__(self, name: str, variables: Mapping[str, Any], loader: Any) -> None:
        """Take the variables of the host `name` as Ansible's variable manager returns them."""
        from ansible.template import Templar

        self._name, self._variables = name, variables
        self.templar = Templar(loader=loader, variables=variables)

    def __getitem__(self, name: str) -> Any:
        try:
            return plain_data(self.templar.template(self._variables[name]))
        except AnsibleError as error:
            raise InventoryError(f"{self._name}: {name}: {last_line(str(error))}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._variables

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)


@functools.cache
def _vault_secrets() -> list[Any]:
    """Return the vault's secrets as ansible.cfg names them. Ansible keeps them once per process."""
    from ansible.cli import CLI
    from ansible.constants import config
    from ansible.parsing.dataloader import DataLoader
    from ansible.parsing.vault import VaultSecretsContext
    from ansible.plugins.loader import init_plugin_loader

    if VaultSecretsContext.current(optional=True):  # inside ansible-playbook
        secrets: list[Any] = VaultSecretsContext.current().secrets
        return secrets
    init_plugin_loader()
    identities = config.get_config_value("DEFAULT_VAULT_IDENTITY_LIST")
    found: list[Any] = CLI.setup_vault_secrets(DataLoader(), vault_ids=identities, auto_prompt=False)
    return found


def make_login(name: str, variables: Any, context: Any, templar: Any, task: Any = None) -> Login:
    """Return how Ansible would log in to a host: its connection `ssh` reads variables, ansible.cfg, environment and flags.

    `context`: `ansible.playbook.play_context.PlayContext` of the task, or an empty one. `task`: the task whose keywords
    count, such as `remote_user`. Raises InventoryError: the host has a connection other than `ssh` and `local`, or one
    of its variables is wrong.
    """
    kind = str(variables.get("ansible_connection") or (task.connection if task else "ssh"))
    kind = kind.removeprefix("ansible.builtin.")
    if kind == "local":
        return Login()
    if kind not in ("ssh", "smart"):
        raise InventoryError(f"{name}: ansible_connection is {quoted(kind)}: set it to ssh or local")
    context.remote_addr = variables.get("ansible_host", name)
    keys = (task.dump_attrs() if task else {}) | {"timeout": context.timeout}
    if context.password:
        keys["password"] = context.password
    keys.pop("retries", None)
    try:
        connection = connection_loader.get("ssh", context, None, task_uuid=task._uuid if task else "")
        connection.set_options(task_keys=keys, var_options=connection._resolve_option_variables(variables, templar))
        option = connection.get_option
        arguments = " ".join(option(name) or "" for name in ("ssh_args", "ssh_common_args", "ssh_extra_args"))
        checks = () if option("host_key_checking") else ("-o", "StrictHostKeyChecking=no")
        return Login(
            address=str(option("host")),
            user=str(option("remote_user") or ""),
            port=int(option("port") or 0),
            key_file=str(option("private_key_file") or ""),
            extra_arguments=(*shlex.split(arguments), *checks),
            executable=str(option("ssh_executable") or "ssh"),
            password=str(option("password") or ""),
        )
    except (AnsibleError, ValueError) as error:
        raise InventoryError(f"{name}: {last_line(str(error))}") from error


def failure(message: str, **more: Any) -> dict[str, Any]:
    """Return the result of a failed action, whose message is one line.

    The callback `trainyard` prints the message as that line, without Ansible's report around it.
    """
    return {"failed": True, "plain": True, "msg": message, **more}
