"""What code of a rank leaves in folders of a run: programs of the host follow no link, wait for nobody, and end with their connection."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_hosts import free_port, until
from ssh_server import Server, control_folder, server

from trainer.supervise.processes import all_pids, environ, is_running
from trainyard.run.follow.gathered_logs import FILES_LIMIT, copy_logs
from trainyard.run.follow.manage_runs import manage_runs
from trainyard.run.launch.start_ranks import begin
from trainyard.run.launch_options import LaunchOptions
from trainyard.wire.connection import Host, HostConnection, RemoteError
from trainyard.wire.openssh import LocalTransport, OpenSSHTransport
from trainyard.wire.remote_archive import remote_command, remote_input
from trainyard.wire.run_errors import RunError

__all__ = ["control_folder", "server"]
pytestmark = pytest.mark.slow

LIMIT = 10.0  # s for a program to end on a loaded machine; its own limit is much longer


class Here:
    """A data folder of this machine with one run, and a home that no verb may touch."""

    def __init__(self, folder: Path) -> None:
        self.data, self.home = folder / "data", folder / "home"
        self.run = self.data / "runs/r"
        for path in (self.run, self.data / "store", self.home):
            path.mkdir(parents=True)
        (self.home / "authorized_keys").write_text("key")
        self.home.chmod(0o750)
        self.connection = HostConnection(Host("node1", "127.0.0.1", str(self.data), sys.executable), LocalTransport())

    def call(self, verb: str, **request: Any) -> dict[str, Any]:
        """Run a verb in time."""
        start = time.monotonic()
        try:
            return self.connection.call(verb, request)
        finally:
            assert time.monotonic() - start < LIMIT

    def start(self) -> dict[str, Any]:
        return self.call("run_start", run_dir=str(self.run), command=["/bin/sleep", "60"], backend="process")

    def receive(self, **more: Any) -> dict[str, Any]:
        store = self.data / "store"
        request = {"files": {str(store / "datasets/d"): "0" * 64}, "arrived": {}, "check": False, **more}
        return self.call("receive", **request, cache=str(store / "digests.json"), incoming=str(store / "incoming"))

    def check_home(self) -> None:
        """Check that nothing has changed outside."""
        assert [path.name for path in self.home.iterdir()] == ["authorized_keys"]
        assert (self.home / "authorized_keys").read_text() == "key" and self.home.stat().st_mode & 0o777 == 0o750


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


@pytest.mark.parametrize("name", ["state", "logs"])
def test_a_restart_does_not_follow_a_link(name: str, here: Here) -> None:
    """A start removes the files in `state`: it deleted authorized_keys where that was a link to ~/.ssh."""
    (here.run / name).symlink_to(here.home)
    with pytest.raises(RemoteError, match=f"it is a symbolic link: remove it: '{here.run}/{name}'"):
        here.start()
    here.check_home()


def test_a_start_through_a_link_in_place_of_the_run_folder_is_refused(here: Here) -> None:
    here.run.rmdir()
    here.run.symlink_to(here.home)
    with pytest.raises(RemoteError, match="there is no run folder"):
        here.start()
    with pytest.raises(RemoteError, match="symbolic link"):
        here.call(
            "commit", run_dir=str(here.run), token="t", contents={}, trainer=f"{here.data}/store/t", previous=None
        )
    here.check_home()


@pytest.mark.parametrize("case", ["link state", "link .", "mode state", "mode ."])
def test_a_run_that_closes_its_folders_is_stopped(case: str, here: Here) -> None:
    """Its records cannot be read, and its supervisor is halted."""
    pid, connection, kind, folder = here.start()["pid"], here.connection, case[:4], here.run / case[5:]
    os.kill(pid, signal.SIGSTOP)
    if kind == "link":
        folder.rename(here.data / "moved")
        folder.symlink_to(here.home)
    folder.chmod(0o750 if kind == "link" else 0)
    how: tuple[Any, ...] = ([connection.host], lambda _: connection, LaunchOptions(), print)
    listed = manage_runs("listed", "", *how)["lines"]
    every = case == "link ."
    found = manage_runs("stopped", "" if every else "r", *how, now=True, every=every)
    folder.chmod(0o750)
    assert found["changed"] and not is_running(pid) and listed[1].split()[:2] == ["r", "node1"], listed
    assert not marked(here.run, "TRAINYARD_RUN_DIR")
    here.check_home()


def test_a_start_copes_with_folders_in_place_of_files(here: Here) -> None:
    for name in ("state/go2/deep", "state/rank0.json", "state/node.json", "stop/deep"):
        (here.run / name).mkdir(parents=True)
    (here.run / "state/go2/file").touch()
    (here.run / "state/go2").chmod(0)
    for name in ("lock", "claim.json", "env", "logs/torchrun.0.log"):
        (here.run / name).mkdir(parents=True)
        with pytest.raises(RemoteError, match=f"(it is a folder|not a regular file): remove it: '{here.run}/{name}'"):
            here.start()
        (here.run / name).rmdir()
    here.start()
    assert here.call("run_stop", run_dir=str(here.run), now=True)["status"] == "stopped"


@pytest.mark.parametrize("name", ["incoming", "datasets"])
def test_staging_does_not_follow_a_link(name: str, here: Here) -> None:
    """It set the mode of the folder, and removed old files in it."""
    os.utime(here.home / "authorized_keys", (0, 0))
    (here.data / "store" / name).symlink_to(here.home)
    arrived = here.data / "store/new"
    arrived.write_text("x")
    more = {"arrived": {str(here.data / "store/datasets/d"): str(arrived)}} if name == "datasets" else {}
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    with pytest.raises(RemoteError, match="symbolic link"):
        here.receive(files={str(here.data / "store/datasets/d"): digest}, **more)
    here.check_home()


def test_staging_does_not_wait_for_a_fifo(here: Here) -> None:
    os.mkfifo(here.data / "store/digests.json")
    assert here.receive()["lacking"] == [str(here.data / "store/datasets/d")]
    assert (here.data / "store/digests.json").exists()
    os.mkfifo(here.data / "store/incoming/x")
    with pytest.raises(RemoteError, match="not a regular file"):
        here.receive(arrived={str(here.data / "store/datasets/d"): str(here.data / "store/incoming/x")})


FIFOS = ["lock", "claim.json", "env", "state/node.json", "state/rank0.json", "metrics.jsonl"]
FIFOS += ["result.json", "spec.yml", "logs/rank0.log", "checkpoints/step-00000001/manifest.json", "trainer.zip"]


@pytest.mark.parametrize("name", FIFOS)
def test_no_verb_waits_for_a_fifo(name: str, here: Here) -> None:
    path = here.run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("run_status", {"run_dir": str(here.run), "logs_from": {"rank0.log": -5}}),
        ("run_list", {"data_dir": str(here.data)}),
        ("run_stop", {"run_dir": str(here.run), "grace": 0.5}),
        ("checkpoints", {"run_dir": str(here.run)}),
        ("read_files", {"run_dir": str(here.run), "text": [name], "sizes": ["*", "*/*"], "sha256": ["*", "*/*"]}),
        ("exchange", {"root": str(here.data / "runs"), "token": "t", "lend": [f"r/{name}"]}),
    ]
    for verb, request in calls:
        try:
            answer = here.call(verb, **request)
        except RemoteError as error:
            assert "no answer" not in str(error)
        else:
            assert verb != "read_files" or (answer["text"] == {name: None} and name not in answer["sizes"])


def test_links_to_secrets_are_not_read(here: Here) -> None:
    secret = here.home / "authorized_keys"
    for name in ("logs/rank0.log", "result.json", "checkpoints/step-00000001/state.pt"):
        (here.run / name).parent.mkdir(parents=True, exist_ok=True)
        (here.run / name).symlink_to(secret)
        with pytest.raises(RemoteError, match="symbolic link"):
            here.call("exchange", root=str(here.data / "runs"), token="t", lend=[f"r/{name}"])
        answer = here.call("read_files", run_dir=str(here.run), text=[name], sizes=["*", "*/*"], sha256=["*", "*/*"])
        assert answer == {"text": {name: None}, "sizes": {}, "sha256": {}}
    (here.run / "state").mkdir()
    answer = here.call("run_status", run_dir=str(here.run), logs_from={"rank0.log": -5})
    assert answer["logs"]["rank0.log"]["lines"] == []
    here.check_home()


@pytest.mark.parametrize("kind", ["fifo", "link", "link to a folder", "state"])
def test_the_begin_of_a_run_follows_no_link_and_waits_for_no_fifo(kind: str, here: Here) -> None:
    state, began = here.run / "state", time.monotonic()
    if kind == "state":
        state.symlink_to(here.home)
    else:
        state.mkdir()
        if kind == "fifo":
            os.mkfifo(state / "go")
        else:
            (state / "go").symlink_to(here.home / ("new" if kind == "link" else ""))
    with pytest.raises(RemoteError, match="symbolic link" if kind == "state" else "File exists"):
        begin(here.connection, str(here.run))
    assert time.monotonic() - began < LIMIT
    here.check_home()


def test_a_run_begins_again_in_a_data_folder_that_is_a_link(here: Here, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(here.data)
    for _ in range(2):
        (here.run / "lock").touch()
        here.call("run_start", run_dir=str(here.run), command=["/bin/true"], backend="process", hold=True)
        assert begin(here.connection, f"{tmp_path}/link/runs/r")["now"] > 0
        until(lambda: json.loads((here.run / "state/node.json").read_text())["ended"], LIMIT, "the end")
        here.call("run_stop", run_dir=str(here.run), grace=0.5)


class Exchanged:
    """A connection to a host where code of a rank exchanges a log once it is listed."""

    def __init__(self, here: Here, exchange: Callable[[Path], None]) -> None:
        self._here, self._exchange = here, exchange
        self.host, self.transport, self.fetch = here.connection.host, here.connection.transport, here.connection.fetch

    def call(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        answer = self._here.connection.call(verb, request)
        log = self._here.run / "logs/rank0.log"
        if verb == "read_files":
            log.unlink()
            self._exchange(log)
        return answer


@pytest.mark.parametrize("kind", ["link", "endless link", "fifo"])
def test_logs_that_are_exchanged_while_they_are_copied(kind: str, here: Here, tmp_path: Path) -> None:
    for name in ("logs/rank0.log", "state/rank0.json"):
        (here.run / name).parent.mkdir()
        (here.run / name).write_text("of the run")
    targets = {"link": here.home / "authorized_keys", "endless link": Path("/dev/zero")}
    exchange = os.mkfifo if kind == "fifo" else (lambda log: log.symlink_to(targets[kind]))
    connection: Any = Exchanged(here, exchange)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"node1: .*(symbolic link|not a regular file)"):
        copy_logs("r", [connection.host], lambda _: connection, tmp_path / "to", 1 << 20)
    assert time.monotonic() - began < LIMIT and not [path for path in (tmp_path / "to").rglob("*") if path.is_file()]
    here.check_home()


def test_the_copy_of_logs_is_limited(here: Here, tmp_path: Path) -> None:
    (here.run / "logs").mkdir()
    with (here.run / "logs/rank0.log").open("wb") as log:
        log.truncate(1 << 40)
        log.seek(0, os.SEEK_END)
        log.write(b"the end")
    found = copy_logs("r", [here.connection.host], lambda _: here.connection, tmp_path / "to", 1 << 20)
    assert found["files"] == ["node1/rank0.log"] and "only its last 1 MiB" in found["lines"][0]
    assert (tmp_path / "to/node1/rank0.log").read_bytes() == bytes((1 << 20) - 7) + b"the end"
    for number in range(FILES_LIMIT):
        (here.run / f"{number}.log").touch()
    with pytest.raises(RunError, match=f"has {FILES_LIMIT + 1} logs"):
        copy_logs("r", [here.connection.host], lambda _: here.connection, tmp_path / "to", 1 << 20)


# Time limits and connections


def marked(mark: object, name: str = "TRAINYARD_TEST") -> list[int]:
    """Return the processes of a verb, or of a run, that this test has started."""
    return [pid for pid in all_pids() if environ(pid).get(name) == str(mark) and is_running(pid)]


def waiting_relay(folder: Path) -> tuple[str, bytes, int]:
    """Return command and input of a verb that waits for a host that never connects, and its port."""
    store, port = folder / "store", free_port()
    store.mkdir()
    file = {"target": f"{store}/a", "temporary": f"{store}/incoming/a", "size": 9, "sha256": "0", "mode": 0o644}
    request = {"files": [file | {"source": "host", "wanted": False}], "address": "127.0.0.1", "port": port}
    request |= {"previous": "127.0.0.9", "next": "", "next_port": 0, "certificate": "", "key": ""}
    request |= {"cache": f"{store}/digests.json", "connect": 600.0, "idle": 600.0}
    command = f"TRAINYARD_TEST={folder}; export TRAINYARD_TEST; {remote_command('relay', sys.executable)}"
    return command, remote_input(request, "relay"), port


def listens(port: int) -> bool:
    return f":{port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text(encoding="utf-8")


def test_a_program_ends_when_its_ssh_client_is_killed(server: Server, tmp_path: Path) -> None:
    command, stdin, port = waiting_relay(tmp_path)
    argv = OpenSSHTransport(server.login).stream_argv(command)
    # A killed client leaves the descriptors that it inherits non-blocking: it gets none of pytest.
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(argv, **streams) as client:
        assert client.stdin
        client.stdin.write(stdin)
        client.stdin.close()
        until(functools.partial(listens, port), 30, "the relay to wait")
        assert marked(str(tmp_path))
        client.kill()
    until(lambda: not marked(str(tmp_path)), LIMIT, "the program on the host to end")


def test_a_program_ends_when_its_request_is_given_up_on_a_shared_connection(server: Server, tmp_path: Path) -> None:
    command, stdin, port = waiting_relay(tmp_path)
    transport = OpenSSHTransport(server.login)
    thread = threading.Thread(target=lambda: transport.execute(command, stdin), daemon=True)
    thread.start()
    until(functools.partial(listens, port), 30, "the relay to wait")
    transport.abort()
    until(lambda: not marked(str(tmp_path)), LIMIT, "the program on the host to end")


LIMITED = """
import sys
from trainyard.remote import __main__ as program
program.VERBS["relay"] = (*program.VERBS["relay"][:2], 1.0)
sys.argv[1:] = ["relay"]
program.main()
"""


def test_a_program_ends_at_its_time_limit(tmp_path: Path) -> None:
    """That of its verb; here, one that waits for a host is given a second."""
    _, stdin, _ = waiting_relay(tmp_path)
    request = stdin[stdin.index(b'{"files"') :]
    done = subprocess.run([sys.executable, "-c", LIMITED], input=request, capture_output=True, timeout=30, check=False)
    assert json.loads(done.stdout) == {"error": "relay: not done within 1 s"}


BLOCKED = """
import os, subprocess, sys
from trainyard.remote.watch import EndedError, kill_group, watch
watch(0.5, finishes=False)
try:
    child = subprocess.Popen(["/bin/sleep", "60"])
    os.open(sys.argv[1], os.O_RDONLY)
except EndedError as error:
    print(error, flush=True)
    kill_group()
"""


def test_a_time_limit_ends_a_system_call_that_blocks_and_children(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    environment = {**os.environ, "TRAINYARD_TEST": str(tmp_path)}
    command = [sys.executable, "-c", BLOCKED, str(tmp_path / "fifo")]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=LIMIT, check=False)
    assert done.stdout == b"not done within 0 s\n" or done.stdout == b"not done within 1 s\n"
    until(lambda: not marked(str(tmp_path)), LIMIT, "the child to end")


def test_a_start_is_completed_without_its_connection(here: Here) -> None:
    """Not half of it: the supervisor has its lock and its record, so that status and stop know it."""
    request = {"run_dir": str(here.run), "command": ["/bin/sleep", "60"], "backend": "process"}
    command = ["/bin/sh", "-c", remote_command("run_start", sys.executable)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        process.stdout.close()
        process.stdin.write(remote_input(request, "run_start"))
        process.stdin.close()
        process.wait(60)
    assert here.call("run_status", run_dir=str(here.run))["status"] == "running"
    assert here.call("run_stop", run_dir=str(here.run), now=True)["status"] == "stopped"
    assert here.call("run_status", run_dir=str(here.run))["alive"] is False
