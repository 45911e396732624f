"""Each dataset of a folder of all formats and shapes is read, or refused by one line that says how to map it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dataset_folder import CASES, Case, write_cases
from tables import table

from trainer.common.errors import UserError
from trainer.config.dataset_source import DatasetSource
from trainer.data.samples import check_source, read_source
from trainer.spec import make_spec
from trainyard.run.plan.gather_facts import check_requirements
from trainyard.wire.run_errors import PlanError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("datasets")
    return write_cases(tmp_path_factory.mktemp("datasets"))


def source(case: Case, folder: dict[str, Path], columns: dict[str, str]) -> DatasetSource:
    return make_spec({"dataset": str(folder[case.name]), "columns": columns}, "").sources[0]


def refusal(case: Case, error: UserError) -> None:
    assert isinstance(case.expect, str) and case.expect in str(error)
    assert str(error).isprintable() and len(str(error)) < 1000


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reader(case: Case, folder: dict[str, Path]) -> None:
    if isinstance(case.expect, int):
        assert len(read_source(source(case, folder, {}))) == case.expect
        return
    with pytest.raises(UserError) as caught:
        read_source(source(case, folder, {}))
    refusal(case, caught.value)
    assert case.name in str(caught.value)
    if case.columns:
        assert len(read_source(source(case, folder, case.columns))) == case.samples


@pytest.mark.slow
@pytest.mark.parametrize("library", [True, False], ids=["with datasets", "without datasets"])
def test_the_check_of_the_controller(library: bool, folder: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library, it finds what it can, and leaves the rest to the hosts."""
    if not library:
        monkeypatch.setitem(sys.modules, "datasets", None)
        monkeypatch.setattr("trainer.data.samples.has_library", lambda: False)
    for case in CASES:
        if isinstance(case.expect, int) or (case.needs_library and not library):
            check_source(source(case, folder, {}))
            continue
        with pytest.raises(UserError) as caught:
            check_source(source(case, folder, {}))
        refusal(case, caught.value)
        if case.columns:
            check_source(source(case, folder, case.columns))


def test_hosts_without_the_library_are_refused_where_it_is_needed(folder: dict[str, Path]) -> None:
    host = SimpleNamespace(name="node2", facts={"versions": {}, "gpus": []}, gpus=[])

    def check(**fields: Any) -> None:
        check_requirements([host], make_spec(fields, ""))  # type: ignore[list-item]

    for name in ("chat.parquet", "text.jsonl.zst", "saved", "card"):
        path = folder[name]
        with pytest.raises(PlanError, match=f"node2: dataset={path} needs the Python package datasets: install it"):
            check(dataset=["a.jsonl", str(path)])
        check(dataset=str(path), fake_data=True)
    for name in ("messages.jsonl", "chat.csv", "parts", "list.json", "text.jsonl.gz", "splits"):
        check(dataset=str(folder[name]))
    with pytest.raises(PlanError, match="dataset=owner/name needs"):
        check(dataset="owner/name")
    host.facts["versions"]["datasets"] = "5.2.0"
    check(dataset="owner/name")


@pytest.mark.parametrize(("name", "pieces"), table("dataset_folder")["the_text_of_a_dataset_is_unchanged"])
def test_the_text_of_a_dataset_is_unchanged(name: str, pieces: list[list[Any]], folder: dict[str, Path]) -> None:
    samples = read_source(make_spec({"dataset": str(folder[name])}, "").sources[0])
    assert [list(piece) for sample in samples for piece in sample.pieces] == pieces


def test_cells_of_a_csv_file_are_text(folder: dict[str, Path]) -> None:
    """The library alone would read 7 for 007, and nothing for NA."""
    samples = read_source(make_spec({"dataset": str(folder["alpaca.csv"])}, "").sources[0])
    question, answer = samples[1].messages
    assert question == {"role": "user", "content": 'Q, "x"\nline\n\nNA'}
    assert answer == {"role": "assistant", "content": "007"}


def test_tool_calls_in_parquet_have_no_keys_of_other_calls(folder: dict[str, Path]) -> None:
    (sample,) = read_source(make_spec({"dataset": str(folder["calls.parquet"])}, "").sources[0])
    assert [sorted(message) for message in sample.messages] == table("dataset_folder")["tool_calls_in_parquet"]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", ["saved-splits", "card", "splits"])
def test_splits(name: str, split: str, folder: dict[str, Path]) -> None:
    def read(split: str) -> int:
        return len(read_source(make_spec({"dataset": {"path": str(folder[name]), "split": split}}, "").sources[0]))

    assert read(split) == {"saved-splits": (3, 1), "card": (2, 1), "splits": (1, 2)}[name][split == "test"]
    with pytest.raises(UserError, match=r"has no split 'validation': set dataset_split to te?[sr][ta]"):
        read("validation")


@pytest.mark.parametrize(("name", "fields", "refused"), table("dataset_folder")["a_part_of_a_dataset_without_parts"])
def test_what_has_no_parts_is_refused(name: str, fields: dict[str, str], refused: str, folder: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=refused):
        check_source(make_spec({"dataset": str(folder[name]), **fields}, "").sources[0])


def test_a_split_is_checked_without_the_library(folder: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.samples.has_library", lambda: False)
    (mixed := folder["parts"].parent / "mixed").mkdir()
    (mixed / "test.jsonl").write_text('{"text": "a"}\n')
    (mixed / "train.parquet").write_bytes(folder["chat.parquet"].read_bytes())
    assert check_source(make_spec({"dataset": {"path": str(mixed), "split": "test"}}, "").sources[0]) is None
    with pytest.raises(UserError, match="is a file, which has no split"):
        check_source(make_spec({"dataset": {"path": str(folder["chat.parquet"]), "split": "a"}}, "").sources[0])


@pytest.mark.parametrize("name", ["x[1]*?.csv", "a b.parquet", ".hidden.csv", "é'\"{}.csv", "http:--x.csv"])
def test_names_of_files_are_no_patterns(name: str, tmp_path: Path, folder: dict[str, Path]) -> None:
    file = tmp_path / "__sub[a-z]" / name
    file.parent.mkdir()
    file.write_bytes(folder["qa.parquet" if name.endswith("parquet") else "qa.csv"].read_bytes())
    (tmp_path / "__sub[a-z]" / "x1abc.csv").write_text("question,answer\n1,2\n3,4\n")
    columns = {"prompt": "question", "completion": "answer"}
    assert len(read_source(make_spec({"dataset": str(file), "columns": columns}, "").sources[0])) == 1


@pytest.mark.parametrize("name", ["x.csv", "x.parquet", "x.jsonl.gz", "folder/a.jsonl", "saved/a.arrow"])
def test_a_fifo_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    if name.startswith("saved"):
        for file in ("state.json", "dataset_info.json"):
            (path.parent / file).write_text("{}")
    dataset = path if path.parent == tmp_path else path.parent
    for read in (read_source, check_source):
        with pytest.raises(UserError, match="not a regular file"):
            read(make_spec({"dataset": str(dataset)}, "").sources[0])


def test_a_copy_in_the_cache_of_the_hub_has_links(tmp_path: Path, folder: dict[str, Path]) -> None:
    for file in [path for path in folder["card"].rglob("*") if path.is_file()]:
        link = tmp_path / "snapshot" / file.relative_to(folder["card"])
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    assert len(read_source(make_spec({"dataset": str(tmp_path / "snapshot")}, "").sources[0])) == 2


def test_a_readme_cannot_name_files_outside_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret.jsonl").write_text('{"text": "a"}\n')
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: ../secret.jsonl\n---\n")
    with pytest.raises(UserError) as caught:
        read_source(make_spec({"dataset": str(folder)}, "").sources[0])
    assert str(folder) in str(caught.value) and "outside of the folder" in str(caught.value)


@pytest.mark.slow
def test_nothing_is_written_but_temporary_files(folder: dict[str, Path], tmp_path: Path) -> None:
    """A run of another user, or with a full home, reads its data."""
    environment = os.environ | {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(Path.cwd())}
    program = "import sys; from pathlib import Path; from trainer.data.samples import read_samples; [read_samples(Path(p)) for p in sys.argv[1:]]"
    names = ("alpaca.csv", "chat.parquet", "rows.arrow", "saved", "card")
    subprocess.run([sys.executable, "-c", program, *(str(folder[name]) for name in names)], env=environment, check=True)
    assert not [*tmp_path.rglob("*")]


@pytest.mark.slow
def test_a_dataset_of_the_hub_from_the_cache_of_the_library(tmp_path: Path, folder: dict[str, Path]) -> None:
    """A stand-in for the hub, which tests do not reach: the library finds the dataset in its cache while it is offline."""
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path.cwd())}
    program = table("dataset_folder")["program"]
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder["qa.parquet"])], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    count, shape, split, absent = done.stdout.splitlines()
    assert count == "1", done.stderr
    assert shape.startswith("dataset: org/name record 0: has the keys question, answer; expected")
    assert "cannot read org/name (dev) from the hub or its cache: " in split
    assert "cannot read org/none (train) from the hub or its cache: " in absent
