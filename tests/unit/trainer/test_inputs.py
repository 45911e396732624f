"""Inputs that break careless readers: special files, unknown users, long names, expanding YAML, escape sequences."""

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile import TERMINAL_STRINGS, limits

from trainer.__main__ import main
from trainer.common.errors import UserError
from trainer.common.formats import quoted
from trainer.config.yaml_text import MAX_YAML
from trainer.costs.host_memory import read_hosts
from trainer.data.corpus import save_corpus
from trainer.data.samples import read_samples
from trainer.data.tiny import ensure_tiny_model
from trainer.model_files.model_name import check_model_name
from trainer.spec import make_spec, read_spec
from trainyard.extra_vars import plain_data, read_run_spec
from trainyard.run.launch_options import make_options
from trainyard.run.prepare.model_files import model_folder
from trainyard.run.prepare.spec_files import dataset_file

TOP = Path(__file__).resolve().parents[3]
BOMB = "lr:\n" + "\n".join(f"- &b{n} [{', '.join([f'*b{n - 1}'] * 9) if n else 'x' * 9}]" for n in range(10)) + "\n"


def command(*argv: str, seconds: float = 20.0, memory: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the trainer's command line as a process of its own, with a limit of its address space in bytes."""
    limit: Callable[[], None] | None = None
    if memory:
        limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (memory, memory))  # noqa: E731
    return subprocess.run(
        [sys.executable, "-m", "trainer", *argv],
        cwd=TOP, capture_output=True, text=True, timeout=seconds, check=False, preexec_fn=limit, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def refusal(reader: Callable[[], Any]) -> str:
    """Return the message with which a reader refuses its input: one line, without waiting."""
    with pytest.raises(UserError) as caught, limits():
        reader()
    text = str(caught.value)
    assert text.isprintable() and len(text) <= 2000
    return text


# Paths ----------------------------------------------------------------------------------------------------------------

IMPOSSIBLE = ["~nosuchuser/x", "/tmp/" + "x" * 300, "/tmp/" + "d/" * 2040 + "x", "~root/\x7f"]


@pytest.mark.parametrize("path", IMPOSSIBLE, ids=["user", "long-name", "long-path", "control"])
def test_a_path_that_cannot_exist_is_one_line(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (
        ["check", path],
        ["check", f"dataset={path}"],
        ["plan", f"--data-dir={path}", f"--model={path}", "--no-measure"],
        ["plan", f"--hosts={path}"],
        ["plan", f"--dataset={path}", "--no-measure", "--strategy=nonsense"],
    ):
        code = main(argv)
        shown = capsys.readouterr().err
        assert code == 0 or (code == 2 and shown.startswith("error: ") and shown.count("\n") == 1), (argv, shown)
    for field, reader in (
        ("dataset", lambda spec, *_: dataset_file(spec)),
        ("model", lambda spec, *_: model_folder(spec, [], tmp_path, print)),
    ):
        refusal(lambda field=field, reader=reader: reader(make_spec({field: path}, "-e"), tmp_path, print))  # type: ignore[misc]
    refusal(lambda: read_run_spec(path, {}, TOP))
    if path.startswith("~n"):
        assert "unknown user" in refusal(lambda: make_options({"collect_to": path}))


def special_files(folder: Path) -> list[Path]:
    """Return paths that exist and are not regular files, with a reader that may wait for each of them."""
    fifo, link, loop = folder / "fifo.jsonl", folder / "zero.jsonl", folder / "loop.jsonl"
    os.mkfifo(fifo)
    link.symlink_to("/dev/zero")
    loop.symlink_to(loop)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket.jsonl"))
    (folder / "folder.jsonl").mkdir()
    return [fifo, link, loop, folder / "socket.jsonl", folder / "folder.jsonl"]


def test_special_files_are_refused_at_once(tmp_path: Path) -> None:
    for path in special_files(tmp_path):
        refusal(lambda path=path: read_samples(path))  # type: ignore[misc]
        refusal(lambda path=path: read_spec(path, {}, "the flags"))  # type: ignore[misc]
        refusal(lambda path=path: dataset_file(make_spec({"dataset": str(path)}, "-e")))  # type: ignore[misc]
        refusal(lambda path=path: read_hosts(str(path)))  # type: ignore[misc]


def test_a_model_folder_with_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    spec = make_spec({"model": str(tmp_path)}, "-e")
    for reader in (lambda: check_model_name(spec.model), lambda: model_folder(spec, [], tmp_path, print)):
        assert refusal(reader) == f"model: {tmp_path}/model.safetensors is not a regular file: remove it"


@pytest.mark.parametrize("argument", ["max_stesp=4", "--max-stesp=4"])
def test_a_misspelt_field_is_not_a_file(argument: str) -> None:
    done = command("check", argument)
    assert done.stderr == "error: run spec: unknown name 'max_stesp' in the flags; did you mean 'max_steps'?\n"


def test_many_unknown_names_are_few_lines_and_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    monkeypatch.setattr("trainer.spec.suggest", lambda name: searched.append(name) or "")
    text = refusal(lambda: make_spec({f"unknown{number}": 1 for number in range(5000)}, "-e"))
    assert len(searched) == 5 and text.endswith("unknown name 'unknown4' in -e; and 4995 more")


# YAML -----------------------------------------------------------------------------------------------------------------


def test_aliases_do_not_expand(tmp_path: Path) -> None:
    file = tmp_path / "bomb.yml"
    file.write_text(BOMB)
    assert file.stat().st_size < 600
    done = command("check", str(file), memory=1 << 30)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr[-500:]
    assert "an alias (*name) of a list or a mapping is not allowed: write its values" in done.stderr
    file.write_text(f"model: &t {'x' * 50_000}\nlora_targets: [{', '.join(['*t'] * 9)}]\n")
    assert "stand for too much text" in refusal(lambda: read_spec(file, {}, "the flags"))
    file.write_text("epochs: &n 3\nbatch_size: *n\n")
    assert read_spec(file, {}, "the flags").batch_size == 3, "an alias of a single value is harmless"


@pytest.mark.slow
def test_extra_variables_do_not_expand() -> None:
    nested: Any = "x"
    for _ in range(12):
        nested = [nested] * 9
    assert "more than 1000000 values" in refusal(lambda: plain_data({"a": nested}))
    cycle: list[Any] = []
    cycle.append(cycle)
    assert "contains itself" in refusal(lambda: plain_data(cycle))


@pytest.mark.parametrize(
    "text",
    [
        *("lr: !!bool x", "lr: !!int ''", "lr: !!float x", "lr: !!timestamp x", f"lr: {'1:' * 2000}1.5", "- " * 3000),
        *(f"seed: 0x{'f' * 5000}", f"lr: {'x' * MAX_YAML}", "\n".join(f"x{n}: 1" for n in range(4000))),
        *(f"{json.dumps(text)}: 1" for text in TERMINAL_STRINGS),
    ],
    ids=lambda text: ascii(text)[:25],
)
def test_a_spec_that_breaks_the_parser_is_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "spec.yml"
    file.write_text(text)
    refusal(lambda: read_spec(file, {}, "the flags"))


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"collective_timeout": "1e300"},
        {"strategy": "diloco", "outer_lr": "1e308"},
        {"lr": "1e308"},
        {"fake_data": True, "max_steps": 1_000_000_000},
        {"fake_data": True, "total_batch_size": 1_000_000, "seq_length": 8192},
        {"fake_data": True, "total_batch_size": 65_536, "seq_length": 8},
        {"total_batch_size": 10**30},
        {"gradient_accumulation": 10**400},
        {"max_steps": "9" * 5000},
        {"run": 10**5000},
        {"lora_targets": [10**5000]},
        {"model": "x" * 5000},
    ],
    ids=lambda values: quoted(values, 40),
)
def test_numbers_are_bounded_before_they_overflow(values: dict[str, Any]) -> None:
    refusal(lambda: make_spec(values, "-e"))


@pytest.mark.parametrize("name", ["stall_limit", "lost_limit", "restart_delay", "progress_interval"])
def test_limits_are_within_the_range_of_timers(name: str) -> None:
    refusal(lambda: make_options({name: 1e300}))
    assert getattr(make_options({name: 3600}), name) == 3600


def test_the_longest_spec_can_be_read_again(tmp_path: Path) -> None:
    long: dict[str, Any] = dict.fromkeys(("model", "dataset", "dataset_split"), "🚂" * 4096)
    spec = make_spec(long | {"lora_targets": ["🚂" * 12] * 1000}, "-e")
    (tmp_path / "spec.yml").write_text(spec.to_yaml())
    assert (tmp_path / "spec.yml").stat().st_size > 230_000
    assert read_spec(tmp_path / "spec.yml", {}, "-e") == spec
    refusal(lambda: make_spec({"lora_targets": ["x" * 13] * 1000}, "-e"))
    refusal(lambda: make_spec({"lora_targets": ["x"] * 1001}, "-e"))


# Datasets -------------------------------------------------------------------------------------------------------------


def test_a_record_of_endless_length_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.json_files.MAX_LINE", 1 << 20)
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "good"}\n' + "x" * (2 << 20))
    assert f"{file}:2: longer than 1 MiB" in refusal(lambda: read_samples(file))


def test_what_is_derived_from_a_dataset_is_private(tmp_path: Path) -> None:
    import numpy as np

    from trainer.data.corpus import Corpus
    from trainer.data.samples import Sample

    save_corpus(Corpus(np.arange(3, dtype=np.int32), np.ones(3, np.bool_), np.array([0, 3])), tmp_path / "c/corpus.npz")
    assert (tmp_path / "c/corpus.npz").stat().st_mode & 0o777 == 0o600
    before = os.umask(0o077)
    try:
        folder = ensure_tiny_model(tmp_path, None, 1, lambda: [Sample(pieces=(("text", True),))])
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o077 == 0 and (folder / "config.json").stat().st_mode & 0o077 == 0


def test_the_former_dataset_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spec of a run of before is read, and the run is shown; a resume needs the dataset."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yml").write_text("run: before\nmodel: tiny\ndataset: ansible-docs\nepochs: 1\n")
    spec = read_spec(tmp_path / "spec.yml", {}, "the flags")
    said = "dataset: ansible-docs is not part of trainyard any more: start a new run with dataset=observatory, or with a file"
    with pytest.raises(UserError) as refused:
        dataset_file(spec)
    assert str(refused.value) == said
    with pytest.raises(UserError) as refused:
        read_samples(spec.sources[0].path)
    assert str(refused.value) == said
    (tmp_path / "ansible-docs").mkdir()
    (tmp_path / "ansible-docs/a.jsonl").write_text("{}\n")
    assert dataset_file(spec) == tmp_path / "ansible-docs", "a folder of this name is one"
