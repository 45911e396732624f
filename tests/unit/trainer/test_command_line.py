"""Arguments of ``python -m trainer``."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tables import table

from trainer.__main__ import COMMANDS, main, take_path, take_positional, take_switch, take_value
from trainer.common.errors import UserError


@pytest.mark.parametrize("argv", [["--a", "1", "--hosts", "2"], ["--a", "1", "--hosts=2"]])
def test_a_value_is_removed_from_the_arguments(argv: list[str]) -> None:
    assert take_value(argv, "--hosts") == "2"
    assert argv == ["--a", "1"]
    assert take_value(argv, "--hosts") is None


@pytest.mark.parametrize("argv", [["--hosts"], ["--hosts", "--json"]])
def test_a_missing_value_is_an_error(argv: list[str]) -> None:
    with pytest.raises(UserError, match=r"^--hosts: expected a value: --hosts=\.\.\.$"):
        take_value(argv, "--hosts")


def test_paths_switches_and_positional_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/user")
    argv = ["spec.yml", "--json", "--data-dir=data", "--run-dir", "~/run"]
    assert (take_switch(argv, "--json"), take_switch(argv, "--json")) == (True, False)
    assert take_path(argv, "--data-dir") == tmp_path / "data"
    assert take_path(argv, "--run-dir") == Path("/home/user/run")
    assert (take_positional(argv), take_positional(argv), take_positional(["--json"])) == ("spec.yml", None, None)
    assert not argv


@pytest.mark.parametrize("speed", ["fast", "0", "-1", "nan", "1e9"])
def test_an_invalid_link_speed_is_one_line(speed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"--link-mbit={speed}"]) == 2
    assert capsys.readouterr().err == f"error: --link-mbit: got {speed!r}, expected a number of Mbit/s > 0\n"


def test_every_command_is_in_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    for name in COMMANDS:
        assert name in usage


def test_check_prints_a_spec_that_it_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "lr=0.5", "model=m", "dataset=d.jsonl", "run=r"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "spec.yml").write_text(text)
    assert main(["check", str(tmp_path / "spec.yml")]) == 0
    assert capsys.readouterr().out == text and "lr: 0.5" in text


# Programs that answer over a connection ------------------------------------------------------------------------------

# Descriptor 1 is another one soon, as with the export to Ollama; a library holds the interpreter's lock while it waits for a file.
SHORT = {name: ("-c", table("connection")[name]) for name in ("replaced", "locked")}
PROGRAMS = table("connection")["programs"] | SHORT


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_a_program_ends_when_nobody_reads_its_answer(name: str) -> None:
    """It waits for its request meanwhile, which stands for its work."""
    reader, writer = os.pipe()
    program = subprocess.Popen([sys.executable, *PROGRAMS[name]], stdin=subprocess.PIPE, stdout=writer)
    os.close(writer)
    os.close(reader)
    try:
        assert program.wait(120) == -signal.SIGKILL
    finally:
        program.kill()
        assert program.stdin
        program.stdin.close()
        program.wait()
