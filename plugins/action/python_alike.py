"""See that all hosts have the same Python environment. Documented in plugins/modules/python_alike.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[2]
if str(TOP) not in sys.path:
    sys.path.append(str(TOP))

from plugins.module_utils.environments import differences
from plugins.module_utils.links import AllHosts, plain


class ActionModule(AllHosts):
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
            return plain(
                f"{empty[0]}: there is no working Python at {look['python']}: mend cluster_python, or say python_env: venv"
            )
        # Somebody else's environment has no wheel of ours, and needs none: a run brings its own trainer.
        if any(look["env"] == "as-is" for look in looks.values()):
            versions = {host: {k: v for k, v in found.items() if k != "trainyard"} for host, found in versions.items()}
        # What --check has not made cannot be compared.
        lines = differences({host: found for host, found in versions.items() if found})
        if lines:
            return plain(
                "the hosts' environments differ: bring them to one state (roles/python/README.md)", lines=lines
            )
        return {"changed": False, "versions": next(iter(versions.values()), {})}
