"""How messages name commands and options: in the words of the front end that this process serves.

A process serves `ansible-playbook`, with playbooks of a folder or of a collection, or the program `trainyard`, all of which is inside
`serving_program`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_serves_program = False
_collection = ""  # that has the playbooks; empty: they are in the project's folder
_AT_THE_TOP = ("site", "train")  # playbooks that are not in the folder `playbooks`


def serve_collection(name: str) -> None:
    """Name the playbooks as those of a collection from now on."""
    global _collection
    _collection = name


@contextlib.contextmanager
def serving_program() -> Iterator[None]:
    """Name commands and options as the program `trainyard` takes them, in all threads."""
    global _serves_program
    before, _serves_program = _serves_program, True
    try:
        yield
    finally:
        _serves_program = before


def playbook_of(command: str) -> str:
    """Return the playbook of a command, and the `-e` that it needs: `playbooks/stop.yml`, `playbooks/queue.yml -e do=add`."""
    word, _, verb = command.partition(" ")
    name, folder = word.replace("-", "_"), "" if word in _AT_THE_TOP else "playbooks/"
    return f"{f'{_collection}.{name}' if _collection else f'{folder}{name}.yml'}{f' -e do={verb}' if verb else ''}"


def playbook(command: str) -> str:
    """Name a command by its playbook, as in a sentence: `train.yml`, or `trainyard train`."""
    return f"trainyard {command}" if _serves_program else playbook_of(command)


def command(name: str, run: str = "") -> str:
    """Return the words that a user types: `ansible-playbook playbooks/stop.yml -e run=a`, or `trainyard stop a`."""
    if _serves_program:
        return f"trainyard {name}{f' {run}' if run else ''}"
    return f"ansible-playbook {playbook_of(name)}{f' -e run={run}' if run else ''}"


def queue_verb(verb: str, run: str = "") -> str:
    """Name a verb of the queue: `do=hold run=a`, or `trainyard queue hold a`."""
    return command(f"queue {verb}", run) if _serves_program else f"do={verb}{f' run={run}' if run else ''}"


def option(name: str, value: object = True) -> str:
    """Return an option with its value: `-e run=a`, or `--run a`. A flag that is true has no value."""
    if not _serves_program:
        return f"-e {name}={'true' if value is True else value}"
    return f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}"
