"""See that all hosts have the same Python environment. Documented in plugins/modules/python_env_consistency.py."""

from __future__ import annotations

from typing import Any

from trainyard.ansible_adapter import ClusterAction, failure
from trainyard.python_env.resolve import differences


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        hostvars = variables["hostvars"]
        # A task that --check skips registers nothing worth having.
        looks = {
            host: hostvars[host].get("__python_made", {}).get("look") or hostvars[host]["__python_look"]["look"]
            for host in variables["ansible_play_hosts"]
        }
        versions = {host: dict(look["versions"]) for host, look in looks.items()}
        empty = [host for host, found in versions.items() if not found]
        if empty and not self._task.check_mode:
            look = looks[empty[0]]
            return failure(
                f"{empty[0]}: there is no working Python at {look['python']}: mend cluster_python, or say python_env: venv"
            )
        # Somebody else's environment has no wheel of ours, and needs none: a run brings its own trainer.
        if any(look["env"] == "as-is" for look in looks.values()):
            versions = {host: {k: v for k, v in found.items() if k != "trainyard"} for host, found in versions.items()}
        # What --check has not made cannot be compared.
        lines = differences({host: found for host, found in versions.items() if found})
        if lines:
            return failure(
                "the hosts' environments differ: bring them to one state (roles/python/README.md)", lines=lines
            )
        return {"changed": False, "versions": next(iter(versions.values()), {})}
