"""The output callback `trainyard`: plain failures on one line, tables unchanged, other output as Ansible's default."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ansible_runner
import pytest
import yaml
from run_hosts import TOP

SAY = """#!/usr/bin/python
import sys
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({"result": {"type": "dict"}}, supports_check_mode=True)
module.exit_json(**module.params["result"])
"""


@pytest.fixture
def say(tmp_path: Path):
    """Run a task with a given result on two hosts; return what was printed, without colors."""
    (tmp_path / "say.py").write_text(SAY)
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(TOP / "ansible.cfg"),
        "ANSIBLE_LIBRARY": str(tmp_path),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
    }

    def run(task: dict, *arguments: str, hosts: str = "a,b,") -> str:
        play = {"name": "Play", "hosts": "all", "gather_facts": False, "connection": "local", "tasks": [task]}
        (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
        command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", hosts, *arguments]
        done = subprocess.run(
            [*command, str(tmp_path / "play.yml")],
            cwd=TOP,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.partition("PLAY RECAP")[0]

    return run


def body(output: str) -> list[str]:
    """Return the lines between the banner of the play and the recap, without empty lines."""
    return [line for line in output.splitlines() if line.strip() and not line.startswith("PLAY ")]


def result(**values) -> dict:
    return {"name": "Task", "say": {"result": values}}


@pytest.mark.slow
def test_a_plain_failure_is_one_line_per_host(say) -> None:
    output = say(result(failed=True, plain=True, msg="no room\n on /data"))
    assert sorted(body(output)) == ["error: a: no room on /data", "error: b: no room on /data"]


@pytest.mark.slow
def test_a_plain_failure_of_all_hosts_names_no_host(say) -> None:
    output = say(result(failed=True, plain=True, msg="no room", lines=["because", "of this"]) | {"run_once": True})
    assert body(output) == ["error: no room", "because", "of this"]


@pytest.mark.slow
def test_fail_and_assert_are_one_line(say) -> None:
    assert body(say({"name": "Task", "ansible.builtin.fail": {"msg": "give a model"}}, hosts="a,")) == [
        "error: a: give a model"
    ]
    check = {"name": "Task", "ansible.builtin.assert": {"that": "false", "fail_msg": "give a model"}, "run_once": True}
    assert body(say(check)) == ["error: give a model"]


@pytest.mark.slow
def test_text_after_an_empty_line_of_a_message_is_printed_unchanged(say) -> None:
    task = {"name": "Task", "ansible.builtin.fail": {"msg": "the hosts\ndiffer\n\n       a    b\ntorch  2.0  2.1"}}
    assert body(say(task | {"run_once": True})) == ["error: the hosts differ", "       a    b", "torch  2.0  2.1"]


@pytest.mark.slow
def test_items_with_plain_failures(say) -> None:
    task = {"name": "Task", "say": {"result": "{{ item }}"}, "run_once": True}
    task["loop"] = [{"failed": True, "plain": True, "msg": "first"}, {"msg": "well"}]
    output = body(say(task))
    assert "error: first" in output
    assert not any("fatal" in line or "One or more" in line for line in output)


@pytest.mark.slow
def test_an_ignored_plain_failure(say) -> None:
    output = say(result(failed=True, plain=True, msg="no room") | {"ignore_errors": True}, hosts="a,")
    assert body(output) == ["error: a: no room", "...ignoring"]


@pytest.mark.slow
def test_lines_are_printed_unchanged(say) -> None:
    output = body(say(result(lines=["rank  host", "0     a"]) | {"run_once": True}))
    assert output[0].startswith("TASK [Task]")
    assert output[1:] == ["rank  host", "0     a"]


@pytest.mark.slow
def test_other_results_have_the_default_output(say) -> None:
    output = say(result(failed=True, msg="no room"), hosts="a,")
    assert "fatal: [a]: FAILED! =>" in output and "no room" in output
    assert body(say(result(changed=True), hosts="a,"))[1:] == ["changed: [a]"]
    assert '"well"' in say(result(msg="well"), "-v", hosts="a,") or "well" in say(result(msg="well"), "-v", hosts="a,")


def test_the_callback_works_under_ansible_runner(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    tasks = [{"name": "Task", "ansible.builtin.fail": {"msg": "give a model"}, "run_once": True}]
    play = {"name": "Play", "hosts": "all", "gather_facts": False, "connection": "local", "tasks": tasks}
    (tmp_path / "project/play.yml").write_text(yaml.safe_dump([play]))
    events: list[dict] = []
    ended = ansible_runner.run(
        private_data_dir=str(tmp_path),
        playbook="play.yml",
        inventory="a,",
        quiet=True,
        envvars={
            "ANSIBLE_CONFIG": str(TOP / "ansible.cfg"),
            "ANSIBLE_CALLBACK_PLUGINS": str(TOP / "plugins/callback"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "ANSIBLE_STDOUT_CALLBACK": "trainyard",
            "ANSIBLE_NOCOLOR": "1",
        },
        event_handler=lambda event: bool(events.append(event)) or True,
    )
    assert ended.rc == 2
    output = [event["stdout"] for event in events if event["event"] == "runner_on_failed"]
    assert output == ["error: give a model"]


def test_the_documentation_is_readable() -> None:
    doc = [str(Path(sys.executable).with_name("ansible-doc")), "-t", "callback", "trainyard"]
    shown = subprocess.run(
        doc, cwd=TOP, env={**os.environ, "ANSIBLE_CONFIG": str(TOP / "ansible.cfg")}, capture_output=True, check=True
    )
    assert b"display_failed_stderr" in shown.stdout


@pytest.mark.slow
def test_site_ends_with_the_roles_that_changed_something(tmp_path: Path) -> None:
    tasks = tmp_path / "roles/packages/tasks/main.yml"
    tasks.parent.mkdir(parents=True)
    play = [{"hosts": "all", "gather_facts": False, "connection": "local", "roles": ["packages"]}]
    for name, changes, line in (
        ("site.yml", "inventory_hostname == 'b'", "changed: packages on b"),
        ("site.yml", "false", "changed: nothing"),
        ("other.yml", "true", None),
    ):
        tasks.write_text(yaml.safe_dump([{"name": "Task", "ansible.builtin.command": "true", "changed_when": changes}]))
        (tmp_path / name).write_text(yaml.safe_dump(play))
        command = [Path(sys.executable).with_name("ansible-playbook"), "-i", "a,b", tmp_path / name]
        environment = os.environ | {"ANSIBLE_CONFIG": str(TOP / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
        environment["ANSIBLE_PYTHON_INTERPRETER"] = sys.executable
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert [each for each in done.stdout.splitlines() if each.startswith("changed: ") and "[" not in each] == (
            [line] if line else []
        ), done.stdout


@pytest.mark.slow
def test_refused_arguments_of_a_role_are_one_line(say) -> None:
    spec = {"argument_spec": {"port": {"type": "int"}, "state": {"choices": ["on", "off"]}}}
    values = {"provided_arguments": {"port": "many", "state": "x\x1b[2J"}, "validate_args_context": {"name": "queue"}}
    (line,) = body(say({"name": "Task", "ansible.builtin.validate_argument_spec": spec | values}, hosts="a,"))
    assert line.startswith("error: a: role queue: ")
    assert "port" in line and "state" in line and line.isprintable()
