"""Edit the address of one NIC in netplan's files: move its definition to a file of its own.

Needs PyYAML, a dependency of netplan, and nothing of Ansible. Scalars stay the strings that they are in the files:
netplan reads `"true"` as `true`, and a MAC address does not turn into a base-60 number.
"""

from __future__ import annotations

import copy
import fnmatch
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

OURS = "60-trainyard.yaml"
HEADER = "# trainyard: written by the role netplan; the former files are in /var/lib/trainyard/netplan\n"
# networkd applies the first match, so this id must sort before definitions that match several NICs.
SHARED_ID = "0-trainyard"


@dataclass(frozen=True)
class Nic:
    """A NIC in its current state. `gateway` and `dns` are the current values, empty if there are none."""

    name: str
    mac: str
    gateway: str = ""
    dns: tuple[str, ...] = ()
    permanent: bool = False  # whether netplan can match its MAC address


@dataclass(frozen=True)
class AddressSettings:
    """The address settings of a host in the inventory.

    None for `gateway` and `dns`, and 0 for `mtu`, keep the current value. The gateway "none" removes the default route.
    """

    address: str
    gateway: str | None = None
    dns: tuple[str, ...] | None = None
    mtu: int = 0
    by_mac: bool = False


def edit(files: dict[str, str], nic: Nic, settings: AddressSettings) -> dict[str, str | None]:
    """Return the changes to the files (name -> text) of /etc/netplan: name -> new text, or None to remove the file.

    The definition of the NIC moves to OURS. The definitions of other NICs stay in their files; a file without the NIC is
    not rewritten. The result is empty if the files are up to date. Raises ValueError with a one-line message.
    """
    trees = {name: load(name, text) for name, text in sorted(files.items())}
    found: dict[str, Any] = {}
    section, identity = "ethernets", ""
    shared: dict[str, Any] = {}
    stripped = copy.deepcopy(trees)
    for name, kind, one, definition in definitions(trees):
        if is_nic(one, definition, nic):
            section, identity = kind, identity or one
            found = merge(found, definition)
            del stripped[name][kind][one]
            if not stripped[name][kind]:
                del stripped[name][kind]
        elif covers(definition, nic):
            shared = shared or {"id": one, "definition": definition}
    if not found and shared:
        if shared["id"] <= SHARED_ID:
            raise ValueError(
                f"{shared['id']} in /etc/netplan matches several NICs: add a separate definition for {nic.name}"
            )
        identity = SHARED_ID
        found = {**shared["definition"], "match": {"name": nic.name}}
    if not found and settings.by_mac and nic.permanent:
        found = {"match": {"macaddress": nic.mac}, "set-name": nic.name}
    ours = stripped.get(OURS, {})
    ours.setdefault("version", "2")
    ours.setdefault(section, {})[identity or nic.name] = with_address(found, nic, settings)
    stripped[OURS] = ours
    return {
        name: None if name != OURS and not set(tree) - {"version"} else dump(tree)
        for name, tree in stripped.items()
        if tree != trees.get(name)
    }


def with_address(definition: dict[str, Any], nic: Nic, settings: AddressSettings) -> dict[str, Any]:
    """Return the definition of a NIC with the address as its only one of that family; keep the other family."""
    interface = ipaddress.ip_interface(settings.address)
    version = interface.version
    new = copy.deepcopy(definition)
    configured = next((str(r["via"]) for r in routes(new) if is_default(r, version)), None) or new.get(
        f"gateway{version}"
    )
    for key in (f"dhcp{version}-overrides", f"gateway{version}"):
        new.pop(key, None)
    new[f"dhcp{version}"] = "false"
    other_family = [entry for entry in new.get("addresses") or [] if _family(entry) != version]
    new["addresses"] = [*other_family, str(interface)]

    gateway = settings.gateway if settings.gateway is not None else configured or nic.gateway
    if gateway == "none" or (
        settings.gateway is None and gateway and ipaddress.ip_address(gateway) not in interface.network
    ):
        gateway = ""
    kept = [route for route in routes(new) if not is_default(route, version)]
    # An unchanged default route keeps its other settings, such as the metric.
    unchanged = [route for route in routes(new) if is_default(route, version) and str(route["via"]) == gateway]
    new["routes"] = [*kept, *(unchanged or ([{"to": "default", "via": gateway}] if gateway else []))]
    if not new["routes"]:
        del new["routes"]

    servers = dict(new.get("nameservers") or {})
    dns = settings.dns if settings.dns is not None else tuple(servers.get("addresses") or nic.dns)
    servers["addresses"] = list(dns)
    if not dns:
        del servers["addresses"]
    new["nameservers"] = servers
    if not servers:
        del new["nameservers"]
    if settings.mtu:
        new["mtu"] = str(settings.mtu)
    return new


def definitions(trees: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yield (file, section, id, definition) of every device in the files."""
    for name, tree in trees.items():
        for section, devices in tree.items():
            if section.endswith("s") and isinstance(devices, dict) and section not in ("openvswitch",):
                for one, definition in devices.items():
                    if isinstance(definition, dict) or definition == "":
                        yield name, section, one, definition or {}


def is_nic(identity: str, definition: dict[str, Any], nic: Nic) -> bool:
    """Tell whether a definition applies to this NIC only."""
    match = definition.get("match")
    if not isinstance(match, dict):
        return identity == nic.name
    if "macaddress" in match:
        return str(match["macaddress"]).lower() == nic.mac.lower()
    return str(match.get("name", "")) == nic.name


def covers(definition: dict[str, Any], nic: Nic) -> bool:
    """Tell whether a definition that may apply to several NICs applies to this one."""
    match = definition.get("match")
    if not isinstance(match, dict) or "macaddress" in match:
        return False
    return fnmatch.fnmatchcase(nic.name, str(match.get("name", "*")))


def routes(definition: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the routes of a definition."""
    return [route for route in definition.get("routes") or [] if isinstance(route, dict)]


def is_default(route: dict[str, Any], version: int) -> bool:
    """Tell whether a route is the default route of this IP version in the main routing table."""
    if route.get("to") not in ("default", "0.0.0.0/0", "::/0") or "via" not in route or "table" in route:
        return False
    return ipaddress.ip_address(str(route["via"])).version == version


def merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge two definitions of a device as netplan does: mappings key by key, lists by concatenation."""
    new = dict(one)
    for key, value in other.items():
        old = new.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            new[key] = merge(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            new[key] = [*old, *(entry for entry in value if entry not in old)]
        else:
            new[key] = value
    return new


def load(name: str, text: str) -> dict[str, Any]:
    """Return the mapping below `network:` in a file. Raises ValueError with a one-line message."""
    try:
        tree = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"/etc/netplan/{name} is not valid YAML: {' '.join(str(error).split())}") from None
    network = tree.get("network") if isinstance(tree, dict) else {} if tree is None else None
    if not isinstance(network, dict):
        if network in (None, "") and (tree is None or isinstance(tree, dict)):
            return {}
        raise ValueError(f"/etc/netplan/{name} has no mapping `network`")
    return network


def dump(tree: dict[str, Any]) -> str:
    """Return the text of a file with this content below `network:`."""
    return HEADER + yaml.safe_dump({"network": _plain(tree)}, sort_keys=False, default_flow_style=False)


def _plain(value: Any, key: str = "") -> Any:
    """Convert booleans and numbers to their YAML types, so that they are written without quotes."""
    if isinstance(value, dict):
        return {name: _plain(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if value in ("true", "false"):
        return value == "true"
    return int(value) if key in ("version", "mtu", "metric") and value.isdecimal() else value


def _family(entry: Any) -> int:
    text = next(iter(entry)) if isinstance(entry, dict) else entry
    try:
        return ipaddress.ip_interface(str(text)).version
    except ValueError:
        return 0
