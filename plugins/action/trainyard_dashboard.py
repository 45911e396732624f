"""Serve the dashboard. Documented in plugins/modules/trainyard_dashboard.py."""

import functools
import json
from pathlib import Path
from typing import Any

from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars

from trainer.errors import UserError
from trainyard.ansible_adapter import ClusterAction, Inventory, failure
from trainyard.connection import InventoryError
from trainyard.dashboard.options import PASSWORD, DashboardOptions, run_dashboard
from trainyard.dashboard.project import Project
from trainyard.extra_vars import plain_data
from trainyard.queue.host import queue_host

TOP = Path(__file__).resolve().parents[2]


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        values = {f"dashboard_{name}": value for name, value in self.arguments().items()}
        variables = task_vars or {}
        try:
            options = DashboardOptions.from_variables(values, "dashboard.yml")
            launch = self.launch_options(variables)
            # Its connections stay open, which Ansible's plugins cannot do.
            given = json.dumps(plain_data(load_extra_vars(self._loader)))
            limit = ",".join(variables["ansible_play_hosts"])
            inventory = Inventory(variables["ansible_inventory_sources"], limit, [given])
            hostvars = variables["hostvars"]
            find_queue = functools.partial(queue_host, variables["groups"])
            project = Project.of(TOP, variables["groups"], hostvars)
            how: dict[str, Any] = {"find_queue": find_queue, "project": project, "check": self._task.check_mode}
            how["password"] = str(self.resolve(variables.get(PASSWORD, "")))  # not an argument, which -vvv would show
            return run_dashboard(inventory.hosts, inventory.connect, launch, options, Display().display, **how)
        except (UserError, InventoryError) as error:
            return failure(str(error))
