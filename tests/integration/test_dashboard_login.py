"""The dashboard on TLS with a password: a real server on an address of 127.0.0.0/8, and real clients."""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import browser, console_errors
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from dashboard_site import PROGRAM, Dashboard, shown_text, take_pictures, write_inventory
from run_hosts import TOP, Bed, command_line, until
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from trainer.common.errors import UserError
from trainer.supervise.processes import descendants, is_running
from trainyard.dashboard import security
from trainyard.dashboard.certificate import FILE, own_certificate, user_certificate
from trainyard.dashboard.dashboard_options import DashboardOptions, run_dashboard
from trainyard.dashboard.password import ATTEMPTS, AttemptLimit, hash_password, matches, read_password
from trainyard.dashboard.project import Project
from trainyard.dashboard.server import login_method

__all__ = ["browser"]
ADDRESS, OTHER = "127.0.0.9", "192.0.2.7"
PASSWORD = "correct horse battery"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@dataclass
class Served:
    """A dashboard in a process of its own, with what it has printed."""

    process: subprocess.Popen[str]
    folder: Path
    port: int
    lines: list[str]

    def ask(self, method: str, path: str, body: str = "", **headers: str) -> tuple[int, dict[str, str], str]:
        """Send a request from an address of its own, with the dashboard's certificate as the only trusted one."""
        trusted = ssl.create_default_context(cafile=str(self.folder / "home/.trainyard/dashboard" / FILE))
        source = (headers.pop("source", "127.0.0.1"), 0)
        connection = http.client.HTTPSConnection(ADDRESS, self.port, timeout=20, context=trusted, source_address=source)
        connection.request(method, path, body or None, {name.replace("_", "-"): text for name, text in headers.items()})
        reply = connection.getresponse()
        found = reply.status, {name.lower(): text for name, text in reply.getheaders()}, reply.read().decode()
        connection.close()
        return found

    def log_in(self, password: str, source: str = "127.0.0.1", **headers: str) -> tuple[int, dict[str, str], str]:
        return self.ask("POST", "/login", f"password={password}", source=source, **FORM, **headers)


SERVE = """
import sys
from pathlib import Path
from trainyard.wire.connection import Host, HostConnection
from trainyard.dashboard.dashboard_options import DashboardOptions, run_dashboard
from trainyard.dashboard.project import Project
from trainyard.wire.openssh import LocalTransport
from trainyard.run.launch_options import LaunchOptions
folder = Path(sys.argv[1])
host = Host("node1", "127.0.0.1", str(folder / "data"), sys.executable)
given = {"dashboard_listen": sys.argv[2], "dashboard_port": 0, "dashboard_password_file": str(folder / "password")}
def no_queue():
    from trainer.common.errors import UserError
    raise UserError("no queue")
options = DashboardOptions.from_variables(given, "test")
how = {"find_queue": no_queue, "project": Project(folder / "home")}
run_dashboard([host], lambda one: HostConnection(one, LocalTransport()), LaunchOptions(), options, lambda line: print(line, flush=True), **how)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("login")
    (folder / "password").write_text(f"{PASSWORD}\n")
    (folder / "password").chmod(0o600)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(folder), ADDRESS],
        cwd=TOP,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(3)]
        found = re.fullmatch(rf"dashboard: https://{ADDRESS}:(\d+)/\n", lines[0])
        assert found, "".join(lines) + process.stdout.read()
        yield Served(process, folder, int(found[1]), lines)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_password_logs_in_over_tls_and_only_until_the_session_ends(served: Served) -> None:
    for path in ("/", "/runs", "/metrics", "/live/nodes", "/logout"):
        assert served.ask("GET", path)[0] in (401, 405), path
    assert served.ask("GET", "/health")[::2] == (200, "ok\n")
    status, headers, _ = served.ask("GET", "/", Accept="text/html")
    assert (status, headers["location"]) == (303, "/login")
    status, _, form = served.ask("GET", "/login")
    assert status == 200 and 'type="password"' in form and 'method="post"' in form
    assert served.ask("GET", "/static/dashboard.css")[0] == 200
    assert served.ask("GET", "/static/../runs")[0] == served.ask("GET", "/static/%2e%2e/app.py")[0] == 404

    assert served.log_in(PASSWORD, Origin="https://evil.example")[0] == 403
    assert served.log_in(PASSWORD, Sec_Fetch_Site="cross-site")[0] == 403
    assert served.ask("GET", f"/login?password={PASSWORD.replace(' ', '+')}")[0] == 200  # the form again
    status, headers, _ = served.log_in(PASSWORD, Origin=f"https://{ADDRESS}:{served.port}")
    cookie = headers["set-cookie"]
    wanted = {"HttpOnly", "SameSite=strict", "Secure", "Path=/", "Max-Age=43200"}
    assert status == 303 and set(cookie.split("; ")) >= wanted
    session = cookie.partition(";")[0]
    assert session.startswith("__Host-trainyard_")
    status, _, page = served.ask("GET", "/", Cookie=session)
    assert status == 200 and "Log out" in page
    assert served.ask("GET", "/", Cookie=session, Host=f"evil.example:{served.port}")[0] == 400

    csrf = re.findall(r'name="csrf" value="(\w+)"', page)[0]
    assert served.ask("POST", "/logout", "csrf=wrong", Cookie=session, **FORM)[0] == 403
    assert served.ask("POST", "/logout", f"csrf={csrf}", Cookie=session, **FORM)[0] == 303
    assert served.ask("GET", "/", Cookie=session)[0] == 401


@pytest.mark.slow
def test_the_login_page_is_accessible_and_lets_a_user_in(served: Served, browser: WebDriver, tmp_path: Path) -> None:
    # The browser does not trust the certificate of this test.
    browser.execute_cdp_cmd("Security.setIgnoreCertificateErrors", {"ignore": True})
    browser.get(f"https://{ADDRESS}:{served.port}/runs")
    assert browser.current_url.endswith("/login")
    take_pictures(browser, "login", tmp_path)
    browser.find_element(By.ID, "password").send_keys("a wrong password" + Keys.ENTER)
    until(lambda: "The password is wrong" in shown_text(browser, "main"), 20, "the refusal")
    take_pictures(browser, "login-wrong", tmp_path)
    assert browser.switch_to.active_element.get_attribute("id") == "password"
    browser.switch_to.active_element.send_keys(PASSWORD + Keys.ENTER)
    until(lambda: shown_text(browser, "#live-state") == "live", 20, "the first page")
    errors = [line for line in console_errors(browser) if "401" not in line]
    assert errors == []
    assert served.process.stdout and "wrong password from" in served.process.stdout.readline()


@pytest.mark.slow
def test_wrong_passwords_are_counted_by_address_and_the_log_has_none_of_them(served: Served) -> None:
    for _ in range(ATTEMPTS):
        status, _, page = served.log_in("not the password", source="127.0.0.77", X_Forwarded_For="127.0.0.78")
        assert status == 401 and "The password is wrong" in page
    status, _, page = served.log_in(PASSWORD, source="127.0.0.77", X_Forwarded_For="127.0.0.79")
    assert status == 429 and "try again in" in page
    basic = base64.b64encode(f"any:{PASSWORD}".encode()).decode()
    assert served.ask("GET", "/metrics", source="127.0.0.77", Authorization=f"Basic {basic}")[0] == 401
    assert served.ask("GET", "/metrics", source="127.0.0.76", Authorization=f"Basic {basic}")[0] == 200
    assert served.ask("GET", "/", source="127.0.0.76", Authorization=f"Basic {basic}")[0] == 401
    assert served.log_in(PASSWORD, source="127.0.0.76")[0] == 303
    assert served.process.stdout
    printed = [served.process.stdout.readline() for _ in range(ATTEMPTS)]
    assert printed == ["dashboard: wrong password from 127.0.0.77\n"] * ATTEMPTS
    assert PASSWORD not in "".join([*served.lines, *printed])
    assert PASSWORD.encode() not in Path(f"/proc/{served.process.pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_the_printed_fingerprint_is_that_of_the_connection(served: Served) -> None:
    open_context = ssl.create_default_context()
    open_context.check_hostname, open_context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(ADDRESS, served.port, timeout=20, context=open_context)
    connection.connect()
    sock: Any = connection.sock
    shown = hashlib.sha256(sock.getpeercert(binary_form=True)).hexdigest().upper()
    assert ":".join(re.findall("..", shown)) in served.lines[1] and sock.version() in ("TLSv1.2", "TLSv1.3")
    connection.close()
    plain = http.client.HTTPConnection(ADDRESS, served.port, timeout=20)
    plain.request("GET", "/login")
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.getresponse()


@pytest.mark.slow
def test_an_address_of_the_network_needs_a_password(tmp_path: Path) -> None:
    words = [*PROGRAM, "dashboard", f"--dashboard-listen={OTHER}", "-i"]
    # With the variable of the password, only the address is wrong: it is not one of this machine.
    for more, expected in (
        ({}, f"other machines reach {OTHER}, and there is no password"),
        ({"dashboard_password": PASSWORD}, f"the dashboard cannot listen on {OTHER}:5000"),
    ):
        inventory = write_inventory(Bed(tmp_path), {"node1": {}}, **more)
        done = subprocess.run([*words, str(inventory)], cwd=TOP, capture_output=True, text=True, check=False)
        text = " ".join((done.stdout + done.stderr).split())
        assert done.returncode != 0 and expected in text and PASSWORD not in text, text


@pytest.mark.slow
def test_the_playbook_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    inventory = write_inventory(Bed(tmp_path), {"node1": {}})
    words = ["ansible-playbook", "playbooks/dashboard.yml", "-i", str(inventory), "-e", "dashboard_port=0"]
    played = subprocess.Popen(
        words, cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        assert played.stdout
        lines = (re.search(r"127\.0\.0\.1:(\d+)/login\?token=(\S+)", line) for line in played.stdout)
        found = next(filter(None, lines))
        site = Dashboard(played, int(found[1]), found[2])
        samplers = until(lambda: [pid for pid in descendants(played.pid) if b"sample" in command_line(pid)], 20, "one")
        assert "node1" in site.ask("GET", "/", Cookie=site.session())[2]
        assert not any(site.token.encode() in command_line(pid) for pid in [played.pid, *descendants(played.pid)])
        os.killpg(played.pid, signal.SIGINT)  # as Ctrl-C on a terminal does
        assert "User interrupted execution" in played.communicate(timeout=20)[0]
        until(lambda: not any(map(is_running, samplers)), 20, "the sampler's end")
        with pytest.raises(ConnectionRefusedError):
            site.ask("GET", "/")
    finally:
        played.kill()


def options(**given: Any) -> DashboardOptions:
    return DashboardOptions.from_variables({f"dashboard_{name}": value for name, value in given.items()}, "test")


def test_wrong_options_are_refused_in_one_line(tmp_path: Path) -> None:
    def file(name: str, text: str, mode: int = 0o600) -> Path:
        path = tmp_path / name
        path.write_text(text)
        path.chmod(mode)
        return path

    short, old = file("short", "too short\n"), file("old", "scrypt:32768:8:1:AAAA:AAAA\n")
    damaged, readable = file("damaged", "$argon2id$v=19$m=1,t=1,p=1$\n"), file("readable", f"{PASSWORD}\n", 0o644)
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"listen": OTHER}, "", "there is no password: set dashboard_password_file"),
        ({"listen": "::ffff:192.0.2.7"}, "", "there is no password"),
        ({"listen": OTHER, "password_file": str(short)}, "", "has 9 characters: give it 12 or more"),
        ({"listen": OTHER}, "short", "has 5 characters"),
        ({"listen": OTHER, "password_file": str(readable)}, "", f"run chmod 600 {readable}"),
        ({"listen": OTHER, "password_file": str(tmp_path / "none")}, "", "No such file"),
        ({"listen": OTHER, "password_file": str(damaged)}, "", "is damaged"),
        ({"listen": OTHER, "password_file": str(old)}, "", "write it again"),
        ({"listen": OTHER, "password_file": str(readable)}, PASSWORD, "remove one of them"),
        ({"listen": OTHER, "certificate": "/a.pem"}, PASSWORD, "set both or none"),
        ({"certificate": "/a.pem", "key": "/b.pem"}, "", "TLS needs a password"),
    ]
    for given, password, text in wrong:
        with pytest.raises(UserError, match=re.escape(text)) as caught:
            login_method(options(**given), password, tmp_path / "home")
        assert "\n" not in str(caught.value)
    for listen in ("0.0.0.0", "::", "node1", "127.0.0.1:5000"):
        with pytest.raises(UserError, match="dashboard_listen: expected an IP address of this machine"):
            options(listen=listen)
    assert login_method(options(listen="127.0.0.2"), PASSWORD, tmp_path / "home").password is None
    assert not (tmp_path / "home").exists()
    given = options(listen=OTHER, port=0, password_file=str(file("good", f"{PASSWORD}\n")))
    how: dict[str, Any] = {"find_queue": str, "project": Project(tmp_path / "home")}
    with pytest.raises(UserError, match=re.escape("set dashboard_listen to an address of this machine")):
        run_dashboard([], lambda one: None, None, given, print, **how)  # type: ignore[arg-type, return-value]


@pytest.mark.slow
def test_the_hash_is_salted_and_written_once(tmp_path: Path) -> None:
    one, two = hash_password(PASSWORD), hash_password(PASSWORD)
    assert (
        one != two and matches(one, PASSWORD) and not matches(one, PASSWORD + " ") and not matches(one[:-1], PASSWORD)
    )
    file = tmp_path / "password"
    words = [sys.executable, "-m", "trainyard.dashboard.password", str(file)]

    def write(password: str) -> str:
        given = f"{password}\n"
        return subprocess.run(words, cwd=TOP, input=given, capture_output=True, text=True, check=False).stdout.strip()

    assert [write(PASSWORD), write(PASSWORD), write("another password")] == ["changed", "unchanged", "changed"]
    assert file.stat().st_mode & 0o777 == 0o600 and "another" not in file.read_text()
    found = read_password("", str(file))
    assert found and matches(found, "another password") and not matches(found, PASSWORD)


def test_the_limit_counts_addresses_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("trainyard.dashboard.password.time.monotonic", lambda: now[0])
    limit = AttemptLimit()
    assert [limit.begin("a") for _ in range(ATTEMPTS)] == [0.0] * ATTEMPTS
    assert limit.begin("a") == 300.0 and limit.begin("b") == 0.0
    limit.withdraw("b")
    assert sum(limit.begin(f"c{number}") == 0.0 for number in range(100)) == 30 - ATTEMPTS
    assert limit.begin("d") == 300.0
    now[0] += 301
    assert limit.begin("a") == limit.begin("d") == 0.0


def test_a_session_ends_after_its_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(security.time, "monotonic", lambda: now[0])
    access = security.SessionAuth(security.Site(OTHER, 443, (OTHER,), tls=True), "a hash", print)
    assert access.site.hosts == (f"{OTHER}:443", OTHER)
    cookie = access.begin_session().headers["set-cookie"].partition(";")[0].encode()
    scope = {"type": "http", "headers": [(b"cookie", cookie)]}
    assert access.in_session(scope)
    now[0] += security.LIFETIME - 1
    assert access.in_session(scope) and not access.in_session({"type": "http", "headers": []})
    now[0] += 2
    assert not access.in_session(scope)


def test_the_certificate_is_made_once_and_a_foreign_one_is_checked(tmp_path: Path) -> None:
    first = own_certificate(tmp_path / "own", "192.0.2.7")
    assert own_certificate(tmp_path / "own", "192.0.2.7") == first and "192.0.2.7" in first.names
    assert first.file.stat().st_mode & 0o777 == 0o600 and (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    moved = own_certificate(tmp_path / "own", "2001:db8::1")
    assert moved.fingerprint != first.fingerprint and "2001:db8::1" in moved.names
    other = own_certificate(tmp_path / "other", "192.0.2.7")
    assert user_certificate(str(moved.file), str(moved.file)).fingerprint == moved.fingerprint
    with pytest.raises(UserError, match="is not the key of"):
        user_certificate(str(moved.file), str(other.file))
    key = serialization.load_pem_private_key(moved.file.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    how = serialization.BestAvailableEncryption(b"secret")
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how))
    locked.chmod(0o600)
    with pytest.raises(UserError, match="has a passphrase"):
        user_certificate(str(moved.file), str(locked))
    moved.file.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        user_certificate(str(moved.file), str(moved.file))
    assert x509.load_pem_x509_certificate(moved.file.read_bytes()).not_valid_after_utc
