"""Do one step of a run on all hosts of the play. Documented in plugins/modules/trainyard_run.py."""

from pathlib import Path
from typing import Any

from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars

from trainer.errors import UserError
from trainyard.ansible_adapter import ClusterAction, cluster_connections, failure, play_hosts, play_records
from trainyard.connection import InventoryError
from trainyard.extra_vars import plain_data, read_run_spec
from trainyard.run.errors import RunError
from trainyard.run.session import RunSession
from trainyard.run.session_state import SessionState

TOP = Path(__file__).resolve().parents[2]
ARGUMENTS = {
    "step": {"choices": ["prepare", "plan", "preflight", "stage", "launch", "follow", "collect"], "required": True},
    "session": {"type": "dict", "default": {}},
    "options": {"type": "dict", "default": {}},
}


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        _, a = self.validate_argument_spec(ARGUMENTS)
        variables, report, check = task_vars or {}, Display().display, self._task.check_mode
        try:
            options = self.launch_options(variables, a["options"])
            hosts, connect = play_hosts(variables), cluster_connections(self, variables)
            state = SessionState(**plain_data(a["session"]))
            keep: dict[str, Any] = {"keep_record": records.keep} if (records := play_records(self, variables)) else {}
            session = RunSession(hosts, connect, options, home=TOP, report=report, check=check, state=state, **keep)
            if a["step"] == "prepare":
                session.spec = read_run_spec(options.spec, plain_data(load_extra_vars(self._loader)), TOP, report)
            how = {"preview": True} if a["step"] == "plan" and set(variables["ansible_run_tags"]) == {"plan"} else {}
            return getattr(session, a["step"])(**how) | {"session": session.state.as_dict()}
        except (RunError, UserError, InventoryError) as error:
            return failure(str(error), **getattr(error, "details", {}))
