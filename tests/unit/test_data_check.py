"""The samples of a run on the controller: a bad one is refused with its line before any host is contacted."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tables import table
from trainer_fixtures import model_folder
from trainer_runs import records, write_jsonl

from trainer.common.errors import UserError
from trainer.spec import make_spec
from trainyard.run.plan.make_plan import data_lines
from trainyard.run.prepare import data_check
from trainyard.run.prepare.spec_files import PreparedRun, prepare

__all__ = ["model_folder"]

STRICT = table("data_check")["strict"]
USER, ASSISTANT = {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a dog"}
SYSTEM = {"role": "system", "content": "red"}


@pytest.fixture
def strict(model_folder: Path, tmp_path: Path) -> Path:
    """A model whose template has no system role, and whose roles must alternate."""
    folder = tmp_path / "strict"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": STRICT}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


def prepared(model: Path, rows: list[Any], folder: Path, **fields: Any) -> PreparedRun:
    dataset = write_jsonl(folder / "d.jsonl", rows)
    spec = make_spec({"model": str(model), "dataset": str(dataset), "seq_length": 64} | fields, "-e")
    return prepare(spec, folder / "work", lambda line: None)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([SYSTEM, USER, ASSISTANT], "has no system role (System role not supported): remove it, or set system=prepend"),
        ([USER, USER, ASSISTANT], "rejects the order of the roles user, user, assistant (Roles must alternate)"),
        ([USER, {"role": "narrator", "content": "x"}], "has role 'narrator', expected one of"),
        ([USER, ASSISTANT | {"content": [{"type": "image"}]}], "has a part of type 'image'"),
    ],
)
def test_one_bad_record_among_many(strict: Path, tmp_path: Path, messages: list[Any], why: str) -> None:
    rows: list[Any] = [{"messages": [USER, ASSISTANT]} for _ in range(400)]
    rows[276] = {"messages": messages}
    with pytest.raises(UserError, match=re.escape(why)) as error:
        prepared(strict, rows, tmp_path)
    assert f"{tmp_path}/d.jsonl:277: " in str(error.value)
    if SYSTEM in messages:
        assert prepared(strict, rows, tmp_path, system="prepend").data.samples == 400


def test_prompts_that_the_template_of_a_student_rejects(strict: Path) -> None:
    spec = make_spec({"model": str(strict), "seq_length": 64}, "-e")
    chats = [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER]]
    with pytest.raises(UserError, match=r"^p.jsonl: prompt 2: the chat template of the model has no system role"):
        data_check.check_prompts(spec, str(strict), chats, "p.jsonl")
    data_check.check_prompts(spec.model_copy(update={"system": "prepend"}), str(strict), chats, "p.jsonl")
    data_check.check_prompts(spec, "", chats, "p.jsonl")


def test_totals_are_planned_and_kept(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepared(model_folder, records(30), tmp_path)
    assert made.data.samples == made.data.answers == 30 and made.data.unread == 0
    totals, steps, *_ = data_lines(made, made.spec)
    assert totals == f"data: {made.data.line()}"
    assert steps == "steps: about 1 of 32 rows (28 samples a step); epochs: 1 of 28 samples"

    def fail(*_: Any) -> None:
        raise AssertionError

    with monkeypatch.context() as patch:  # nothing is encoded again
        patch.setattr(data_check, "check_samples", fail)
        assert prepared(model_folder, records(30), tmp_path).data == made.data
    assert prepared(model_folder, records(30), tmp_path, train_on="all").data.tokens > made.data.tokens


def test_more_than_half_of_the_samples_lost_stops_the_run(model_folder: Path, tmp_path: Path) -> None:
    rows = [*records(4), *({"messages": [USER]} for _ in range(5))]
    with pytest.raises(UserError, match=r"5 of 9 samples of the dataset are not trained .* or set keep_going=dropped"):
        prepared(model_folder, rows, tmp_path)
    made = prepared(model_folder, rows, tmp_path, keep_going="dropped")
    assert [line for line in data_lines(made, made.spec) if line.startswith("WARNING: 5 of 9 samples")]
    assert prepared(model_folder, rows[:8], tmp_path).data.dropped == {"without an answer with loss": 4}


def test_what_only_the_hosts_have_is_left_to_them(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    for file in model_folder.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / "slow" / file.name).symlink_to(file)
    made = prepared(tmp_path / "slow", records(5), tmp_path)
    assert made.data is None and data_lines(made, made.spec) == ["data: the ranks count it before the first step"]
    fake = make_spec({"fake_data": True}, "the test")
    assert data_lines(PreparedRun(fake, [], {}), fake) == []
