"""Host keys and known_hosts, compared with OpenSSH's tools."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_ollama import Server, serve
from netlab import daemon
from tables import table

from trainyard.discovery.ollama_replies import Server as Seen
from trainyard.discovery.scan_result import LanMachine
from trainyard.discovery.ssh import fetch_host_keys, fingerprint, known_hosts_name, read_known_hosts
from trainyard.discovery.trust import check_trust

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="needs OpenSSH's ssh-keygen")


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> list[str]:
    """Three public keys, `type base64`."""
    folder = tmp_path_factory.mktemp("keys")
    made = []
    for kind, name in (("ed25519", "a"), ("ed25519", "b"), ("ecdsa", "c")):
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", folder / name], check=True)
        made.append(" ".join((folder / f"{name}.pub").read_text().split()[:2]))
    return made


LINES = table("ssh")["lines"]
HOSTS = [
    *("10.0.0.5", "10.0.0.6", "node1", "NODE1", "10.0.0.7", "[10.0.0.7]:2222", "[10.0.0.5]:2222", "x.lan", "bad.lan"),
    *("10.0.1.7", "10.0.1.77", "10.0.0.9", "10.0.0.1", "a.example.org"),
]


@pytest.mark.parametrize("hashed", [False, True])
def test_known_hosts_is_read_as_ssh_keygen_reads_it(tmp_path, keys, hashed):
    file = tmp_path / "known_hosts"
    # ssh-keygen does not hash a file with a malformed line.
    file.write_text("\n".join(line for line in LINES if not (hashed and line == "broken")).format(*keys) + "\n")
    if hashed:
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", file], check=True, capture_output=True)
        assert "|1|" in file.read_text()
    entries = read_known_hosts([str(file), str(tmp_path / "none")])
    for host in HOSTS:
        done = subprocess.run(["ssh-keygen", "-F", host.lower(), "-f", file], capture_output=True, text=True).stdout
        expected = {
            " ".join(line.split()[1:3]) for line in done.splitlines() if line and not line.startswith(("#", "@cert"))
        }
        assert {e.key for e in entries if e.names(host.lower()) and not e.revoked} == expected, host
    assert [e.revoked for e in entries if e.names("10.0.0.8")] == [True]


def test_fingerprints_equal_those_of_ssh(tmp_path, keys):
    for key in keys:
        (tmp_path / "k.pub").write_text(key + "\n")
        done = subprocess.run(
            ["ssh-keygen", "-lf", tmp_path / "k.pub"], capture_output=True, text=True, check=True
        ).stdout
        assert done.split()[1] == fingerprint(key)


def machine(*host_keys: str, port: int = 22) -> LanMachine:
    seen = Seen(address="10.0.0.5", port=11434, version="0.12.3")
    return LanMachine(local=False, ssh_port=port, host_keys=host_keys, servers=(seen,))


@pytest.mark.parametrize(("line", "port", "ready", "reason"), table("known_hosts_trust"))
def test_check_trust(tmp_path, keys, line, port, ready, reason):
    file = tmp_path / "known_hosts"
    file.write_text(line.format(*keys) + "\n")
    found = machine(keys[0], keys[2], port=port)
    trust = check_trust(found, read_known_hosts([str(file)]), {"10.0.0.5": ["node1"]}, str(file))
    assert (trust.ready, reason in trust.reason) == (ready, True), trust
    if not ready and trust.accept:
        # After the command, both trainyard and ssh know the machine.
        subprocess.run(["sh", "-c", trust.accept], check=True, capture_output=True)
        assert check_trust(found, read_known_hosts([str(file)]), {}, str(file)).ready
        name = known_hosts_name("10.0.0.5", port)
        assert keys[0] in subprocess.run(["ssh-keygen", "-F", name, "-f", file], capture_output=True, text=True).stdout


def test_without_ssh_there_is_nothing_to_accept():
    trust = check_trust(machine(), [], {}, "known_hosts")
    assert not trust.ready and not trust.accept
    assert trust.reason == "no SSH server presents a key on port 22"


def sshd(folder: Path, name: str, address: str, port: int, namespace: str | None = None, before: Sequence[str] = ()):
    """A real sshd with its own host key (`folder/name`), as a context; `before` is a command that starts it."""
    program = shutil.which("sshd") or "/usr/sbin/sshd"
    if not Path(program).exists():
        pytest.skip("needs sshd (package openssh-server)")
    Path("/run/sshd").mkdir(exist_ok=True)
    key = folder / name
    if not key.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    options = [f"ListenAddress={address}:{port}", f"HostKey={key}", "PidFile=none", "UsePAM=no", "StrictModes=no"]
    options += [f"AuthorizedKeysFile={folder}/authorized_keys", "PermitRootLogin=yes", "MaxStartups=100"]
    command = [*before, program, "-D", "-e", "-f", "/dev/null", *(w for o in options for w in ("-o", o))]
    return daemon(namespace, command, folder / f"{name}.{address}.log")


def keys_at(address: str, port: int, seconds: float = 10) -> tuple[str, ...]:
    """Return the keys that the server presents, as soon as it listens."""
    deadline = time.monotonic() + seconds
    while not (found := asyncio.run(fetch_host_keys(address, port, 2.0))) and time.monotonic() < deadline:
        pass
    return found


@pytest.mark.lab
def test_a_real_sshds_key(tmp_path):
    with sshd(tmp_path, "host", "127.0.9.1", 18022):
        assert keys_at("127.0.9.1", 18022) == (" ".join((tmp_path / "host.pub").read_text().split()[:2]),)


@pytest.mark.parametrize("kind", ["tarpit", "endless", "garbage", "hang_up", "drip"])
def test_a_server_without_ssh_has_no_key_after_the_timeout(kind):
    with serve([Server("127.0.9.2", 18022, kind=kind)]):
        start = time.perf_counter()
        assert asyncio.run(fetch_host_keys("127.0.9.2", 18022, 1.0)) == ()
        assert time.perf_counter() - start < 2


def test_without_ssh_keyscan_there_is_no_key(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with serve([Server("127.0.9.2", 18022)]):
        assert asyncio.run(fetch_host_keys("127.0.9.2", 18022, 1.0)) == ()
