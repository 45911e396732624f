"""Ask the teachers of the cluster, and train students on their answers. Documented in plugins/modules/trainyard_distill.py."""

from pathlib import Path
from typing import Any

from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars

from trainer.errors import UserError
from trainyard.ansible_adapter import ClusterAction, cluster_connections, failure, play_hosts
from trainyard.connection import InventoryError
from trainyard.extra_vars import plain_data
from trainyard.ollama.distill import Distillation, make_distill_options, student_specs
from trainyard.ollama.teachers import candidates
from trainyard.run.errors import RunError
from trainyard.run.options import options_from_variables

TOP = Path(__file__).resolve().parents[2]


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        self.validate_argument_spec({})
        variables, report = task_vars or {}, Display().display
        try:
            extra_vars = plain_data(load_extra_vars(self._loader))
            launch = options_from_variables(variables, lambda value: plain_data(self._templar.template(value)))
            options = make_distill_options(extra_vars)
            specs = student_specs(launch.spec, extra_vars, TOP, report)
            groups = variables["groups"]
            machines = candidates(groups["cluster"], groups.get("discovered", []), variables["hostvars"])
            hosts, connect = play_hosts(variables), cluster_connections(self, variables)
            return Distillation(options, specs, machines, hosts, connect, launch, TOP, report).run(
                self._task.check_mode
            )
        except (RunError, UserError, InventoryError) as error:
            return failure(str(error), **getattr(error, "details", {}))
