"""The controller's part of an address change: reach the host at its new address in time, or let it roll back.

One task does all steps, so that every host has its own timer. If the wait were a separate task, one unreachable host would
delay all other hosts until their timers expire.

The host's part has three steps (see plugins/modules/netplan.py): `plan` returns the pending change, `try` applies it with
a rollback timer, and `confirm` makes it permanent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from trainyard.wire.connection import RemoteError, last_line
from trainyard.wire.known_hosts import KnownHosts

ROLLBACK_LIMIT = 60.0  # s after the timer has expired, within which the host answers at its old address
PAUSE = 0.5  # s between two attempts
TIMEOUT = 30  # s; the module's default
# Every step opens its own connection, because the address changes.
SSH_OPTIONS = "-o ControlPath=none -o ConnectTimeout=3 -o StrictHostKeyChecking=yes"


class AddressChangeError(Exception):
    """The address was not changed; the message is one line."""


class AddressChange:
    """The change of one host's address.

    Args:
        step: runs a step on the host and returns its result; raises RemoteError, or returns `unreachable`, if the host
            does not answer.
        connect_to: uses another address from now on, with these options of ssh.
        address: the current address; empty if the connection is not SSH.
        known_hosts: the host keys that identify the host; None if the connection is not SSH.
    """

    def __init__(
        self,
        step: Callable[[str], dict[str, Any]],
        connect_to: Callable[[str, str], None],
        address: str,
        known_hosts: KnownHosts | None,
    ) -> None:
        self.run_step = step
        self.connect_to = connect_to
        self.address = address
        self.known_hosts = known_hosts

    def run(self, arguments: Mapping[str, Any], check_mode: bool = False) -> dict[str, Any]:
        """Give the host its new address, or without `address` its former one, and return the result of the task.

        `check_mode`: only return what would change. Raises AddressChangeError: the host is not at its new address.
        """
        new_address = str(arguments.get("address") or "").partition("/")[0]
        try:
            return self._run(new_address, float(arguments.get("timeout") or TIMEOUT), check_mode)
        except RemoteError as error:
            return {"unreachable": True, "msg": str(error)}

    def _run(self, new_address: str, timeout: float, check_mode: bool) -> dict[str, Any]:
        if self.known_hosts and new_address:
            self._check_keys(new_address)
            if new_address != self.address and self._has_key(new_address):
                self._resume_at(new_address)
        info = self.step("plan")
        if info.get("failed"):
            return info
        result = {"changed": info["changed"], "diff": info["diff"], "nic": info["nic"]}
        result |= {"address": info["present"], "before": info["present"]}
        if not info["changed"] or check_mode:
            return result
        return result | self._change(str(info["target"]), str(info["present"]), timeout)

    def step(self, step: str) -> dict[str, Any]:
        """Run a step on the host and return its result. Raises RemoteError if the host does not answer."""
        result = self.run_step(step)
        if result.get("unreachable"):
            raise RemoteError(str(result.get("msg", "")))
        return result

    def _change(self, target: str, old: str, timeout: float) -> dict[str, Any]:
        """Try the address, and confirm it when the host answers there. Raises AddressChangeError after a rollback."""
        if self.known_hosts and not self._has_key(target):
            what = f"known_hosts has no SSH host key for {self.address}"
            raise AddressChangeError(f"{what}, which is needed to identify the host at {target}")
        tried = self.step("try")
        if tried.get("failed"):
            return tried
        start = time.monotonic()
        reason = "the change was not applied in time"
        self._connect_to(target)
        # Stop one second early: a confirmation while the timer expires has no defined result.
        while time.monotonic() - start < timeout - 1:
            try:
                done = self.step("confirm")
            except RemoteError as error:
                reason = last_line(str(error)) or "unreachable"
                time.sleep(PAUSE)
                continue
            if done.get("failed") or done.get("lost"):
                reason = str(done.get("msg") or reason)
                break
            if done.get("waiting"):
                time.sleep(PAUSE)
                continue
            if self.known_hosts and target:
                self.known_hosts.add_address(target)
            return {"changed": True, "address": target}
        raise self._wait_for_rollback(old, start + timeout + ROLLBACK_LIMIT, f"not reached at {target} ({reason})")

    def _wait_for_rollback(self, old: str, deadline: float, what: str) -> AddressChangeError:
        """Return the error to raise, as soon as the host answers at its old address again, or at the deadline."""
        self._connect_to(old)
        while time.monotonic() < deadline:
            try:
                info = self.step("plan")
            except RemoteError:
                time.sleep(PAUSE)
                continue
            if not info.get("pending") and (not self.known_hosts or info.get("present", old) == old):
                remedy = "check netplan_address with its prefix, and netplan_nic"
                return AddressChangeError(f"{what}, so it rolled back to {old}: {remedy}")
            time.sleep(PAUSE)
        remedy = "reboot the host to restore its former address"
        return AddressChangeError(f"{what}, and it does not answer at {old}: {remedy}")

    def _resume_at(self, new_address: str) -> None:
        """Keep the new address if the host already has it. Raises AddressChangeError if another machine has it."""
        self._connect_to(new_address)
        try:
            self.step("plan")
        except RemoteError as error:
            self._connect_to(self.address)
            if "Host key verification failed" in str(error) or "HOST IDENTIFICATION HAS CHANGED" in str(error):
                other = f"a machine with another SSH host key than {self.address}"
                raise AddressChangeError(f"{new_address} is already in use by {other}") from None
            return
        if self.known_hosts:
            self.known_hosts.add_address(new_address)

    def _check_keys(self, new_address: str) -> None:
        """Raise AddressChangeError if known_hosts has another machine's key for the new address."""
        known = self.known_hosts
        if known is None:
            return
        own, there = known.keys(known.name), known.keys(known.entry(new_address))
        if own and there and not own & there:
            raise AddressChangeError(
                f"known_hosts has another SSH host key for {new_address} than for {self.address}: if that is not another "
                f"machine, remove the old key: ssh-keygen -R '{known.entry(new_address)}' -f {known.files[0]}"
            )

    def _has_key(self, address: str) -> bool:
        """Return whether a key identifies the host, at its current address or at this one."""
        known = self.known_hosts
        return known is not None and bool(known.keys(known.name) or known.keys(known.entry(address)))

    def _connect_to(self, address: str) -> None:
        """Use an address from now on, and accept only the known host keys. No effect if the connection is not SSH."""
        if known := self.known_hosts:
            alias = known.name if known.keys(known.name) else known.entry(address)
            self.connect_to(address, f"{SSH_OPTIONS} -o HostKeyAlias={alias}")
