"""The output callback `trainyard`: plain failures on one line, tables unchanged, other output as Ansible's default."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import ansible_runner
import pytest
import yaml
from run_hosts import TOP
from tables import table

SAY = """#!/usr/bin/python
import sys
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({"result": {"type": "dict"}}, supports_check_mode=True)
module.exit_json(**module.params["result"])
"""


def run(folder: Path, playbook: str, plays: list[dict], *arguments: str, hosts: str = "a,b,") -> str:
    """Run a playbook and return what it printed, without colors. The module `say` returns a given result."""
    (folder / "say.py").write_text(SAY)
    (folder / playbook).write_text(yaml.safe_dump(plays))
    environment = os.environ | {"ANSIBLE_CONFIG": str(TOP / "ansible.cfg"), "ANSIBLE_LIBRARY": str(folder)}
    environment |= {"ANSIBLE_NOCOLOR": "1", "ANSIBLE_PYTHON_INTERPRETER": sys.executable}
    command = [Path(sys.executable).with_name("ansible-playbook"), "-i", hosts, *arguments, folder / playbook]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout


def result(**values) -> dict:
    return {"say": {"result": values}}


CTRL_C = """
import os, signal, sys, time
from plugins.callback import trainyard
sys.unraisablehook = trainyard.repeat_interrupt
left = [1]
os.register_at_fork(before=lambda: left and left.pop() and os.kill(os.getpid(), signal.SIGINT))
try:
    if not os.fork():
        os._exit(0)
    time.sleep(5)
    print("ignored")
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_while_a_worker_is_forked_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", CTRL_C], cwd=TOP, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


# Task and the lines that it prints, without its banner; an entry that ends with "..." is the beginning of a line.
CASES: dict[str, tuple[dict, list[str]]] = table("callback")["cases"]


@pytest.mark.slow
def test_plain_failures_and_tables_are_printed_unchanged(tmp_path: Path) -> None:
    """Every case is a play, whose failure is rescued so that the next one runs."""
    play = {"hosts": "all", "gather_facts": False, "connection": "local"}
    rescue = [{"name": "Continue", "ansible.builtin.meta": "noop"}]
    plays = [
        play | {"name": name, "tasks": [{"block": [{"name": "Task", **task}], "rescue": rescue}]}
        for name, (task, _) in CASES.items()
    ]
    shown: dict[str, list[str]] = {}
    for line in run(tmp_path, "play.yml", plays).partition("PLAY RECAP")[0].splitlines():
        if line.startswith("PLAY ["):
            lines = shown.setdefault(line[6:].partition("]")[0], [])
        elif line.strip() and not line.startswith("TASK ["):
            lines.append(line)
    assert list(shown) == list(CASES)
    for name, (_, expected) in CASES.items():
        printed = sorted(shown[name]) if name == "failure of each host" else shown[name]
        assert all(line.isprintable() for line in printed)
        begin = expected[0].removesuffix("...")
        assert printed == expected or any(line.startswith(begin) and begin != expected[0] for line in printed), printed
        assert not any("fatal" in line or "ERROR" in line for line in printed)


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
    play = {"hosts": "all", "gather_facts": False, "connection": "local", "roles": ["packages"]}
    for name, changes, line in table("callback")["site_ends"]:
        tasks.write_text(yaml.safe_dump([{"name": "Task", "ansible.builtin.command": "true", "changed_when": changes}]))
        lines = run(tmp_path, name, [play]).splitlines()
        assert [each for each in lines if each.startswith("changed: ") and "[" not in each] == ([line] if line else [])


SLOW_ACTION = table("callback")["slow_action"]


def test_lines_of_a_running_task_reach_a_pipe(tmp_path: Path) -> None:
    """A user's shell does not set PYTHONUNBUFFERED."""
    (tmp_path / "slow.py").write_text(SLOW_ACTION)
    play = {"hosts": "a", "gather_facts": False, "tasks": [{"slow": {"until": str(tmp_path / "read")}}]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"ANSIBLE_CONFIG": str(TOP / "ansible.cfg"), "ANSIBLE_ACTION_PLUGINS": str(tmp_path)}
    command = [Path(sys.executable).with_name("ansible-playbook"), "-i", "a,", "-c", "local", tmp_path / "play.yml"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(60.0, (tmp_path / "read").touch)
        timer.start()
        assert process.stdout and any("begun" in line for line in process.stdout)
        assert not (tmp_path / "read").exists(), "the line came after the task had ended"
        timer.cancel()
        (tmp_path / "read").touch()
        assert "failed=0" in process.stdout.read() and process.wait() == 0
