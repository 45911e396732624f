"""An OpenSSH server on 127.0.0.1 for tests of transports, with keys of its own."""

from __future__ import annotations

import contextlib
import getpass
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from run_hosts import free_port, until

from trainyard.connection import Login


@dataclass(frozen=True)
class Server:
    """An sshd that listens on 127.0.0.1, and the login that it accepts."""

    login: Login
    folder: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    program = shutil.which("sshd") or "/usr/sbin/sshd"
    if not Path(program).exists() or not shutil.which("ssh"):
        pytest.skip("needs ssh and sshd (packages openssh-client, openssh-server)")
    folder = tmp_path_factory.mktemp("sshd")
    folder.chmod(0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = free_port()
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    host_key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}\n")
    options = ["UsePAM=no", "StrictModes=no", "PidFile=none", "ListenAddress=127.0.0.1", "PasswordAuthentication=no"]
    options += [f"HostKey={folder}/host", f"AuthorizedKeysFile={folder}/authorized_keys", "PermitRootLogin=yes"]
    options += ["Subsystem=sftp internal-sftp"]
    with contextlib.suppress(OSError):
        Path("/run/sshd").mkdir(exist_ok=True)
    arguments = [program, "-D", "-e", "-f", "/dev/null", "-p", str(port)]
    log = (folder / "log").open("wb")
    process = subprocess.Popen([*arguments, *(f"-o{option}" for option in options)], stderr=log)

    def listens() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    until(listens, 20, "sshd")
    known = ("-o", f"UserKnownHostsFile={folder}/known_hosts", "-o", "GlobalKnownHostsFile=/dev/null")
    yield Server(Login("127.0.0.1", getpass.getuser(), port, str(folder / "user"), known), folder)
    process.terminate()
    process.wait(10)


@pytest.fixture(autouse=True)
def control_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache folder of this test's own, with a short path; shared connections end with the test."""
    with tempfile.TemporaryDirectory(prefix="ty-") as cache:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        yield
        for control in [*Path(cache).glob("trainyard/ssh/*"), *tmp_path.glob("cp/*")]:
            subprocess.run(["ssh", "-o", f"ControlPath={control}", "-O", "exit", "x"], capture_output=True, check=False)
