"""Each dataset of a folder of all formats and shapes is read, or refused by one line that says how to map it."""

from pathlib import Path

import pytest
from dataset_folder import CASES, Case, write_cases

from trainer.config import make_spec
from trainer.config.dataset_source import DatasetSource
from trainer.data.samples import check_source, read_source
from trainer.errors import UserError


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


@pytest.mark.parametrize("library", [True, False], ids=["with datasets", "without datasets"])
def test_the_check_of_the_controller(library: bool, folder: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library, it finds what it can, and leaves the rest to the hosts."""
    if not library:
        monkeypatch.setitem(__import__("sys").modules, "datasets", None)
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
