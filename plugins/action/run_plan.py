"""Ask every host what it is, check that these hosts can run this together, and plan it. Documented in plugins/modules/run_plan.py."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Callable
from typing import Any

import yaml

from trainer.config.run_spec import FIELDS, TINY, RunSpec, changed_fields, make_spec
from trainer.errors import UserError
from trainer.planner.recommend import choose
from trainyard.ansible_adapter import ClusterAction, cluster_connections, failure
from trainyard.connection import FanOut
from trainyard.preflight import checks
from trainyard.preflight.connectivity import check_mesh, high_ports
from trainyard.run.plan import PORTS, HostUnreachableError, PlanError, choose_port, head_first, plan, table

PROBE_LIMIT = 60.0  # s for a host to say what it is
BACK_LIMIT = 2.0  # s, after the others have answered, for one that was lost to be back
FAST = 2000.0  # Mbit/s: what one stream of pairs.py can be trusted to see
MARGIN = 200 << 20  # bytes that a run writes besides what is staged: logs, events, checkpoints of a small adapter


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        _, a = self.validate_argument_spec(
            {
                "run": {"type": "dict", "required": True},
                "master_port": {"type": "int"},
                "head": {"type": "str", "default": ""},
                "nodes_min": {"type": "int", "default": 0},
                "retries": {"type": "int", "default": 0},
                "elastic": {"type": "bool", "default": False},
                "again": {"type": "bool", "default": False},
                "attempt": {"type": "int", "default": 0},
                "lost": {"type": "list", "elements": "str", "default": []},
            }
        )
        hostvars = variables["hostvars"]
        self.connect = cluster_connections(self, variables)
        try:
            hosts = [describe(name, hostvars[name]) for name in variables["ansible_play_hosts_all"]]
            return self.plan(head_first(hosts, a["head"]), hostvars, a)
        except PlanError as error:
            return failure(str(error), try_again=isinstance(error, HostUnreachableError))

    def plan(self, hosts: list[dict[str, Any]], hostvars: Any, a: dict[str, Any]) -> dict[str, Any]:
        run, spec = a["run"]["run"], dict(a["run"]["spec"])
        hosts, left_out = self.those_that_can(hosts, hostvars, a)
        check(hosts)
        chosen = ""
        if spec["strategy"] == "auto":
            if not any(host["facts"]["spec"] for host in hosts):
                check_mesh(hosts, high_ports(), self.connect)
            spec["strategy"], chosen = automatic(hosts, spec, a["run"]["files"])
        check_wishes(hosts, spec, any(file["kind"] == "dataset" for file in a["run"]["files"]))
        apart = by_torchft(spec)
        if apart and a["elastic"]:
            raise PlanError(
                "elastic: torchrun cannot start ranks again where diloco_members=torchft does it: leave elastic out"
            )
        lines = [f"{host} is left out: {why}" for host, why in left_out.items()]
        parts = [host["facts"]["part"] for host in hosts if host["facts"]["part"]]
        attempt = max((part["attempt"] for part in parts), default=0)
        running = [host["host"] for host in hosts if host["facts"]["running"]]
        # A start that is not this session's is another's, at the same run: that one goes on.
        members = those_of(hosts, attempt) if running and (not a["again"] or attempt > a["attempt"]) else []
        if running and not members and not (a["again"] or a["retries"]):
            raise PlanError(
                f"run {run} is half alive (on {', '.join(running)} only): ansible-playbook playbooks/stop.yml -e run={run}"
            )
        port = 0
        if not members:
            port = choose_port(a["master_port"], hosts[0]["facts"]["free_ports"], hosts[0]["host"])
        if a["again"]:  # what `never` forbids is to go on with what was there before the first start
            spec["resume"] = "auto"
        hosts = members or hosts
        elastic = (a["nodes_min"] or len(hosts)) if a["elastic"] else 0
        nodes = plan(
            hosts,
            run=run,
            port=port,
            attempt=attempt + 1,
            elastic=elastic,
            restarts=a["retries"] or 3,
            replica_hosts=spec["replica_hosts"] if apart else 0,
        )
        entries = [
            node.as_dict()
            | {
                "spec": host_spec(spec, a["run"]["files"], node.data_dir),
                "versions": host["facts"]["versions"],
                "gpus": [gpu["name"] for gpu in host["facts"]["gpus"]],
                "memory_mib": min(
                    (gpu["memory_mib"] for gpu in host["facts"]["gpus"]), default=host["facts"]["memory_mib"]
                ),
            }
            for node, host in zip(nodes, hosts, strict=True)
        ]
        state = "new"
        lines += table(nodes, spec, port, hosts[0]["facts"].get("rows", [])) + ([chosen] if chosen else [])
        if members:
            state, lines = "running", [f"run {run} is running already: following it"]
        elif a["again"] and any(
            host["facts"]["stop_wanted"] and (host["facts"]["part"] or {}).get("attempt") == attempt for host in hosts
        ):
            state, lines = "stopped", [f"run {run} was stopped: train.yml with the same spec goes on from there"]
        elif same_run(hosts, entries[0]["spec"], run):
            state, lines = "finished", []
        return {"changed": False, "plan": entries, "state": state, "port": port, "lines": lines}

    def those_that_can(
        self, hosts: list[dict[str, Any]], hostvars: Any, a: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Return the hosts that can take part, with their `facts`, and why the others cannot.

        Raises:
            PlanError: all have to (nodes_min is 0), or too few can.
        """
        left_out: dict[str, str] = {}
        unheard: dict[str, str] = {}
        while True:
            silent = gather_facts(self, hosts, hostvars, a)
            unheard |= silent
            if not a["nodes_min"] and silent:
                raise HostUnreachableError(silence(silent))
            unfit = {host["host"]: unfitness(host, a["run"]["bytes"]) for host in hosts if host["host"] not in silent}
            unfit = {name: why for name, why in unfit.items() if why}
            if not a["nodes_min"] and unfit:
                raise PlanError(": ".join(next(iter(unfit.items()))))
            left_out |= silent | unfit
            able = [host for host in hosts if host["host"] not in left_out]
            if len(able) < a["nodes_min"]:
                raise (HostUnreachableError if unheard else PlanError)(
                    f"{len(able)} of {len(able) + len(left_out)} hosts can take part, nodes_min is {a['nodes_min']}: "
                    + "; ".join(f"{host}: {why}" for host, why in left_out.items())
                )
            if not left_out or able[0] is hosts[0]:
                return able, left_out
            hosts = able  # another head: its ports, and the way to it, have to be asked for


def by_torchft(spec: dict[str, Any]) -> bool:
    """Return whether every replica of the run has a torchrun of its own (see RunSpec.by_torchft)."""
    return spec["strategy"] in ("diloco", "auto") and spec["diloco_members"] == "torchft"


def those_of(hosts: list[dict[str, Any]], attempt: int) -> list[dict[str, Any]]:
    """Return the hosts of the start `attempt` by node rank if all of them run, else none."""
    alive = {
        host["host"]: host
        for host in hosts
        if host["facts"]["running"] and (host["facts"]["part"] or {}).get("attempt") == attempt
    }
    names: list[str] = next((host["facts"]["part"]["hosts"] for host in alive.values()), [])
    return [alive[name] for name in names] if names and set(names) <= set(alive) else []


def describe(name: str, variables: Any) -> dict[str, Any]:
    """Return what the inventory says of a host. Raises PlanError."""
    address = str(variables.get("cluster_address") or "")
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise PlanError(
            f"{name}: cluster_address is {address!r}, takes the IP address that its peers reach it at"
        ) from None
    for needed in ("cluster_data_dir", "cluster_python"):
        path = str(variables.get(needed) or "")
        if not path.startswith("/"):
            raise PlanError(f"{name}: {needed} is {path!r}, takes an absolute path on that host")
    return {
        "host": name,
        "address": address,
        "data_dir": str(variables["cluster_data_dir"]).rstrip("/"),
        "python": str(variables["cluster_python"]),
        "backend": str(variables.get("cluster_backend") or "auto"),
        "processes": int(variables.get("cluster_processes") or 0),
    }


def gather_facts(action: ActionModule, hosts: list[dict[str, Any]], hostvars: Any, a: dict[str, Any]) -> dict[str, str]:
    """Put `facts` (see host_facts.gather) into every host's description; return why a host did not answer."""
    questions: dict[str, Callable[[], dict[str, Any]]] = {}
    run, apart = a["run"]["run"], by_torchft(a["run"]["spec"])
    wanted = [a["master_port"]] if a["master_port"] else []
    ports = [*wanted, *(PORTS if apart or not wanted else [])]
    for place, host in enumerate(hosts):
        link = action.connect(host["host"])
        about = {
            "head": hosts[0]["address"],
            "address": host["address"],
            "ports": ports if place == 0 or apart else [],
            "python": host["python"],
            "data_dir": host["data_dir"],
            "run_dir": f"{host['data_dir']}/runs/{run}",
        }
        questions[host["host"]] = functools.partial(link.call, "host_facts", about)
    asked = FanOut(questions).wait(PROBE_LIMIT, doubtful=a["lost"], grace=BACK_LIMIT)
    for host in hosts:
        host["facts"] = asked.answers.get(host["host"])
    return {host["host"]: no_python(host, asked.errors[host["host"]]) for host in hosts if host["host"] in asked.errors}


def no_python(host: dict[str, Any], word: str) -> str:
    """Return why a host did not answer: ssh's word, or that there is no Python where it should be."""
    if "not found" in word or "No such file" in word:
        return f"there is no Python at {host['python']}: set it up with site.yml, or mend cluster_python"
    return f"does not answer: {word}"


def silence(silent: dict[str, str]) -> str:
    """Return one line for the hosts that did not answer."""
    host, why = next(iter(silent.items()))
    if len(silent) > 1 and why.startswith("does not answer"):
        return f"{', '.join(silent)} do not answer: {why.partition(': ')[2]}"
    return f"{host} {why}" if why.startswith("does not answer") else f"{host}: {why}"


def unfitness(host: dict[str, Any], staged: int) -> str:
    """Return why this host alone cannot take part, or an empty string. `staged`: bytes that will be brought there."""
    found = checks.environment(host)
    if not host["facts"]["running"]:
        found += checks.room(host, staged + MARGIN)
    return found[0].plain if found else ""


def check(hosts: list[dict[str, Any]]) -> None:
    """Check that these hosts can run one thing together. Raises PlanError."""
    for finding in [*checks.twins(hosts), *checks.unlike(hosts)]:
        # Those of two hosts name both.
        raise PlanError(f"{finding.host}: {finding.plain}" if finding.check == "address" else finding.plain)


def check_wishes(hosts: list[dict[str, Any]], spec: dict[str, Any], dataset_staged: bool) -> None:
    """Check that every host has what the spec asks for beyond the usual. Raises PlanError."""
    eight, four = spec["optimizer"] == "adamw8bit", spec["quantize"] == "nf4"
    needs = {
        "bitsandbytes": (eight and "optimizer=adamw8bit") or (four and "quantize=nf4"),
        "deepspeed": spec["strategy"] == "deepspeed" and "strategy=deepspeed",
        "torchft": by_torchft(spec) and "diloco_members=torchft",
        "wandb": "wandb" in spec["loggers"] and "loggers=wandb",
        "unsloth": spec["backend"] == "unsloth" and "backend=unsloth",
        "datasets": not dataset_staged and not spec["fake_data"] and f"dataset={spec['dataset']} (a hub id)",
    }
    for host in hosts:
        name, facts = host["host"], host["facts"]
        if spec["backend"] == "unsloth" and not facts["gpus"]:
            raise PlanError(f"{name}: backend=unsloth needs an NVIDIA GPU, and there is none: take backend=peft")
        for package, wish in needs.items():
            if wish and package not in facts["versions"]:
                raise PlanError(
                    f"{name}: {wish} needs the Python package {package} there: install it, or leave that out"
                )
        if spec["torch_compile"] and not facts["compiler"]:
            raise PlanError(
                f"{name}: torch_compile needs a C++ compiler there: apt install g++, or torch_compile=false"
            )


def automatic(hosts: list[dict[str, Any]], spec: dict[str, Any], files: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the strategy that auto means here, and why: what the run began with, if it did. Raises PlanError."""
    for host in hosts:
        if host["facts"]["spec"]:
            began = RunSpec.model_validate(yaml.safe_load(host["facts"]["spec"])).strategy
            return began, f"auto: this run began with {began}"
    model = next((file["src"] for file in files if file["kind"] == "model" and spec["model"] != TINY), spec["model"])
    known = []
    links = link_speeds(hosts)
    for host, link in zip(hosts, links, strict=True):
        facts = host["facts"]
        processes = host["processes"] or len(facts["gpus"]) or 1
        known.append(
            {
                "processes": processes,
                "threads": max(1, facts["cpus"] // processes),
                "gpu_mib": min((gpu["memory_mib"] for gpu in facts["gpus"]), default=0),
                "memory_mib": facts["memory_mib"],
                "link_mbit": link,
            }
        )
    fields = {name: value for name, value in spec.items() if name in FIELDS} | {"model": model}
    try:
        strategy, why = choose(make_spec(fields, "the plan"), known)
        thinnest = min((link for link in links if link), default=0.0)
        measured = thinnest in [checks.line_to_head(host).get("mbit") for host in hosts]
        return strategy, f"{why} (link measured)" if measured else why
    except UserError as error:
        raise PlanError(str(error)) from None


def link_speeds(hosts: list[dict[str, Any]]) -> list[float]:
    """Return the Mbit/s of every host's line to the head as it was measured, else what its driver states; 0 is unknown.

    One stream of a small program does not fill a fast line: beyond `FAST` the driver knows better.
    """
    measured = [checks.line_to_head(host).get("mbit", 0.0) for host in hosts]
    speeds = []
    for place, (host, mbit) in enumerate(zip(hosts, measured, strict=True)):
        stated = float(host["facts"]["link_mbit"])
        if any(measured) and place == 0:
            stated = 0.0  # the head's own is in all that was measured
        speeds.append(mbit if 0 < mbit < FAST else max(mbit, stated))
    return speeds


def host_spec(spec: dict[str, Any], files: list[dict[str, Any]], data_dir: str) -> dict[str, Any]:
    """Return the spec with model and dataset as they will lie on that host."""
    paths = {entry["kind"]: f"{data_dir}/{entry['dest']}" for entry in files if entry["kind"] in ("model", "dataset")}
    return {name: value for name, value in spec.items() if name in FIELDS} | paths


def same_run(hosts: list[dict[str, Any]], spec: dict[str, Any], run: str) -> bool:
    """Tell whether the run is there and finished on every host. Raises PlanError if its folder is another spec's."""
    facts = hosts[0]["facts"]
    now = make_spec(spec, "the plan")
    if facts["spec"] is not None:
        before = RunSpec.model_validate(yaml.safe_load(facts["spec"]))
        different = changed_fields(before, now)
        if different:
            raise PlanError(
                f"run {run} exists with another spec ({'; '.join(different)}): take another name with -e run=NAME"
            )
        if now.resume == "never" and (facts["result"] or {}).get("status") != "finished":
            raise PlanError(f"run {run} has checkpoints and resume is never: take another name with -e run=NAME")
    return all((host["facts"]["result"] or {}).get("status") == "finished" for host in hosts)
