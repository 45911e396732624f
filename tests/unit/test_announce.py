"""Messages about the events of a run: to a web server, by apprise, and to a program of the user."""

from __future__ import annotations

import socket
import subprocess
import threading
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
    for url, why in (("http://[bad/token", "a URL is not valid"), ("token", "a URL has no scheme")):
        with pytest.raises(UserError, match=f"^notify: {why}") as error:
            announcer(lines, notify=[url]).check()
        assert "token" not in str(error.value)


def test_apprise_gets_the_url_in_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "python"))
    lines: list[str] = []
    announce = announcer(lines, notify=["tgram://secret/1"])
    with pytest.raises(UserError, match=r"^notify: 'tgram' needs the program apprise: pip install apprise"):
        announce.check()
    program(
        tmp_path / "apprise",
        f'echo "$@" > {tmp_path}/words; stat -c %a "$2" >> {tmp_path}/words; cat "$2" >> {tmp_path}/words\n',
    )
    announce.check()
    announce("finished", "mine", "40 of 40 steps")
    words, mode, url = (tmp_path / "words").read_text().splitlines()
    assert words.endswith("--title trainyard: run mine finished --body 40 of 40 steps") and "secret" not in words
    assert (mode, url, lines) == ("600", "tgram://secret/1", [])
    program(tmp_path / "apprise", "echo tgram://secret/1 >&2; exit 3\n")
    announce("finished", "mine")
    assert lines == ["warning: notify: tgram: not sent: apprise ended with exit code 3"]


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

    def endless(words: list[str], *_: object) -> None:
        raise subprocess.TimeoutExpired(words, 60)

    monkeypatch.setattr(module, "_run", endless)
    announce("finished", "mine")
    assert lines[1] == f"warning: hook: {hook}: ended after 60 s"
    hook.chmod(0o644)
    with pytest.raises(UserError, match="is missing or not executable: chmod"):
        announce.check()
