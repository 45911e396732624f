"""Messages name commands and options in the words of the front end that prints them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from trainyard.front_end import command, option, playbook, queue_verb, serving_program

PACKAGE = Path(__file__).resolve().parents[2] / "trainyard"
ONE_DIALECT = re.compile(r"-e [a-z_]+=|playbooks/|\b(?:train|site)\.yml|\bdo=[a-z]")
# What runs on a host, which serves no front end; what one front end alone uses; and descriptions of options.
EXCEPT = (
    "remote/",
    "cli/",
    "commands/table.py",
    "front_end.py",
    "discovery/",
    "extra_vars.py",
    "workflows/merge_runs.py",
    "ansible_adapter.py",
    "new_project.py",
)


def test_both_dialects() -> None:
    def words() -> list[str]:
        found = [command("stop", "a.b"), command("queue list"), playbook("site"), playbook("remove-host")]
        return [*found, queue_verb("release", "a"), queue_verb("list"), option("run", "NAME"), option("teacher_pull")]

    of_ansible = ["ansible-playbook playbooks/stop.yml -e run=a.b", "ansible-playbook playbooks/queue.yml -e do=list"]
    of_ansible += ["site.yml", "playbooks/remove_host.yml", "do=release run=a", "do=list", "-e run=NAME"]
    assert words() == [*of_ansible, "-e teacher_pull=true"]
    with serving_program():
        of_program = ["trainyard stop a.b", "trainyard queue list", "trainyard site", "trainyard remove-host"]
        of_program += ["trainyard queue release a", "trainyard queue list", "--run NAME", "--teacher-pull"]
        assert words() == of_program
    assert words()[0] == of_ansible[0]


def texts(source: str) -> Iterator[str]:
    """Return the constant parts of the strings of a module that are no docstrings."""
    tree = ast.parse(source)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_no_message_is_written_in_one_dialect() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if not name.startswith(EXCEPT):
            found += [f"{name}: {text}" for text in texts(path.read_text(encoding="utf-8")) if ONE_DIALECT.search(text)]
    assert [text for text in found if "-e nvidia_install=true" not in text] == []
