"""Follow a run to its end, and start it again when it breaks. Documented in plugins/modules/session.py."""

from __future__ import annotations

import time
from typing import Any

from ansible.utils.display import Display

from trainyard.ansible_adapter import ClusterAction, failure
from trainyard.run.restart_policy import RestartPolicy

display = Display()


class ActionModule(ClusterAction):
    """The rounds of a run: follow; when it broke, wait, then plan, stage and start with the hosts that can."""

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        self.task_vars = task_vars or {}
        _, self.a = self.validate_argument_spec(
            {
                "plan": {"type": "list", "elements": "dict", "default": []},
                "broken": {"type": "dict", "default": {}},
                "run": {"type": "dict", "required": True},
                "environment": {"type": "dict", "default": {}, "no_log": True},
                "properties": {"type": "list", "elements": "str", "default": []},
                "master_port": {"type": "int"},
                "head": {"type": "str", "default": ""},
                "retries": {"type": "int", "default": 0},
                "retry_delay": {"type": "float", "default": 1.0},
                "nodes_min": {"type": "int", "default": 0},
                "elastic": {"type": "bool", "default": False},
                "interval": {"type": "float", "default": 2.0},
                "stall_limit": {"type": "float", "default": 600.0},
                "lost_limit": {"type": "float", "default": 10.0},
            }
        )
        if self._task.check_mode:
            return {"skipped": True, "msg": "nothing runs in check mode"}
        self.plan = self.a["plan"]
        rounds = RestartPolicy(self.a["retries"], self.a["nodes_min"], self.a["retry_delay"])
        # All of the run's, not those of the last start alone: one that was away then may be back for the next.
        hosts = len(self.task_vars["ansible_play_hosts_all"])
        ended = self.a["broken"] and failure(self.a["broken"]["msg"], lost=list(self.a["broken"].get("troubles", [])))
        self.begun = not ended
        while True:
            if self.begun:
                ended = self.call(
                    "ranks", state="followed", plan=self.plan, **self.only("interval", "stall_limit", "lost_limit")
                )
            if not ended.get("failed"):
                return ended | {"plan": self.plan}
            # What broke a start after this one is told when it is: no start, no further one.
            while ended.get("failed"):
                if why := rounds.broke(ended, hosts):
                    word = [f"not started again: {why}"] if self.a["retries"] else []
                    return ended | {"lines": [*ended.get("lines", []), *word]}
                self.tell(ended, rounds)
                time.sleep(rounds.wait())
                ended = self.again(ended)
            if ended["state"] == "stopped":
                return {"changed": True, "status": "stopped", "plan": self.plan, "lines": ended["lines"]}
            self.plan = ended["plan"]

    def again(self, failure: dict[str, Any]) -> dict[str, Any]:
        """Plan, stage and start once more; return the plan's result, or the failure of what failed."""
        lost = failure.get("lost", [])
        planned = self.call(
            "run_plan",
            again=self.begun,
            attempt=max((entry.get("attempt", 0) for entry in self.plan), default=0),
            lost=lost,
            **self.only("run", "master_port", "head", "nodes_min", "retries", "elastic"),
        )
        if planned.get("failed"):
            return planned | {"lost": lost}
        for line in planned["lines"]:
            display.display(line)
        if planned["state"] == "running":  # it had begun, but the word of that was lost
            self.begun = True
        if planned["state"] in ("running", "stopped"):
            return planned
        plan = planned["plan"]
        staged = self.call(
            "stage",
            plan=plan,
            environment=self.a["environment"],
            **{name: self.a["run"][name] for name in ("files", "origin")},
        )
        if staged.get("failed"):
            return staged
        started = self.call("ranks", state="started", plan=plan, properties=self.a["properties"])
        if started.get("failed"):
            return started
        self.begun = True
        return planned

    def tell(self, failure: dict[str, Any], rounds: RestartPolicy) -> None:
        """Say what broke, and what comes now."""
        for line in [f"failed: {failure['msg']}", *failure.get("lines", [])]:
            display.display(line)
        count = f"{rounds.in_a_row} of {rounds.retries}" if rounds.retries < 1000 else str(rounds.in_a_row)
        display.display(f"starting again in {rounds.wait():.0f} s (retry {count} without progress in between)")

    def only(self, *names: str) -> dict[str, Any]:
        return {name: self.a[name] for name in names}

    def call(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Run another action plugin of ours, as a task with these arguments would."""
        task = self._task.copy()
        task.action, task.args = action, arguments
        plugin = self._shared_loader_obj.action_loader.get(
            action,
            task=task,
            connection=self._connection,
            play_context=self._play_context,
            loader=self._loader,
            templar=self._templar,
            shared_loader_obj=self._shared_loader_obj,
        )
        try:
            answer: dict[str, Any] = plugin.run(task_vars=self.task_vars)
        except Exception as error:  # a bug, or a connection plugin's: this round failed, the run need not
            return failure(f"{action}: {error}")
        return answer
