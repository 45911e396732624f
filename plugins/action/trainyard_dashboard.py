"""Serve the dashboard. Documented in plugins/modules/trainyard_dashboard.py."""

from pathlib import Path
from typing import Any

from ansible.utils.display import Display

from trainer.errors import UserError
from trainyard.ansible_adapter import ClusterAction, Inventory, failure
from trainyard.connection import InventoryError
from trainyard.dashboard.options import PORT, DashboardOptions, run_dashboard
from trainyard.dashboard.project import Project
from trainyard.extra_vars import plain_data
from trainyard.queue.manage import queue_host
from trainyard.run.options import options_from_variables

TOP = Path(__file__).resolve().parents[2]
ARGUMENTS = {"port": {"type": "int", "default": PORT}}


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        _, a = self.validate_argument_spec(ARGUMENTS)
        variables = task_vars or {}
        resolve = lambda value: plain_data(self._templar.template(value))  # noqa: E731
        try:
            options = DashboardOptions.from_variables({"dashboard_port": a["port"]}, "dashboard.yml")
            launch = options_from_variables(variables, resolve)
            # Its connections stay open, which Ansible's plugins cannot do.
            inventory = Inventory(variables["ansible_inventory_sources"], ",".join(variables["ansible_play_hosts"]))
            hostvars = variables["hostvars"]
            find_queue = lambda: queue_host(variables["groups"], lambda host, name: hostvars[host].get(name))  # noqa: E731
            project = Project.of(TOP, inventory.hosts, hostvars)
            how: dict[str, Any] = {"find_queue": find_queue, "project": project, "check": self._task.check_mode}
            return run_dashboard(inventory.hosts, inventory.connect, launch, options, Display().display, **how)
        except (UserError, InventoryError) as error:
            return failure(str(error))
