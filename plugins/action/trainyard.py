"""Run a command of trainyard for all hosts of the play. Documented in plugins/modules/trainyard.py."""

from pathlib import Path
from typing import Any

from ansible.constants import CONFIG_FILE
from ansible.utils.display import Display

from trainer.common.errors import UserError, nearest
from trainer.common.formats import quoted
from trainyard import front_end
from trainyard.ansible_adapter import ClusterAction, failure
from trainyard.commands.call import Call, own_groups
from trainyard.commands.functions import train_step
from trainyard.commands.groups import Group
from trainyard.commands.role_steps import ROLE_STEPS
from trainyard.commands.table import COMMANDS
from trainyard.project_folder import COLLECTION, check_collection, project_folder
from trainyard.python_env.resolve import EnvironmentBuildError
from trainyard.queue.manage import check_verb
from trainyard.run.launch_options import names as launch_names
from trainyard.wire.connection import InventoryError, RemoteError
from trainyard.wire.run_errors import RunError

IN_COLLECTION = __name__.startswith("ansible_collections.")
if IN_COLLECTION:
    front_end.serve_collection(COLLECTION)
ERRORS = (RunError, RemoteError, UserError, InventoryError, EnvironmentBuildError)


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        arguments, variables = self.arguments(), task_vars or {}
        try:
            if IN_COLLECTION:
                check_collection(Path(__file__))
            call = self.call(arguments["command"], arguments["options"], variables)
            if arguments["step"]:
                return train_step(call, arguments["step"], arguments["session"])
            if step := ROLE_STEPS.get(call.command):
                return step(call)
            call.check_names()
            run = COMMANDS[call.command].run
            return (run(call) if run else None) or {}
        except ERRORS as error:
            return failure(str(error), **getattr(error, "details", {}))

    def call(self, word: str, options: dict[str, Any] | None, variables: dict[str, Any]) -> Call:
        """Return the call that the task describes. Raises UserError, InventoryError."""
        extra_vars = self.extra_vars()
        name = f"queue {check_verb(extra_vars.get('do'))}" if word == "queue" else word
        if name == "train" and set(variables["ansible_run_tags"]) == {"plan"}:
            name = "plan"
        known = [*COMMANDS, *ROLE_STEPS]
        if name not in known:
            raise UserError(f"command: unknown command {quoted(name)}{nearest(name, known)}")
        command = COMMANDS.get(name)
        groups = command.groups if command else ()
        launch = {key: value for key, value in (options or {}).items() if key in launch_names()}
        of_task = {key: value for key, value in (options or {}).items() if key not in launch}
        given = self.given(own_groups(groups), variables) if options is None else of_task
        cluster = self.cluster(variables, launch)
        report, check, top = Display().display, self._task.check_mode, project_folder(CONFIG_FILE or "", IN_COLLECTION)
        return Call(name, groups, given, extra_vars, extra_vars, cluster, top, report, check)

    def given(self, groups: list[Group], variables: dict[str, Any]) -> dict[str, Any]:
        """Return the variables that are named like an option of the command."""
        found = {}
        for group in groups:
            for name in filter(group.knows, variables):
                found[group.field_name(name)] = self.resolve(variables[name])
        return found
