"""The same requests over both transports: a local process and OpenSSH."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_hosts import free_port, until
from ssh_server import Server, control_folder, server, ssh_variables
from tables import table

from trainyard.ansible_adapter import Inventory
from trainyard.remote.__main__ import VERBS
from trainyard.wire import openssh
from trainyard.wire.connection import (
    TOO_MUCH,
    FanOut,
    Host,
    HostConnection,
    InventoryError,
    Login,
    RemoteError,
    Transport,
)
from trainyard.wire.openssh import LocalTransport, OpenSSHTransport
from trainyard.wire.remote_archive import remote_archive, remote_command, remote_input

__all__ = ["control_folder", "server"]

HOSTILE = 'it\'s "quoted" $HOME `id` \\ ; * \t\n\u00e9'  # every character that a shell may treat specially


@pytest.fixture(params=["local", "ssh"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return LocalTransport() if request.param == "local" else OpenSSHTransport(request.getfixturevalue("server").login)


@pytest.fixture
def connection(transport: Transport, tmp_path: Path) -> HostConnection:
    return HostConnection(Host("node1", "127.0.0.1", str(tmp_path), sys.executable), transport)


def test_a_command_has_input_output_and_an_exit_code(transport: Transport) -> None:
    assert transport.execute("cat; echo oops >&2; exit 7", b"in\0put\xff")[:2] == (7, b"in\0put\xff")
    assert b"oops" in transport.execute("echo oops >&2")[2]
    assert transport.execute("cat")[1] == b"", "a command without input reads empty input"
    assert transport.execute(f"printf %s {shlex.quote(HOSTILE)}")[1].decode() == HOSTILE


def test_large_input_and_output(transport: Transport) -> None:
    data = bytes(range(256)) * (3 << 12)  # 3 MiB, more than any pipe holds
    assert transport.execute("cat", data)[1] == data


def test_files_are_copied_in_both_directions(transport: Transport, tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    source, there, back = tmp_path / "a b'c.bin", tmp_path / "there $x'y.bin", tmp_path / "back.bin"
    source.write_bytes(data)
    transport.put(str(source), str(there))
    transport.fetch(str(there), str(back))
    assert there.read_bytes() == back.read_bytes() == data


def test_a_failed_copy_is_reported_in_one_line(transport: Transport, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RemoteError, match=r"^cannot copy \S+/file to \S+/nowhere/file: .*\S$") as error:
        transport.put(str(tmp_path / "file"), str(tmp_path / "nowhere/file"))
    assert "\n" not in str(error.value)
    with pytest.raises(RemoteError, match=r"^cannot fetch \S+/missing: .*\S$") as error:
        transport.fetch(str(tmp_path / "missing"), str(tmp_path / "copy"))
    assert "\n" not in str(error.value)


def test_a_pending_command_can_be_ended(transport: Transport) -> None:
    """As for a host that never ends its answer."""
    pending = FanOut({"node1": lambda: {"code": transport.execute("sleep 40")[0]}}).wait(0.7)
    assert "no answer" in pending.errors["node1"]
    # On a loaded machine, the command may not have started yet.
    until(lambda: transport.abort() or not pending.threads["node1"].is_alive(), 20, "the end of the command")


@pytest.mark.slow
def test_endless_output_does_not_fill_the_memory(transport: Transport) -> None:
    connection = HostConnection(Host("node1", "127.0.0.1", "/nonexistent", sys.executable), transport)
    before = resident_mib()
    asked = FanOut({"node1": lambda: connection.run("exec cat /dev/zero")}).wait(3.0)
    assert asked.errors["node1"] in (TOO_MUCH, "no answer within 3 s")
    grown = resident_mib() - before
    transport.abort()
    asked.threads["node1"].join(10)
    assert not asked.threads["node1"].is_alive() and grown < 500


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_a_verb_answers_and_leaves_no_file(connection: HostConnection, tmp_path: Path) -> None:
    run = tmp_path / "runs/r"
    (run / "logs").mkdir(parents=True)
    (run / "plan.json").write_text("[1]")
    (run / "logs/rank0.log").write_text("12345")
    before = sorted(tmp_path.rglob("*"))
    request = {"folder": str(run), "text": ["plan.json", "none"], "sizes": ["logs/*"], "sha256": ["*.json"]}
    assert connection.call("read_files", request) == {
        "text": {"plan.json": "[1]", "none": None},
        "sizes": {"logs/rank0.log": 5},
        "sha256": {"plan.json": hashlib.sha256(b"[1]").hexdigest()},
    }
    assert connection.call("run_status", {"run_dir": str(run), "logs_from": {"rank0.log": -1}})["status"] == "none"
    assert connection.call("run_list", {"data_dir": str(tmp_path)})["runs"] == []
    assert connection.call("run_stop", {"run_dir": str(run)}) == {"status": "none", "killed": 0}
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before and "cp" not in path.parts] == []


def test_errors_of_a_verb_are_one_line(connection: HostConnection) -> None:
    with pytest.raises(RemoteError, match=r"^KeyError: 'folder'$"):
        connection.call("read_files", {})
    with pytest.raises(RemoteError, match=r"^unknown verb 'nonsense'$"):
        connection.call("nonsense", {})
    with pytest.raises(RemoteError, match=r"/nonexistent/python.*(not found|No such file)"):
        connection.call("run_list", {"data_dir": "/nonexistent"}, python="/nonexistent/python")


@pytest.mark.slow
def test_a_request_is_not_in_any_command_line(connection: HostConnection, tmp_path: Path) -> None:
    """`mesh` waits for its peer, so its process can be inspected in the meantime."""
    request = {
        "name": "a", "names": ["a", "b"], "address": "127.0.0.1", "head": "a", "ports": [free_port()],
        "peers": {"b": "127.0.0.1"}, "token": "hunter2hunter2", "limit": 3.0, "device": "lo", "data_dir": "",
    }  # fmt: skip
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(connection.call("mesh", request)))
    thread.start()
    seen = until(lambda: [line for line in command_lines() if b"\0mesh" in line], 10, "the program")
    assert not any(b"hunter2" in line for line in command_lines()) and seen
    thread.join(20)
    assert answers and answers[0]["taken"] == []


def command_lines() -> list[bytes]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((entry / "cmdline").read_bytes())
    return found


def test_an_unreachable_host_is_reported(server: Server) -> None:
    closed = Login("127.0.0.1", port=free_port(), extra_arguments=server.login.extra_arguments)
    with pytest.raises(RemoteError, match="refused") as error:
        OpenSSHTransport(closed).execute("true")
    assert "\n" not in str(error.value)


# Variables of the connection as Ansible's documentation has them: what ssh gets of each.
LOGINS = table("logins")["logins"]


def logins(folder: Path, variables: dict[str, Any]) -> Login:
    (folder / "hosts.yml").write_text(yaml.safe_dump({"cluster": {"hosts": {"box.lan": variables}}}))
    return Inventory([str(folder / "hosts.yml")]).hosts[0].login


@pytest.mark.parametrize("case", LOGINS)
def test_the_login_is_that_of_ansible(case: str, tmp_path: Path) -> None:
    variables, words = LOGINS[case]
    login = logins(tmp_path, variables)
    command = login.ssh_command()
    assert any(command[at : at + len(words)] == words for at in range(len(command))), command
    assert command[0] == "ssh" and login.destination() == "box.lan"
    assert ("-p" in command) == ("port" in case or "template" in case), (
        "Port of ssh_config counts where no port is given"
    )


def test_a_password_is_in_no_command_line(tmp_path: Path) -> None:
    login = logins(tmp_path, {"ansible_user": "me", "ansible_password": "hunter2"})
    program = tmp_path / "ssh"
    program.write_text('#!/bin/sh\n[ "$SSH_ASKPASS_REQUIRE" = force ] && "$SSH_ASKPASS"; echo "$*"\n')
    program.chmod(0o755)
    password, arguments = OpenSSHTransport(replace(login, executable=str(program))).execute("true")[1].splitlines()
    assert password == b"hunter2" and b"hunter2" not in arguments and b"BatchMode=no" in arguments
    assert "hunter2" not in repr(login)


def test_another_connection_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match=r"^box\.lan: ansible_connection is 'docker': set it to ssh or local$"):
        logins(tmp_path, {"ansible_connection": "docker"})


def test_an_unknown_host_key_is_refused(server: Server, tmp_path: Path) -> None:
    (tmp_path / "known_hosts").write_text("")
    known = ("-o", f"UserKnownHostsFile={tmp_path}/known_hosts", "-o", "GlobalKnownHostsFile=/dev/null")
    login = Login("127.0.0.1", server.login.user, server.login.port, server.login.key_file, known)
    with pytest.raises(RemoteError, match="Host key verification failed"):
        OpenSSHTransport(login).execute("true")
    assert (tmp_path / "known_hosts").read_text() == "", "the key is not added"


def test_requests_share_one_ssh_connection(server: Server) -> None:
    transport = OpenSSHTransport(server.login)
    first = server_pid(transport)
    assert server_pid(transport) == first


def server_pid(transport: Transport) -> bytes:
    """The sshd process that serves the transport: the parent of its shell."""
    return transport.execute("echo $PPID")[1]


def test_no_shared_connection_if_the_socket_path_is_too_long(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("x" * 60)))
    assert openssh.multiplexing() == ()
    assert OpenSSHTransport(server.login).execute("echo yes")[1] == b"yes\n"


def test_hosts_of_an_inventory(tmp_path: Path, server: Server) -> None:
    """Templates and the group's variables are resolved as in a play."""
    inventory = tmp_path / "hosts.yml"
    over_ssh = ssh_variables(server.login, tmp_path / "cp") | {"cluster_managed": False}
    hosts: dict[str, dict[str, object]] = {"node1": {"ansible_connection": "local", "cluster_address": "10.0.0.1"}}
    hosts["node2"] = over_ssh | {"cluster_address": "10.0.0.2"}
    variables = {"base": "/srv", "cluster_data_dir": "{{ base }}/{{ inventory_hostname }}/", "cluster_processes": 2}
    variables["cluster_python"] = "{{ base }}/venv/bin/python"
    variables["ansible_python_interpreter"] = "/usr/bin/python3.11"
    inventory.write_text(
        yaml.safe_dump({"cluster": {"hosts": hosts, "vars": variables}, "other": {"hosts": {"x": {}}}})
    )
    read = Inventory([str(inventory)])
    first, second = read.hosts
    urls = ("http://127.0.0.1:11434", "http://10.0.0.1:11434")
    known: dict[str, Any] = {"processes": 2, "system_python": "/usr/bin/python3.11", "ollama_urls": urls}
    assert first == Host("node1", "10.0.0.1", "/srv/node1", "/srv/venv/bin/python", **known)
    assert (second.name, second.managed) == ("node2", False)
    assert replace(second.login, extra_arguments=second.login.extra_arguments[-4:]) == server.login
    assert read.connect(second).transport.execute("echo there")[1] == b"there\n"
    first.check()
    with pytest.raises(InventoryError, match="x: cluster_address is 'x'"):
        read.connect("x").host.check()
    inventory.write_text(yaml.safe_dump({"cluster": {"hosts": {"x": {"cluster_processes": "two"}}}}))
    with pytest.raises(InventoryError, match=r"^x: cluster_processes is 'two'"):
        Inventory([str(inventory)])


@pytest.mark.slow
def test_vault_values_of_an_inventory(tmp_path: Path) -> None:
    """In a separate process: Ansible keeps the secrets of a vault until its process ends."""
    (tmp_path / "password").write_text("open sesame\n")
    environment = {**os.environ, "ANSIBLE_VAULT_PASSWORD_FILE": str(tmp_path / "password")}
    vault = [Path(sys.executable).with_name("ansible-vault"), "encrypt_string", "--name", "ansible_user", "ali"]
    secret = subprocess.run(vault, env=environment, capture_output=True, text=True, check=True).stdout
    variables = textwrap.indent(secret, " " * 6)
    (tmp_path / "hosts.yml").write_text(f"cluster:\n  hosts:\n    node1:\n{variables}")
    program = "import sys; from trainyard.ansible_adapter import Inventory\n"
    program += "print(Inventory([sys.argv[1]]).hosts[0].login.user)"
    command = [sys.executable, "-c", program, tmp_path / "hosts.yml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "ali\n"


@pytest.mark.slow
def test_many_hosts_at_once() -> None:
    """A host that hangs has no answer within the limit, one that fails has its error, and no host waits for another."""

    def answer(after: float, error: str = "") -> Callable[[], dict[str, Any]]:
        def work() -> dict[str, Any]:
            time.sleep(after)
            if error:
                raise RemoteError(error)
            return {"after": after}

        return work

    start = time.monotonic()
    asked = FanOut({"hangs": answer(30), "fails": answer(0.1, "no"), "answers": answer(0.2)}).wait(1.0)
    assert time.monotonic() - start < 2
    assert asked.answers == {"answers": {"after": 0.2}}
    assert asked.errors == {"hangs": "no answer within 1 s", "fails": "no"}
    start = time.monotonic()
    asked = FanOut({"lost": answer(30), "answers": answer(0.2)}).wait(20, doubtful=["lost"], grace=0.3)
    assert time.monotonic() - start < 2 and set(asked.errors) == {"lost"}
    # The grace period starts when the others have answered, regardless of the position of the slow host.
    asked = FanOut({"lost": answer(30), "slow": answer(0.8)}).wait(20, doubtful=["lost"], grace=0.1)
    assert set(asked.answers) == {"slow"} and set(asked.errors) == {"lost"}


@pytest.mark.slow
def test_a_request_carries_the_modules_of_its_verb_only(tmp_path: Path) -> None:
    """Each verb can be imported from its archive, also what functions import later; a status request is small."""
    assert len(remote_input({}, "run_status")) < 14_000 < len(remote_input({})) / 4
    for verb, (module, *_) in VERBS.items():
        archive = tmp_path / f"{verb}.zip"
        archive.write_bytes(remote_archive(verb))
        with zipfile.ZipFile(archive) as opened:
            names = [name.removesuffix(".py").replace("/", ".") for name in opened.namelist() if "__init__" not in name]
        assert module in names
        code = f"import sys; sys.path.insert(0, {str(archive)!r}); import {', '.join(names)}"
        # Without the folder of packages of the tests' environment, as on a host.
        subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_the_archive_is_reproducible_and_needs_only_the_standard_library() -> None:
    first = remote_archive()
    remote_archive.cache_clear()
    assert remote_archive() == first
    command = remote_command("host_facts", sys.executable)
    request = remote_input(
        {"head": "127.0.0.1", "address": "127.0.0.1", "ports": [], "run_dir": "/r/x", "data_dir": "/r", "python": "/no"}
    )
    done = subprocess.run(["/bin/sh", "-c", command], input=request, capture_output=True, check=True)
    assert json.loads(done.stdout)["interface"] == "lo"
