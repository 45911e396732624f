"""An OpenSSH server on loopback addresses for tests of transports, with keys of its own."""

import contextlib
import functools
import getpass
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from run_hosts import free_port, until

from trainyard.wire.connection import Login

MOST_ADDRESSES = 16  # on which one sshd listens: its MAX_LISTEN_SOCKS


@dataclass(frozen=True)
class Server:
    """An sshd that listens on 127.0.0.1, and the login that it accepts."""

    login: Login
    folder: Path


@contextlib.contextmanager
def serve_ssh(folder: Path, addresses: Sequence[str] = ("127.0.0.1",)) -> Iterator[Server]:
    """Run sshd on loopback addresses, with one port and one key; the login is that of the first address."""
    if Path(pwd.getpwuid(os.getuid()).pw_shell).name in ("nologin", "false"):
        pytest.skip(f"the account {getpass.getuser()} has no login shell")
    program = shutil.which("sshd") or "/usr/sbin/sshd"
    folder.chmod(0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = free_port()
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    host_key = " ".join((folder / "host.pub").read_text().split()[:2])
    names = ",".join(f"[{address}]:{port}" for address in addresses)
    (folder / "known_hosts").write_text(f"{names} {host_key}\n")
    options = ["UsePAM=no", "StrictModes=no", "PidFile=none", "PasswordAuthentication=no", "MaxStartups=100"]
    options += [f"HostKey={folder}/host", f"AuthorizedKeysFile={folder}/authorized_keys", "PermitRootLogin=yes"]
    options += ["Subsystem=sftp internal-sftp"]
    with contextlib.suppress(OSError):
        Path("/run/sshd").mkdir(exist_ok=True)
    arguments = [program, "-D", "-e", "-f", "/dev/null", "-p", str(port), *(f"-o{option}" for option in options)]
    with contextlib.ExitStack() as servers:
        for first in range(0, len(addresses), MOST_ADDRESSES):
            group = addresses[first : first + MOST_ADDRESSES]
            servers.enter_context(
                sshd([*arguments, *(f"-oListenAddress={address}" for address in group)], folder / "log")
            )
            until(functools.partial(listens, group[0], port), 20, f"sshd: see {folder}/log")
        known = ("-o", f"UserKnownHostsFile={folder}/known_hosts", "-o", "GlobalKnownHostsFile=/dev/null")
        yield Server(Login(addresses[0], getpass.getuser(), port, str(folder / "user"), known), folder)


def ssh_variables(login: Login, control: Path) -> dict[str, object]:
    """Return the variables of an inventory for a login; `control`: the folder of shared connections."""
    found = {"ansible_host": login.address, "ansible_user": login.user, "ansible_port": login.port}
    found |= {"ansible_ssh_private_key_file": login.key_file, "ansible_ssh_control_path_dir": str(control)}
    return found | {"ansible_connection": "ssh", "ansible_ssh_common_args": " ".join(login.extra_arguments)}


@contextlib.contextmanager
def sshd(command: list[str], log: Path) -> Iterator[None]:
    """Run an sshd; its messages are added to a log."""
    with log.open("ab") as file:
        process = subprocess.Popen(command, stderr=file)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


def listens(address: str, port: int) -> bool:
    """Return whether a server accepts connections."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not (shutil.which("sshd") or Path("/usr/sbin/sshd").exists()) or not shutil.which("ssh"):
        pytest.skip("needs ssh and sshd (packages openssh-client, openssh-server)")
    with serve_ssh(tmp_path_factory.mktemp("sshd")) as found:
        yield found


@pytest.fixture(autouse=True)
def control_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache folder of this test's own, with a short path; shared connections end with the test."""
    with tempfile.TemporaryDirectory(prefix="ty-") as cache:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        yield
        for control in [*Path(cache).glob("trainyard/ssh/*"), *tmp_path.glob("cp/*")]:
            subprocess.run(["ssh", "-o", f"ControlPath={control}", "-O", "exit", "x"], capture_output=True, check=False)
