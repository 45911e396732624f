"""A rank with a teacher on another host: answers arrive in advance, the rank reopens a lost connection, and names a
lost teacher."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from trainer.common.errors import UserError
from trainer.data.packing import IGNORED
from trainer.distillation import teacher_client
from trainer.distillation.teacher_client import RemoteTeacher, TeacherLostError
from trainer.distillation.teacher_protocol import Answer, Properties, Question, vocabulary_digest
from trainer.distributed import TEACHER_ADDRESS, TEACHER_TOKEN
from trainer.launch.teacher_server import TeacherServer
from trainer.spec import make_spec
from trainer.strategy import Batch

FIELDS = {"teacher": "t", "teacher_host": "node3", "teacher_top_k": 2, "distill_alpha": 1, "seq_length": 16}
SPEC = make_spec(FIELDS | {"batch_size": 2}, "test")


class Tokens:
    """A tokenizer of 100 tokens."""

    def __len__(self) -> int:
        return 100

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(100)}


class Answering:
    """A real server whose model is a rule: the most probable tokens at a place are the token there and the next one."""

    def __init__(self, port: int = 0) -> None:
        self.listener = socket.create_server(("127.0.0.1", port))
        self.port = self.listener.getsockname()[1]
        self.server = TeacherServer(self.listener, "the token", SPEC)
        self.asked: list[Question] = []
        self.cut = False  # cut the connection instead of the next answer
        self.go = threading.Event()
        self.go.set()
        threading.Thread(target=self._answer, daemon=True).start()

    def ready(self) -> None:
        self.server.ready(Properties(vocabulary_digest(Tokens().get_vocab()), False, 2), 100)

    def _answer(self) -> None:
        while True:
            question, pending = self.server.questions.get()
            self.go.wait(10)
            self.asked.append(question)
            if self.cut:
                self.cut = False
                pending.set_exception(OSError("cut"))
                continue
            token = question.ids.reshape(-1)[question.places]
            values = np.tile(np.array([-0.5, -1.0], np.float32), (len(token), 1))
            pending.set_result(Answer(np.stack([token, (token + 1) % 100], 1).astype(np.int32), values))


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answering]:
    made = Answering()
    monkeypatch.setenv(TEACHER_ADDRESS, f"127.0.0.1:{made.port}")
    monkeypatch.setenv(TEACHER_TOKEN, "the token")
    monkeypatch.setattr(teacher_client, "PAUSE", 0.02)
    monkeypatch.setattr(teacher_client, "RETRY_LIMIT", 0.3)
    monkeypatch.setattr(teacher_client, "START_LIMIT", 0.3)
    yield made


def batch(shift: int = 0) -> Batch:
    ids = torch.arange(24).view(2, 12) + shift
    labels = torch.full_like(ids, IGNORED)
    labels[0, 4:7], labels[1, 11] = ids[0, 4:7], ids[1, 11]
    return Batch(ids, torch.arange(12).repeat(2, 1), labels)


def remote(waiting: Any = lambda note: None) -> RemoteTeacher:
    return RemoteTeacher(SPEC, Tokens(), torch.device("cpu"), waiting)


def check(found: Any, shift: int = 0) -> None:
    """The answer for a token with loss is at the position of that token, and belongs to the previous token."""
    top = found.result()
    taught = (top.values[..., 0] > -torch.inf).nonzero().tolist()
    assert taught == [[0, 4], [0, 5], [0, 6], [1, 11]]
    assert top.ids[0, 4].tolist() == [3 + shift, 4 + shift] and top.ids[1, 11].tolist() == [22 + shift, 23 + shift]
    assert top.values[0, 4].tolist() == [-0.5, -1.0]


def test_answers_are_at_the_places_of_their_tokens(answering: Answering) -> None:
    answering.ready()
    teacher = remote()
    assert not teacher.properties.isolates_samples
    check(teacher.judge(batch()))
    answering.go.clear()
    first, second = teacher.judge(batch(7)), teacher.judge(batch(3))  # neither waits
    answering.go.set()
    check(second, 3)
    check(first, 7)
    weights = torch.ones(4)
    assert teacher.judge(batch(), weights).result().weights is weights  # type: ignore[union-attr]
    teacher.close()


def test_the_wait_for_an_answer_does_not_count_as_computation(answering: Answering) -> None:
    answering.ready()
    answering.go.clear()
    pending: Any = remote().judge(batch())
    threading.Timer(0.3, answering.go.set).start()
    check(pending)
    assert 0.2 < pending.waited < 10, "the strategy subtracts it from the time of the forward pass"
    pending.result()
    assert pending.waited < 0.1


def test_a_batch_without_loss_asks_nothing(answering: Answering) -> None:
    answering.ready()
    empty = batch()._replace(labels=torch.full((2, 12), IGNORED))
    top: Any = remote().judge(empty)
    assert not (top.values > -torch.inf).any() and top.ids.shape == (2, 12, 2) and not answering.asked


def test_a_rank_waits_while_the_teacher_loads(answering: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.launch.teacher_server.KEEPALIVE", 0.02)
    notes: list[str] = []

    def waiting(note: str) -> None:
        notes.append(note)
        answering.ready()

    remote(waiting)
    assert notes[0] == "waiting for the teacher on node3"


def test_a_lost_connection_returns_with_the_same_question(answering: Answering) -> None:
    answering.ready()
    teacher = remote()
    answering.cut = True
    check(teacher.judge(batch()))
    one, again = answering.asked
    assert np.array_equal(one.ids, again.ids) and np.array_equal(one.places, again.places)


def test_a_lost_teacher_is_named(answering: Answering) -> None:
    answering.ready()
    teacher = remote()
    answering.cut = True
    teacher._place = ("127.0.0.1", 1)  # nobody listens there
    found: Any = teacher.judge(batch())
    with pytest.raises(
        TeacherLostError, match=r"^the teacher on node3 \(127.0.0.1:\d+\) did not answer for 0 s: .*refused"
    ):
        found.result()


def test_a_run_that_was_not_started_with_a_teacher(answering: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEACHER_TOKEN, "another")
    with pytest.raises(TeacherLostError, match="did not answer for 0 s"):
        remote()
    monkeypatch.delenv(TEACHER_TOKEN)
    with pytest.raises(UserError, match="no teacher was started with this run"):
        remote()
