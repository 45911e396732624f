"""Dynamic inventory: the machines that answer on the Ollama port. Thin: the work is in trainyard/discovery."""

from __future__ import annotations

DOCUMENTATION = r"""
name: ollama
short_description: Finds the machines of the local network that run Ollama
description:
  - Scans private networks for Ollama servers, tells which answers are one machine, and fills the cluster from them.
  - A found machine whose SSH host key is not in known_hosts lands in the group C(untrusted), with the one command that
    accepts it. The others go to C(cluster), and there to C(head) or C(workers).
  - A found machine that an earlier inventory source declares, by address or by a name that resolves to it, is that host
    and no second one. Sources are read in the order given, those in a folder by name, so this file comes last.
  - The groups C(discovered), C(cluster), C(head), C(workers) and C(untrusted) always exist, empty if need be.
options:
  plugin:
    description: Marks this file as this plugin's.
    type: str
    required: true
    choices: [ollama]
  networks:
    description:
      - Networks to scan, in CIDR notation. V(auto) stands for every private IPv4 network that this machine is attached
        to, with its real mask.
      - A public network is refused.
    type: list
    elements: str
    default: [auto]
  interface:
    description: Names of the interfaces that V(auto) and O(ipv6_neighbours) look at. Empty means all that are up.
    type: list
    elements: str
    default: []
  hosts:
    description:
      - Single machines to ask beside the networks, by name or address, IPv4 or IPv6, with or without a port
        (C(node1), C(10.0.0.5:11500), C([fd00::5]:11434), C(fe80::5%eth0)). These may be public.
    type: list
    elements: str
    default: []
  exclude:
    description: Addresses and networks that are never asked.
    type: list
    elements: str
    default: []
  this_machine:
    description: Ask this machine as well, at 127.0.0.1.
    type: bool
    default: true
  ipv6_neighbours:
    description: Ask the IPv6 link-local neighbours that the kernel knows as well. IPv6 networks are too large to scan.
    type: bool
    default: false
  ports:
    description: TCP ports to ask at every address.
    type: list
    elements: int
    default: [11434]
  connect_timeout:
    description:
      - Seconds to wait for a connection, counted from the first of the addresses that are asked at once. A silent network
        costs this once for every O(concurrency) addresses.
    type: float
    default: 0.3
  answer_timeout:
    description: Seconds for each reply of an open port, from the request to the last byte.
    type: float
    default: 2.0
  passes:
    description: V(2) asks the addresses that stayed silent once more, slower, for machines on Wi-Fi that sleep.
    type: int
    default: 1
    choices: [1, 2]
  second_timeout:
    description: Seconds to wait for a connection in the second pass.
    type: float
    default: 1.0
  concurrency:
    description:
      - Unanswered connections at once, 1 to 4096. Fewer are used where the limit of open files is low, and never more
        than the kernel's neighbour table holds.
    type: int
    default: 256
  max_addresses:
    description:
      - The most addresses to scan, 1 to 1048576. An attached network beyond it is left out with a warning, a written
        one is an error.
    type: int
    default: 4096
  verify:
    description:
      - Take only what is really Ollama, that is whose C(/api/version) and C(/api/tags) parse. With V(false) every open
        port counts, with an empty version and no models.
    type: bool
    default: true
  ssh_port:
    description: Port where SSH listens on machines that no earlier source declares with an C(ansible_port).
    type: int
    default: 22
  known_hosts:
    description: Files with the accepted SSH host keys. The command that accepts a machine writes to the first.
    type: list
    elements: str
    default: [~/.ssh/known_hosts, /etc/ssh/ssh_known_hosts]
  head:
    description:
      - Which machine is the head, unless an earlier source says so. V(lowest) takes the lowest address, V(this_machine)
        the one that scans; anything else is an address or an inventory name. Where it is not there, V(lowest) holds.
    type: str
    default: lowest
  strict:
    description:
      - Make an invalid entry of O(compose), O(groups) or O(keyed_groups), and a O(head) or a name of O(hosts) that is
        not there, an error instead of a warning.
extends_documentation_fragment:
  - constructed
  - inventory_cache
"""

EXAMPLES = r"""
---
# inventory/ollama.yml: this network, as it is
plugin: ollama
---
# two networks and a machine behind a router, Wi-Fi machines too
plugin: ollama
networks: [auto, 10.20.0.0/24]
hosts: [workstation.example.org]
passes: 2
---
# a group for each quantisation, a group for the large ones, and 60 s of cache
plugin: ollama
keyed_groups:
  - key: ollama_models | map(attribute='quantisation') | unique | list
    prefix: quantisation
groups:
  large: ollama_models | selectattr('size', 'gt', 20000000000) | list | length > 0
cache: true
cache_plugin: jsonfile
cache_connection: ~/.cache/trainyard
cache_timeout: 60
"""

import hashlib
import json
import re
import sys
import time
from typing import Any

from ansible.errors import AnsibleParserError
from ansible.inventory.helpers import get_group_vars
from ansible.plugins.inventory import BaseInventoryPlugin, Cacheable, Constructable

from trainyard.discovery import networks
from trainyard.discovery.engine import discover
from trainyard.discovery.identity import Machine
from trainyard.discovery.report import Report, advice, summary, verdict
from trainyard.discovery.settings import Settings, SettingsError
from trainyard.discovery.ssh import read_known_hosts
from trainyard.discovery.trust import Trust, judge

GROUPS = ("discovered", "cluster", "head", "workers", "untrusted")


class InventoryModule(BaseInventoryPlugin, Constructable, Cacheable):
    """`plugin: ollama`."""

    NAME = "ollama"

    def verify_file(self, path: str) -> bool:
        """Any YAML file: which plugin it is for, its `plugin:` line says."""
        return super().verify_file(path) and path.endswith((".yml", ".yaml"))

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        """Scans, and fills the inventory.

        Raises:
            AnsibleParserError: an option that cannot be used; one line.
        """
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
        option = self.get_option
        return Settings(
            networks=tuple(map(str, option("networks"))),
            hosts=tuple(map(str, option("hosts"))),
            exclude=tuple(map(str, option("exclude"))),
            interfaces=tuple(map(str, option("interface"))),
            ports=tuple(dict.fromkeys(option("ports"))),
            **{
                name: option(name)
                for name in (
                    *("this_machine", "ipv6_neighbours", "connect_timeout", "answer_timeout", "passes"),
                    *("second_timeout", "concurrency", "max_addresses", "verify", "ssh_port"),
                )
            },
        )

    def _report(self, path: str, use_cache: bool) -> Report:
        """The scan, or its copy out of the cache where the options and the network are still the same."""
        settings = self._settings()
        if not self.get_option("cache"):
            return discover(settings, self.declared.ssh_ports)
        here = sorted(f"{a.interface} {a.address} {a.network}" for a in networks.attached())
        state = json.dumps([vars(settings), self.declared.ssh_ports, here], sort_keys=True)
        key = f"{self.get_cache_key(path)}_{hashlib.sha256(state.encode()).hexdigest()[:12]}"
        if use_cache:
            try:
                report = Report.model_validate_json(json.dumps(self._cache[key]))
            except KeyError:
                pass
            except ValueError:
                self.display.warning(f"ollama: the cache entry {key} is damaged: scanning again")
            else:
                self._say(
                    f"not scanned now: shown from the cache, {time.time() - report.scanned_at:.0f} s old "
                    f"(cache_timeout {self.get_option('cache_timeout')} s); it may be stale, --flush-cache scans again"
                )
                return report
        report = discover(settings, self.declared.ssh_ports)
        self._cache[key] = report.model_dump(mode="json")
        return report

    def _populate(self, report: Report) -> None:
        known = read_known_hosts(self.get_option("known_hosts"))
        names = self.declared.names
        file = self.get_option("known_hosts")[0]
        judged = [(machine, judge(machine, known, names, file)) for machine in report.machines]
        judged.sort(key=lambda pair: networks.address_order(_login_address(pair[0], pair[1], report)))
        ready: list[str] = []
        refused: list[tuple[str, Trust]] = []
        for machine, trust in judged:
            declared = self.declared.hosts_of(machine, report.own_addresses)
            hosts = declared or [_host_name(_login_address(machine, trust, report))]
            for host in hosts:
                self._add(host, machine, trust, report, bool(declared))
            if trust.ready:
                ready += [h for h in hosts if not self.declared.in_cluster(h)]
                continue
            refused.append((hosts[0], trust))
            if not declared:
                self.inventory.add_child("untrusted", hosts[0])
        missing = self.declared.cluster_size() - sum(
            any(self.declared.in_cluster(h) for h in self.declared.hosts_of(m, report.own_addresses))
            for m in report.machines
        )
        self._share_out(ready)
        self._construct()
        self._speak(report, refused, missing)

    def _add(self, host: str, machine: Machine, trust: Trust, report: Report, declared: bool) -> None:
        """One host and its variables. What the person declared about a host stands."""
        self.inventory.add_host(host, group="discovered")
        variables = _variables(machine, trust, report)
        if not declared:
            variables["ansible_host"] = _login_address(machine, trust, report)
            if machine.local:
                variables["ansible_connection"] = "local"
                variables["ansible_python_interpreter"] = sys.executable  # as for the implicit localhost
            elif trust.place.ssh_port != 22:
                variables["ansible_port"] = trust.place.ssh_port
        for name, value in variables.items():
            # Never marked as a template: text from the network stays text.
            self.inventory.set_variable(host, name, value)
        for kind, words in (
            ("model", {m["name"] for m in variables["ollama_models"]}),
            ("family", {m["family"] for m in variables["ollama_models"]}),
        ):
            for group in sorted(filter(None, (_group_name(kind, word) for word in words))):
                self.inventory.add_group(group)
                self.inventory.add_child(group, host)

    def _share_out(self, ready: list[str]) -> None:
        """Head and workers: what was declared first, then by address."""
        cluster = self.inventory.groups["cluster"]
        waiting = [h.name for h in cluster.get_hosts() if not self.declared.has_role(h.name)] + ready
        if waiting and not self.inventory.groups["head"].get_hosts():
            head = self._head(waiting)
            waiting.remove(head)
            self.inventory.add_child("head", head)
        for host in waiting:
            self.inventory.add_child("workers", host)

    def _head(self, candidates: list[str]) -> str:
        rule = self.get_option("head")
        if rule == "lowest":
            return candidates[0]
        for host in candidates:
            variables = self.inventory.get_host(host).vars
            if host == rule or rule in variables.get("ollama_addresses", []):
                return host
            if rule == "this_machine" and variables.get("ollama_this_machine"):
                return host
        self._complain(f"head: {rule} is not among the machines that are ready; took {candidates[0]}")
        return candidates[0]

    def _construct(self) -> None:
        strict = self.get_option("strict")
        for host in self.inventory.groups["discovered"].get_hosts():
            self._set_composite_vars(self.get_option("compose"), host.get_vars(), host.name, strict)
            self._add_host_to_composed_groups(self.get_option("groups"), host.get_vars(), host.name, strict)
            self._add_host_to_keyed_groups(self.get_option("keyed_groups"), host.get_vars(), host.name, strict)

    def _speak(self, report: Report, refused: list[tuple[str, Trust]], missing: int) -> None:
        ready = len(report.machines) - len(refused)
        words = verdict(len(report.machines), ready, missing)
        self.inventory.set_variable(
            "discovered",
            "ollama_scan",
            {
                "networks": list(report.networks),
                "addresses": report.addresses,
                "seconds": report.seconds,
                "machines": len(report.machines),
                "ready": ready,
                "verdict": words,
            },
        )
        self._say(summary(report))
        for line in (*report.skipped, *report.warnings[:20]):
            self.display.warning(f"ollama: {line}")
        for name in report.unresolved:
            self._complain(f"hosts: {name} does not resolve to an address; write its address")
        if report.left_out:
            self._say(f"{report.left_out} models have malformed entries and were left out")
        for place, reason in report.rejected:
            self.display.vv(f"ollama: {place}: {reason}")
        for host, trust in refused[:20]:
            self._say(f"{host} is untrusted: {trust.reason}")
            if trust.accept:
                self._say(f"  if {trust.fingerprint} is its key, accept it: {trust.accept}")
        if not report.machines:
            for tip in advice(report):
                self._say(f"try: {tip}")
        self._say(words)

    def _complain(self, text: str) -> None:
        if self.get_option("strict"):
            raise AnsibleParserError(f"ollama: {text}")
        self.display.warning(f"ollama: {text}")

    def _say(self, text: str) -> None:
        """To stderr: stdout belongs to the graph, or to JSON."""
        self.display.display(f"ollama: {text}", stderr=True)


class Declared:
    """The hosts of the sources before this one, by address. `names`, `ssh_ports`: what is declared for an address."""

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
        # As it was before this plugin adds to it.
        self._cluster = [h.name for h in inventory.groups["cluster"].get_hosts()]
        self._roles = {h.name for g in ("head", "workers", "untrusted") for h in inventory.groups[g].get_hosts()}

    def hosts_of(self, machine: Machine, own_addresses: tuple[str, ...]) -> list[str]:
        """The declared hosts that are this machine: several where the inventory has one machine as several nodes."""
        found = [h for address in machine.addresses for h in self._hosts.get(address, [])]
        if machine.local:
            found += self._local
            found += [
                h for a, hosts in self._hosts.items() if a.startswith("127.") or a in own_addresses for h in hosts
            ]
        return list(dict.fromkeys(found))

    def in_cluster(self, host: str) -> bool:
        return host in self._cluster or host in self._roles

    def has_role(self, host: str) -> bool:
        return host in self._roles

    def cluster_size(self) -> int:
        return len(self._cluster)


def _login_address(machine: Machine, trust: Trust, report: Report) -> str:
    """Where the other machines reach it: this machine may have answered at 127.0.0.1 alone."""
    if trust.place.address.startswith("127.") and report.own_addresses:
        return report.own_addresses[0]
    return trust.place.address


def _host_name(address: str) -> str:
    """An address as inventory name: without the characters that host patterns give a meaning to."""
    return re.sub(r"[:%]+", "-", address).strip("-")


def _variables(machine: Machine, trust: Trust, report: Report) -> dict[str, Any]:
    """A machine's variables; sizes in bytes, times in milliseconds."""
    places = [trust.place, *(p for p in machine.places if p is not trust.place)]
    servers = [(p.address, s) for p in places for s in p.servers]
    models = {m.name: m for _, s in reversed(servers) for m in s.models}
    loaded = {m.name: m for _, s in reversed(servers) for m in s.loaded}
    return {
        "ollama_url": _url(*servers[0]),
        "ollama_urls": [_url(*server) for server in servers],
        "ollama_version": servers[0][1].version,
        "ollama_models": [models[name].model_dump() for name in sorted(models)],
        "ollama_loaded": [loaded[name].model_dump() for name in sorted(loaded)],
        "ollama_vram": sum(m.vram for m in loaded.values()),
        "ollama_response_ms": servers[0][1].response_ms,
        "ollama_addresses": machine.addresses,
        "ollama_this_machine": machine.local,
        "ollama_ready": trust.ready,
        "ollama_trust": trust.reason,
        "ollama_fingerprint": trust.fingerprint,
        "ollama_accept": trust.accept,
        "ollama_scanned_at": report.scanned_at,
    }


def _url(address: str, server: Any) -> str:
    host = f"[{address.replace('%', '%25')}]" if ":" in address else address
    return f"http://{host}:{server.port}"


def _group_name(kind: str, word: str) -> str:
    """`ollama_model_qwen2_5_0_5b` out of `qwen2.5:0.5b`; nothing where no letter or digit is left."""
    safe = re.sub(r"[^a-z0-9]", "_", word.lower())
    return f"ollama_{kind}_{safe}" if re.search("[a-z0-9]", safe) else ""
