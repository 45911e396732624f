"""The messages between ranks and a teacher on another host: malformed messages and peers without the token are refused."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.distillation import teacher_protocol
from trainer.distillation.teacher_protocol import (
    MAGIC,
    Answer,
    Kind,
    Properties,
    ProtocolError,
    Question,
    admit,
    answer_limit,
    introduce,
    question_limit,
    receive,
    send,
)
from trainer.launch.teacher_server import TeacherServer
from trainer.spec import make_spec

LIMITS = {"tokens": 64, "length": 16, "vocabulary": 100}
QUESTION = Question(
    np.arange(24, dtype=np.int32).reshape(2, 12), np.tile(np.arange(12, dtype=np.int32), (2, 1)), np.array([0, 5, 22])
)
VALUES = np.array([[-0.5, -1.0, -np.inf], [-0.1, -0.1, -9.0]], np.float32)
ANSWER = Answer(np.array([[3, 1, 0], [99, 2, 7]], np.int32), VALUES)
WANTED = {"places": 2, "top_k": 3, "vocabulary": 100}
PROPERTIES = Properties("0" * 64, True, 20)


def test_messages_survive_the_way() -> None:
    question = Question.decode(QUESTION.encode(), **LIMITS)
    for name in ("ids", "positions", "places"):
        assert np.array_equal(getattr(question, name), getattr(QUESTION, name))
    assert len(QUESTION.encode()) <= question_limit(24)
    answer = Answer.decode(ANSWER.encode(), **WANTED)
    assert np.array_equal(answer.ids, ANSWER.ids) and np.array_equal(answer.values, VALUES)
    assert len(ANSWER.encode()) == answer_limit(2, 3)
    assert Properties.decode(PROPERTIES.encode()) == PROPERTIES


def changed(**arrays: Any) -> bytes:
    return Question(**({name: getattr(QUESTION, name) for name in ("ids", "positions", "places")} | arrays)).encode()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "without its shape"),
        (struct.pack("<III", 2**16, 2**16, 1), "65536 rows"),
        (struct.pack("<III", 0, 12, 1), "0 rows"),
        (struct.pack("<III", 1, 17, 1), "17 tokens"),
        (struct.pack("<III", 6, 12, 1), "6 rows"),
        (struct.pack("<III", 2, 12, 25) + bytes(4 * (48 + 25)), "25 of them"),
        (QUESTION.encode()[:-1], "whose length"),
        (QUESTION.encode() + b"\0", "whose length"),
        (changed(ids=QUESTION.ids + 90), "a token that the teacher does not have"),
        (changed(ids=QUESTION.ids - 1), "a token that the teacher does not have"),
        (changed(positions=QUESTION.positions + 5), "a position"),
        (changed(positions=QUESTION.positions - 1), "a position"),
        (changed(places=np.array([0, 5, 24])), "places"),
        (changed(places=np.array([0, 5, 5])), "places"),
        (changed(places=np.array([-1, 5, 6])), "places"),
    ],
)
def test_a_malformed_question_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        Question.decode(body, **LIMITS)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "shape"),
        (ANSWER.encode()[:-1], "shape"),
        (Answer(ANSWER.ids[:1], VALUES[:1]).encode(), "shape"),
        (Answer(ANSWER.ids.reshape(3, 2), VALUES.reshape(3, 2)).encode(), "shape"),
        (Answer(ANSWER.ids + 1, VALUES).encode(), "a token that the student does not have"),
        (Answer(ANSWER.ids - 1, VALUES).encode(), "a token that the student does not have"),
        (Answer(ANSWER.ids, VALUES * np.nan).encode(), "not log-probabilities"),
        (Answer(ANSWER.ids, VALUES * np.array([1, np.nan, 1], np.float32)).encode(), "not log-probabilities"),
        (Answer(ANSWER.ids, -VALUES).encode(), "not log-probabilities"),
        (Answer(ANSWER.ids, np.full_like(VALUES, -np.inf)).encode(), "not log-probabilities"),
        (Answer(ANSWER.ids, VALUES[:, ::-1]).encode(), "not log-probabilities"),
        (Answer(ANSWER.ids, VALUES[:, [1, 0, 2]]).encode(), "descending"),
    ],
)
def test_a_malformed_answer_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        Answer.decode(body, **WANTED)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[" * 5000,
        *(
            Properties(*values).encode()
            for values in (("0" * 63, True, 20), ("0" * 64, 1, 20), ("0" * 64, True, 0), ("0" * 64, True, 10**9))
        ),
    ],
)
def test_malformed_properties_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        Properties.decode(body)


@given(st.binary(max_size=400), st.integers(0, 300), st.booleans())
def test_no_bytes_do_more_than_raise_a_protocol_error(noise: bytes, at: int, whole: bool) -> None:
    for sound, decode, limits in (
        (QUESTION.encode(), Question.decode, LIMITS),
        (ANSWER.encode(), Answer.decode, WANTED),
    ):
        body = noise if whole else sound[:at] + noise[:8] + sound[at + 8 :]
        try:
            found: Any = decode(body, **limits)  # type: ignore[operator]
        except ProtocolError:
            continue
        assert found.ids.min() >= 0 and found.ids.max() < 100


# Connections --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(5)
    yield ends
    for end in ends:
        end.close()


def meet(pair: tuple[socket.socket, socket.socket], teacher: str, rank: str) -> list[BaseException | None]:
    """Let both sides prove their token; return their errors."""
    found: list[BaseException | None] = [None, None]

    def side(place: int, work: Any, token: str) -> None:
        try:
            work(pair[place], token)
        except (OSError, EOFError) as error:
            found[place] = error
            pair[place].close()

    threads = [
        threading.Thread(target=side, args=arguments) for arguments in ((0, admit, teacher), (1, introduce, rank))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    return found


def test_both_sides_need_the_token_and_never_send_it(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []

    def recorded(connection: socket.socket, kind: Kind, body: bytes = b"") -> None:
        sent.append(body)
        send(connection, kind, body)

    monkeypatch.setattr(teacher_protocol, "send", recorded)
    assert meet(pair, "the token", "the token") == [None, None]
    assert len(sent) == 3 and not any(b"the token" in body for body in sent)
    first = list(sent)
    assert meet(pair, "the token", "the token") == [None, None]
    assert not set(first) & set(sent[3:]), "a recorded proof is worth nothing later"
    challenge, proof, accepted = first
    teacher, rank = pair
    send(rank, Kind.PROOF, proof)
    with pytest.raises(ProtocolError, match="does not know the token"):
        admit(teacher, "the token")
    receive(rank, 4096, Kind.CHALLENGE)
    send(teacher, Kind.CHALLENGE, challenge)
    send(teacher, Kind.ACCEPTED, accepted)
    with pytest.raises(ProtocolError, match="does not know the token"):
        introduce(rank, "the token")


def test_a_teacher_without_the_token_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    teacher, rank = pair
    send(teacher, Kind.CHALLENGE, MAGIC + bytes(32))
    send(teacher, Kind.ACCEPTED, bytes(32))
    with pytest.raises(ProtocolError, match="does not know the token"):
        introduce(rank, "the token")
    kind, proof = receive(teacher, 4096, Kind.PROOF)
    assert kind == Kind.PROOF and b"the token" not in proof


def test_a_message_of_another_kind_or_size_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    for header in (struct.pack("!BI", 99, 0), struct.pack("!BI", Kind.END, 0), struct.pack("!BI", Kind.ANSWER, 101)):
        one.sendall(header)
        with pytest.raises(ProtocolError, match="sent a message of"):
            receive(other, 100, Kind.ANSWER)
    one.sendall(struct.pack("!BI", Kind.ANSWER, 10) + b"12345")
    one.close()
    with pytest.raises(ProtocolError, match="within a message"):
        receive(other, 100, Kind.ANSWER)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TeacherServer, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    spec = make_spec(
        {"teacher": "t", "teacher_host": "h", "distill_alpha": 1, "seq_length": 16, "batch_size": 2}, "test"
    )
    made = TeacherServer(listener, "the token", spec)
    made.ready(PROPERTIES, 100)
    yield made, listener.getsockname()[1]


def connected(port: int, token: str = "the token") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 5)
    introduce(connection, token)
    assert Properties.decode(receive(connection, 4096, Kind.READY)[1]) == PROPERTIES
    return connection


def test_the_server_names_a_bad_question_and_drops_the_rank(server: tuple[TeacherServer, int]) -> None:
    with connected(server[1]) as rank:
        send(rank, Kind.QUESTION, changed(places=np.array([5, 5, 5])))
        kind, text = receive(rank, 4096, Kind.ERROR)
        assert kind == Kind.ERROR and text == b"the rank sent places that are not ascending places of the micro-batch"
        with pytest.raises(EOFError):
            receive(rank, 4096, Kind.ANSWER)
    assert server[0].questions.empty() and not server[0].finished


def test_the_server_ends_when_training_has_ended_and_all_ranks_have_left(server: tuple[TeacherServer, int]) -> None:
    teacher, port = server
    with connected(port) as first, connected(port) as second:
        send(first, Kind.QUESTION, QUESTION.encode())
        question, pending = teacher.questions.get(timeout=5)
        pending.set_result(ANSWER)
        assert np.array_equal(question.ids, QUESTION.ids)
        assert receive(first, answer_limit(2, 3), Kind.ANSWER)[1] == ANSWER.encode()
        send(first, Kind.END)
        with pytest.raises(EOFError):
            receive(first, 4096, Kind.ANSWER)
        assert not teacher.finished and teacher.idle_seconds == 0
        send(second, Kind.END)
        with pytest.raises(EOFError):
            receive(second, 4096, Kind.ANSWER)
    for _ in range(500):
        if teacher.finished:
            break
        threading.Event().wait(0.01)
    assert teacher.finished


def test_the_server_refuses_a_rank_without_the_token(
    server: tuple[TeacherServer, int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((OSError, EOFError)):
        connected(server[1], "another")
    assert server[0].idle_seconds > 0
    assert "refused a connection from 127.0.0.1: does not know the token of the run" in capsys.readouterr().err
