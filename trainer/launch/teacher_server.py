"""The teacher of a run on a separate host. It answers the questions of all ranks, one after another.

Usage: ``python -m trainer.launch.teacher_server SPEC.yml --run-dir DIR --rank N``, with the address and the run's token in the environment
(TEACHER_ADDRESS, TEACHER_TOKEN). It listens on that address for the hosts of the run only, and ends when training has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.common.errors import UserError
from trainer.common.lazy import LazyModule
from trainer.config import RunSpec
from trainer.distillation.teacher_protocol import (
    KEEPALIVE,
    Answer,
    Kind,
    Properties,
    Question,
    admit,
    question_limit,
    receive,
    send,
    vocabulary_digest,
)
from trainer.distributed import TEACHER_ADDRESS, TEACHER_TOKEN
from trainer.distributed.listeners import listen
from trainer.records.telemetry import Heartbeat
from trainer.spec import read_spec

if TYPE_CHECKING:
    import torch

    from trainer.distillation.teacher import TeacherModel
else:
    torch = LazyModule("torch")  # the first heartbeat is written before it is imported

ADMIT_LIMIT = 10.0  # s for a rank to prove that it knows the token
IDLE_LIMIT = 900.0  # s without a connection after which the teacher exits, because its ranks have exited
MAX_CONNECTIONS = 4096
MAX_REFUSALS = 20  # refused connections that the log names
TICK = 0.2  # s between two checks of the connections
# A host that vanished is noticed after about 30 s; see tcp(7).
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


class TeacherServer:
    """The connections of the ranks. Each has a thread; `questions` are for the thread that owns the model."""

    def __init__(self, server: socket.socket, token: str, spec: RunSpec) -> None:
        self.questions: queue.Queue[tuple[Question, Future[Answer]]] = queue.Queue()
        self._server, self._token, self._spec = server, token, spec
        self._lock = threading.Lock()
        self._connections = self._open = self._refused = 0
        self._ended = False
        self._last_open = time.monotonic()
        self._loaded = threading.Event()
        self._properties, self._embeddings = b"", 0
        threading.Thread(target=self._accept, daemon=True).start()

    def ready(self, properties: Properties, embeddings: int) -> None:
        """Begin to take questions. `embeddings`: number of token ids that the teacher accepts."""
        self._properties, self._embeddings = properties.encode(), embeddings
        self._last_open = time.monotonic()
        self._loaded.set()

    @property
    def finished(self) -> bool:
        """Whether training has ended and all ranks have left."""
        with self._lock:
            return self._ended and not self._open

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last rank left; 0 while one is connected."""
        with self._lock:
            return 0.0 if self._open else time.monotonic() - self._last_open

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, *_) = self._server.accept()
            except OSError:  # the peer has left already, or this process has too many open files
                time.sleep(TICK)
                continue
            with self._lock:
                crowded = self._connections >= MAX_CONNECTIONS
                self._connections += not crowded
            if crowded:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection, host), daemon=True).start()

    def _serve(self, connection: socket.socket, host: str) -> None:
        with connection:
            try:
                connection.settimeout(ADMIT_LIMIT)
                admit(connection, self._token)
            except (OSError, EOFError) as error:
                self._refuse(host, error)
            else:
                self._admitted(+1)
                with contextlib.suppress(OSError, EOFError):  # the rank connects again, or has failed
                    self._talk(connection)
                self._admitted(-1)
        with self._lock:
            self._connections -= 1

    def _admitted(self, change: int) -> None:
        with self._lock:
            self._open += change
            self._last_open = time.monotonic()

    def _refuse(self, host: str, error: Exception) -> None:
        with self._lock:
            self._refused += 1
        if self._refused <= MAX_REFUSALS:
            print(f"refused a connection from {host}: {error or type(error).__name__}", file=sys.stderr)

    def _talk(self, connection: socket.socket) -> None:
        """Answer the questions of a rank until it leaves. Raises OSError, EOFError."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        while not self._loaded.wait(KEEPALIVE):
            send(connection, Kind.WAIT)
        send(connection, Kind.READY, self._properties)
        connection.settimeout(None)  # a rank may compute for any time between two questions
        tokens = self._spec.batch_size * self._spec.seq_length
        while True:
            try:
                kind, body = receive(connection, question_limit(tokens), Kind.QUESTION, Kind.END)
                if kind == Kind.END:
                    with self._lock:
                        self._ended = True
                    return
                question = Question.decode(
                    body, tokens=tokens, length=self._spec.seq_length, vocabulary=self._embeddings
                )
            except ConnectionError as error:
                with contextlib.suppress(OSError):
                    send(connection, Kind.ERROR, f"the rank {error}".encode())
                raise
            send(connection, Kind.ANSWER, self._answer(connection, question).encode())

    def _answer(self, connection: socket.socket, question: Question) -> Answer:
        pending: Future[Answer] = Future()
        self.questions.put((question, pending))
        while True:
            with contextlib.suppress(TimeoutError):
                return pending.result(KEEPALIVE)
            send(connection, Kind.WAIT)


def serve(spec: RunSpec, heartbeat: Heartbeat, address: str, token: str) -> None:
    """Load the teacher and answer until training has ended.

    Raises:
        UserError: the address is in use, the teacher cannot be loaded, or no rank is connected.
    """
    host, _, port = address.rpartition(":")
    try:
        listener = listen(host, int(port))
    except OSError as error:
        raise UserError(f"teacher_host: cannot listen on {address}: {error.strerror}: start the run again") from None
    server = TeacherServer(listener, token, spec)
    print(f"the teacher listens on {address}", flush=True)
    heartbeat("starting", force=True, note="loading the teacher")

    from trainer.distillation.teacher import TeacherModel
    from trainer.models.model import isolates_packed_samples
    from trainer.strategy.base import autocast

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    teacher = TeacherModel(spec, device)
    with autocast(spec, device):
        isolates = spec.packing is False or isolates_packed_samples(teacher.model, teacher.vocabulary)
        server.ready(Properties(vocabulary_digest(teacher.tokens), isolates, spec.teacher_top_k), teacher.embeddings)
        heartbeat("teaching", force=True, note="")
        answered = 0
        while not server.finished:
            try:
                question, pending = server.questions.get(timeout=TICK)
            except queue.Empty:
                if server.idle_seconds > IDLE_LIMIT:
                    raise UserError(
                        f"teacher_host: no rank was connected for {IDLE_LIMIT:.0f} s: start the run again"
                    ) from None
                continue
            pending.set_result(compute(teacher, question, device, spec))
            answered += 1
            heartbeat("teaching", note=f"answered {answered} micro-batches")
    print(f"training has ended after {answered} answered micro-batches", flush=True)


def compute(teacher: TeacherModel, question: Question, device: torch.device, spec: RunSpec) -> Answer:
    """Return the most probable tokens at the places of a question. Raises UserError if the teacher's numbers are unusable."""
    from trainer.models.loss import top_tokens

    arrays = (question.ids, question.positions, question.places)
    ids, positions, places = (torch.tensor(array, dtype=torch.int64, device=device) for array in arrays)
    found, values = top_tokens(teacher.logits(ids, positions, places), spec.teacher_top_k, teacher.vocabulary)
    if not bool(torch.isfinite(values[:, 0]).all()):
        raise UserError(f"teacher: the probabilities of {spec.teacher} are not finite: set precision=32-true")
    return Answer(found.cpu().numpy(), values.cpu().numpy())


def main(arguments: Sequence[str]) -> int:
    """Run the teacher and return its exit status. Errors are also reported in its heartbeat, as those of a rank."""
    from trainer.distributed.worker_process import die_with_launcher, redirect_output
    from trainer.records.failure_report import report_failure

    parser = argparse.ArgumentParser(prog="trainer.launch.teacher_server", allow_abbrev=False)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True, help="the number of its heartbeat and log, after the ranks'")
    given = parser.parse_args(arguments)
    die_with_launcher()
    redirect_output(given.run_dir / "logs" / f"rank{given.rank}.log")
    heartbeat = Heartbeat(given.run_dir, given.rank)
    heartbeat("starting", force=True, note="importing torch")
    # Not kept in the environment, which programs that a library starts would inherit.
    address, token = os.environ.get(TEACHER_ADDRESS, ""), os.environ.pop(TEACHER_TOKEN, "")
    try:
        if not address or not token:
            raise UserError(
                f"teacher_host: {TEACHER_ADDRESS} and {TEACHER_TOKEN} are not set: start the run with train.yml"
            )
        serve(read_spec(given.spec, {}, str(given.spec)), heartbeat, address, token)
    except Exception as error:
        return report_failure(heartbeat, error)
    heartbeat("stopped" if (given.run_dir / "stop").exists() else "finished", force=True, note="")
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # not through the threads of open connections
