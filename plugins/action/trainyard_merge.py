"""Merge the results of runs. Documented in plugins/modules/trainyard_merge.py."""

from pathlib import Path
from typing import Any

from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars

from trainer.errors import UserError
from trainyard.ansible_adapter import ClusterAction, cluster_connections, failure, play_hosts
from trainyard.connection import InventoryError
from trainyard.extra_vars import plain_data
from trainyard.run.errors import RunError
from trainyard.run.merge import make_merge_options, merge_runs

TOP = Path(__file__).resolve().parents[2]


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        self.validate_argument_spec({})
        variables, check = task_vars or {}, self._task.check_mode
        try:
            options = make_merge_options(plain_data(load_extra_vars(self._loader)))
            launch = self.launch_options(variables)
            hosts, connect = play_hosts(variables), cluster_connections(self, variables)
            return merge_runs(options, hosts, connect, launch, home=TOP, report=Display().display, check=check)
        except (RunError, UserError, InventoryError) as error:
            return failure(str(error), **getattr(error, "details", {}))
