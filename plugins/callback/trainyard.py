"""The default output, but what one line tells whole is one line, and a table is a table."""

from __future__ import annotations

DOCUMENTATION = r"""
name: trainyard
type: stdout
short_description: Default screen output with plain errors and tables
description:
  - As P(ansible.builtin.default#callback), with four differences.
  - A failed result that carries C(plain=true), and any failure of M(ansible.builtin.fail) and M(ansible.builtin.assert),
    is printed as one line, C(error. host. message), without the host if the task runs once for all.
  - A host that does not answer is one line, C(error. host does not answer. ssh's last line).
  - The strings in a result's C(lines) are printed as they are, in place of C(ok), or after the error.
  - The banner of a task that prints while it runs (M(trainyard_run), M(trainyard_runs)) comes before what it prints.
extends_documentation_fragment:
  - default_callback
  - result_format_callback
requirements:
  - set as stdout in configuration
"""

from typing import Any

from ansible import constants as C
from ansible.plugins.callback.default import CallbackModule as Default

MESSAGE_ONLY = ("fail", "assert")  # what fails there is a sentence that somebody wrote for the reader
LIVE = ("trainyard_run", "trainyard_runs")


class CallbackModule(Default):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "trainyard"

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        super().v2_playbook_on_task_start(task, is_conditional)
        if name(task) in LIVE and self._last_task_banner != task._uuid:
            self._print_task_banner(task)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        items = result.result.get("results") if result.task.loop else None
        if items and any(is_plain(result.task, item) for item in items if item.get("failed")):
            return  # its items have been printed
        if not is_plain(result.task, result.result):
            super().v2_runner_on_failed(result, ignore_errors)
            return
        self.print_error(result)
        if ignore_errors:
            self._display.display("...ignoring", color=C.COLOR_SKIP)

    def v2_runner_item_on_failed(self, result: Any) -> None:
        if is_plain(result.task, result.result):
            self.print_error(result)
        else:
            super().v2_runner_item_on_failed(result)

    def v2_runner_on_ok(self, result: Any) -> None:
        lines = lines_of(result.result)
        if not lines or self._run_is_verbose(result):
            super().v2_runner_on_ok(result)
            return
        if self._last_task_banner != result.task._uuid:
            self._print_task_banner(result.task)
        self._handle_warnings(result.result)
        self._display.display("\n".join(lines))

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._handle_warnings(result.result)
        why = (str(result.result.get("msg", "")).strip().splitlines() or [""])[-1].strip()
        line = f"error: {self.host_label(result)} does not answer: {why}"
        self._display.display(line, color=C.COLOR_UNREACHABLE, stderr=self.get_option("display_failed_stderr"))
        if result.task.ignore_unreachable:
            self._display.display("...ignoring", color=C.COLOR_SKIP)

    def print_error(self, result: Any) -> None:
        self._handle_warnings(result.result)
        message = " ".join(str(result.result.get("msg", "")).split())
        where = "" if result.task.run_once or name(result.task) in LIVE else f"{self.host_label(result)}: "
        stderr = self.get_option("display_failed_stderr")
        self._display.display(f"error: {where}{message}", color=C.COLOR_ERROR, stderr=stderr)
        if lines := lines_of(result.result):
            self._display.display("\n".join(lines), stderr=stderr)


def name(task: Any) -> str:
    return str(task.action).rpartition(".")[2]


def is_plain(task: Any, result: dict[str, Any]) -> bool:
    return bool(result.get("plain")) or name(task) in MESSAGE_ONLY


def lines_of(result: dict[str, Any]) -> list[str]:
    lines = result.get("lines")
    return [str(line) for line in lines] if isinstance(lines, list) else []
