"""Filters that return data about the peers of a host: addresses, names, SSH keys."""

from __future__ import annotations

import ipaddress
from typing import Any

from trainyard.inventory_problems import inventory_problems as problems_of


def cluster_addresses(hostvars: Any, hosts: list[str]) -> dict[str, str]:
    """Return `{host: address at which its peers reach it}` in the order of the inventory."""
    known = {host: hostvars[host] for host in hosts}
    return {host: str(v.get("cluster_address") or v.get("ansible_host") or host) for host, v in known.items()}


def inventory_problems(hostvars: Any, hosts: list[str]) -> list[str]:
    """Return a line for each fault that the inventory alone tells, see `trainyard.inventory_problems`."""
    found = problems_of(hostvars, cluster_addresses(hostvars, hosts))
    return [f"{host}: {text}: {remedy}" for host, _check, text, remedy in found]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def peer_names(hostvars: Any, hosts: list[str]) -> dict[str, list[str]]:
    """Return the line of /etc/hosts for every host; none for a host whose name is an address."""
    entries = cluster_addresses(hostvars, hosts).items()
    return {host: [f"{at} {host}"] if _is_address(at) and not _is_address(host) else [] for host, at in entries}


def _public_keys(hostvars: Any, host: str, kind: str) -> list[str]:
    """Return the public keys that the role ssh read in this play: the host's (`host`) or its login user's (`key`)."""
    lines = (hostvars[host].get("__ssh_info") or {}).get("stdout_lines") or []
    return [line.removeprefix(f"{kind} ") for line in lines if line.startswith(f"{kind} ssh-")]


def _key(line: str) -> str:
    """Return type and key of a public key, without its comment, which may contain anything."""
    return " ".join(line.split()[:2])


def peer_host_keys(hostvars: Any, hosts: list[str]) -> dict[str, list[str]]:
    """Return the known_hosts lines of the hosts that reported their keys in this play.

    A server with a port other than 22 is written ``[name]:port``: man sshd, SSH_KNOWN_HOSTS FILE FORMAT.
    """
    addresses = cluster_addresses(hostvars, hosts)
    lines: dict[str, list[str]] = {}
    for host in hosts:
        port = int(hostvars[host].get("ansible_port") or 22)
        names = dict.fromkeys([host, addresses[host], str(hostvars[host].get("ansible_host") or host)])
        patterns = ",".join(name if port == 22 else f"[{name}]:{port}" for name in names)
        if keys := _public_keys(hostvars, host, "host"):
            lines[host] = [f"{patterns} {_key(key)}" for key in keys]
    return lines


def peer_keys(
    hostvars: Any, hosts: list[str], controller_key: str = "", command: str | None = ""
) -> dict[str, list[str]]:
    """Return the authorized_keys lines of the hosts that reported their keys in this play, and of the controller.

    The key of a peer is valid from cluster addresses only, and permits no forwarding: man sshd, AUTHORIZED_KEYS FILE
    FORMAT. `command`: the only command that the key of a peer runs. "" permits a shell; with None no host has a line.
    """
    addresses = ",".join(dict.fromkeys(cluster_addresses(hostvars, hosts).values()))
    limits = f'from="{addresses}",no-agent-forwarding,no-port-forwarding,no-X11-forwarding'
    if command:
        limits = f'restrict,from="{addresses}",command="{command}"'
    lines: dict[str, list[str]] = {}
    for host in hosts:
        keys = _public_keys(hostvars, host, "key")
        # A fact of the role ssh; an empty list for a host that copies nothing.
        if command is None or (command and hostvars[host].get("_ssh_copies") == []):
            lines[host] = []
        elif keys:
            lines[host] = [f"{limits} {_key(key)}" for key in keys]
    if controller_key:
        lines["(controller)"] = [_key(controller_key)]
    return lines


# These lines are in files on hosts: a change of them would leave the blocks of earlier versions behind.
_MARK = " # trainyard:"
# Records that the role created the file, so that the file is removed with its last line.
_CREATED = "# trainyard made this file"


def host_block(text: str, lines: dict[str, list[str]], members: list[str], keep_prefix: str = "") -> str:
    """Return the block of a file with lines for hosts, in the order of `members`; empty without a line.

    Hosts without new lines, such as those that the play leaves out, keep those of their current ones that start with
    `keep_prefix`. `text`: the file; empty if it does not exist, or is to be created.
    """
    current: dict[str, list[str]] = {}
    for line in text.splitlines():
        head, mark, member = line.rpartition(_MARK)
        if mark and head.startswith(keep_prefix):
            current.setdefault(member, []).append(head)
    block = [f"{line}{_MARK}{member}" for member in members for line in lines.get(member, current.get(member, []))]
    created = not text or _CREATED in text.splitlines()
    return "\n".join([*([_CREATED] if created else []), *block]) if block else ""


class FilterModule:
    """Filters for the hosts of the cluster, by their names in templates."""

    def filters(self) -> dict[str, Any]:
        filters = (cluster_addresses, inventory_problems, peer_names, peer_host_keys, peer_keys, host_block)
        return {each.__name__: each for each in filters}
