"""Check all hosts of the play before a run. Documented in plugins/modules/preflight.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.utils.vars import load_extra_vars

from trainer.errors import UserError
from trainyard.ansible_adapter import ClusterAction, cluster_connections, failure, play_hosts
from trainyard.connection import InventoryError
from trainyard.extra_vars import check_given, plain_data
from trainyard.preflight.runner import run_preflight
from trainyard.run.plan import PORTS

TOP = Path(__file__).resolve().parents[2]


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        arguments, connect = self.arguments(), cluster_connections(self, task_vars or {})
        port = arguments["master_port"] or PORTS.start
        try:
            check_given(plain_data(load_extra_vars(self._loader)), TOP, ["run"])
            hosts = play_hosts(task_vars or {})
            for host in hosts:
                host.check()
            options = {"all_reduce": not arguments["quick"], "write": not self._task.check_mode}
            report = run_preflight(hosts, connect, port, run=arguments["run"], **options)
        except (UserError, InventoryError) as error:
            return failure(str(error))
        answer = {"lines": report.output(arguments["json"]), **report.as_dict()}
        return failure(report.error, **answer) if report.error else {"changed": False, **answer}
