"""Change the address of a host and reconnect to it. Documented in plugins/modules/netplan.py."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

from trainyard.ansible_adapter import failure
from trainyard.provision.address_change import AddressChange, AddressChangeError
from trainyard.wire.connection import RemoteError
from trainyard.wire.known_hosts import find_known_hosts


class ActionModule(ActionBase):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        option, address, known = self._connection.get_option, "", None
        if self._connection.transport == "ssh":
            address, self.ssh_args = option("host") or self._play_context.remote_addr, option("ssh_args") or ""
            arguments = f"{option('ssh_common_args') or ''} {option('ssh_extra_args') or ''}"
            known = find_known_hosts(option("ssh_executable"), arguments, address, option("port"))
        change = AddressChange(lambda step: self.step(step, task_vars), self.connect_to, address, known)
        try:
            return change.run(self._task.args, self._play_context.check_mode)
        except AddressChangeError as error:
            return failure(str(error))

    def step(self, step: str, task_vars: dict[str, Any] | None) -> dict[str, Any]:
        try:
            return dict(self._execute_module(module_args=self._task.args | {"step": step}, task_vars=task_vars))
        except AnsibleConnectionFailure as error:
            raise RemoteError(str(error)) from error

    def connect_to(self, address: str, options: str) -> None:
        self._connection.set_option("host", address)
        self._connection.set_option("ssh_args", f"{options} {self.ssh_args}")
