"""Add runs to the queue, and manage them. Documented in plugins/modules/trainyard_queue.py."""

from pathlib import Path
from typing import Any

from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars

from trainer.errors import UserError
from trainyard.ansible_adapter import ClusterAction, failure, play_cluster
from trainyard.connection import InventoryError
from trainyard.extra_vars import plain_data
from trainyard.queue.manage import manage_queue
from trainyard.run.errors import RunError

TOP = Path(__file__).resolve().parents[2]


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        self.validate_argument_spec({})
        try:
            cluster = play_cluster(self, task_vars or {})
            values = plain_data(load_extra_vars(self._loader))
            return manage_queue(values, cluster, TOP, Display().display, self._task.check_mode)
        except (RunError, UserError, InventoryError) as error:
            return failure(str(error), **getattr(error, "details", {}))
