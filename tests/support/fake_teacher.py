"""A server with the part of Ollama's API that a teacher needs, in a process of its own that a test can kill.

python fake_teacher.py '{"address": "127.0.0.2", "port": 11434, "slots": 1, "seconds": 0.05, "log": "asked.txt"}'

Prints `ready`. An answer takes `seconds` (a random time around it with `spread`) in one of `slots`; it depends on the
question alone. Every question that was answered completely is a line of the log.
"""

import contextlib
import dataclasses
import hashlib
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from threaded_server import QuietHandler

DIGEST = hashlib.sha256(b"teacher").hexdigest()


@dataclasses.dataclass(frozen=True)
class Teacher:
    """One server."""

    address: str
    port: int
    slots: int = 1
    seconds: float = 0.02
    spread: float = 0.5
    log: str = ""
    model: str = "teacher:latest"
    digest: str = DIGEST
    version: str = "0.12.3"
    shown: dict[str, Any] = dataclasses.field(default_factory=dict)  # /api/show

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"


def start(teacher: Teacher) -> subprocess.Popen[str]:
    """Start the server, and return when it listens."""
    command = [sys.executable, "-S", __file__, json.dumps(dataclasses.asdict(teacher))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


@contextlib.contextmanager
def serve(*teachers: Teacher) -> Iterator[list[subprocess.Popen[str]]]:
    """Run servers until the block ends."""
    processes = [start(teacher) for teacher in teachers]
    try:
        yield processes
    finally:
        for process in processes:
            stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()


def question_of(body: dict[str, Any]) -> str:
    """Return what identifies a question in the log."""
    return hashlib.sha256(json.dumps([body["messages"], body["options"]], sort_keys=True).encode()).hexdigest()


def text_of(body: dict[str, Any]) -> str:
    """Return the answer to a question: the next number, or words that depend on the question alone."""
    if numbers := re.findall(r"What follows (\d+)\?", body["messages"][-1]["content"]):
        return f"After {numbers[0]} comes {int(numbers[0]) + 1}."
    draw = random.Random(question_of(body))
    return " ".join(f"w{draw.randrange(10_000)}" for _ in range(24))


class _Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    teacher: Teacher
    slots: threading.Semaphore
    lock = threading.Lock()

    def do_GET(self) -> None:
        models = {"models": [{"name": self.teacher.model, "digest": self.teacher.digest}]}
        version = {"version": self.teacher.version}
        self.reply(200, json.dumps(version if self.path == "/api/version" else models))

    def do_POST(self) -> None:
        body = self.asked()
        if self.path == "/api/show":
            return self.reply(200, json.dumps(self.teacher.shown))
        if body.get("model") != self.teacher.model:
            return self.reply(404, json.dumps({"error": "model not found"}))
        start = time.monotonic()
        with self.slots:
            queued = time.monotonic() - start
            own = self.teacher.seconds * random.uniform(1 - self.teacher.spread, 1 + self.teacher.spread)
            time.sleep(own)
        text = text_of(body)
        half = len(text) // 2
        total = time.monotonic() - start
        last = {"message": {"role": "assistant", "content": text[half:]}, "done": True, "done_reason": "stop"}
        last |= {"total_duration": int(total * 1e9), "eval_duration": int((total - queued) * 1e9), "eval_count": 24}
        first = {"message": {"role": "assistant", "content": text[:half]}, "done": False}
        # Before the answer is sent: a client that has an answer finds its question in the log, whatever is killed.
        if self.teacher.log:
            with self.lock, Path(self.teacher.log).open("a") as log:
                log.write(question_of(body) + "\n")
        return self.reply(200, "".join(json.dumps(line) + "\n" for line in (first, last)))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main(settings: str) -> None:
    _Handler.teacher = Teacher(**json.loads(settings))
    _Handler.slots = threading.Semaphore(_Handler.teacher.slots)
    server = _Server((_Handler.teacher.address, _Handler.teacher.port), _Handler)
    print("ready", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
