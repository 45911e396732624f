"""Plan the Python environment of every host of the play. Documented in plugins/modules/python_env_plan.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainyard.ansible_adapter import ClusterAction, failure, play_hosts
from trainyard.connection import InventoryError
from trainyard.python_env.plan import plan_environments
from trainyard.python_env.resolve import EnvironmentBuildError

TOP = Path(__file__).resolve().parents[2]


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        arguments = self.arguments()
        try:
            hosts = play_hosts(task_vars or {})
            return plan_environments(TOP, hosts, arguments["environments"], arguments, not self._task.check_mode)
        except (EnvironmentBuildError, InventoryError) as error:
            return failure(str(error))
