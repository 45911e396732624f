"""Talking to all hosts of a play from one task: a thread a host, each over the host's own connection plugin.

Neither `forks` nor the order of hosts matters then, and a question costs one round trip: a small program, piped to the
host's Python, prints one JSON object.
"""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import connection_loader

from trainer.worker_process import die_with_launcher


class ClusterAction(ActionBase):
    """An action that runs on the controller, once for all hosts of the play."""

    BYPASS_HOST_LOOP = True
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Prepare for any action of ours: what carries it out ends with ansible-playbook.

        Ansible's workers live in sessions of their own. When the terminal is closed, or ansible-playbook killed, one that
        follows a run would go on, and start it again beside whoever follows it next.
        """
        die_with_launcher()
        result: dict[str, Any] = super().run(tmp, task_vars)
        return result


class RemoteError(Exception):
    """A host did not answer, or answered that it cannot; the message is one plain line."""


class HostConnection:
    """One host's own connection. Made in the main thread (it templates); used by one thread at a time."""

    def __init__(self, action: ActionBase, hostvars: Any, host: str) -> None:
        variables = hostvars[host]
        self.host = host
        self.variables = variables
        self.python: str = variables.get("cluster_python") or "/usr/bin/python3"
        # As ansible.executor.task_executor does for the one host of a common task.
        context = action._play_context.copy()
        context.remote_addr = variables.get("ansible_host", host)
        kind = variables.get("ansible_connection") or action._task.connection
        self.connection = connection_loader.get(kind, context, None, task_uuid=action._task._uuid)
        if self.connection is None:
            raise AnsibleError(f"{host}: there is no connection plugin {kind!r}")
        keys = action._task.dump_attrs() | {"timeout": context.timeout}
        if context.password:
            keys["password"] = context.password
        keys.pop("retries", None)
        options = self.connection._resolve_option_variables(variables, action._templar)
        self.connection.set_options(task_keys=keys, var_options=options)

    def ask(self, program: bytes, *arguments: str) -> dict[str, Any]:
        """Pipe a program to the host's Python (its standard library alone) and return the object that it prints.

        Raises:
            RemoteError: no answer, or the answer is `{"error": ...}`.
        """
        words = " ".join(shlex.quote(argument) for argument in arguments)
        return self.run(f"exec {shlex.quote(self.python)} -I -S - {words}", program)

    def run(self, command: str, stdin: bytes | None = None) -> dict[str, Any]:
        """Run a shell command there and return the last JSON object on its stdout. Raises RemoteError."""
        try:
            # sudoable=False: no terminal, so that the output is only what was printed.
            code, out, err = self.connection.exec_command(
                f"/bin/sh -c {shlex.quote(command)}", in_data=stdin, sudoable=False
            )
        except AnsibleConnectionFailure as error:
            raise RemoteError(last_line(str(error)) or "unreachable") from error
        lines = [line for line in out.decode(errors="replace").splitlines() if line.startswith("{")]
        try:
            answer: dict[str, Any] = json.loads(lines[-1])
        except (IndexError, ValueError):
            raise RemoteError(last_line(err.decode(errors="replace")) or f"no answer, exit code {code}") from None
        if "error" in answer:
            raise RemoteError(answer["error"])
        return answer

    def put(self, source: str, target: str) -> None:
        """Copy a file of the controller to the host. Raises RemoteError."""
        try:
            self.connection.put_file(source, target)
        except (AnsibleError, OSError) as error:
            raise RemoteError(f"cannot copy {source} to {target}: {last_line(str(error))}") from None

    def fetch(self, source: str, target: str) -> None:
        """Copy a file of the host to the controller. Raises RemoteError."""
        try:
            self.connection.fetch_file(source, target)
        except (AnsibleError, OSError) as error:
            raise RemoteError(f"cannot fetch {source}: {last_line(str(error))}") from None


def last_line(text: str) -> str:
    """Return the last line of a command's complaint: the one that says why."""
    return (text.strip().splitlines() or [""])[-1].strip()


class FanOut:
    """The same question to many hosts at once. Threads are daemons: one on a dead host must not hold the playbook."""

    def __init__(self, questions: dict[str, Callable[[], dict[str, Any]]]) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        self.troubles: dict[str, str] = {}
        self.threads = {
            host: threading.Thread(target=self._ask, args=(host, question), daemon=True)
            for host, question in questions.items()
        }
        for thread in self.threads.values():
            thread.start()

    def _ask(self, host: str, question: Callable[[], dict[str, Any]]) -> None:
        try:
            self.answers[host] = question()
        except Exception as error:  # whatever a connection plugin throws: it is this host's trouble, not the run's
            self.troubles[host] = str(error)

    def wait(self, limit: float, doubtful: Collection[str] = (), grace: float = 0.0) -> FanOut:
        """Wait for all for up to `limit` seconds; whoever is not back then has not answered.

        The `doubtful` hosts, which are not expected to answer, have `grace` seconds after the others at most.
        """
        began = time.monotonic()
        deadline = began + limit
        for host, thread in sorted(self.threads.items(), key=lambda item: item[0] in doubtful):
            if host in doubtful:
                deadline = min(deadline, time.monotonic() + grace)
                grace = 0.0
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self.troubles.setdefault(host, f"no answer within {time.monotonic() - began:.0f} s")
        return self


def plain(message: str, **more: Any) -> dict[str, Any]:
    """Return a failure that one line tells whole; the callback `trainyard` prints it as that."""
    return {"failed": True, "plain": True, "msg": message, **more}
