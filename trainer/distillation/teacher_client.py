"""A teacher on another host, as a rank uses it: it sends questions, and the answers arrive while the rank computes."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainer.data.packing import IGNORED
from trainer.distillation.teacher_protocol import (
    SILENCE_LIMIT,
    Answer,
    Kind,
    Properties,
    Question,
    answer_limit,
    introduce,
    receive,
    send,
    text_of,
)
from trainer.distributed import TEACHER_ADDRESS, TEACHER_TOKEN
from trainer.method.method_base import places_of
from trainer.models.loss import Teacher, TopProbabilities, at_places
from trainer.strategy import Batch

START_LIMIT = 300.0  # s for a teacher to listen after its ranks have started
LOAD_LIMIT = 3600.0  # s for a teacher to load
RETRY_LIMIT = 30.0  # s for a lost connection to return
CONNECT_LIMIT = 5.0  # s for one attempt to connect
PAUSE = 0.5  # s between two attempts


class TeacherLostError(ConnectionError):
    """The teacher's host no longer answers. A restart of the run may succeed."""


class RemoteTeacher:
    """The teacher on the host `teacher_host`. One question at a time; its answer is a function of the question alone."""

    # Micro-batches that are requested in advance, so that the teacher computes during backward passes.
    ahead = 1

    def __init__(
        self, spec: RunSpec, tokenizer: Any, device: torch.device, waiting: Callable[[str], object] = lambda note: None
    ) -> None:
        """Connect to the teacher, and wait until it has loaded.

        Args:
            tokenizer: tokenizer of the student.
            waiting: called at intervals until then, with what this rank waits for.

        Raises:
            UserError: the run was not started with a teacher.
            TeacherLostError: the teacher does not answer.
        """
        address, _, port = os.environ.get(TEACHER_ADDRESS, "").rpartition(":")
        self._token = os.environ.get(TEACHER_TOKEN, "")
        if not address or not self._token or not port.isdecimal():
            raise UserError(
                "teacher_host: no teacher was started with this run: start the run with train.yml, or omit teacher_host"
            )
        self._spec, self._device, self._vocabulary = spec, device, len(tokenizer)
        self._place = (address, int(port))
        self._name = f"the teacher on {spec.teacher_host} ({address}:{port})"
        self._connection: socket.socket | None = None
        self._thread = ThreadPoolExecutor(1, "teacher")
        note = f"waiting for the teacher on {spec.teacher_host}"
        self.properties = self._retried(lambda: self._connect(LOAD_LIMIT, lambda: waiting(note)), START_LIMIT)
        if self.properties.top_k != spec.teacher_top_k:
            raise TeacherLostError(f"{self._name} belongs to another run: it sends {self.properties.top_k} tokens")

    def judge(self, batch: Batch, weights: torch.Tensor | None = None) -> Teacher:
        """Ask for the most probable tokens at the places with loss of a micro-batch. `weights`: see TeacherLogits."""
        places = places_of(batch)
        if not bool((batch.labels[:, 1:] != IGNORED).any()):  # nothing to ask
            none = torch.full((1, self._spec.teacher_top_k), -torch.inf, device=self._device)
            return at_places(batch.ids.shape, places, torch.zeros_like(none, dtype=torch.int32), none, weights)
        arrays = [tensor.to("cpu", torch.int32).numpy() for tensor in (batch.ids, batch.positions, places)]
        asked = self._thread.submit(self._retried, lambda: self._ask(Question(*arrays)), RETRY_LIMIT)
        return _Pending(asked, batch.ids.shape, places, weights)

    def close(self) -> None:
        """Tell the teacher that training has ended on all ranks."""
        self._thread.shutdown()
        if self._connection:
            with contextlib.suppress(OSError):
                send(self._connection, Kind.END)
        self._disconnect()

    def _retried(self, work: Callable[[], Any], limit: float) -> Any:
        """Return the result of `work`, repeated after a lost connection. Raises TeacherLostError after `limit` seconds."""
        deadline = 0.0
        while True:
            try:
                return work()
            except TeacherLostError:
                raise
            except (OSError, EOFError) as error:  # a ProtocolError is an OSError
                self._disconnect()
                deadline = deadline or time.monotonic() + limit
                if time.monotonic() > deadline:
                    why = str(error) or type(error).__name__
                    raise TeacherLostError(f"{self._name} did not answer for {limit:.0f} s: {why}") from None
            time.sleep(PAUSE)

    def _connect(self, limit: float, waiting: Callable[[], object]) -> Properties:
        """Connect, and return the properties that the teacher reports. `limit`: seconds for it to load."""
        self._connection = socket.create_connection(self._place, CONNECT_LIMIT)
        self._connection.settimeout(SILENCE_LIMIT)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        introduce(self._connection, self._token)
        return Properties.decode(self._await(Kind.READY, 0, limit, waiting))

    def _ask(self, question: Question) -> Answer:
        if self._connection is None:
            self._connect(RETRY_LIMIT, lambda: None)
        assert self._connection is not None
        send(self._connection, Kind.QUESTION, question.encode())
        places, top_k = len(question.places), self._spec.teacher_top_k
        body = self._await(Kind.ANSWER, answer_limit(places, top_k), self._spec.collective_timeout, lambda: None)
        return Answer.decode(body, places=places, top_k=top_k, vocabulary=self._vocabulary)

    def _await(self, wanted: Kind, size: int, limit: float, waiting: Callable[[], object]) -> bytes:
        """Return the body of the expected message; the teacher sends keep-alive messages until then.

        Raises:
            TeacherLostError: it has no answer, or none within `limit` seconds.
        """
        assert self._connection is not None
        deadline = time.monotonic() + limit
        while True:
            kind, body = receive(self._connection, size, wanted, Kind.WAIT, Kind.ERROR)
            if kind == wanted:
                return body
            if kind == Kind.ERROR:
                raise TeacherLostError(f"{self._name} has no answer: {text_of(body)}")
            if time.monotonic() > deadline:
                raise TeacherLostError(f"{self._name} computes for more than {limit:g} s")
            waiting()

    def _disconnect(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None


class _Pending:
    """An answer that the teacher computes."""

    def __init__(
        self, asked: Future[Answer], shape: torch.Size, places: torch.Tensor, weights: torch.Tensor | None
    ) -> None:
        self._asked, self._shape, self._places, self._weights = asked, shape, places, weights
        self.waited = 0.0

    def result(self) -> TopProbabilities:
        """Wait for the answer and return it. Raises TeacherLostError."""
        device = self._places.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # time in which the student computes is not counted as waiting
        began = time.perf_counter()
        answer = self._asked.result()
        self.waited = time.perf_counter() - began
        # Copies, because torch warns about arrays of received bytes, which are not writable.
        ids, values = torch.tensor(answer.ids, device=device), torch.tensor(answer.values, device=device)
        return at_places(self._shape, self._places, ids, values, self._weights)
