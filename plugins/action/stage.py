"""Bring the trainer, the spec, the dataset and the model to every host at once; only what differs travels.

Documented in plugins/modules/stage.py.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import yaml

from trainyard.ansible_adapter import ClusterAction, cluster_connections, failure
from trainyard.connection import FanOut, HostConnection
from trainyard.run.plan import Node, PlanError, environment

STAGE_LIMIT = 3600.0  # s: a model over a slow line takes its time


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        connect = cluster_connections(self, task_vars or {})
        _, a = self.validate_argument_spec(
            {
                "plan": {"type": "list", "elements": "dict", "required": True},
                "files": {"type": "list", "elements": "dict", "required": True},
                "origin": {"type": "dict", "default": {}},
                "environment": {"type": "dict", "default": {}, "no_log": True},
            }
        )
        try:
            questions = {entry["host"]: self.errand(connect(entry["host"]), entry, a) for entry in a["plan"]}
        except PlanError as error:
            return failure(str(error))
        done = FanOut(questions).wait(STAGE_LIMIT)
        if done.errors:
            host = next(entry["host"] for entry in a["plan"] if entry["host"] in done.errors)
            return failure(f"{host}: {done.errors[host]}", troubles=done.errors, try_again=True)
        changed = {host: answer["changed"] for host, answer in done.answers.items()}
        return {"changed": any(changed.values()), "files": changed}

    def errand(self, link: HostConnection, entry: dict[str, Any], a: dict[str, Any]) -> Any:
        """Return the work for one host: compare, copy what it lacks, put everything in place."""
        sources, wanted = targets(entry, a["files"])
        store = f"{entry['data_dir']}/store"
        question = {
            "files": wanted,
            "arrived": {},
            "contents": small_files(entry, a),
            "cache": f"{store}/digests.json",
            "incoming": f"{store}/incoming",
            "check": self._task.check_mode,
        }

        def work() -> dict[str, Any]:
            answer = link.call("receive", question)
            if "changed" in answer:
                return answer
            arrived = {path: f"{store}/incoming/{wanted[path]}" for path in answer["lacking"]}
            for path, aside in arrived.items():
                link.put(sources[path], aside)
            return link.call("receive", question | {"arrived": arrived})

        return work


def targets(entry: dict[str, Any], files: list[dict[str, Any]]) -> tuple[dict[str, str], dict[str, str]]:
    """Return {path on the host: path here} and {path on the host: sha256} of every file that has to be there."""
    sources, wanted = {}, {}
    for file in files:
        base = f"{entry['data_dir']}/{file['dest']}" if file["dest"] else f"{entry['run_dir']}/trainer.zip"
        for name, digest in file["sha256"].items():
            target = f"{base}/{name}" if name else base
            sources[target] = f"{file['src']}/{name}" if name else file["src"]
            wanted[target] = digest
    return sources, wanted


def small_files(entry: dict[str, Any], a: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Return {path: (mode, base64)} of what is written afresh for every start."""
    node = Node(**{name: entry[name] for name in Node.__dataclass_fields__})
    hosts = [{name: value for name, value in other.items() if name != "spec"} for other in a["plan"]]
    texts = {
        "spec.yml": (0o644, yaml.safe_dump(json.loads(json.dumps(entry["spec"])), sort_keys=False)),
        "plan.json": (0o644, json.dumps(hosts, indent=1)),
        "origin.json": (0o644, json.dumps(a["origin"], indent=1)),
        "env": (0o600, environment(node, a["environment"])),
    }
    return {
        f"{entry['run_dir']}/{name}": (mode, base64.b64encode(text.encode()).decode())
        for name, (mode, text) in texts.items()
    }
