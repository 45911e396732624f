"""The table of commands, and the checks of a call that both front ends share."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tables import table

from trainer.common.errors import UserError
from trainyard.commands.call import Call, own_groups
from trainyard.commands.role_steps import ROLE_STEPS
from trainyard.commands.table import COMMANDS
from trainyard.front_end import command, option, playbook, queue_verb, serving_program
from trainyard.inventory import ClusterHosts
from trainyard.run.launch_options import LaunchOptions

TOP = Path(__file__).resolve().parents[2]


def call(command: str, program: bool, **extra_vars: Any) -> Call:
    cluster = ClusterHosts([], {}, {}, lambda host: pytest.fail("no host is asked"), lambda values: LaunchOptions())
    play = (lambda values: None) if program else None
    groups = COMMANDS[command].all_groups
    return Call(command, groups, {}, extra_vars, extra_vars, cluster, TOP, print, play=play)


@pytest.mark.parametrize("program", [False, True], ids=["playbook", "program"])
def test_unknown_names_are_errors(program: bool) -> None:
    call("status", program, run="a", cluster_gpus=1, limit="node1", ollama_url="http://127.0.0.1:1").check_names()
    call("train", program, lerning_rate=1).check_names()  # `spec` checks them
    for verb, name in (("status", "rnu"), ("merge", "foo"), ("queue list", "rnu"), ("dashboard", "dashboard_prt")):
        with pytest.raises(UserError, match=f"-e {name}: unknown name"):
            call(verb, program, **{name: 1}).check_names()
    with pytest.raises(UserError, match="takes NAME=VALUE"):
        call("status", program, _raw_params="word").check_names()


def test_a_playbook_takes_the_fields_of_a_run_beside_its_own_names() -> None:
    call("status", False, lr=1, host="node1").check_names()
    call("queue hold", False, do="hold", priority="low").check_names()
    with pytest.raises(UserError, match="-e lr: unknown name"):
        call("status", True, lr=1).check_names()


def test_the_run_spec_leaves_the_options_of_the_command_out() -> None:
    assert [group.title for group in own_groups(COMMANDS["data"].all_groups)] == ["command options"]
    assert not own_groups(COMMANDS["train"].all_groups)
    assert call("data", False, samples=1, model="tiny", lr="1e-3").spec().lr == 1e-3


@pytest.mark.parametrize(("servers", "found"), [("cluster", True), ("http://10.0.0.5:11434", False)])
def test_a_session_knows_if_its_servers_were_found(servers: str, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"rollout_servers": ("http://10.0.0.5:11434",)}
    resolved = lambda spec, machines, report: spec.model_copy(update=addresses)  # noqa: E731
    monkeypatch.setattr("trainyard.commands.call.with_rollout_servers", resolved)
    one = call("train", True, method="grpo", reward="exact", rollout_servers=servers)
    session = one.session(spec=one.spec())
    assert session.spec and session.spec.rollout_servers == addresses["rollout_servers"]
    assert session.servers_found is found


def tasks(content: Any) -> Iterator[dict[str, Any]]:
    """Return the arguments of the tasks `trainyard` of a playbook, or of a role's tasks."""
    for entry in content if isinstance(content, list) else []:
        if "trainyard" in entry:
            yield entry["trainyard"]
        for part in ("tasks", "block", "rescue", "always"):
            yield from tasks(entry.get(part))


def test_playbooks_and_roles_name_commands_that_exist() -> None:
    files = [*(TOP / "playbooks").glob("*.yml"), *(TOP / "roles").glob("*/tasks/*.yml")]
    named = {task["command"] for file in files for task in tasks(yaml.safe_load(file.read_text(encoding="utf-8")))}
    assert named <= {*COMMANDS, *ROLE_STEPS, "queue"}
    assert set(ROLE_STEPS) <= named and {"train", "status", "stop", "check-training"} <= named


# Messages in the words of the front end ------------------------------------------------------------------------------

PACKAGE = Path(__file__).resolve().parents[2] / "trainyard"
ONE_DIALECT = re.compile(r"-e [a-z_]+=|playbooks/|\b(?:train|site)\.yml|\bdo=[a-z]")
# What runs on a host, which serves no front end; what one front end alone uses; and descriptions of options.
EXCEPT = tuple(table("front_end")["except"])


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
