"""Log-probabilities of a teacher's tokens: request them, check them, keep them, and align them with the text of an
answer.

Ollama gives them from 0.12.11 on: with `logprobs` and `top_logprobs` in the request, a line of the streamed reply has
`logprobs`, a list with `token`, `logprob`, `bytes` and `top_logprobs` (https://github.com/ollama/ollama/pull/12899,
/pull/13068). Tokens that are not complete UTF-8 characters arrive as U+FFFD (/issues/13497), so that their bytes are unknown.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

from trainer.generation.ollama_client import MAX_ANSWER

FIRST_VERSION = (0, 12, 11)  # of Ollama, whose older versions ignore the request silently
TOP = 20  # alternatives of each token; the API gives no more
_TOKEN_REPLY = 8 << 10  # bytes of a reply for each token, of which about 3000 are used
_MAX_REPLY = 256 << 20  # bytes of a reply
_MAX_TOKEN = 1024  # bytes of a token
_MAX_PACKED = 256 << 20  # bytes of unpacked log-probabilities
_UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()
_DIGITS = 4  # after the point; 1e-4 changes a probability by 0.01 %

Token = tuple[bytes, dict[bytes, float]]  # a token, and the log-probabilities of its alternatives and itself


class LogprobReader:
    """Collects the log-probabilities of one streamed answer from an untrusted server.

    One malformed entry makes all unusable: the answer then has none.
    """

    def __init__(self) -> None:
        self._tokens: list[Token] = []
        self._malformed = False

    def request(self, max_tokens: int) -> dict[str, Any]:
        """Return the arguments of OllamaClient.chat for an answer of at most `max_tokens`."""
        keep = min(_MAX_REPLY, MAX_ANSWER + max_tokens * _TOKEN_REPLY)
        return {"extra": {"logprobs": True, "top_logprobs": TOP}, "read": self.add, "keep": keep}

    def add(self, line: Mapping[str, Any]) -> None:
        """Read a line of the reply."""
        entries = line.get("logprobs")
        if entries is None or self._malformed:
            return
        try:
            self._tokens += [_token(entry) for entry in entries]
        except (TypeError, ValueError, LookupError, AttributeError):
            self._malformed, self._tokens = True, []

    def packed(self) -> str:
        """Return all as compressed text for the file of answers; empty if there are none."""
        if not self._tokens:
            return ""
        plain = [[token.hex(), {other.hex(): value for other, value in top.items()}] for token, top in self._tokens]
        return base64.b64encode(zlib.compress(json.dumps(plain, separators=(",", ":")).encode())).decode()


def _token(entry: Any) -> Token:
    """Return a token of a reply. Raises ValueError, TypeError, LookupError or AttributeError."""
    others = entry["top_logprobs"]
    if not isinstance(others, list) or not 1 <= len(others) <= TOP:
        raise ValueError("expected 1 to 20 alternatives")
    top: dict[bytes, float] = {}
    for other in others:
        token, value = _bytes(other), other["logprob"]
        if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < 1e-3:
            raise ValueError("expected a log-probability")
        if token and _UNKNOWN not in token:  # several tokens may look like it
            top.setdefault(token, round(min(0.0, value), _DIGITS))
    return _bytes(entry), top


def _bytes(entry: Any) -> bytes:
    given = entry.get("bytes")
    token = entry["token"].encode() if given is None else bytes(given) if isinstance(given, list) else None
    if token is None or len(token) > _MAX_TOKEN:
        raise ValueError("expected the bytes of a token")
    return token


def unpack(packed: object) -> list[Token]:
    """Return what `LogprobReader.packed` returned; nothing if it is damaged."""
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(str(packed), validate=True), _MAX_PACKED)
        return [
            (bytes.fromhex(token), {bytes.fromhex(other): float(value) for other, value in top.items()})
            for token, top in json.loads(data)
        ]
    except (binascii.Error, zlib.error, ValueError, TypeError, AttributeError, RecursionError):
        return []


def align(tokens: list[Token], text: str) -> list[dict[str, Any]] | None:
    """Return the tokens that make up a text, as `teacher_logprobs` of a training row, or None if no run of tokens does.

    The reply has more tokens than the text where the teacher thinks before it answers, or ends with spaces.

    Returns:
        for each token `token`, its bytes in hex, and `top`, the log-probabilities by the bytes in hex.
    """
    wanted = text.encode()
    start = b"".join(token for token, _ in tokens).rfind(wanted) if wanted else -1
    ends = list(itertools.accumulate((len(token) for token, _ in tokens), initial=0))
    try:
        first, last = ends.index(start), ends.index(start + len(wanted))
    except ValueError:
        return None
    return [
        {"token": token.hex(), "top": {other.hex(): value for other, value in top.items()}}
        for token, top in tokens[first:last]
        if token
    ]
