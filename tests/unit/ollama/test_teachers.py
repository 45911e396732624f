"""The selection of teachers: trusted machines with the same model."""

import csv
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_teacher import Teacher, serve
from run_hosts import TOP, free_port
from tables import table

from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainer.generation.ollama_client import Answer, Cancel
from trainyard.ollama import collect
from trainyard.ollama.answers import AnswerFile
from trainyard.ollama.collect import Questions, collect_answers, make_dataset
from trainyard.ollama.distill_options import DistillOptions, make_distill_options
from trainyard.ollama.prompts import read_prompts
from trainyard.ollama.teacher_nodes import Prompt
from trainyard.ollama.teachers import Candidate, candidates, find_teachers
from trainyard.wire.connection import Host
from trainyard.workflows.distill import student_specs
from trainyard.workflows.merge_runs import MergeOptions, make_merge_options
from trainyard.workflows.students import host_groups

OTHER = "b" * 64


def test_trust_of_the_inventory() -> None:
    variables = table("teachers")["variables"]
    assert candidates(["node1", "node2", "node3"], ["10.0.0.9", "10.0.0.8", "same"], variables) == [
        Candidate("node1", "http://10.0.0.1:11434", True),
        Candidate("node2", "http://[fd00::2]:11500", True),
        Candidate("node3", "http://10.0.0.3:11434", False),
        Candidate("10.0.0.9", "http://10.0.0.9:11434", False),
        Candidate("10.0.0.8", "http://10.0.0.8:11434", False),
    ]


def test_the_choice_of_teachers() -> None:
    servers = [
        Teacher("127.0.0.2", free_port()),
        Teacher("127.0.0.3", free_port(), model="other:latest"),
        Teacher("127.0.0.4", free_port(), digest=OTHER),
    ]
    a, b, c = (Candidate(f"node{n}", server.url, True) for n, server in enumerate(servers, 1))
    dead = Candidate("dead", f"http://127.0.0.5:{free_port()}", True)
    stranger = Candidate("stranger", servers[2].url, False)
    with serve(*servers):
        lines: list[str] = []
        found = find_teachers([a, b, dead, stranger], "teacher", report=lines.append)
        assert [(teacher.name, teacher.model) for teacher in found] == [("node1", "teacher:latest")]
        text = "\n".join(lines)
        assert "not trusted, so they get no prompts: stranger; to include them: -e teachers=all" in text
        assert "dead does not teach: connection refused" in text
        assert "without teacher: node2" in text
        with pytest.raises(UserError, match=f"different models .*node1 .*node4 {OTHER[:12]}".replace("node4", "node3")):
            find_teachers([a, c], "teacher")
        assert len(find_teachers([a, c], "teacher", mixed=True)) == 2
        assert len(find_teachers([a, stranger], "teacher", untrusted=True, mixed=True)) == 2
        with pytest.raises(UserError, match="no host has nothing: pull it"):
            find_teachers([a, b], "nothing")
        with pytest.raises(UserError, match="discovered machines are not trusted"):
            find_teachers([stranger], "teacher")


def test_prompts_of_every_shape(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    user = {"role": "user", "content": "u"}
    rows = [
        {"prompt": "a"},
        {"prompt": "b", "completion": "x"},
        {"prompt": [{"role": "user", "content": "c"}]},
        {"instruction": "d", "input": "e"},
        {"messages": [user, {"role": "assistant", "content": "x"}, user, {"role": "assistant", "content": "y"}]},
        {"prompt": "a", "completion": "again"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = read_prompts(path)
    assert [chat[-1]["content"] for chat in chats] == ["a", "b", "c", "d\n\ne", "u"]
    assert [len(chat) for chat in chats] == [1, 1, 1, 1, 3]
    assert all(chat[0] == {"role": "system", "content": "s"} for chat in read_prompts(path, "s"))


@pytest.mark.parametrize(("cut", "unanswered", "outcome"), table("teachers")["answers_that_are_lost_are_loud_and_more"])
def test_answers_that_are_lost_are_loud_and_more_than_half_stop(
    tmp_path: Path, cut: int, unanswered: int, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(number: int) -> dict[str, Any]:
        finished = "length" if number < cut else "stop"
        chat = [{"role": "user", "content": f"Question {number}"}]
        return {"messages": chat, "text": f"Answer {number}", "finished": finished}

    monkeypatch.setattr(collect, "collect_answers", lambda *_: None)
    monkeypatch.setattr(collect, "wanted_records", lambda *_: [record(n) for n in range(10 - unanswered)])
    chats = [[{"role": "user", "content": f"Question {n}"}] for n in range(10)]
    questions = Questions(chats, make_distill_options({"teacher": "t", "prompts": "p", "near_duplicates": 0}))
    lines: list[str] = []
    with AnswerFile(tmp_path / "a.jsonl") as answers:

        def make(**how: Any) -> int:
            return len(make_dataset(questions, [], [], answers, tmp_path, lines.append, **how)[1].samples)

        if "more than half" not in outcome:
            assert make() == 10 - cut
        else:
            with pytest.raises(UserError, match=re.escape(outcome)):
                make()
            assert make(allow_dropped=True) == 10 - cut - unanswered
    assert any(line.startswith("WARNING") for line in lines) == bool(outcome)
    assert not outcome.startswith("WARNING") or any(line.startswith(outcome) for line in lines)


@pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
def test_prompts_of_tables(tmp_path: Path, name: str) -> None:
    """A row without an answer is a prompt; tests/unit/trainer has the formats."""
    rows = [("a, b", ""), ("c\nd", "x"), ("a, b", "again")]
    if name == "p.csv":
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file).writerows([("prompt", "completion"), *rows])
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = {"prompt": [row[0] for row in rows], "completion": [row[1] or None for row in rows]}
        parquet.write_table(pyarrow.table(table), tmp_path / name)
    assert [chat[-1]["content"] for chat in read_prompts(tmp_path / name)] == ["a, b", "c\nd"]


def test_columns_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    path.write_text("question,id\nWhy?,1\n")
    with pytest.raises(UserError, match=r"record 1: .*columns=prompt=question"):
        read_prompts(path)
    (spec,) = specs_of(columns="prompt=question", model="tiny")
    assert read_prompts(path, spec=spec) == [[{"role": "user", "content": "Why?"}]]
    with pytest.raises(UserError, match="prompts: no such file: nowhere"):
        read_prompts(Path("nowhere"))


@pytest.mark.parametrize(("text", "message"), table("teachers")["prompts_that_are_none"])
def test_prompts_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_prompts(path)


def test_options() -> None:
    options = make_distill_options({"teacher": "t", "prompts": "p", "samples": "3", "lr": 1, "hybrid": "true"})
    assert options == DistillOptions(teacher="t", prompts="p", samples=3, hybrid=True)
    with pytest.raises(UserError, match=r"set -e teacher=MODEL"):
        make_distill_options({"prompts": "p"})
    with pytest.raises(UserError, match="temperature: expected a number >= 0 and <= 100, got 'hot'"):
        make_distill_options({"teacher": "t", "prompts": "p", "temperature": "hot"})


def specs_of(**given: Any) -> list[RunSpec]:
    asked = {"teacher": "t", "prompts": "p", **given}
    return student_specs(make_distill_options(asked), "", asked, TOP, print)


def test_students() -> None:
    specs = specs_of(model="tiny,org/a", run="mine", lr=0.1)
    assert [(spec.model, spec.run, spec.lr, spec.eval_start) for spec in specs] == [
        ("tiny", "mine-1", 0.1, True),
        ("org/a", "mine-2", 0.1, True),
    ]
    with pytest.raises(UserError, match="set prompts instead of dataset"):
        specs_of(dataset="x")
    with pytest.raises(UserError, match="temprature: unknown name"):
        specs_of(temprature=1)


@pytest.mark.parametrize(("given", "expected"), table("teachers")["students_of_one_model_differ"])
def test_students_of_one_model_differ(given: dict[str, Any], expected: list[list[Any]]) -> None:
    specs = specs_of(**given)
    assert [[spec.model, spec.seed, spec.shared_seed, spec.data_part] for spec in specs] == expected
    assert len({spec.named().run for spec in specs}) == len(specs)


def test_groups_of_hosts() -> None:
    hosts = [Host(f"n{n}", "10.0.0.1", "/d", "/p") for n in range(5)]

    def names(students: int, hybrid: bool) -> list[str]:
        return [" ".join(host.name for host in group) for group in host_groups(hosts, students, hybrid)]

    assert names(2, False) == ["n0", "n1"]
    assert names(9, False) == ["n0", "n1", "n2", "n3", "n4"]
    assert names(2, True) == ["n0 n1", "n2 n3 n4"]
    assert names(4, True) == ["n0 n1", "n2 n3 n4"]
    assert names(1, True) == ["n0 n1 n2 n3 n4"]


@pytest.mark.parametrize(("values", "message"), table("teachers")["mistakes_in_a_merge"])
def test_mistakes_in_a_merge(values: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_merge_options(values)


def test_options_of_a_merge() -> None:
    options = make_merge_options({"runs": "a, b", "weights": "0.25,0.75", "lr": 1})
    assert options == MergeOptions(runs=("a", "b"), weights=(0.25, 0.75))


def test_prompts_of_other_formats(tmp_path: Path) -> None:
    """What a record says of its answers does not matter to the teachers; its system message does."""
    file = tmp_path / "p.jsonl"
    rows = table("teachers")["rows"]
    file.write_text("\n".join(map(json.dumps, rows)))
    system = {"role": "system", "content": "S"}
    assert read_prompts(file) == [
        [system, {"role": "user", "content": "Q"}],
        [system, {"role": "user", "content": "P"}],
        [{"role": "user", "content": "M"}],
    ]
    file.write_text(json.dumps({"prompt": "Q", "images": ["a.png"]}))
    with pytest.raises(UserError, match=r"p.jsonl:1: has 'images', which is not text"):
        read_prompts(file)


# Answers on disk -----------------------------------------------------------------------------------------------------

PROMPTS = [f"question {number}" for number in range(30)]


class Node:
    """A server that answers at once, and what it was asked."""

    name, digest = "node1", "d" * 64

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ask(self, prompt: Prompt, cancel: Cancel) -> Answer:
        self.asked.append(prompt.messages[0]["content"])
        return Answer("text", "", "stop", 1, 0.0, 0.0)

    def probe(self) -> None: ...


class KilledError(Exception):
    """The controller is killed at this point."""


def test_a_killed_collection_asks_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "answers.jsonl", AnswerFile._write
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    questions = Questions(chats, DistillOptions(teacher="t", prompts="-"))

    def cut(self: AnswerFile, data: bytes) -> None:
        if len(self) >= 5:
            write(self, data[:20])
            raise KilledError
        write(self, data)

    monkeypatch.setattr(AnswerFile, "_write", cut)
    with pytest.raises(KilledError), AnswerFile(path) as answers:
        collect_answers(questions, [Node()], answers, print)
    monkeypatch.undo()
    node = Node()
    with AnswerFile(path) as answers:
        left = len(PROMPTS) - len(answers)
        assert answers.repaired == 20 and 0 < left <= len(PROMPTS) - 5
        with pytest.raises(UserError, match="another controller collects answers"):
            AnswerFile(path)
        collect_answers(questions, [node], answers, print)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert Counter(record["messages"][0]["content"] for record in records) == Counter(PROMPTS)
    assert len(node.asked) == left
