"""SSH host keys: those that a machine presents, and those in known_hosts (sshd(8), SSH_KNOWN_HOSTS FILE FORMAT)."""

import asyncio
import base64
import contextlib
import fnmatch
import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass

from trainer.common.errors import UserError
from trainer.common.inputs import read_regular, user_path

_MAX_FILE = 64 * 1024 * 1024  # bytes
KEY = re.compile(r"(?:ssh|ecdsa|sk)-[\w@.-]{1,64} [A-Za-z0-9+/]{16,2048}={0,2}", re.ASCII)


@dataclass(frozen=True)
class KnownHost:
    """A line of known_hosts: `patterns` (or one hashed name), the key, and whether the line is marked `@revoked`."""

    patterns: tuple[str, ...]
    key: str
    revoked: bool

    def names(self, host: str) -> bool:
        """Return whether the line applies to `host`, given as in known_hosts: `name` or `[name]:port`."""
        if self.patterns[0].startswith("|1|"):
            return _hash_matches(self.patterns[0], host)
        if any(p.startswith("!") and _matches(host, p[1:]) for p in self.patterns):
            return False
        return any(_matches(host, p) for p in self.patterns)


def read_known_hosts(paths: Iterable[str]) -> list[KnownHost]:
    """Return the entries of all files. Missing files and malformed lines are ignored.

    `@cert-authority` lines are also ignored: only a login can verify the certificate of a host.
    """
    entries = []
    for path in paths:
        try:
            text = read_regular(user_path(path, "known_hosts"), _MAX_FILE).decode(errors="replace")
        except (OSError, UserError):
            continue
        for line in text.splitlines():
            words = line.split()
            marker = words.pop(0) if words and words[0].startswith("@") else ""
            if len(words) >= 3 and not words[0].startswith("#") and marker in ("", "@revoked"):
                patterns = tuple(p for p in words[0].split(",") if p)
                if patterns:
                    entries.append(KnownHost(patterns, f"{words[1]} {words[2]}", marker == "@revoked"))
    return entries


def known_hosts_name(host: str, port: int) -> str:
    """Return a host as known_hosts writes it: bare at port 22, `[host]:port` at any other."""
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


def fingerprint(key: str) -> str:
    """Return `SHA256:...` of a key, as ssh and `ssh-keygen -l` show it."""
    digest = hashlib.sha256(base64.b64decode(key.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


async def fetch_host_keys(address: str, port: int, timeout: float) -> tuple[str, ...]:
    """Return the host keys that a machine presents (`type base64`, sorted).

    The result is empty without an SSH server, without ssh-keyscan on this machine, or after `timeout` seconds. It does
    not prove identity: a machine may present a key that it does not own. SSH verifies the key at login.
    """
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout):
            # Most machines without SSH refuse the connection immediately and need no process.
            _, writer = await asyncio.open_connection(address, port)
            writer.transport.abort()
            out = await _ssh_keyscan(address, port, timeout)
        # "address type base64"; comment lines contain text of the server and are ignored.
        lines = (line.partition(" ")[2] for line in out.decode("ascii", "replace").splitlines() if line[:1] != "#")
        return tuple(sorted({key for key in lines if KEY.fullmatch(key) and _decodes(key)}))
    return ()


async def _ssh_keyscan(address: str, port: int, timeout: float) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *("ssh-keyscan", "-T", str(max(1, round(timeout))), "-p", str(port), "--", address),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        return (await process.communicate())[0]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _decodes(key: str) -> bool:
    try:
        return bool(base64.b64decode(key.split()[1], validate=True))
    except ValueError:
        return False


def _matches(host: str, pattern: str) -> bool:
    # fnmatch has character sets, known_hosts has none: "[10.0.0.5]:2222" is literal.
    return fnmatch.fnmatchcase(host, pattern.lower().replace("[", "[[]"))


def _hash_matches(pattern: str, host: str) -> bool:
    try:
        _, _, salt, digest = pattern.split("|")
        wanted = base64.b64decode(digest, validate=True)
        made = hmac.new(base64.b64decode(salt, validate=True), host.encode(), hashlib.sha1).digest()
    except ValueError:
        return False
    return hmac.compare_digest(wanted, made)
