"""Messages that name playbooks and `-e`, in the words of the program `trainyard`."""

from __future__ import annotations

import functools
import re

from trainyard.cli.commands import COMMANDS

_OPTION = re.compile(r"(?<![\w-])-e ([a-z_]+)=('[^']*'|[\w./:,@+-]*[\w/])")

_VERBS = "|".join(name.removeprefix("queue ") for name in COMMANDS if name.startswith("queue "))
_VERB = re.compile(rf"(?<![\w-])(?<!-e )do=({_VERBS})(?![\w|])(?: run=([\w.-]*\w))?")


def as_typed(text: str) -> str:
    """Return a message with the commands and flags of the program in place of playbooks and `-e`.

    Options that no command declares, such as variables of roles, stay as values of `-e`.
    """
    for pattern, command in _playbooks():
        text = pattern.sub(command, text)
    text = _VERB.sub(lambda match: f"trainyard queue {match[1]}{f' {match[2]}' if match[2] else ''}", text)
    return _OPTION.sub(lambda match: _flag(match[1], match[2]) or match[0], text)


@functools.cache
def _playbooks() -> list[tuple[re.Pattern[str], str]]:
    """Return what each command replaces, the longest words first: `playbooks/stop.yml -e run=NAME` is `trainyard stop NAME`."""
    found = []
    for name, command in COMMANDS.items():
        words = r"(?<![\w./-])(?:ansible-playbook )?" + re.escape(command.playbook) + r"(?![\w:/])"
        if command.positional == "run":
            found.append((re.compile(words + r" -e run=([\w.-]*\w)"), rf"trainyard {name} \1"))
        found.append((re.compile(words), f"trainyard {name}"))
    return sorted(found, key=lambda pair: -len(pair[0].pattern))


def _flag(name: str, value: str) -> str:
    """Return an option as a flag; empty if no command has it."""
    group = next((group for command in COMMANDS.values() for group in command.all_groups if group.knows(name)), None)
    if group is None:
        return ""
    if group.takes_no_value(name) and value in ("true", "false"):
        return _as_flag(name if value == "true" else f"no_{name}")
    return f"{_as_flag(name)} {value}"


def _as_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
