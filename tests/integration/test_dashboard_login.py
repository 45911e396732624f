"""The token of the dashboard, TLS, and options that are refused: a real server on an address of 127.0.0.0/8."""

from __future__ import annotations

import http.client
import os
import re
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard_site import ENVIRONMENT, PROGRAM, certificate_file, end
from run_hosts import TOP, Bed, write_inventory

from trainer.common.errors import UserError
from trainyard.dashboard import server
from trainyard.dashboard.dashboard_options import DashboardOptions
from trainyard.dashboard.security import read_token

ADDRESS, OTHER = "127.0.0.9", "192.0.2.7"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    found = Bed(tmp_path_factory.mktemp("login"))
    yield found
    found.clean()


def start(bed: Bed, *more: str) -> tuple[subprocess.Popen[str], str]:
    """Start a dashboard over TLS; return its process, and the line with its URL."""
    inventory = write_inventory(bed.folder, {"node1": {}})
    tls = bed.folder / "tls.pem"
    words = ["dashboard", "-i", str(inventory), "--dashboard-port=0", f"--dashboard-listen={ADDRESS}"]
    words += [f"--certfile={tls if tls.exists() else certificate_file(tls)}", *more]
    environment = ENVIRONMENT | {"XDG_CACHE_HOME": str(bed.folder / "cache")}
    process = subprocess.Popen([*PROGRAM, *words], cwd=TOP, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    return process, process.stdout.readline()


def ask(port: int, method: str, path: str, body: str = "", **headers: str) -> tuple[int, dict[str, str], str]:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(ADDRESS, port, timeout=20, context=context)
    connection.request(method, path, body or None, {name.replace("_", "-"): text for name, text in headers.items()})
    reply = connection.getresponse()
    found = reply.status, {name.lower(): text for name, text in reply.getheaders()}, reply.read().decode()
    connection.close()
    return found


@pytest.mark.slow
def test_the_token_logs_in_over_tls_and_stays_for_the_next_start(bed: Bed) -> None:
    process, line = start(bed)
    try:
        found = re.fullmatch(rf"dashboard: https://{ADDRESS}:(\d+)/login\?token=(\S+)\n", line)
        assert found, line
        port, token = int(found[1]), found[2]
        file = bed.folder / "cache/trainyard/dashboard-token"
        assert file.stat().st_mode & 0o777 == 0o600 and file.read_text() == f"{token}\n"
        for path in ("/", "/runs", "/metrics", "/live/nodes", "/static/dashboard.css", "/login", "/login?token=x"):
            assert ask(port, "GET", path)[0] == 401, path
        assert ask(port, "GET", "/health")[::2] == (200, "ok\n")
        status, headers, _ = ask(port, "GET", f"/login?token={token}")
        cookie = headers["set-cookie"]
        assert status == 303 and set(cookie.split("; ")) >= {"HttpOnly", "SameSite=strict", "Secure", "Path=/"}
        session = cookie.partition(";")[0]
        assert session.startswith("__Host-trainyard_")
        # With a name of the certificate.
        status, _, page = ask(port, "GET", "/start", Cookie=session, Host=f"cluster.example:{port}")
        assert status == 200
        csrf = re.findall(r'name="csrf" value="(\w+)"', page)[0]
        how = {"Cookie": session, "Host": f"cluster.example:{port}", **FORM}
        assert ask(port, "POST", "/start", f"csrf={csrf}", **how, Origin="https://evil.example")[0] == 403
        assert (
            ask(port, "POST", "/start", f"csrf={csrf}&lr=x", **how, Origin=f"https://cluster.example:{port}")[0] == 400
        )
    finally:
        end(process)
    process, line = start(bed)
    end(process)
    assert token in line


def test_the_journal_gets_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not server._in_journal()
    output = os.fstat(1)
    monkeypatch.setenv("JOURNAL_STREAM", f"{output.st_dev}:{output.st_ino}")
    assert server._in_journal()
    monkeypatch.setenv("JOURNAL_STREAM", f"{output.st_dev}:{output.st_ino + 1}")
    assert not server._in_journal(), "the journal of a terminal's own unit"


def test_a_token_that_others_may_know_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cache/token"
    token = read_token(file)
    assert len(token) == 43 and read_token(file) == token
    file.chmod(0o640)
    with pytest.raises(UserError, match="other users may have read"):
        read_token(file)
    file.write_text("short\n")
    file.chmod(0o600)
    with pytest.raises(UserError, match="delete it"):
        read_token(file)
    with pytest.raises(UserError, match="cannot read"):
        read_token(file / "token")


def options(**given: Any) -> DashboardOptions:
    return DashboardOptions.from_variables(given, "test")


def test_wrong_options_are_refused_in_one_line(tmp_path: Path) -> None:
    both, other = certificate_file(tmp_path / "both.pem"), certificate_file(tmp_path / "other.pem")
    readable = certificate_file(tmp_path / "readable.pem")
    readable.chmod(0o644)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"dashboard_listen": OTHER}, f"other machines reach {OTHER}: set certfile and keyfile"),
        ({"dashboard_listen": "::ffff:192.0.2.7"}, "set certfile and keyfile"),
        ({"keyfile": str(both)}, "set certfile, too"),
        ({"certfile": str(tmp_path / "none")}, "No such file"),
        ({"certfile": str(both), "keyfile": str(other)}, "are not a PEM certificate and its key"),
        ({"certfile": str(readable)}, f"run chmod 600 {readable}"),
    ]
    for given, text in wrong:
        with pytest.raises(UserError, match=re.escape(text)) as caught:
            options(**given).tls_files()
        assert "\n" not in str(caught.value)
    for listen in ("0.0.0.0", "::", "node1", "127.0.0.1:5000"):
        with pytest.raises(UserError, match="dashboard_listen: expected an IP address of this machine"):
            options(dashboard_listen=listen)
    assert options(dashboard_listen="127.0.0.2").tls_files() is None
    assert options(dashboard_listen=OTHER, certfile=str(both)).tls_files() == (both, both)


@pytest.mark.slow
def test_former_options_say_what_replaces_them(bed: Bed, tmp_path: Path) -> None:
    inventory = write_inventory(bed.folder, {"node1": {}})

    def said(*words: str) -> str:
        command = [*PROGRAM, "dashboard", "--check", "-i", str(inventory), *words]
        return subprocess.run(command, cwd=TOP, env=ENVIRONMENT, capture_output=True, text=True, check=False).stderr

    assert "no longer exists: the token is the login" in said("--dashboard-password-file=x")
    assert "other machines reach 192.0.2.7" in said(f"--dashboard-listen={OTHER}")
    tls = certificate_file(tmp_path / "tls.pem")
    assert not said(f"--dashboard-listen={OTHER}", f"--dashboard-certificate={tls}", f"--dashboard-key={tls}")
