"""The messages between ranks and a teacher on another host. No torch.

A message is a kind (1 byte), the length of its body (4 bytes, big-endian), and the body. A connection begins with mutual proofs
that both sides know the run's token (HMAC-SHA256 over a random number of each side), so that the token is never sent. Then the
teacher sends its properties, and answers one question after another. All numbers in a body are little-endian and 4 bytes long.

The other side is not trusted: every length, shape and value is checked before it is used.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import secrets
import socket
import struct
from dataclasses import dataclass

import numpy as np

from trainer.common.formats import printable
from trainer.config.presets import MAX_ANSWER, MAX_TEACHER_TOP_K

MAGIC = b"trainyard teacher 1\n"
NONCE = 32  # bytes
MAX_TEXT = 4096  # bytes of a message that is not a question or an answer
SILENCE_LIMIT = 30.0  # s without a message after which a connection is broken
KEEPALIVE = 5.0  # s between two messages of a teacher that loads or computes
_HEADER = struct.Struct("!BI")
_QUESTION, _ANSWER = struct.Struct("<III"), struct.Struct("<II")
_ROUNDING = 1e-3  # by which a log-probability may exceed 0


class ProtocolError(ConnectionError):
    """The other side violated the protocol, or does not have the run's token."""


class Kind(enum.IntEnum):
    """What a message is."""

    CHALLENGE = 1  # of the teacher: MAGIC and a random number
    PROOF = 2  # of the rank: a random number, and the proof of the token
    ACCEPTED = 3  # of the teacher: its proof of the token
    WAIT = 4  # of the teacher: it is alive, and loads or computes
    READY = 5  # of the teacher: its properties
    QUESTION = 6
    ANSWER = 7
    ERROR = 8  # of the teacher: why it has no answer, as text
    END = 9  # of the rank: training has ended on all ranks


@dataclass(frozen=True)
class Properties:
    """The properties that a teacher reports.

    Attributes:
        vocabulary: the digest of its tokens, see `vocabulary_digest`.
        isolates_samples: whether it keeps the samples of a packed row apart.
        top_k: number of tokens of an answer at each place.
    """

    vocabulary: str
    isolates_samples: bool
    top_k: int

    def encode(self) -> bytes:
        """Return the body of a message."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def decode(cls, body: bytes) -> Properties:
        """Return what a body describes. Raises ProtocolError."""
        try:
            values = json.loads(body)
            found = cls(values["vocabulary"], values["isolates_samples"], values["top_k"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ProtocolError("sent properties that are not a JSON object with their names") from None
        types = (type(found.vocabulary), type(found.isolates_samples), type(found.top_k))
        if types != (str, bool, int) or len(found.vocabulary) != 64 or not 0 < found.top_k <= MAX_TEACHER_TOP_K:
            raise ProtocolError("sent properties that are not valid")
        return found


@dataclass(frozen=True)
class Question:
    """A micro-batch. `ids`, `positions`: int32 [rows, T]; `places`: int32 [n], ascending places of the flattened micro-batch."""

    ids: np.ndarray
    positions: np.ndarray
    places: np.ndarray

    def encode(self) -> bytes:
        """Return the body of a message."""
        parts = [array.astype("<i4").tobytes() for array in (self.ids, self.positions, self.places)]
        return b"".join([_QUESTION.pack(*self.ids.shape, len(self.places)), *parts])

    @classmethod
    def decode(cls, body: bytes, *, tokens: int, length: int, vocabulary: int) -> Question:
        """Return what a body describes.

        Args:
            tokens: maximum number of places.
            length: maximum length of a row; positions are below it.
            vocabulary: number of token ids.

        Raises:
            ProtocolError: it is not a valid question within these limits.
        """
        if len(body) < _QUESTION.size:
            raise ProtocolError("sent a question without its shape")
        rows, width, count = _QUESTION.unpack_from(body)
        if not (0 < width <= length and 0 < rows * width <= min(tokens, MAX_ANSWER) and 0 < count <= rows * width):
            raise ProtocolError(f"sent a question of {rows} rows of {width} tokens, {count} of them with loss")
        if len(body) != _QUESTION.size + 4 * (2 * rows * width + count):
            raise ProtocolError("sent a question whose length is not that of its shape")
        numbers = np.frombuffer(body, "<i4", offset=_QUESTION.size)
        ids, positions, places = np.split(numbers, [rows * width, 2 * rows * width])
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise ProtocolError("sent a token that the teacher does not have")
        if positions.min() < 0 or positions.max() >= length:
            raise ProtocolError("sent a position outside of the row")
        if places[0] < 0 or places[-1] >= rows * width or (np.diff(places) <= 0).any():
            raise ProtocolError("sent places that are not ascending places of the micro-batch")
        return cls(ids.reshape(rows, width), positions.reshape(rows, width), places)


@dataclass(frozen=True)
class Answer:
    """The most probable tokens at every place: `ids`, int32 [n, K]; `values`, float32 [n, K], see `TopProbabilities`."""

    ids: np.ndarray
    values: np.ndarray

    def encode(self) -> bytes:
        """Return the body of a message."""
        return b"".join(
            [_ANSWER.pack(*self.ids.shape), self.ids.astype("<i4").tobytes(), self.values.astype("<f4").tobytes()]
        )

    @classmethod
    def decode(cls, body: bytes, *, places: int, top_k: int, vocabulary: int) -> Answer:
        """Return what a body describes. Raises ProtocolError if it does not answer a question of `places` places."""
        count = places * top_k
        if len(body) != _ANSWER.size + 8 * count or _ANSWER.unpack_from(body) != (places, top_k):
            raise ProtocolError("sent an answer whose shape is not that of the question")
        ids = np.frombuffer(body, "<i4", count, _ANSWER.size).reshape(places, top_k)
        values = np.frombuffer(body, "<f4", count, _ANSWER.size + 4 * count).reshape(places, top_k)
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise ProtocolError("sent a token that the student does not have")
        # The comparison is false for NaN. Only tokens after the first may be missing (-inf).
        if not (np.isfinite(values[:, 0]).all() and (values <= _ROUNDING).all()):
            raise ProtocolError("sent values that are not log-probabilities")
        if (values[:, 1:] > values[:, :-1]).any():
            raise ProtocolError("sent log-probabilities that are not in descending order")
        return cls(ids, values)


def vocabulary_digest(tokens: dict[str, int]) -> str:
    """Return the SHA-256 of {token: id}, as 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(sorted(tokens.items())).encode()).hexdigest()


# Messages ---------------------------------------------------------------------------------------------------------------


def send(connection: socket.socket, kind: Kind, body: bytes = b"") -> None:
    """Send a message. Raises OSError."""
    connection.sendall(_HEADER.pack(kind, len(body)))
    connection.sendall(body)


def receive(connection: socket.socket, limit: int, *kinds: Kind) -> tuple[Kind, bytes]:
    """Return the next message.

    Args:
        limit: maximum bytes of its body.
        kinds: permitted kinds of the message.

    Raises:
        ProtocolError: it is something else, or longer.
        EOFError: the connection was closed before a message.
        OSError: it is broken.
    """
    number, length = _HEADER.unpack(_exactly(connection, _HEADER.size, between=True))
    if number not in kinds:
        raise ProtocolError(f"sent a message of kind {number}, expected {' or '.join(kind.name for kind in kinds)}")
    kind = Kind(number)
    if length > (limit if kind in (Kind.QUESTION, Kind.ANSWER) else MAX_TEXT):
        raise ProtocolError(f"sent a message of {length} bytes")
    return kind, _exactly(connection, length)


def _exactly(connection: socket.socket, count: int, *, between: bool = False) -> bytes:
    """Return `count` bytes. Raises EOFError if the connection ends before the first one and `between` messages; OSError."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(1 << 20, count - len(parts)))
        if not part:
            if between and not parts:
                raise EOFError("closed the connection")
            raise ProtocolError("closed the connection within a message")
        parts += part
    return bytes(parts)


def question_limit(tokens: int) -> int:
    """Return the maximum bytes of a question of `tokens` tokens."""
    return _QUESTION.size + 12 * min(tokens, MAX_ANSWER)


def answer_limit(places: int, top_k: int) -> int:
    """Return the bytes of an answer."""
    return _ANSWER.size + 8 * places * top_k


def text_of(body: bytes) -> str:
    """Return the text of a message as one printable line."""
    return printable(body.decode(errors="replace"), 500)


# Proofs of the token ----------------------------------------------------------------------------------------------------


def _proof(token: str, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(token.encode(), MAGIC + side + first + second, "sha256")


def admit(connection: socket.socket, token: str) -> None:
    """Let a rank prove that it knows the token, and prove it to the rank. Raises ProtocolError, EOFError, OSError."""
    mine = secrets.token_bytes(NONCE)
    send(connection, Kind.CHALLENGE, MAGIC + mine)
    body = receive(connection, MAX_TEXT, Kind.PROOF)[1]
    theirs = body[:NONCE]
    if not hmac.compare_digest(body[NONCE:], _proof(token, b"rank", mine, theirs)):
        raise ProtocolError("does not know the token of the run")
    send(connection, Kind.ACCEPTED, _proof(token, b"teacher", theirs, mine))


def introduce(connection: socket.socket, token: str) -> None:
    """Prove to a teacher that this rank knows the token, and check its proof. Raises ProtocolError, EOFError, OSError."""
    body = receive(connection, MAX_TEXT, Kind.CHALLENGE)[1]
    if len(body) != len(MAGIC) + NONCE or not body.startswith(MAGIC):
        raise ProtocolError("is not a teacher of this version")
    mine, theirs = secrets.token_bytes(NONCE), body[len(MAGIC) :]
    send(connection, Kind.PROOF, mine + _proof(token, b"rank", theirs, mine))
    if not hmac.compare_digest(
        receive(connection, MAX_TEXT, Kind.ACCEPTED)[1], _proof(token, b"teacher", mine, theirs)
    ):
        raise ProtocolError("does not know the token of the run")
