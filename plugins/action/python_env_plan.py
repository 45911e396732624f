"""Settle which Python environment every host of the play is to have. Documented in plugins/modules/python_plan.py."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[2]
from trainyard.ansible_adapter import ClusterAction, failure
from trainyard.python_env import resolve
from trainyard.python_env.bundle import pip_archive, trainer_version, trainer_wheel
from trainyard.python_env.resolve import EnvironmentBuildError, Wish

KIT = TOP / ".trainyard" / "python"


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        _, a = self.validate_argument_spec(
            {
                "torch": {"type": "bool", "default": True},
                "extras": {"type": "list", "elements": "str", "default": []},
                "lock": {"type": "str", "default": ""},
                "flavour": {"type": "str", "default": "auto"},
                "conda_lock": {"type": "str", "default": ""},
                "port": {"type": "int", "required": True},
            }
        )
        hostvars = variables["hostvars"]
        looks = {host: hostvars[host]["__python_look"]["look"] for host in variables["ansible_play_hosts"]}
        try:
            wish = Wish(
                resolve.requirements(TOP / "pyproject.toml", a["extras"], a["torch"]),
                resolve.pins(Path(a["lock"] or TOP / "constraints.txt")),
                trainer_version(TOP),
                a["flavour"],
                conda_text(a["conda_lock"]),
            )
            hosts = resolve.plan(looks, wish)
            todo = any(entry["todo"] != "none" for entry in hosts.values())
            making = todo and not self._task.check_mode
            kit = {"pip": str(pip_archive(KIT)), "trainer": str(trainer_wheel(TOP, KIT))} if making else {}
        except EnvironmentBuildError as error:
            return failure(str(error))
        # A folder of its own for every attempt: what a killed one left running on a host cannot write into it.
        attempt = secrets.token_hex(3)
        for host, entry in hosts.items():
            entry["fresh"] = f"{entry['key']}-{attempt}"
            entry["source"] = source(host, entry, hostvars, a["port"])
        return {
            "changed": False,
            "todo": todo,
            "hosts": hosts,
            "requirements": list(wish.requirements),
            "pins": list(wish.pins),
            "torch": next((line for line in wish.pins if line.startswith("torch==")), "torch") if a["torch"] else "",
            "trainer": wish.trainer,
            "kit": kit,
            "conda": resolve.conda_packages(wish.conda),
        }


def conda_text(path: str) -> str:
    """Return the conda lock's text. Raises EnvironmentBuildError."""
    if not path:
        return ""
    try:
        return Path(path).expanduser().read_text()
    except OSError as error:
        raise EnvironmentBuildError(f"python_conda_lock: cannot read {path}: {error.strerror}") from None


def source(host: str, entry: dict[str, Any], hostvars: Any, port: int) -> str:
    """Return where the host gets its files: its own folder, or the one that its builder shows to the cluster."""
    builder = entry["builder"]
    if builder == host:
        return f"file://{hostvars[host]['cluster_data_dir']}/python/shared"
    address = str(hostvars[builder]["cluster_address"])
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"
