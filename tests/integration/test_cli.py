"""The program `trainyard` as users run it: real processes on this machine, over local processes and over OpenSSH."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_target import serve_target
from fake_teacher import Teacher, serve
from run_hosts import TOP, Bed, bed, free_port, questions, until, write_inventory
from ssh_server import Server, control_folder, server, ssh_variables
from test_run_session import local, session_of_plan

__all__ = ["bed", "control_folder", "server"]

INTERRUPTED = 99


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("ANSIBLE_NOCOLOR", "1")
    monkeypatch.delenv("ANSIBLE_CONFIG", raising=False)  # the program finds it


@pytest.fixture
def hosts(server: Server, bed: Bed) -> Path:
    control = Path(os.environ["XDG_CACHE_HOME"])
    return inventory(bed.folder, **ssh_variables(server.login, control))


def inventory(folder: Path, **variables: Any) -> Path:
    python = "{{ ansible_playbook_python }}"
    return write_inventory(folder, {"node1": {}, "node2": {}}, **{"cluster_python": python, **variables})


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "trainyard.cli", *map(str, words)]


def run(*words: object, cwd: Path = TOP) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(TOP)}
    return subprocess.run(
        command(*words), cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def answer(*words: object) -> dict[str, Any]:
    """Return the JSON of a command that succeeds."""
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def start(bed: Bed, name: str, *words: object) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a command in a process group of its own; return it and the file of its output."""
    output = bed.folder / f"{name}.txt"
    with output.open("wb") as sink:
        started = subprocess.Popen(command(*words), cwd=TOP, stdout=sink, stderr=sink, start_new_session=True)
    bed.started.append(started)
    return started, output


def error_line(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    lines = [line for line in done.stderr.splitlines() if not line.startswith("[WARNING]")]
    assert (done.returncode, len(lines), done.stdout) == (code, 1, ""), done
    return lines[0]


def words_of_run(bed: Bed, hosts: Path, steps: int) -> list[object]:
    """Return the arguments of a small run, from a file, a flag, a name of another tool and an assignment."""
    spec = bed.folder / "spec.yml"
    fields = {"run": "r", "seq_length": 64, "total_batch_size": 4, "checkpoint_interval": 2, "eval_interval": 0}
    spec.write_text(
        yaml.safe_dump(fields | {"dataset": str(questions(bed.folder)), "epochs": 10_000, "loggers": "none"})
    )
    words = [f"--max_steps={steps}", "per-device-train-batch-size=2", "lr=1e-3", "--progress-interval", "0.2"]
    return [spec, "-i", hosts, *words]


@pytest.mark.slow
def test_a_run_is_planned(bed: Bed, hosts: Path) -> None:
    this_run = words_of_run(bed, hosts, 6)
    planned = answer("plan", *this_run)
    assert [(entry["host"], entry["ranks"]) for entry in planned["plan"]] == [("node1", [0]), ("node2", [1])]
    assert planned["plan"][0]["spec"]["lr"] == 1e-3 and planned["phase"] == "new"
    would = run("train", *this_run, "--check")
    assert (would.returncode, would.stdout.splitlines()[-1]) == (0, "would start r on node1, node2")
    assert not bed.run_dir(0).exists()
    rendered = run("train", *this_run, "--render-only", f"--render-to={bed.folder / 'out'}")
    scripts = sorted((bed.folder / "out").iterdir())
    assert rendered.returncode == 0 and [file.name for file in scripts] == ["node1.sh", "node2.sh", "r.sbatch"]
    assert not any(subprocess.run(["bash", "-n", file], check=False).returncode for file in scripts)


@pytest.mark.long
def test_a_run_is_trained_once(bed: Bed, hosts: Path) -> None:
    this_run = words_of_run(bed, hosts, 6)
    ended = answer("train", *this_run)
    assert (ended["run"], ended["status"], ended["result"]["step"]) == ("r", "finished", 6)
    assert ended["result"]["world_size"] == 2 and not bed.live_processes()
    again = run("train", *this_run)
    assert again.returncode == 0 and "run r is finished: nothing to do" in again.stdout
    other = run("train", *this_run, "--batch-size", "4")
    assert other.returncode == 2 and "set batch_size to different values" in other.stderr


@pytest.mark.long
def test_a_run_is_listed_followed_left_and_stopped(bed: Bed, hosts: Path) -> None:
    bed.make_run(2)
    session_of_plan(bed, local, bed.plan(2, 100_000), []).launch()
    bed.at_step(1)
    runs = answer("status", "r", "-i", hosts, "--no-hardware")["runs"]
    assert [(state["host"], state["alive"]) for state in runs] == [("node1", True), ("node2", True)]
    alone = answer("status", "-i", hosts, "--no-hardware", "-l", "node2")["runs"]
    assert [state["host"] for state in alone] == ["node2"]

    following, output = start(bed, "attach", "attach", "r", "-i", hosts)
    until(lambda: "step " in output.read_text(), 60, "a progress line")
    os.killpg(following.pid, signal.SIGINT)
    assert following.wait(30) == INTERRUPTED, output.read_text()
    assert output.read_text().splitlines()[-1].startswith("error: interrupted; a run that has started continues: ")
    assert bed.node(0)["status"] == "running"

    following, output = start(bed, "attach", "attach", "run=r", "-i", hosts)
    until(lambda: "step " in output.read_text(), 60, "a progress line")
    would = run("stop", "r", "-i", hosts, "--check")
    assert (would.returncode, would.stdout) == (0, "would stop r on node1, node2\n")
    stopped = run("stop", "r", "-i", hosts)
    assert stopped.returncode == 0, stopped
    assert re.fullmatch(r"run r: node1 stopped, node2 stopped after step \d+\n", stopped.stdout), stopped
    assert following.wait(60) == 0 and "run r was stopped after step" in output.read_text()
    assert not bed.live_processes()
    logs = answer("logs", "r", "-i", hosts, "--logs-to", bed.folder / "logs")
    assert {"node1/node.json", "node2/rank1.json"} <= set(logs["files"])
    assert json.loads((bed.folder / "logs/node2/node.json").read_text())["status"] == "stopped"


@pytest.mark.slow
def test_a_failed_run_has_exit_code_1_and_its_evidence(bed: Bed) -> None:
    hosts = inventory(bed.folder, cluster_python="/nonexistent/python")
    done = run("train", "-i", hosts, "--fake-data", "--seq-length", "64")
    assert done.returncode == 1
    assert "error: node1: there is no Python at /nonexistent/python: run trainyard site" in done.stderr
    answered = run("train", "-i", hosts, "--fake-data", "--seq-length", "64", "--json")
    assert json.loads(answered.stdout)["error"].startswith("node1: there is no Python") and answered.returncode == 1
    failed = run("logs", "nosuch", "-i", inventory(bed.folder))
    assert failed.returncode == 1 and "no host has a run nosuch" in failed.stderr + failed.stdout


@pytest.mark.slow
def test_the_hosts_are_those_of_the_playbooks(tmp_path: Path) -> None:
    """Defaults of the role `cluster`, the launch options of the inventory, `-e` and the kinds of transport."""
    path = tmp_path / "inventory.yml"
    nodes = {
        "node1": {"ansible_host": "192.0.2.1", "ansible_user": "me", "ansible_port": 2222},
        "node2": {"ansible_host": "192.0.2.2", "ansible_password": "secret"},
        "node3": {"ansible_connection": "local", "cluster_address": "192.0.2.3"},
    }
    common = {"lost_limit": 7, "cluster_env": {"A": "{{ word }}"}, "word": "b", "ansible_ssh_common_args": "-o A=b"}
    path.write_text(yaml.safe_dump({"cluster": {"hosts": nodes, "vars": common}, "other": {"hosts": {"node4": {}}}}))
    program = """
import json, sys
from trainyard.ansible_adapter import Inventory
found = Inventory([sys.argv[1]], "!node9", ["word=c", '{"max_restarts": 3}'])
kinds = [found.connect(host).transport.kind for host in found.hosts for again in range(2)]
login = found.connect(found.hosts[0]).transport.login
print(json.dumps([[vars(host)[name] for host in found.hosts for name in ("name", "address", "data_dir")], kinds,
    [login.address, login.user, login.port, login.extra_arguments[-2:]], found.hosts[0].env,
    found.groups["other"], found.variables["node1"]["lost_limit"], found.extra_vars]))
"""
    environment = os.environ | {"PYTHONPATH": str(TOP), "ANSIBLE_CONFIG": str(TOP / "ansible.cfg")}
    arguments = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    hosts, kinds, login, env, other, lost_limit, extra_vars = json.loads(done.stdout)
    folder = "/srv/trainyard"
    assert hosts == [*("node1", "192.0.2.1", folder), *("node2", "192.0.2.2", folder), *("node3", "192.0.2.3", folder)]
    assert kinds == ["ssh", "ssh", "ssh", "ssh", "local", "local"]
    assert login == ["192.0.2.1", "me", 2222, ["-o", "A=b"]]
    assert env == {"A": "c"} and other == ["node4"] and lost_limit == 7
    assert extra_vars == {"word": "c", "max_restarts": 3}


@pytest.mark.slow
def test_the_servers_of_the_inventory_teach_and_receive_models(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What follows 1?"}\n{"prompt": "What follows 2?"}\n')
    teacher = Teacher("127.0.0.2", free_port(), log=str(tmp_path / "asked"), model="teacher:latest")
    with serve(teacher), serve_target("127.0.0.1", "0.30.0", lambda model, question: "") as target:
        hosts = inventory(tmp_path, ollama_url="{{ address }}/", address=teacher.url)
        words = ["--teacher", "teacher", f"prompts={prompts}", "--samples", "3", "model=tiny", "--max-steps", "5"]
        would = answer("distill", *words, "-i", hosts, "--check")
        assert would["msg"] == "would ask 6 answers of node1" and not (tmp_path / "asked").exists()
        target.models["mine:latest"] = {}
        hosts = inventory(tmp_path, ollama_url="{{ address }}", address=target.url)
        left = run("undeploy", "mine:latest", "-i", hosts)
        kept = "mine:latest is not from trainyard: kept"
        assert (left.returncode, sorted(left.stdout.splitlines())) == (
            0,
            [f"node1: {kept}", "node2: has the same server as node1"],
        ), left
        assert list(target.models) == ["mine:latest"]


@pytest.mark.slow
def test_a_playbook_gets_the_words_after_two_dashes(tmp_path: Path) -> None:
    hosts = inventory(tmp_path)
    listed = run("site", "-i", hosts, "-l", "node2", "-C", "--", "--list-hosts")
    assert listed.returncode == 0 and "node2" in listed.stdout and "node1" not in listed.stdout, listed
    listed = run("site", "-i", hosts, "--json", "--", "--list-tasks")
    assert json.loads(listed.stdout) == {"playbook": "site.yml", "lines": []} and "TAGS: [ssh]" in listed.stderr
    wrong = run("site", "-i", hosts, "-e", "word", "--", "--no-such-option")
    assert wrong.returncode == 1 and wrong.stderr.endswith("error: trainyard site failed: see the lines above\n")


@pytest.mark.slow
def test_ctrl_c_ends_a_playbook_as_ansible_does(bed: Bed) -> None:
    (bed.folder / "node1").mkdir()
    checking, output = start(bed, "site", "check-training", "-i", inventory(bed.folder), "-e", "max_steps=100000")
    until(lambda: "TASK [" in output.read_text(), 60, "the first task")
    os.killpg(checking.pid, signal.SIGINT)
    assert checking.wait(60) == INTERRUPTED, output.read_text()
    # Ansible prints a traceback of its own if the signal comes while it starts a worker.
    assert "error: interrupted" in output.read_text() and "trainyard/cli" not in output.read_text()


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe_ends_the_program_without_a_traceback(tmp_path: Path) -> None:
    words = " ".join(command("status", "-i", inventory(tmp_path), "--no-hardware"))
    done = subprocess.run(f"{words} | true", shell=True, cwd=TOP, stderr=subprocess.PIPE, text=True, check=False)
    assert not re.search("Traceback|BrokenPipe", done.stderr)
