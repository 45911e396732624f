"""Decide whether a machine is trusted: known_hosts must have a key for it, and the machine must present that key."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainyard.discovery.scan_result import LanMachine
from trainyard.discovery.ssh import KnownHost, fingerprint, known_hosts_name

_BEST_FIRST = ("ssh-ed25519", "ecdsa-", "ssh-rsa")


@dataclass(frozen=True)
class Trust:
    """Whether one machine is trusted.

    Attributes:
        fingerprint: fingerprint of the key that it presents, to compare on the machine itself; empty without a key.
    """

    ready: bool  # whether it may be in the cluster
    reason: str  # one line
    fingerprint: str = ""
    accept: str = ""  # the command that accepts this key; empty if there is nothing to accept


def check_trust(
    machine: LanMachine, known: Sequence[KnownHost], names: Mapping[str, Sequence[str]], file: str
) -> Trust:
    """Check a machine against all entries of known_hosts.

    `names`: address -> names by which declared hosts are reached. `file`: to which the accepting command writes.
    """
    if machine.local:
        return Trust(True, "this machine")
    address, port = machine.addresses[0], machine.ssh_port
    # ssh(1) also accepts a matching key from an entry without a port.
    bare = {host.lower() for host in (address, *names.get(address, ()))}
    hosts = {known_hosts_name(host, port) for host in bare}
    entries = [e for e in known if any(e.names(host) for host in hosts)]
    shown = set(machine.host_keys)
    where = known_hosts_name(address, port)
    if not shown:
        return Trust(False, f"no SSH server presents a key on port {port}")
    key = min(machine.host_keys, key=lambda k: [not k.startswith(kind) for kind in _BEST_FIRST])
    if any(e.revoked and e.key in shown for e in entries):
        return Trust(False, "its SSH host key is revoked in known_hosts", fingerprint(key))
    matching = entries + [e for e in known if any(e.names(host) for host in bare)]
    if any(e.key in shown and not e.revoked for e in matching):
        return Trust(True, "its SSH host key is known", fingerprint(key))
    accept = f"mkdir -p ~/.ssh && echo '{where} {key}' >> {file}"
    if any(not e.revoked for e in entries):
        why = "another machine has this address now, or intercepts the connection"
        remedy = f"ssh-keygen -f {file} -R '{where}'; {accept}"
        return Trust(False, f"its SSH host key is not the one in known_hosts: {why}", fingerprint(key), remedy)
    return Trust(False, "its SSH host key has not been accepted", fingerprint(key), accept)
