"""Ansible's default output, with one-line errors and plain tables."""

from __future__ import annotations

DOCUMENTATION = r"""
name: trainyard
type: stdout
short_description: Default screen output with one-line errors and tables
description:
  - The output of P(ansible.builtin.default#callback), with seven differences.
  - A failed result is printed as one line, C(error. host. message), without the host if the task runs once for all hosts. The message is that of
    the task if it has C(plain=true), or is of M(ansible.builtin.fail), M(ansible.builtin.assert) or M(ansible.builtin.validate_argument_spec).
    Otherwise it is the name of the task and what its module or program says, and C(-v) prints the whole result.
  - In the message of M(ansible.builtin.fail) and M(ansible.builtin.assert), text after an empty line is printed unchanged
    after that line.
  - A refusal of sudo is printed as one line with the remedy.
  - An unreachable host is printed as one line, C(error. host does not answer. last line of ssh).
  - The strings in the C(lines) of a result are printed unchanged, instead of C(ok) or after the error.
  - Before the recap of C(site.yml), one line names the roles that changed something, and the hosts.
  - The banner of a task M(trainyard) that prints while it runs is printed before its output.
extends_documentation_fragment:
  - default_callback
  - result_format_callback
requirements:
  - set as stdout in configuration
"""

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

from ansible import constants as C
from ansible.errors import AnsibleError
from ansible.plugins.callback.default import CallbackModule as Default

try:
    from trainer.common.formats import printable
    from trainyard.provision.sudo import sudo_error
except ModuleNotFoundError as error:
    raise AnsibleError(
        f"Ansible's Python ({sys.executable}) does not have the package {error.name}: "
        "run make setup, or pip install '.[controller]', in the project's folder"
    ) from None

MAIN = os.getpid()  # of ansible-playbook
MESSAGE_ONLY = ("fail", "assert", "validate_argument_spec")  # their message is for the user
ESCAPES = 200  # characters by which the escapes of control characters may lengthen a line
SILENT = ("preflight", "deploy", "undeploy", "queue", "plan-python")


class CallbackModule(Default):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "trainyard"

    def __init__(self) -> None:
        super().__init__()
        sys.unraisablehook = repeat_interrupt
        # Ansible's Display never flushes: into a pipe or a file, the progress of a run of hours would appear at its end.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        self._playbook = ""
        self._changed: dict[str, list[str]] = {}  # role -> hosts, in the order of their first changes

    def v2_playbook_on_start(self, playbook: Any) -> None:
        self._playbook = Path(playbook._file_name).name
        super().v2_playbook_on_start(playbook)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        if self._playbook == "site.yml":
            listed = "; ".join(f"{role} on {', '.join(hosts)}" for role, hosts in self._changed.items())
            self._display.display(f"\nchanged: {shown(listed) or 'nothing'}")
        super().v2_playbook_on_stats(stats)

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        super().v2_playbook_on_task_start(task, is_conditional)
        if is_live(task) and self._last_task_banner != task._uuid:
            self._print_task_banner(task)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        items = result.result.get("results") if result.task.loop else None
        if items and any(self.is_line(result.task, item) for item in items if item.get("failed")):
            return  # the items have been printed
        if not self.is_line(result.task, result.result):
            super().v2_runner_on_failed(result, ignore_errors)
            return
        self.print_error(result)
        if ignore_errors:
            self._display.display("...ignoring", color=C.COLOR_SKIP)

    def v2_runner_item_on_failed(self, result: Any) -> None:
        if self.is_line(result.task, result.result):
            self.print_error(result)
        else:
            super().v2_runner_item_on_failed(result)

    def is_line(self, task: Any, result: dict[str, Any]) -> bool:
        """Return whether a failed result is printed as one line."""
        return not self._display.verbosity or is_plain(task, result)

    def v2_runner_on_ok(self, result: Any) -> None:
        if result.result.get("changed") and result.task._role:
            hosts = self._changed.setdefault(result.task._role.get_name(), [])
            if result.host.get_name() not in hosts:
                hosts.append(result.host.get_name())
        lines = table_lines(result.result)
        if not lines or self._run_is_verbose(result):
            super().v2_runner_on_ok(result)
            return
        if self._last_task_banner != result.task._uuid:
            self._print_task_banner(result.task)
        self._handle_warnings(result.result)
        self._display.display("\n".join(lines))

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._handle_warnings(result.result)
        reason = (str(result.result.get("msg", "")).strip().splitlines() or [""])[-1].strip()
        reason = reason.removeprefix("Task failed: ")
        line = f"error: {self.host_label(result)} does not answer: {shown(reason)}"
        self._display.display(line, color=C.COLOR_UNREACHABLE, stderr=self.get_option("display_failed_stderr"))
        if result.task.ignore_unreachable:
            self._display.display("...ignoring", color=C.COLOR_SKIP)

    def print_error(self, result: Any) -> None:
        """Print the message of a failed result as one line, and its table after it."""
        self._handle_warnings(result.result)
        message, table = refusal_of_sudo(result.result) or str(result.result.get("msg", "")), ""
        if errors := result.result.get("argument_errors"):  # of the arguments of a role
            role = result.result.get("validate_args_context", {}).get("name", "")
            message = f"role {role}: {'; '.join(map(str, errors))}"
        elif action_name(result.task) in MESSAGE_ONLY:
            message, _blank, table = message.partition("\n\n")
        elif not is_plain(result.task, result.result):
            message = f"{result.task.get_name()}: {module_error(result.result)} (-v prints more)"
        task = result.task
        host = "" if task.run_once or is_live(task) else f"{self.host_label(result)}: "
        stderr = self.get_option("display_failed_stderr")
        text = shown(" ".join(message.split()))
        self._display.display(f"error: {host}{text}", color=C.COLOR_ERROR, stderr=stderr)
        if lines := table_lines(result.result) or printable_lines(table.splitlines()):
            self._display.display("\n".join(lines), stderr=stderr)


def repeat_interrupt(unraisable: Any) -> None:
    """Send Ctrl-C again if it came while Ansible forked a worker: Python drops what such a hook raises, and the run would start."""
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
    elif os.getpid() != MAIN:
        os.kill(MAIN, signal.SIGINT)
    else:  # once the fork is over
        signal.signal(signal.SIGALRM, lambda number, frame: os.kill(MAIN, signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.1)


def action_name(task: Any) -> str:
    """Return the name of the task's module, without its collection."""
    return str(task.action).rpartition(".")[2]


def is_live(task: Any) -> bool:
    """Return whether a task prints while it runs."""
    return action_name(task) == "trainyard" and task.args.get("command") not in SILENT


def refusal_of_sudo(result: dict[str, Any]) -> str:
    """Return the cause and the remedy if sudo, and not the module, failed; otherwise an empty string."""
    message = str(result.get("msg", ""))
    if not message.endswith("sudo password") and "deserialization failed" not in message:
        return ""
    return sudo_error(f"{message} {result.get('module_stderr', '')} {result.get('module_stdout', '')}")


def module_error(result: dict[str, Any]) -> str:
    """Return what a module says, or of a program that it ran the last line."""
    lines = [line for name in ("stdout", "stderr") for line in str(result.get(name) or "").splitlines() if line.strip()]
    message = str(result.get("msg") or result.get("censored") or "")
    return lines[-1] if lines and message in ("", "non-zero return code") else message


def is_plain(task: Any, result: dict[str, Any]) -> bool:
    """Return whether the message of a failed result is for the user as it is."""
    return bool(result.get("plain") or refusal_of_sudo(result)) or action_name(task) in MESSAGE_ONLY


def table_lines(result: dict[str, Any]) -> list[str]:
    """Return the `lines` of a result; empty if it has none."""
    lines = result.get("lines")
    return printable_lines(lines) if isinstance(lines, list) else []


def printable_lines(lines: list[Any]) -> list[str]:
    """Return lines without control characters: they may quote what a host sent."""
    return [shown(str(line).expandtabs()) for line in lines]


def shown(text: str) -> str:
    """Return a line without control characters, and otherwise whole."""
    return printable(text, len(text) + ESCAPES)
