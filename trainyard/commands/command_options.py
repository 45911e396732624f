"""The options of the program's commands that neither the run spec nor the launch options declare."""

from __future__ import annotations

from typing import Literal

from pydantic.fields import FieldInfo

from trainer.config.fields import MAX_COUNT, MAX_SECONDS, Words, declare
from trainyard.playbook_options import PlaybookOptions
from trainyard.run.follow.manage_runs import GRACE, WATCH

_INVENTORY = "the inventory; may be repeated; default: that of ansible.cfg"
_EXTRA_VARS = "as `-e` of ansible-playbook: any name that the playbook takes; may be repeated"
_JSON = "print the result as one JSON object on stdout, and other lines on stderr"
_COMMON = {
    "inventory": (Words, declare((), _INVENTORY, expected="FILE, FOLDER or HOST,")),
    "extra_vars": (Words, declare((), _EXTRA_VARS, expected="NAME=VALUE, JSON or @FILE")),
    "check": (bool, declare(False, "change nothing; report what would change")),
    "json": (bool, declare(False, _JSON)),
}
COMMON_OPTIONS = {name: FieldInfo.from_annotated_attribute(*entry) for name, entry in _COMMON.items()}
"""Options of every command. A pydantic model cannot have a field `json`."""

SHORT = {"i": "inventory", "e": "extra_vars", "l": "limit", "C": "check"}
"""One-letter flags, as those of ansible-playbook."""


class RunOptions(PlaybookOptions):
    """Options of a command for one run."""

    run: str = declare("", "name of the run", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,99})?$")


class StatusOptions(RunOptions):
    """What is listed."""

    hardware: bool = declare(True, "list the hardware and the Ollama models of every host, too")
    all: bool = declare(False, "list all runs; otherwise those that are alive, and the last 10 others")
    watch: bool = declare(False, "list the runs again until none is alive")
    interval: float = declare(WATCH, "time between two lists", unit="seconds", ge=0.5, le=MAX_SECONDS)


class StopOptions(RunOptions):
    """How a run is stopped."""

    all: bool = declare(False, "stop every run of every host")
    force: bool = declare(False, "kill the ranks at once, without a checkpoint", deprecated_names=["now"])
    grace: float = declare(
        GRACE, "time that the ranks have to save a checkpoint and exit", unit="seconds", ge=0, le=MAX_SECONDS
    )


class LogsOptions(RunOptions):
    """Where logs are copied."""

    logs_to: str = declare("", "folder on the controller; empty: `runs/RUN/logs-from` in the project")
    logs_max_mib: int = declare(64, "size above which only the end of a file is copied", unit="MiB", ge=1, le=1_000_000)


class DataOptions(PlaybookOptions):
    """What is shown."""

    samples: int | None = declare(
        None,
        "number of samples that are shown, from the first one; unset: 3, and with `--json` all",
        ge=0,
        le=MAX_COUNT,
    )


class InitOptions(PlaybookOptions):
    """The options of the command `init`."""

    folder: str = declare("", "folder of the project; empty: the current one")


class CompletionOptions(PlaybookOptions):
    """The options of the command `completion`."""

    shell: Literal["bash", "zsh"] = declare("bash", "shell that reads the script")
