"""The controller's half of a change of address: reach the host at its new one, within its time, or let it go back.

One task does it all, so that each host has its own clock: where the waiting is a task of its own, one host that does not come back
makes all others wait, until their time is over, too. Documented in plugins/modules/netplan.py.
"""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

from trainyard.ansible_adapter import failure
from trainyard.connection import last_line
from trainyard.known_hosts import pins_of

BACK_LIMIT = 60.0  # s after its time is over: what a host may take to be reachable at its old address
PAUSE = 0.5  # s between two tries


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        self.variables = task_vars or {}
        self.args = dict(self._task.args)
        self.host = str(self.variables["inventory_hostname"])
        self.ssh = self._connection.transport == "ssh"
        self.pins: Any = None
        wished = str(self.args.get("address") or "").partition("/")[0]
        if self.ssh:
            option = self._connection.get_option
            self.old = option("host") or self._play_context.remote_addr
            self.own_arguments = option("ssh_args") or ""
            words = " ".join(option(name) or "" for name in ("ssh_common_args", "ssh_extra_args"))
            self.pins = pins_of(option("ssh_executable"), words, self.old, option("port"))
            if trouble := self._other_key(wished):
                return failure(trouble)
            if wished not in ("", self.old) and self._known(wished) and (trouble := self._go_on_there(wished)):
                return failure(trouble)
        seen = self._step("look")
        if seen.get("failed") or seen.get("unreachable"):
            return seen
        result = {"changed": seen["changed"], "diff": seen["diff"], "nic": seen["nic"]}
        result |= {"address": seen["present"], "before": seen["present"]}
        if not seen["changed"] or self._play_context.check_mode:
            return result
        return result | self._change(seen)

    def _change(self, seen: dict[str, Any]) -> dict[str, Any]:
        """Try it, reach the host there, and have it confirmed; or wait until it is back where it was."""
        target, limit = str(seen["target"]), float(self.args.get("timeout") or 30)
        if self.ssh and not self._known(target):
            return failure(f"known_hosts has no SSH host key for {self.old}, so nobody could tell it at {target}")
        tried = self._step("try")
        if tried.get("failed"):
            return tried
        began = time.monotonic()
        why = "its change was not applied in time"
        if self.ssh:
            self._point_at(target)
        # Not later: what is confirmed while the fuse burns down would be a matter of luck.
        while time.monotonic() - began < limit - 1:
            try:
                done = self._step("confirm")
            except AnsibleConnectionFailure as error:
                why = last_line(str(error)) or "unreachable"
                time.sleep(PAUSE)
                continue
            if done.get("failed") or done.get("lost"):
                why = str(done.get("msg") or why)
                break
            if done.get("waiting"):
                time.sleep(PAUSE)
                continue
            if self.pins and target:
                self.pins.pin(target)
            return {"changed": True, "address": target}
        return self._back(target, str(seen["present"]), why, began + limit + BACK_LIMIT)

    def _back(self, target: str, old: str, why: str, deadline: float) -> dict[str, Any]:
        """Say what went wrong, as soon as the host is where it was."""
        what = f"not reached at {target} ({why})"
        if self.ssh:
            self._point_at(old)
        while time.monotonic() < deadline:
            try:
                seen = self._step("look")
            except AnsibleConnectionFailure:
                time.sleep(PAUSE)
                continue
            if not seen.get("pending") and (not self.ssh or seen.get("present", old) == old):
                return failure(f"{what}, so it went back to {old}: see netplan_address, its prefix and netplan_nic")
            time.sleep(PAUSE)
        return failure(f"{what}, and it does not answer at {old} either: a reboot of it brings its former address back")

    def _go_on_there(self, wished: str) -> str | None:
        """Go on at the new address where the host has it already; return what is wrong with whoever answers there."""
        self._point_at(wished)
        try:
            self._step("look", check=True)
        except AnsibleConnectionFailure as error:
            self._point_at(self.old)
            if "Host key verification failed" in str(error) or "HOST IDENTIFICATION HAS CHANGED" in str(error):
                return f"{wished} is taken already, by a machine with another SSH host key than {self.old}"
            return None
        self.pins.pin(wished)
        return None

    def _other_key(self, wished: str) -> str | None:
        """Return what is wrong with the keys that known_hosts has."""
        mine = self.pins.keys(self.pins.name)
        there = self.pins.keys(self.pins.named(wished)) if wished else set()
        if mine and there and not mine & there:
            return (
                f"known_hosts has another SSH host key for {wished} than for {self.old}: is that another machine? If not, "
                f"take the old key out: ssh-keygen -R '{self.pins.named(wished)}' -f {self.pins.files[0]}"
            )
        return None

    def _known(self, address: str) -> bool:
        """Tell whether there is a key to know the host by, at this address or at the one that it has now."""
        return bool(self.pins.keys(self.pins.name) or self.pins.keys(self.pins.named(address)))

    def _point_at(self, address: str) -> None:
        """Let the connection lead there from now on, each time anew, to the one host that has the known key."""
        name = self.pins.name if self.pins.keys(self.pins.name) else self.pins.named(address)
        first = f"-o ControlPath=none -o ConnectTimeout=3 -o StrictHostKeyChecking=yes -o HostKeyAlias={name}"
        self._connection.set_option("host", address)
        self._connection.set_option("ssh_args", f"{first} {self.own_arguments}")

    def _step(self, step: str, check: bool = False) -> dict[str, Any]:
        """Run a step of the module on the host. Raises AnsibleConnectionFailure where it does not answer."""
        result = self._execute_module(
            module_name="netplan", module_args={**self.args, "step": step}, task_vars=self.variables
        )
        if result.get("unreachable"):
            raise AnsibleConnectionFailure(str(result.get("msg", "")))
        return result
