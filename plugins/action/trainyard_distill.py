"""Ask the teachers of the cluster, and train students on their answers. Documented in plugins/modules/trainyard_distill.py."""

from pathlib import Path
from typing import Any

from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars

from trainer.errors import UserError
from trainyard.ansible_adapter import ClusterAction, failure, play_cluster
from trainyard.connection import InventoryError
from trainyard.extra_vars import plain_data
from trainyard.ollama.distill import distill
from trainyard.run.errors import RunError

TOP = Path(__file__).resolve().parents[2]


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        self.validate_argument_spec({})
        variables, report, check = task_vars or {}, Display().display, self._task.check_mode
        try:
            extra_vars = plain_data(load_extra_vars(self._loader))
            return distill(extra_vars, play_cluster(self, variables), variables["hostvars"], TOP, report, check)
        except (RunError, UserError, InventoryError) as error:
            return failure(str(error), **getattr(error, "details", {}))
