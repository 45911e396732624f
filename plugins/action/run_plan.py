"""Ask every host what it is, check that these hosts can run this together, and plan it. Documented in plugins/modules/run_plan.py."""

from __future__ import annotations

import functools
import ipaddress
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

TOP = Path(__file__).resolve().parents[2]
if str(TOP) not in sys.path:
    sys.path.append(str(TOP))

import yaml

from plugins.module_utils.links import AllHosts, Link, Round, plain
from plugins.module_utils.plan import PORTS, Unplannable, choose_port, plan, table, unlike
from trainer.config import FIELDS, RunSpec, changed_fields, make_spec

PROBE = (TOP / "plugins/module_utils/probe.py").read_bytes()
PROBE_LIMIT = 60.0  # s for a host to say what it is
MARGIN = 200 << 20  # bytes that a run writes besides what is staged: logs, events, checkpoints of a small adapter


class ActionModule(AllHosts):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        _, a = self.validate_argument_spec(
            {
                "run": {"type": "dict", "required": True},
                "master_port": {"type": "int"},
            }
        )
        hostvars = variables["hostvars"]
        try:
            hosts = [describe(name, hostvars[name]) for name in variables["ansible_play_hosts_all"]]
            return self.plan(hosts, hostvars, a)
        except Unplannable as error:
            return plain(str(error))

    def plan(self, hosts: list[dict[str, Any]], hostvars: Any, a: dict[str, Any]) -> dict[str, Any]:
        run, spec = a["run"]["run"], a["run"]["spec"]
        look_around(self, hosts, hostvars, run, [a["master_port"]] if a["master_port"] else list(PORTS))
        check(hosts, a["run"]["bytes"])
        check_wishes(hosts, spec, any(file["kind"] == "dataset" for file in a["run"]["files"]))
        running = [host["host"] for host in hosts if host["facts"]["running"]]
        head = hosts[0]
        port = a["master_port"] or 0
        if not running:
            port = choose_port(a["master_port"], head["facts"]["free_ports"], head["host"])
        nodes = plan(hosts, run=run, port=port)
        entries = [
            node.as_dict()
            | {
                "spec": host_spec(spec, a["run"]["files"], node.data_dir),
                "versions": host["facts"]["versions"],
                "gpus": [gpu["name"] for gpu in host["facts"]["gpus"]],
            }
            for node, host in zip(nodes, hosts, strict=True)
        ]
        state, lines = "new", table(nodes, spec, port)
        if running:
            if len(running) < len(hosts):
                raise Unplannable(
                    f"run {run} is half alive (on {', '.join(running)} only): ansible-playbook playbooks/stop.yml -e run={run}"
                )
            state, lines = "running", [f"run {run} is running already: following it"]
        elif same_run(hosts, entries[0]["spec"], run):
            state, lines = "finished", []
        return {"changed": False, "plan": entries, "state": state, "port": port, "lines": lines}


def describe(name: str, variables: Any) -> dict[str, Any]:
    """Return what the inventory says of a host. Raises Unplannable."""
    address = str(variables.get("cluster_address") or "")
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise Unplannable(
            f"{name}: cluster_address is {address!r}, takes the IP address that its peers reach it at"
        ) from None
    for needed in ("cluster_data_dir", "cluster_python"):
        path = str(variables.get(needed) or "")
        if not path.startswith("/"):
            raise Unplannable(f"{name}: {needed} is {path!r}, takes an absolute path on that host")
    return {
        "host": name,
        "address": address,
        "data_dir": str(variables["cluster_data_dir"]).rstrip("/"),
        "python": str(variables["cluster_python"]),
        "backend": str(variables.get("cluster_backend") or "auto"),
        "processes": int(variables.get("cluster_processes") or 0),
    }


def look_around(action: ActionBase, hosts: list[dict[str, Any]], hostvars: Any, run: str, ports: list[int]) -> None:
    """Put `facts` (see probe.look) into every host's description. Raises Unplannable for a host that does not answer."""
    questions: dict[str, Callable[[], dict[str, Any]]] = {}
    for place, host in enumerate(hosts):
        link = Link(action, hostvars, host["host"])
        about = {
            "head": hosts[0]["address"],
            "address": host["address"],
            "ports": ports if place == 0 else [],
            "python": host["python"],
            "data_dir": host["data_dir"],
            "run_dir": f"{host['data_dir']}/runs/{run}",
        }
        questions[host["host"]] = functools.partial(link.ask, PROBE, json.dumps(about))
    asked = Round(questions).wait(PROBE_LIMIT)
    silent = [name for name in questions if name in asked.troubles]
    if len(silent) > 1:
        raise Unplannable(f"{', '.join(silent)} do not answer: {asked.troubles[silent[0]]}")
    for host in hosts:
        if host["host"] in asked.troubles:
            word = asked.troubles[host["host"]]
            if "not found" in word or "No such file" in word:
                raise Unplannable(
                    f"{host['host']}: there is no Python at {host['python']}: set it up with site.yml, or mend cluster_python"
                )
            raise Unplannable(f"{host['host']} does not answer: {word}")
        host["facts"] = asked.answers[host["host"]]


def check(hosts: list[dict[str, Any]], staged: int) -> None:
    """Check what would fail later, on some host only. Raises Unplannable."""
    seen: dict[tuple[str, ...], str] = {}
    for host in hosts:
        name, facts = host["host"], host["facts"]
        if "torch" not in facts["versions"]:
            raise Unplannable(
                f"{name}: {host['python']} has no torch: set the host up with site.yml, or mend cluster_python"
            )
        if not facts["may_write"]:
            raise Unplannable(f"{name}: cannot write to {host['data_dir']}: mend its rights, or set cluster_data_dir")
        if facts["free_bytes"] < staged + MARGIN:
            raise Unplannable(
                f"{name}: {facts['free_bytes'] / 1e6:.0f} MB free in {host['data_dir']}, the run needs about "
                f"{(staged + MARGIN) / 1e6:.0f} MB: make room, or set cluster_data_dir"
            )
        # Containers share a boot_id, cloned images a machine-id; one machine has both in common with itself.
        twin = seen.setdefault((facts["boot_id"], facts["machine_id"], host["data_dir"]), name)
        if twin != name:
            raise Unplannable(
                f"{twin} and {name} are one machine (same boot_id and machine-id): drop one from the inventory"
            )
    loopback = [host["host"] for host in hosts if ipaddress.ip_address(host["address"]).is_loopback]
    if loopback and len({host["facts"]["boot_id"] for host in hosts}) > 1:
        raise Unplannable(
            f"{loopback[0]}: cluster_address is a loopback address, which the other machines cannot reach"
        )
    differ = unlike(hosts)
    if differ:
        raise Unplannable(differ)


def check_wishes(hosts: list[dict[str, Any]], spec: dict[str, Any], dataset_staged: bool) -> None:
    """Check that every host has what the spec asks for beyond the usual. Raises Unplannable."""
    eight, four = spec["optimizer"] == "adamw8bit", spec["quantize"] == "nf4"
    needs = {
        "bitsandbytes": (eight and "optimizer=adamw8bit") or (four and "quantize=nf4"),
        "wandb": "wandb" in spec["loggers"] and "loggers=wandb",
        "unsloth": spec["backend"] == "unsloth" and "backend=unsloth",
        "datasets": not dataset_staged and not spec["fake_data"] and f"dataset={spec['dataset']} (a hub id)",
    }
    for host in hosts:
        name, facts = host["host"], host["facts"]
        if spec["backend"] == "unsloth" and not facts["gpus"]:
            raise Unplannable(f"{name}: backend=unsloth needs an NVIDIA GPU, and there is none: take backend=peft")
        for package, wish in needs.items():
            if wish and package not in facts["versions"]:
                raise Unplannable(
                    f"{name}: {wish} needs the Python package {package} there: install it, or leave that out"
                )
        if spec["torch_compile"] and not facts["compiler"]:
            raise Unplannable(
                f"{name}: torch_compile needs a C++ compiler there: apt install g++, or torch_compile=false"
            )


def host_spec(spec: dict[str, Any], files: list[dict[str, Any]], data_dir: str) -> dict[str, Any]:
    """Return the spec with model and dataset as they will lie on that host."""
    paths = {entry["kind"]: f"{data_dir}/{entry['dest']}" for entry in files if entry["kind"] in ("model", "dataset")}
    return {name: value for name, value in spec.items() if name in FIELDS} | paths


def same_run(hosts: list[dict[str, Any]], spec: dict[str, Any], run: str) -> bool:
    """Tell whether the run is there and finished on every host. Raises Unplannable if its folder is another spec's."""
    facts = hosts[0]["facts"]
    now = make_spec(spec, "the plan")
    if facts["spec"] is not None:
        before = RunSpec.model_validate(yaml.safe_load(facts["spec"]))
        different = changed_fields(before, now)
        if different:
            raise Unplannable(
                f"run {run} exists with another spec ({'; '.join(different)}): take another name with -e run=NAME"
            )
        if now.resume == "never" and not facts["result"]:
            raise Unplannable(f"run {run} has checkpoints and resume is never: take another name with -e run=NAME")
    return all((host["facts"]["result"] or {}).get("status") == "finished" for host in hosts)
