"""The program `trainyard` without hosts: flags, help, completion, and one schema for all of them."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tables import table

from trainyard.cli import __main__ as program
from trainyard.cli.command_flags import Arguments, parse
from trainyard.commands.groups import COMMON, LAUNCH, SPEC, Group
from trainyard.commands.table import COMMANDS

TOP = Path(__file__).resolve().parents[2]
COMMAND_PAGE = (TOP / "docs/command-line.md").read_text()


def parsed(command: str, *words: str) -> Arguments:
    return parse(command, COMMANDS[command].all_groups, COMMANDS[command].positional, words)


def test_flags_of_the_run_spec_have_every_form_that_the_trainer_accepts() -> None:
    words = ["spec.yml", "--lr", "1e-3", "--max_steps=5", "--packing", "--no-merge", "seed=7", "--fake-data", "no"]
    words += ["--lora-targets", "q_proj", "v_proj", "--zero-stage=3", "--hv.local-steps", "3", "--seq-length=-1"]
    found = parsed("train", *words)
    assert found.of(SPEC) == table("cli_flags")["flags_of_the_run"]
    assert found.of(LAUNCH) == {"spec": "spec.yml"}


def test_launch_options_and_common_options_are_separate() -> None:
    words = ["-i", "a.yml", "-ib.yml", "-e", "x=1", "-l", "node1", "--run-env", "A=b=c", "--run-env", "{B: 2}", "-C"]
    found = parsed("train", *words, "--unit-properties", "MemoryMax=20G", "TasksMax=9", "--json", "--retries", "2")
    assert found.of(COMMON) == {"inventory": ["a.yml", "b.yml"], "extra_vars": ["x=1"], "check": "true", "json": "true"}
    assert found.switch("json") and found.switch("check") and found.of(SPEC) == {}
    assert found.of(LAUNCH) == table("cli_flags")["launch_options_and_common"]


def test_words_without_a_flag() -> None:
    own = COMMANDS["merge"].groups[0]
    assert parsed("merge", "a", "b", "--method=ties", "c").of(own) == {"runs": "a,b,c", "method": "ties"}
    assert parsed("stop", "--force", "r").of(COMMANDS["stop"].groups[0]) == {"force": "true", "run": "r"}
    assert parsed("site", "-i", "x", "--", "--tags", "ssh").rest == ["--tags", "ssh"]


@pytest.mark.parametrize(
    ("words", "said"), table("wrong_words"), ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_wrong_word_is_one_line_and_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANSIBLE_CONFIG", str(TOP / "ansible.cfg"))
    assert program.main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {said}") and captured.err.count("\n") == 1
    assert bool(captured.out) == ("--json" in words)
    assert captured.out == "" or json.loads(captured.out)["error"] == captured.err.removeprefix("error: ").strip()
    assert "sec ret" not in captured.err and "\x1b" not in captured.err


@pytest.mark.parametrize("name", COMMANDS)
def test_no_name_of_a_command_is_in_two_groups(name: str) -> None:
    groups = COMMANDS[name].all_groups
    for place, group in enumerate(groups):
        shared = {field for field in group.fields for other in groups[place + 1 :] if other.knows(field)}
        assert not shared, (group.title, shared)


def test_every_flag_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("distill", "train", "stop", "site"):
        command = COMMANDS[name]
        assert program.main([name, "--lr", "--help"]) == 0
        shown = capsys.readouterr().out
        flags = {f"--{field.replace('_', '-')}" for group in command.all_groups for field in group.fields}
        assert not flags - set(re.findall(r"--[a-z][a-z0-9-]*", shown)), name
        assert command.playbook in " ".join(shown.split())
    assert program.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert not {name for name in COMMANDS if f"\n  {name.split(' ')[0]} " not in shown}
    assert program.main(["queue", "--help"]) == 0
    shown = capsys.readouterr().out
    assert not {name for name in COMMANDS if " " in name and f"\n  {name.split(' ')[1]} " not in shown}


@pytest.mark.slow
def test_bash_completes_commands_flags_and_choices(tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    with script.open("w") as file:
        subprocess.run([sys.executable, "-m", "trainyard.cli", "completion", "bash"], cwd=TOP, stdout=file, check=True)

    def complete(*words: str) -> set[str]:
        line = " ".join(f"'{word}'" for word in words)
        text = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _trainyard_words; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, check=False)
        return set(done.stdout.split())

    assert {"train", "status", "stop", "completion"} <= complete("trainyard", "")
    assert {"--max-steps", "--max-restarts"} <= complete("trainyard", "train", "--max-")
    assert complete("trainyard", "train", "--isolate", "") == {"auto", "always", "never"}
    assert complete("trainyard", "queue", "") >= {"add", "again"}
    assert complete("trainyard", "queue", "add", "--prio") == {"--priority"}
    zsh = subprocess.run(
        [sys.executable, "-m", "trainyard.cli", "completion", "--shell=zsh"], cwd=TOP, capture_output=True, check=True
    )
    assert zsh.stdout.startswith(b"#compdef trainyard") and b"max-steps" in zsh.stdout


def test_a_missing_package_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert program.main(["status"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the command line needs the package ansible: run ") and error.count("\n") == 1
    assert "-m pip install ansible-core" in error


def test_playbooks_of_the_commands_exist() -> None:
    for command in COMMANDS.values():
        if command.on_hosts and not command.playbook.startswith("python -m trainer "):
            assert (TOP / command.playbook.split()[0]).is_file()


def documented() -> list[list[str]]:
    """Return the words of every command in the documentation."""
    pages = [TOP / "README.md", *(TOP / "docs").glob("*.md")]
    blocks = re.findall(
        r"^```console\n(.*?)^```", "\n".join(page.read_text() for page in pages), re.DOTALL | re.MULTILINE
    )
    lines = re.findall(r"^(?:\$ )?trainyard (.*)$", "\n".join(blocks), re.MULTILINE)
    lines += re.findall(r"`trainyard ([a-z][^`]*)`", COMMAND_PAGE)
    return [re.split(r"\s+", re.split(r"  #| [|>] ", line)[0].strip()) for line in lines]


def test_documented_commands_are_accepted() -> None:
    found = documented()
    assert {"train", "status", "completion"} <= {words[0] for words in found}
    for words in found:
        name, *rest = program.with_verb(words)
        if name != "completion":
            parsed(name, *rest)


def test_flags_of_the_command_page_exist() -> None:
    lines = re.findall(r"^trainyard (.*?)(?: -- .*)?$", COMMAND_PAGE, re.MULTILINE)
    named = {name for line in lines for name in re.findall(r"--(?:no-)?([a-z][a-z_-]+)", line)}
    named |= set(re.findall(r"`--([a-z-]+)", COMMAND_PAGE)) - {"help"}
    known = {name for command in COMMANDS.values() for group in command.all_groups for name in group.fields}
    assert len(named) > 10 and {name.replace("-", "_") for name in named} <= known


def test_a_group_has_no_flag_without_a_description() -> None:
    groups: set[Group] = {group for command in COMMANDS.values() for group in command.all_groups}
    assert not [name for group in groups for name, option in group.fields.items() if not option.description]


# A playbook that does not end after Ctrl-C ---------------------------------------------------------------------------

# The program stands for an ansible-playbook that waits for a lock whose holder Ctrl-C has ended.
_ENDS = """
import signal, subprocess, sys, threading
from trainyard.cli import playbooks
playbooks._INTERRUPT_LIMIT = 0.2
program = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(60)"
process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
process.stdout.readline()
threading.Timer(0.1, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
print(playbooks._wait(process), threading.active_count())
"""


def test_a_playbook_that_does_not_end_after_ctrl_c_is_terminated() -> None:
    done = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.stderr) == ("(-15, True) 1\n", "")
