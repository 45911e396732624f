"""List, stop or follow runs on the hosts of the play. Documented in plugins/modules/trainyard_runs.py."""

from pathlib import Path
from typing import Any

from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars

from trainer.errors import UserError
from trainyard.ansible_adapter import ClusterAction, cluster_connections, failure, play_hosts
from trainyard.connection import InventoryError
from trainyard.extra_vars import check_given, plain_data
from trainyard.run.errors import RunError
from trainyard.run.runs import GRACE, WATCH, manage_runs

ARGUMENTS = {
    "state": {"choices": ["listed", "stopped", "followed"], "required": True},
    "run": {"type": "str", "default": ""},
    "grace": {"type": "float", "default": GRACE},
    "force": {"type": "bool", "default": False},
    "all": {"type": "bool", "default": False},
    "watch": {"type": "bool", "default": False},
    "hardware": {"type": "bool", "default": False},
    "interval": {"type": "float", "default": WATCH},
}
NAMES = (*ARGUMENTS, "now", "host", "spec")  # of -e: `now` is a former name of `force`; remove_host.yml takes `host`
TOP = Path(__file__).resolve().parents[2]


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        _, a = self.validate_argument_spec(ARGUMENTS)
        variables = task_vars or {}
        try:
            check_given(plain_data(load_extra_vars(self._loader)), TOP, NAMES)
            options = self.launch_options(variables)
            hosts, connect = play_hosts(variables), cluster_connections(self, variables)
            stop = {"grace": a["grace"], "now": a["force"], "check": self._task.check_mode}
            watch = max(0.5, a["interval"]) if a["watch"] else 0.0
            stop |= {"every": a["all"], "hardware": a["hardware"], "watch": watch}
            return manage_runs(a["state"], a["run"], hosts, connect, options, Display().display, **stop)
        except (RunError, UserError, InventoryError) as error:
            return failure(str(error), **getattr(error, "details", {}))
