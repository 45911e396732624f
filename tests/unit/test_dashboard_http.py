"""The routes of the dashboard over HTTP: who gets in, which forms it takes, and what it sends while a page is open."""

import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import uvicorn
from dashboard_lines import HostOfRuns, cluster_with, pages_of, run_line
from dashboard_site import Dashboard
from test_queue_front_state import NOW, state

from trainer.common.errors import UserError
from trainyard.dashboard import app as app_module
from trainyard.dashboard import security
from trainyard.dashboard.actions import Actions
from trainyard.dashboard.project import Project
from trainyard.dashboard.queue_watch import make_view
from trainyard.dashboard.security import ListenAddress, SessionAuth
from trainyard.dashboard.views import Pages

FORMS = ("/runs/r/stop", "/runs/failed/start", "/runs/r/deploy", "/queue/held/release")


@dataclass
class Served(Dashboard):
    """A dashboard in a thread, with the files of its only host, and stand-ins for the actions."""

    folder: Path
    actions: Mock
    pages: Pages

    def post(self, path: str, text: str, session: str, **headers: str) -> int:
        kind = "application/x-www-form-urlencoded"
        return self.ask("POST", path, text, Cookie=session, Content_Type=kind, **headers)[0]

    def csrf(self, session: str) -> str:
        return re.findall(r'name="csrf" value="(\w+)"', self.ask("GET", "/runs/r", Cookie=session)[2])[0]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "r/logs").mkdir(parents=True)
    (tmp_path / "r/logs/rank0.log").write_text("one\ntwo\n")
    (tmp_path / "r/spec.yml").write_text("model: tiny\n")
    (tmp_path / "r/metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    lines = [run_line(name=name, status=status) for name, status in (("r", "finished"), ("failed", "failed"))]
    pages = pages_of(cluster_with(*(("node1", line) for line in lines)))
    pages.queue.view = make_view(state(), NOW)
    actions = Mock(spec=Actions)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    access = SessionAuth(ListenAddress("127.0.0.1", port), "t" * 43)
    pages._templates.globals["csrf"] = access.csrf
    streams: Any = {"node1": HostOfRuns(tmp_path)}
    app = app_module.Dashboard(pages.cluster, streams, pages, actions, access, Project(tmp_path)).app()
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield Served(cast(Any, None), port, access.token, tmp_path, actions, pages)
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def test_only_who_has_the_token_gets_in(served: Served) -> None:
    for path in ("/", "/runs", "/runs/r", "/live/nodes", "/metrics", "/static/dashboard.js", "/runs/r/series"):
        assert served.ask("GET", path)[0] == 401, path
    assert served.ask("GET", "/login?token=wrong")[0] == 401
    status, headers, _ = served.ask("GET", f"/login?token={served.token}")
    cookie = headers["set-cookie"]
    assert status == 303 and served.token not in cookie
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    session = served.session()
    status, headers, _ = served.ask("GET", "/", Cookie=session)
    assert status == 200 and "unsafe" not in headers["content-security-policy"]
    assert "script-src 'self'" in headers["content-security-policy"] and headers["referrer-policy"] == "same-origin"
    # A name that an attacker's DNS server maps to 127.0.0.1.
    assert served.ask("GET", "/", Cookie=session, Host=f"evil.example:{served.port}")[0] == 400
    for path in ("/runs/none", "/runs/..%2f..", "/live/none", "/live/run?argument=none", "/runs/r/log?host=none"):
        assert served.ask("GET", path, Cookie=session)[0] == 404, path
    assert served.ask("GET", "/live/run?argument=r&log=1&host=nowhere&file=x", Cookie=session)[0] == 404
    bearer = {"Authorization": f"Bearer {served.token}"}
    assert served.ask("GET", "/metrics", **bearer)[0] == 200 and served.ask("GET", "/", **bearer)[0] == 401
    assert served.ask("GET", "/metrics", Authorization="Bearer wrong")[0] == 401


@pytest.mark.parametrize("path", FORMS)
def test_no_action_by_get_nor_from_another_site(served: Served, path: str) -> None:
    session = served.session()
    good = f"csrf={served.csrf(session)}"
    assert served.ask("GET", path, Cookie=session)[0] == 405
    assert served.post(path, good, "") == 401
    for text in ("now=1", "csrf=wrong", "csrf=" + "x" * 80_000):
        assert served.post(path, text, session) == 403
    for origin in ("http://evil.example", "null"):
        assert served.post(path, good, session, Origin=origin) == 403, origin
    assert served.actions.mock_calls == []
    assert served.post(path, good, session, Origin=f"http://127.0.0.1:{served.port}") == 303
    assert len(served.actions.mock_calls) == 1


def test_actions_need_the_right_state_and_known_names(served: Served) -> None:
    session = served.session()
    csrf = f"csrf={served.csrf(session)}"
    post = lambda path, more="": served.post(path, csrf + more, session)  # noqa: E731
    for path in ("/runs/none/start", "/queue/none/cancel", "/queue/held/add"):
        assert post(path) == 404, path
    assert post("/runs/failed/deploy", "&name=x") == 303 and served.actions.mock_calls == [], "it is not finished"
    assert post("/runs/r/deploy", "&name=+mine+&base=b") == post("/runs/r/stop", "&now=1") == 303
    served.actions.deploy.assert_called_once_with("r", "mine", "b")
    served.actions.stop.assert_called_once_with("r", now=True)
    served.actions.change_queue.side_effect = UserError("no such priority")
    assert post("/queue/held/priority", "&priority=top") == 400
    served.actions.change_queue.assert_called_once_with("held", "priority", "top")


def test_pages_show_what_the_host_answers(served: Served) -> None:
    session = served.session()
    get = lambda path: served.ask("GET", path, Cookie=session)  # noqa: E731
    for path in ("/", "/runs?all=1", "/events", "/queue?time=7+days", "/models"):
        assert get(path)[0] == 200, path
    page = get("/runs/r?with=failed,none")[2]
    assert "rank0.log on node1" in page and "Differences of the specs" in page and "<td>tiny</td>" in page
    assert json.loads(get("/runs/r/series")[2])["columns"]["loss"] == [2.5]
    found = json.loads(get("/runs/r/log?host=node1&file=rank0.log&search=two")[2])
    assert found == {"lines": ["two"], "found": 1, "skipped": 0}
    assert get("/static/../app.py")[0] == 404


def test_an_open_page_gets_what_changes(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "PAUSE", 0.05)
    monkeypatch.setattr(app_module, "IDLE", 0.2)
    monkeypatch.setattr(app_module, "BROWSERS", 1)
    session = served.session()
    client = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    client.request("GET", "/live/run?argument=r&log=1", headers={"Cookie": session})
    stream = client.getresponse()

    def message(kind: str) -> dict[str, Any]:
        while stream.readline() != f"event: {kind}\r\n".encode():
            pass
        return cast(dict[str, Any], json.loads(stream.readline().partition(b": ")[2]))

    assert "run-head" in message("regions")["html"]
    assert message("series")["columns"]["step"] == [1]
    assert message("log")["lines"] == [["rank 0", "one"], ["rank 0", "two"]]
    assert served.ask("GET", "/live/nodes", Cookie=session)[0] == 503
    with (served.folder / "r/logs/rank0.log").open("a") as log:
        log.write("three\n")
    assert message("log")["lines"] == [["rank 0", "three"]]
    for _ in range(security.SESSIONS):
        served.session()
    assert served.ask("GET", "/", Cookie=session)[0] == 401, "newer sessions have ended it"
    assert stream.read() is not None, "and with it the stream"
    client.close()


def test_a_form_has_a_limit_of_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    session = served.session()
    monkeypatch.setattr(security, "BODY_LIMIT", 0.3)
    head = f"POST /runs/r/stop HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nCookie: {session}\r\n"
    with socket.create_connection(("127.0.0.1", served.port), 20) as client:
        client.sendall(f"{head}Content-Length: 9\r\n\r\n".encode())
        assert client.recv(13) == b"HTTP/1.1 403 "
