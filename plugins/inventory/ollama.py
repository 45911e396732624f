"""Dynamic inventory of the machines that answer on the Ollama port. The scan is in trainyard/discovery."""

from __future__ import annotations

DOCUMENTATION = r"""
name: ollama
short_description: Find the machines of the local network that run Ollama
description:
  - Scans private networks for Ollama servers, groups the answers by address, and adds the machines to the cluster.
  - A machine whose SSH host key is not in known_hosts is added to the group C(untrusted), with the command that accepts
    the key. All other machines are added to C(cluster), and there to C(head) or C(workers).
  - Sets variables with the prefix C(discovered_). An untrusted machine joins no group of O(groups) and O(keyed_groups).
  - A machine that an earlier inventory source declares, by address or by a name that resolves to it, is the same host.
    Sources are read in the given order, and those in a folder by name, so this file comes last.
  - The groups C(discovered), C(cluster), C(head), C(workers) and C(untrusted) always exist and may be empty.
options:
  plugin: {description: Name of the plugin., type: str, required: true, choices: [ollama, trainyard.cluster.ollama]}
  networks:
    description:
      - Networks to scan, in CIDR notation. V(auto) means every private IPv4 network to which this machine is attached,
        with its actual netmask.
      - A public network is rejected.
    type: list
    elements: str
    default: [auto]
  interface:
    description: Names of the interfaces that V(auto) and O(ipv6_neighbours) use. Empty means all interfaces that are up.
    type: list
    elements: str
    default: []
  hosts:
    description:
      - Single machines to scan in addition to the networks, by name or address, IPv4 or IPv6, with or without a port
        (C(node1), C(10.0.0.5:11500), C([fd00::5]:11434), C(fe80::5%eth0)). These may be public.
    type: list
    elements: str
    default: []
  exclude: {description: Addresses and networks that are never scanned., type: list, elements: str, default: []}
  this_machine: {description: "Also scan this machine, at 127.0.0.1.", type: bool, default: true}
  ipv6_neighbours:
    description: Also scan the IPv6 link-local neighbours that the kernel knows. IPv6 networks are too large to scan.
    type: bool
    default: false
  ports: {description: TCP ports to scan at every address., type: list, elements: int, default: [11434]}
  connect_timeout:
    description:
      - Seconds to wait for a connection, counted from the first address of a batch. A network without answers takes this
        long for every O(concurrency) addresses.
    type: float
    default: 0.3
  answer_timeout:
    description:
      - Seconds to wait for each reply of an open port, from the request to the last byte; and for the SSH host keys of its machine.
    type: float
    default: 2.0
  passes:
    description: V(2) scans the addresses without an answer a second time and more slowly, for machines with Wi-Fi in power-save mode.
    type: int
    default: 1
    choices: [1, 2]
  second_timeout: {description: Seconds to wait for a connection in the second pass., type: float, default: 1.0}
  concurrency:
    description:
      - Maximum number of simultaneous connection attempts, 1 to 4096. The limit of open files may reduce it.
    type: int
    default: 256
  max_addresses:
    description:
      - Maximum number of addresses to scan, 1 to 1048576. An attached network that exceeds it is skipped with a warning.
        A configured network that exceeds it is an error.
    type: int
    default: 4096
  verify:
    description:
      - Accept only Ollama servers, whose C(/api/version) and C(/api/tags) are valid. With V(false), every open port is
        accepted, with an empty version and no models.
    type: bool
    default: true
  ssh_port: {description: SSH port of machines for which no earlier source declares C(ansible_port)., type: int, default: 22}
  known_hosts:
    description: Files with the accepted SSH host keys. The command that accepts a key writes to the first file.
    type: list
    elements: str
    default: [~/.ssh/known_hosts, /etc/ssh/ssh_known_hosts]
  head:
    description:
      - The head, unless an earlier source declares it. V(lowest) selects the machine with the lowest address,
        V(this_machine) the controller; any other value is an address or an inventory name. If that machine was not found,
        V(lowest) applies.
    type: str
    default: lowest
  strict:
    description:
      - Treat an invalid entry of O(compose), O(groups) or O(keyed_groups), and a O(head) or a name of O(hosts) that was
        not found, as an error instead of a warning.
extends_documentation_fragment:
  - constructed
  - inventory_cache
"""

EXAMPLES = r"""
---
# inventory/ollama.yml: the attached networks
plugin: ollama
---
# two networks, a machine behind a router, and machines with Wi-Fi
plugin: ollama
networks: [auto, 10.20.0.0/24]
hosts: [workstation.example.org]
passes: 2
---
# a group for each quantisation, a group for large models, and a cache of 60 s
plugin: ollama
keyed_groups:
  - key: discovered_models | map(attribute='quantisation') | unique | list
    prefix: quantisation
groups:
  large: discovered_models | selectattr('size', 'gt', 20000000000) | list | length > 0
cache: true
cache_plugin: jsonfile
cache_connection: ~/.cache/trainyard
cache_timeout: 60
"""

import dataclasses
import hashlib
import json
import re
import sys
import time
from typing import Any

from ansible.errors import AnsibleParserError
from ansible.inventory.helpers import get_group_vars
from ansible.plugins.inventory import BaseInventoryPlugin, Cacheable, Constructable

try:
    from trainyard.discovery import networks
    from trainyard.discovery.engine import discover
    from trainyard.discovery.facts import machine_facts, model_groups, old_names, scan_facts
    from trainyard.discovery.scan_result import LanMachine, ScanReport, advice, summary, verdict
    from trainyard.discovery.settings import Settings, SettingsError
    from trainyard.discovery.ssh import read_known_hosts
    from trainyard.discovery.trust import Trust, check_trust
except ModuleNotFoundError as error:
    # An AnsibleError would be one warning among those of the other inventory plugins, which cannot read the file.
    sys.exit(
        f"error: Ansible's Python ({sys.executable}) does not have the package {error.name}: "
        "run make setup, or pip install '.[controller]', in the project's folder"
    )

GROUPS = ("discovered", "cluster", "head", "workers", "untrusted")


class InventoryModule(BaseInventoryPlugin, Constructable, Cacheable):
    """An inventory of the machines on the network that serve Ollama (`plugin: ollama`)."""

    NAME = "ollama"

    def verify_file(self, path: str) -> bool:
        """Accept any YAML file; its `plugin:` line names the plugin."""
        return super().verify_file(path) and path.endswith((".yml", ".yaml"))

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        """Scan the networks and fill the inventory. Raises AnsibleParserError of one line for an invalid option."""
        super().parse(inventory, loader, path, cache)
        self._read_config_data(path)
        for group in GROUPS:
            inventory.add_group(group)
        for group in ("head", "workers"):
            inventory.add_child("cluster", group)
        try:
            self.declared = Declared(inventory)
            report = self._report(path, cache)
        except SettingsError as error:
            raise AnsibleParserError(f"{path}: {error}") from error
        self._populate(report)

    def _settings(self) -> Settings:
        option, names = self.get_option, [field.name for field in dataclasses.fields(Settings)]
        values = {name: option(name) for name in names if name != "interfaces"} | {"interfaces": option("interface")}
        words = {name: tuple(map(str, values[name])) for name in ("networks", "hosts", "exclude", "interfaces")}
        return Settings(**values | words | {"ports": tuple(dict.fromkeys(values["ports"]))})

    def _report(self, path: str, use_cache: bool) -> ScanReport:
        """Return the report of a scan, or the cached one if the options and the attached networks are the same."""
        settings = self._settings()
        if not self.get_option("cache"):
            return discover(settings, self.declared.ssh_ports)
        here = sorted(f"{a.interface} {a.address} {a.network}" for a in networks.attached())
        state = json.dumps([vars(settings), self.declared.ssh_ports, here], sort_keys=True)
        key = f"{self.get_cache_key(path)}_{hashlib.sha256(state.encode()).hexdigest()[:12]}"
        if use_cache:
            try:
                report = ScanReport.model_validate_json(json.dumps(self._cache[key]))
            except KeyError:
                pass
            except ValueError:
                self.display.warning(f"ollama: the cache entry {key} is damaged: scanning again")
            else:
                age = (
                    f"{time.time() - report.scanned_at:.0f} s old (cache_timeout {self.get_option('cache_timeout')} s)"
                )
                self._print(f"not scanned: the cached result is {age} and may be outdated; to scan, use --flush-cache")
                return report
        report = discover(settings, self.declared.ssh_ports)
        self._cache[key] = report.model_dump(mode="json")
        return report

    def _populate(self, report: ScanReport) -> None:
        known = read_known_hosts(self.get_option("known_hosts"))
        names = self.declared.names
        file = self.get_option("known_hosts")[0]
        checked = [(machine, check_trust(machine, known, names, file)) for machine in report.machines]
        checked.sort(key=lambda pair: networks.address_order(_login_address(pair[0], report)))
        ready: list[str] = []
        trusted: list[str] = []
        untrusted: list[tuple[str, Trust]] = []
        for machine, trust in checked:
            declared = self.declared.hosts_of(machine, report.own_addresses)
            # Without characters that have a meaning in host patterns.
            hosts = declared or [re.sub(r"[:%]+", "-", _login_address(machine, report)).strip("-")]
            for host in hosts:
                self._add(host, machine, trust, report, bool(declared))
            if trust.ready:
                trusted += hosts
                ready += [h for h in hosts if not self.declared.in_cluster(h)]
                continue
            untrusted.append((hosts[0], trust))
            if not declared:
                self.inventory.add_child("untrusted", hosts[0])
        found = [self.declared.hosts_of(machine, report.own_addresses) for machine in report.machines]
        seen = sum(any(map(self.declared.in_cluster, hosts)) for hosts in found)
        missing = len(self.declared.cluster) - seen
        self._assign_roles(ready)
        self._construct(trusted)
        self._print_report(report, untrusted, missing)

    def _add(self, host: str, machine: LanMachine, trust: Trust, report: ScanReport, declared: bool) -> None:
        """Add a host and its variables. Variables that earlier sources declare about the host have priority."""
        self.inventory.add_host(host, group="discovered")
        variables = machine_facts(machine, trust, report)
        if not declared:
            variables["ansible_host"] = _login_address(machine, report)
            if machine.local:
                variables["ansible_connection"] = "local"
                variables["ansible_python_interpreter"] = sys.executable  # as for the implicit localhost
            elif machine.ssh_port != 22:
                variables["ansible_port"] = machine.ssh_port
        for name, value in variables.items():
            # Text from the network must not be marked as a template.
            self.inventory.set_variable(host, name, value)
        # A machine that is not trusted does not choose the groups, and with them the group variables, of a host.
        for group in model_groups(variables["discovered_models"]) if trust.ready else ():
            self.inventory.add_group(group)
            self.inventory.add_child(group, host)

    def _assign_roles(self, ready: list[str]) -> None:
        """Assign hosts to `head` and `workers`: declared hosts first, then the others by address."""
        cluster = self.inventory.groups["cluster"]
        unassigned = [h.name for h in cluster.get_hosts() if h.name not in self.declared.with_role] + ready
        if unassigned and not self.inventory.groups["head"].get_hosts():
            head = self._head(unassigned)
            unassigned.remove(head)
            self.inventory.add_child("head", head)
        for host in unassigned:
            self.inventory.add_child("workers", host)

    def _head(self, candidates: list[str]) -> str:
        rule = self.get_option("head")
        if rule == "lowest":
            return candidates[0]
        for host in candidates:
            variables = self.inventory.get_host(host).vars
            if host == rule or rule in variables.get("discovered_addresses", []):
                return host
            if rule == "this_machine" and variables.get("discovered_this_machine"):
                return host
        self._warn(f"head: {rule} is not among the machines that are ready; {candidates[0]} is the head")
        return candidates[0]

    def _construct(self, trusted: list[str]) -> None:
        """Evaluate `compose` for all discovered hosts, and `groups` and `keyed_groups` for the trusted ones."""
        compose, groups, keyed_groups = (self.get_option(name) for name in ("compose", "groups", "keyed_groups"))
        for change in old_names([compose, groups, keyed_groups]):
            self._warn(f"compose, groups or keyed_groups: {change}; change the expression")
        strict = self.get_option("strict")
        may_join = set(trusted)
        for host in self.inventory.groups["discovered"].get_hosts():
            self._set_composite_vars(compose, host.get_vars(), host.name, strict)
            if host.name in may_join:
                self._add_host_to_composed_groups(groups, host.get_vars(), host.name, strict)
                self._add_host_to_keyed_groups(keyed_groups, host.get_vars(), host.name, strict)

    def _print_report(self, report: ScanReport, untrusted: list[tuple[str, Trust]], missing: int) -> None:
        """Print what was found and what the user can do, and keep the summary as the variable `discovered_scan`.

        `untrusted`: inventory names of machines whose host key has not been accepted. `missing`: how many declared hosts
        of the cluster the scan did not find.
        """
        ready = len(report.machines) - len(untrusted)
        conclusion = verdict(len(report.machines), ready, missing)
        for name, value in scan_facts(report, ready, conclusion).items():
            self.inventory.set_variable("discovered", name, value)
        self._print(summary(report))
        for line in report.skipped:
            self.display.warning(f"ollama: {line}")
        for name in report.unresolved:
            self._warn(f"hosts: {name} does not resolve to an address; use its address instead")
        if report.left_out:
            self._print(f"{report.left_out} models have malformed entries and are ignored")
        for endpoint, reason in report.rejected:
            self.display.vv(f"ollama: {endpoint}: {reason}")
        for host, trust in untrusted[:20]:
            self._print(f"{host} is untrusted: {trust.reason}")
            if trust.accept:
                self._print(f"  if {trust.fingerprint} is its key, accept it: {trust.accept}")
        if not report.machines:
            for tip in advice(report):
                self._print(f"try: {tip}")
        self._print(conclusion)

    def _warn(self, text: str) -> None:
        if self.get_option("strict"):
            raise AnsibleParserError(f"ollama: {text}")
        self.display.warning(f"ollama: {text}")

    def _print(self, text: str) -> None:
        """Print to stderr, because stdout carries the graph or JSON."""
        self.display.display(f"ollama: {text}", stderr=True)


class Declared:
    """The hosts of earlier inventory sources.

    Attributes:
        names: address -> names or addresses by which the declared hosts are reached.
        ssh_ports: address -> declared SSH port.
    """

    def __init__(self, inventory: Any) -> None:
        self._inventory = inventory
        self._hosts: dict[str, list[str]] = {}
        self._local: list[str] = []
        self.names: dict[str, list[str]] = {}
        self.ssh_ports: dict[str, int] = {}
        hosts = {name: {**get_group_vars(h.get_groups()), **h.vars} for name, h in inventory.hosts.items()}
        targets = {name: str(v.get("ansible_host") or name) for name, v in hosts.items()}
        addresses = networks.resolve(t for t in targets.values() if re.fullmatch(r"[\w.:%-]+", t))
        for name, variables in hosts.items():
            if variables.get("ansible_connection") == "local":
                self._local.append(name)
                continue
            for address in addresses.get(targets[name], []):
                self._hosts.setdefault(address, []).append(name)
                self.names.setdefault(address, []).append(targets[name])
                port = str(variables.get("ansible_port") or "")
                if port.isdecimal():
                    self.ssh_ports[address] = int(port)
        # The groups before this plugin adds hosts to them.
        self.cluster = [h.name for h in inventory.groups["cluster"].get_hosts()]
        self.with_role = {h.name for g in ("head", "workers", "untrusted") for h in inventory.groups[g].get_hosts()}

    def hosts_of(self, machine: LanMachine, own_addresses: tuple[str, ...]) -> list[str]:
        """Return the declared hosts that are this machine. One machine may be declared as several hosts."""
        found = [h for address in machine.addresses for h in self._hosts.get(address, [])]
        if machine.local:
            found += self._local
            own = [a for a in self._hosts if a.startswith("127.") or a in own_addresses]
            found += [h for address in own for h in self._hosts[address]]
        return list(dict.fromkeys(found))

    def in_cluster(self, host: str) -> bool:
        """Return whether the host was declared as a part of the cluster, or as untrusted."""
        return host in self.cluster or host in self.with_role


def _login_address(machine: LanMachine, report: ScanReport) -> str:
    """Return the address at which other machines reach it: this machine may have answered only at 127.0.0.1."""
    address = machine.addresses[0]
    return report.own_addresses[0] if address.startswith("127.") and report.own_addresses else address
