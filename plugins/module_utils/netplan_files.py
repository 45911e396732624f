"""One NIC's address in netplan's files: taken out of wherever it is defined, and put into a file of ours.

Pure Python and PyYAML, which netplan itself needs; no Ansible. Scalars stay the strings that they are in the files: netplan
reads `"true"` as `true`, and nothing is lost on the way (a MAC is no base-60 number).
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
HEADER = "# trainyard: written by the role netplan, which keeps what was here before in /var/lib/trainyard/netplan\n"
# An id that comes before those of definitions for many NICs: networkd takes the first that matches.
SHARED_ID = "0-trainyard"


@dataclass(frozen=True)
class Nic:
    """A NIC as it is now. `gateway` and `dns` are what it uses, for where nothing else is said; empty for none."""

    name: str
    mac: str
    gateway: str = ""
    dns: tuple[str, ...] = ()
    permanent: bool = False  # whether netplan can match its MAC


@dataclass(frozen=True)
class Wish:
    """What an inventory says of a host. `gateway` and `dns` None and `mtu` 0: as it is now; `gateway` "none": none."""

    address: str
    gateway: str | None = None
    dns: tuple[str, ...] | None = None
    mtu: int = 0
    by_mac: bool = False


def edit(files: dict[str, str], nic: Nic, wish: Wish) -> dict[str, str | None]:
    """Return what has to become of the files (name -> text) of /etc/netplan: name -> text, or None to remove it.

    The NIC's definition moves to OURS; the definitions of all others stay where they are, to the letter where they have a
    file to themselves. Nothing is returned where all is as wished. Raises ValueError with a plain line.
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
                f"{shared['id']} in /etc/netplan is for several NICs: give {nic.name} a definition of its own"
            )
        identity = SHARED_ID
        found = {**shared["definition"], "match": {"name": nic.name}}
    if not found and wish.by_mac and nic.permanent:
        found = {"match": {"macaddress": nic.mac}, "set-name": nic.name}
    ours = stripped.get(OURS, {})
    ours.setdefault("version", "2")
    ours.setdefault(section, {})[identity or nic.name] = with_address(found, nic, wish)
    stripped[OURS] = ours
    return {
        name: None if name != OURS and not set(tree) - {"version"} else dump(tree)
        for name, tree in stripped.items()
        if tree != trees.get(name)
    }


def with_address(definition: dict[str, Any], nic: Nic, wish: Wish) -> dict[str, Any]:
    """Return a NIC's definition with the address as its only one of that family; the other family is left alone."""
    wished = ipaddress.ip_interface(wish.address)
    version = wished.version
    new = copy.deepcopy(definition)
    said = next((str(r["via"]) for r in routes(new) if is_default(r, version)), None) or new.get(f"gateway{version}")
    for key in (f"dhcp{version}-overrides", f"gateway{version}"):
        new.pop(key, None)
    new[f"dhcp{version}"] = "false"
    others = [entry for entry in new.get("addresses") or [] if _family(entry) != version]
    new["addresses"] = [*others, str(wished)]

    gateway = wish.gateway if wish.gateway is not None else said or nic.gateway
    if gateway == "none" or (wish.gateway is None and gateway and ipaddress.ip_address(gateway) not in wished.network):
        gateway = ""
    kept = [route for route in routes(new) if not is_default(route, version)]
    # Kept as it was said, metric and all, where it says the same.
    same = [route for route in routes(new) if is_default(route, version) and str(route["via"]) == gateway]
    new["routes"] = [*kept, *(same or ([{"to": "default", "via": gateway}] if gateway else []))]
    if not new["routes"]:
        del new["routes"]

    servers = dict(new.get("nameservers") or {})
    dns = wish.dns if wish.dns is not None else tuple(servers.get("addresses") or nic.dns)
    servers["addresses"] = list(dns)
    if not dns:
        del servers["addresses"]
    new["nameservers"] = servers
    if not servers:
        del new["nameservers"]
    if wish.mtu:
        new["mtu"] = str(wish.mtu)
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
    """Tell whether a definition is this NIC's, and no other's."""
    match = definition.get("match")
    if not isinstance(match, dict):
        return identity == nic.name
    if "macaddress" in match:
        return str(match["macaddress"]).lower() == nic.mac.lower()
    return str(match.get("name", "")) == nic.name


def covers(definition: dict[str, Any], nic: Nic) -> bool:
    """Tell whether a definition that may be for many NICs is for this one, too."""
    match = definition.get("match")
    if not isinstance(match, dict) or "macaddress" in match:
        return False
    return fnmatch.fnmatchcase(nic.name, str(match.get("name", "*")))


def routes(definition: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the routes of a definition."""
    return [route for route in definition.get("routes") or [] if isinstance(route, dict)]


def is_default(route: dict[str, Any], version: int) -> bool:
    """Tell whether a route is the default route of this IP version, in the main table."""
    if route.get("to") not in ("default", "0.0.0.0/0", "::/0") or "via" not in route or "table" in route:
        return False
    return ipaddress.ip_address(str(route["via"])).version == version


def merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return two definitions of one device as netplan merges them: mappings key by key, lists one after the other."""
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
    """Return what is below `network:` in a file. Raises ValueError with a plain line."""
    try:
        tree = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"/etc/netplan/{name} is no YAML: {' '.join(str(error).split())}") from None
    network = tree.get("network") if isinstance(tree, dict) else {} if tree is None else None
    if not isinstance(network, dict):
        if network in (None, "") and (tree is None or isinstance(tree, dict)):
            return {}
        raise ValueError(f"/etc/netplan/{name} has no mapping `network`")
    return network


def dump(tree: dict[str, Any]) -> str:
    """Return the text of a file of ours."""
    return HEADER + yaml.safe_dump({"network": _plain(tree)}, sort_keys=False, default_flow_style=False)


def _plain(value: Any, key: str = "") -> Any:
    """As a person would have written it: `dhcp4: false` without quotes, and numbers where there are only numbers."""
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
