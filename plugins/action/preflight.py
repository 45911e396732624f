"""Find what would spoil a run before there is one, on every host and between every two. Documented in plugins/modules/preflight.py."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainyard.ansible_adapter import ClusterAction, cluster_connections, failure, play_hosts
from trainyard.connection import FanOut, HostConnection
from trainyard.preflight import checks
from trainyard.preflight.connectivity import check_mesh, high_ports
from trainyard.run.errors import PlanError
from trainyard.run.gather import RUN_SPACE as MARGIN
from trainyard.run.gather import describe
from trainyard.run.plan import PORTS

PROBE_LIMIT = 20.0  # s for a host to say what it is: one that hangs says nothing
CHECKUP_LIMIT = 300.0  # s: all datasets are read for their checksums
REDUCE_LIMIT = 60.0  # s, most of it importing torch
MEMORY = 512  # MiB that a process must be able to have: torch imported, and a small model


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        _, a = self.validate_argument_spec(
            {
                "run": {"type": "str", "default": ""},
                "master_port": {"type": "int"},
                "quick": {"type": "bool", "default": False},
                "json": {"type": "str", "default": ""},
                "plan": {"type": "list", "elements": "dict", "default": []},
            }
        )
        self.hostvars = variables["hostvars"]
        self.connect = cluster_connections(self, variables)
        if a["plan"]:
            return self.lines_of(a["plan"], a["master_port"])
        try:
            hosts = [describe(host) for host in play_hosts(variables)]
        except PlanError as error:
            return failure(str(error))
        head_port = a["master_port"] or PORTS.start
        ports = [head_port, *high_ports()]
        self.look(hosts, a["run"])
        check_mesh(answering(hosts), ports, self.link)
        found = checks.judge(hosts, ports, head_port, MARGIN)
        how, reduced = "not tried", None
        if not a["quick"]:
            how, reduced, troubles = self.all_reduce(answering(hosts), found)
            found += checks.all_reduce(troubles)
        lines = [*checks.table(hosts, found), f"all-reduce over all hosts: {how}"]
        return self.report(hosts, found, lines, reduced, a)

    def lines_of(self, plan: list[dict[str, Any]], port: int) -> dict[str, Any]:
        """Return what is wrong between the hosts of a plan; one that does not answer is for the start to find."""
        hosts = [{**host, "facts": {"interface": host["interface"]}} for host in plan]
        ports = [port, *high_ports()]
        check_mesh(hosts, ports, self.connect)
        paired = [host for host in hosts if host.get("mesh")]
        found = checks.lines(paired, ports, port)
        return self.report([], found, [finding.line for finding in found], None, {"json": ""})

    def link(self, host: str) -> HostConnection:
        """A connection that asks the Python that Ansible uses: the cluster's own may be what is missing."""
        link = self.connect(host)
        link.host = dataclasses.replace(link.host, python=link.host.system_python)
        return link

    def look(self, hosts: list[dict[str, Any]], run: str) -> None:
        """Put `facts`, `health` and `asked`, or `trouble`, into every host's description."""
        links = {host["host"]: self.link(host["host"]) for host in hosts}
        questions: dict[str, Callable[[], dict[str, Any]]] = {}
        for host in hosts:
            host["memory_mib"] = MEMORY
            about = {
                "head": hosts[0]["address"],
                "ports": [],
                "run_dir": f"{host['data_dir']}/runs/{run or '.preflight'}",
            }
            about |= {name: host[name] for name in ("address", "python", "data_dir")}
            questions[host["host"]] = functools.partial(links[host["host"]].call, "host_facts", about)
        keep(hosts, FanOut(questions).wait(PROBE_LIMIT), "facts")
        questions = {}
        for host in answering(hosts):
            about = {"data_dir": host["data_dir"], "run": run, "memory_mib": MEMORY}
            about["peers"] = [other["host"] for other in hosts if other is not host]
            about["sudo"] = bool(self.hostvars[host["host"]].get("cluster_managed", True))
            questions[host["host"]] = functools.partial(timed, links[host["host"]], about)
        keep(hosts, FanOut(questions).wait(CHECKUP_LIMIT), "health")
        for host in answering(hosts):
            host["asked"] = host["health"].pop("asked")

    def all_reduce(
        self, hosts: list[dict[str, Any]], found: list[checks.Finding]
    ) -> tuple[str, dict[str, Any] | None, dict[str, str]]:
        """Return how it went in words, what it measured, and what is wrong, by host."""
        if any(finding.level == "failure" for finding in found):
            return "not tried, for something above has to be mended first", None, {}
        if len(hosts) < 2:
            return "not tried, for there is one host only", None, {}
        port = random.choice(
            range(29600, 29999)
        )  # the rendezvous port may be taken; above 32768 the kernel hands them out
        questions: dict[str, Callable[[], dict[str, Any]]] = {}
        for rank, host in enumerate(hosts):
            about = {"rank": rank, "world": len(hosts), "master": hosts[0]["address"], "port": port}
            about |= {"device": host["facts"]["interface"], "limit": REDUCE_LIMIT}
            link = self.link(host["host"])
            questions[host["host"]] = functools.partial(link.call, "all_reduce", about, python=host["python"])
        asked = FanOut(questions).wait(REDUCE_LIMIT + 15)
        if asked.errors:
            return "failed", None, asked.errors
        result = asked.answers[hosts[0]["host"]]
        how = f"{result['mbit']:.0f} Mbit/s, {result['latency_ms']:.2f} ms (torch {result['torch']}, gloo, {len(hosts)} hosts)"
        return how, result, {}

    def report(
        self,
        hosts: list[dict[str, Any]],
        found: list[checks.Finding],
        lines: list[str],
        reduced: dict[str, Any] | None,
        a: dict[str, Any],
    ) -> dict[str, Any]:
        levels = [finding.level for finding in found]
        code = 2 if "failure" in levels else 1 if "warning" in levels else 0
        report = {
            "exit": code,
            "findings": [finding.as_dict() for finding in found],
            "hosts": {host["host"]: shown(host) for host in hosts},
            "all_reduce": reduced,
        }
        if a["json"] in ("true", "True", "yes"):
            lines = [json.dumps(report)]
        elif a["json"]:
            Path(a["json"]).write_text(json.dumps(report, indent=1) + "\n")
        if code == 2:
            failures = [finding for finding in found if finding.level == "failure"]
            first = f"{failures[0].host}: {failures[0].plain}" if failures[0].host else failures[0].plain
            more = f" ({len(failures)} failures, all of them below)" if len(failures) > 1 else ""
            return failure(first + more, lines=lines, **report)
        return {"changed": False, "lines": lines, **report}


def answering(hosts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [host for host in hosts if "trouble" not in host]


def keep(hosts: list[dict[str, Any]], asked: FanOut, name: str) -> None:
    """Put the answers of a round into the hosts' descriptions under `name`; who did not answer has `trouble`."""
    for host in answering(hosts):
        if host["host"] in asked.answers:
            host[name] = asked.answers[host["host"]]
        else:
            host["trouble"] = asked.errors[host["host"]]


def timed(link: HostConnection, about: dict[str, Any]) -> dict[str, Any]:
    """Ask, and add this machine's clock before and after as `asked`. Raises RemoteError."""
    sent = time.time()
    answer = link.call("health", about)
    return answer | {"asked": [sent, time.time()]}


def shown(host: dict[str, Any]) -> dict[str, Any]:
    """Return what the report says of a host: all that it answered, but for what the run itself wrote."""
    return {
        name: value
        for name, value in host.items()
        if name in ("address", "facts", "health", "mesh", "trouble", "data_dir", "python")
    }
