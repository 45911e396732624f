"""Find the hosts that lack the teacher, or copy it to them. Documented in plugins/modules/teacher_copy.py."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars

from trainer.errors import UserError
from trainyard.ansible_adapter import ClusterAction, cluster_connections, failure
from trainyard.connection import InventoryError
from trainyard.extra_vars import plain_data
from trainyard.ollama.distill import student_specs
from trainyard.ollama.distill_options import make_distill_options
from trainyard.ollama.model_copy import copy_model, plan_copy
from trainyard.ollama.teachers import candidates
from trainyard.run.errors import RunError

TOP = Path(__file__).resolve().parents[2]


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        given, variables = self.arguments(), task_vars or {}
        try:
            if given["files"]:
                copy_model(**given, connect=cluster_connections(self, variables))
                return {"changed": True}
            extra_vars = plain_data(load_extra_vars(self._loader))
            options = make_distill_options(extra_vars)
            launch = self.launch_options(variables)
            student_specs(launch.spec, extra_vars, TOP, lambda line: None, queued=options.queue)  # mistakes first
            groups = variables["groups"]
            machines = candidates(groups["cluster"], groups.get("discovered", []), variables["hostvars"])
            plan = plan_copy(machines, options.teacher, variables["ansible_play_hosts_all"], Display().display)
            return asdict(plan) if plan else {"targets": []}
        except (RunError, UserError, InventoryError) as error:
            return failure(str(error), **getattr(error, "details", {}))
