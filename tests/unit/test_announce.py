"""Messages about the events of a run: to a web server, and to a program of the user."""

import contextlib
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from receiver import receiver
from run_hosts import free_port

from trainer.common.errors import UserError
from trainyard.run.follow import announce as module
from trainyard.run.follow.announce import Announcer
from trainyard.run.launch_options import make_options


def announcer(lines: list[str], **options: object) -> Announcer:
    return Announcer(make_options(options), lines.append)


def program(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def test_a_server_gets_every_event_as_json() -> None:
    lines: list[str] = []
    with receiver() as (url, received):
        announce = announcer(lines, notify=[url])
        announce.check()
        announce("failed", "mine", "rank 1 on node2 was killed\x1b[2J\nlast line")
        announce("queue empty", "mine")
    assert [(one["event"], one["run"], one["title"]) for one in received] == [
        ("failed", "mine", "trainyard: run mine failed"),
        ("queue empty", "mine", "trainyard: the queue is empty"),
    ]
    assert received[0]["message"].splitlines() == ["rank 1 on node2 was killed\\x1b[2J", "last line"] and not lines
    assert received[0]["text"] == f"{received[0]['title']}\n{received[0]['message']}"


def test_what_is_not_sent_is_a_line_without_the_url() -> None:
    lines: list[str] = []
    announce = announcer(lines, notify=[f"http://127.0.0.1:{free_port()}/token"])
    announce("finished", "mine")
    assert lines == ["warning: notify: 127.0.0.1: not sent: [Errno 111] Connection refused"]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak_no_http() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"no\x1b[2J\r\n\r\n")
                while connection.recv(65536):  # the client has not read the answer before it closes
                    pass

        answer = threading.Thread(target=speak_no_http)
        answer.start()
        announcer(lines, notify=[f"http://127.0.0.1:{server.getsockname()[1]}/token"])("finished", "mine")
        answer.join()
    assert lines[1] == "warning: notify: 127.0.0.1: not sent: BadStatusLine", lines
    for url in ("http://[bad/token", "token", "tgram://token", "http:///token"):
        with pytest.raises(UserError, match=r"^notify: a URL is not one of http or https") as error:
            announcer(lines, notify=[url]).check()
        assert "token" not in str(error.value)


def test_a_server_that_sends_a_byte_at_a_time_delays_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit of urllib is one for each part of an answer."""
    monkeypatch.setattr(module, "SEND_LIMIT", 1.0)
    lines: list[str] = []
    ended = threading.Event()

    def drip(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            while not ended.wait(0.2):
                connection.sendall(b"x")

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        announce = announcer(lines, notify=[f"http://127.0.0.1:{server.getsockname()[1]}/token"])
        began = time.monotonic()
        announce("restarting", "mine")
        assert time.monotonic() - began < 0.5 and not lines
        announce("failed", "mine")
        assert 1.0 <= time.monotonic() - began < 3.0
        assert lines == ["warning: notify: 127.0.0.1: no answer within 1 s"]
        ended.set()
        server.shutdown(socket.SHUT_RDWR)


def test_a_hook_gets_the_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    hook = program(tmp_path / "hook", f'echo "$TRAINYARD_EVENT|$TRAINYARD_RUN|$TRAINYARD_MESSAGE" >> {tmp_path}/out\n')
    announce = announcer(lines, hook=str(hook))
    announce.check()
    announce("started", "mine", "on node1")
    assert (tmp_path / "out").read_text() == "started|mine|on node1\n" and not lines
    program(hook, "echo no disk >&2; exit 4\n")
    announce("finished", "mine")
    assert lines == [f"warning: hook: {hook}: exit code 4: no disk"]

    def endless(words: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(words, 60)

    monkeypatch.setattr(module.subprocess, "run", endless)
    announce("finished", "mine")
    assert lines[1] == f"warning: hook: {hook}: ended after 60 s"
    hook.chmod(0o644)
    with pytest.raises(UserError, match="is missing or not executable: chmod"):
        announce.check()
