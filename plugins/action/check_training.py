"""Let every host of the play train alone. Documented in plugins/modules/check_training.py."""

from pathlib import Path
from typing import Any

from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars

from trainer.errors import UserError
from trainyard.ansible_adapter import ClusterAction, cluster_connections, failure, play_hosts
from trainyard.connection import InventoryError
from trainyard.extra_vars import plain_data, read_run_spec
from trainyard.run.check_training import check_spec, check_training
from trainyard.run.errors import RunError

TOP = Path(__file__).resolve().parents[2]


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables, report, run = task_vars or {}, Display().display, self.arguments()["run"]
        try:
            options = self.launch_options(variables)
            given = read_run_spec(options.spec, plain_data(load_extra_vars(self._loader)), TOP, report)
            hosts, connect = play_hosts(variables), cluster_connections(self, variables)
            for host in hosts:
                host.check()
            how = {"home": TOP, "report": report, "check": self._task.check_mode}
            return check_training(hosts, connect, options, check_spec(given, run), **how)
        except (RunError, UserError, InventoryError) as error:
            return failure(str(error), **getattr(error, "details", {}))
