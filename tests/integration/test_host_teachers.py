"""A model folder teaches: hosts write the answers with transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.common.errors import UserError
from trainer.data.samples import read_samples
from trainer.data.tiny import make_tiny
from trainyard.ollama.answers import AnswerFile
from trainyard.ollama.collect import Questions
from trainyard.ollama.distill_options import DistillOptions
from trainyard.run.launch_options import LaunchOptions
from trainyard.wire.connection import Host, HostConnection, RemoteError
from trainyard.wire.openssh import LocalTransport
from trainyard.workflows import host_teachers
from trainyard.workflows.host_teachers import HostTeachers


class Bed:
    """A cluster of folders of this machine, of which some fail."""

    def __init__(self, folder: Path, hosts: int) -> None:
        self.folder, self.failing, self.lines = folder, set[str](), list[str]()
        self.hosts = [Host(f"node{n}", "127.0.0.1", str(folder / f"node{n}"), sys.executable) for n in range(hosts)]
        for host in self.hosts:
            Path(host.data_dir).mkdir()

    def connect(self, given: Host | str) -> HostConnection:
        bed, host = self, next(each for each in self.hosts if given in (each, each.name))

        class Connection(HostConnection):
            def call(self, verb: str, *arguments: Any, **more: Any) -> Any:
                if verb == "evaluate" and host.name in bed.failing:
                    raise RemoteError("the connection was lost")
                return super().call(verb, *arguments, **more)

        return Connection(host, LocalTransport())

    def collect(self, model: Path, questions: Questions) -> dict[str, dict[str, Any]]:
        """Return the records of all answers by their keys."""
        teachers = HostTeachers(self, LaunchOptions(), str(model), self.folder, self.lines.append)  # type: ignore[arg-type]
        with AnswerFile(self.folder / "answers.jsonl") as answers:
            self.lines.append(teachers.collect(questions, teachers.nodes, answers, self.lines.append))
            return {record["key"]: record for record in answers.records()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rows = [{"instruction": f"question {n}", "output": f"the answer is {n}"} for n in range(30)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "teacher"
    make_tiny(read_samples(tmp_path / "d.jsonl"), folder, 1)
    return folder


def questions(count: int, **options: Any) -> Questions:
    chats = [[{"role": "user", "content": " ".join(["question"] * (1 + n % 5)) + f" {n}"}] for n in range(count)]
    return Questions(chats, DistillOptions(teacher="x", prompts="-", max_tokens=8, **options))


@pytest.mark.slow
@pytest.mark.long
def test_any_number_of_hosts_writes_the_same_answers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_teachers, "BATCH", 4)
    monkeypatch.setattr(host_teachers, "CHUNKS", 1)
    asked = questions(18, samples=2, temperature=0.8)
    beds = []
    for number in (1, 2):
        (tmp_path / f"bed{number}").mkdir()
        beds.append(Bed(tmp_path / f"bed{number}", number))
    one, two = (bed.collect(model, asked) for bed in beds)
    assert len(one) == 36 and {key: record["text"] for key, record in one.items()} == {
        key: record["text"] for key, record in two.items()
    }
    assert {record["node"] for record in two.values()} == {"node0", "node1"}
    samples: list[set[str]] = [{record["text"] for record in one.values() if record["sample"] == n} for n in (0, 1)]
    assert samples[0] != samples[1], "drawn with another seed"

    # A host that fails is left out, and what it was asked is answered by the others. What is known is not asked again.
    (tmp_path / "bed2/answers.jsonl").unlink()
    beds[1].failing = {"node1"}
    again = beds[1].collect(model, asked)
    assert {record["node"] for record in again.values()} == {"node0"} and again.keys() == one.keys()
    assert any("node1 does not teach any more: the connection was lost" in line for line in beds[1].lines)
    beds[1].failing = {"node0", "node1"}
    assert beds[1].collect(model, asked) == again and "36 of 36 answers are already in" in beds[1].lines[-1]
    with pytest.raises(UserError, match=r"teacher: no host answers \(node0: the connection was lost\): run the same"):
        beds[1].collect(model, questions(4, temperature=0.0))


def test_gpus_come_first_and_a_host_without_room_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bed").mkdir()
    bed = Bed(tmp_path / "bed", 3)

    def choose(*machines: tuple[int, int]) -> list[str]:
        found = {
            host.name: {"gpus": [{"memory_mib": gpu}] * bool(gpu), "memory_mib": memory}
            for host, (gpu, memory) in zip(bed.hosts, machines, strict=False)
        }
        monkeypatch.setattr(host_teachers, "gather_hardware", lambda *_: found)
        bed.lines.clear()
        teachers = HostTeachers(bed, LaunchOptions(), str(model), tmp_path, bed.lines.append)  # type: ignore[arg-type]
        return [node.name for node in teachers.nodes]

    assert choose((0, 8000), (24576, 8000), (24576, 8000)) == ["node1", "node2"]
    assert "node0 does not teach: other hosts have GPUs with room" in bed.lines
    assert choose((0, 8000), (1, 8000)) == ["node0"]
    assert bed.lines[-2:] == [
        "node1 does not teach: 1 MiB of its GPU are too few",
        "node2 does not teach: it does not answer",
    ]
    with pytest.raises(UserError, match=r"teacher: no host has room for the [1-9]"):
        choose((0, 1), (1, 8000))
