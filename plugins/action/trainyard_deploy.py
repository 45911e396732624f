"""Deploy a run to the Ollama servers of all hosts of the play. Documented in plugins/modules/trainyard_deploy.py."""

from pathlib import Path
from typing import Any

from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars

from trainer.errors import UserError
from trainyard.ansible_adapter import ClusterAction, cluster_connections, failure, play_hosts, play_records
from trainyard.connection import InventoryError, RemoteError
from trainyard.extra_vars import check_given, plain_data
from trainyard.ollama.deploy import Deployment
from trainyard.ollama.options import make_deploy_options
from trainyard.ollama.servers import host_urls
from trainyard.run.errors import RunError
from trainyard.service_records import following

TOP = Path(__file__).resolve().parents[2]
WORK = TOP / ".trainyard"


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        arguments, variables = plain_data(self.arguments()), task_vars or {}
        state = arguments.pop("state")
        try:
            check_given(plain_data(load_extra_vars(self._loader)), TOP, arguments)
            options = make_deploy_options(arguments, remove=state == "absent")
            hosts, connect = play_hosts(variables), cluster_connections(self, variables)
            urls = {host.name: host_urls(host) for host in hosts}
            more: dict[str, Any] = {"work": WORK, "report": Display().display, "check": self._task.check_mode}
            deployment = Deployment(hosts, connect, urls, options, **more)
            if state == "absent":
                return deployment.remove()
            with following(play_records(self, variables), WORK):
                return deployment.deploy()
        except (RunError, RemoteError, UserError, InventoryError) as error:
            return failure(str(error), **getattr(error, "details", {}))
