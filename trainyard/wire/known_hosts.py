"""The host keys that OpenSSH has for a host, and how they are added for its new address. Runs on the controller."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple


class KnownHosts(NamedTuple):
    """The host key lookup of ssh: the name in known_hosts, the port, and the files, with the user's own file first."""

    name: str
    port: int
    files: tuple[Path, ...]

    def entry(self, address: str) -> str:
        """Return an address as known_hosts writes it: bare at port 22, `[address]:port` at any other."""
        return address if self.port == 22 else f"[{address}]:{self.port}"

    def keys(self, name: str) -> set[str]:
        """Return the keys (`type key`) of a name, without keys of certificate authorities and revoked keys."""
        found = set()
        for file in self.files:
            if file.exists():
                done = subprocess.run(["ssh-keygen", "-F", name, "-f", str(file)], capture_output=True, text=True)
                lines = (line.split() for line in done.stdout.splitlines() if line and line[0] not in "#@")
                found |= {" ".join(words[1:3]) for words in lines if len(words) >= 3}
        return found

    def add_address(self, address: str) -> bool:
        """Add the host's keys for another address; return whether any was new. Raises OSError."""
        name = self.entry(address)
        new = sorted(self.keys(self.name) - self.keys(name))
        if new:
            file = self.files[0]
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            incomplete = file.exists() and file.read_bytes()[-1:] not in (b"", b"\n")
            text = "".join(f"{name} {key}\n" for key in new)
            # One write, because the keys of other hosts are added at the same time.
            with file.open("a", encoding="utf-8") as out:
                out.write(("\n" if incomplete else "") + text)
        return bool(new)


def find_known_hosts(executable: str, arguments: str, host: str, port: int | None) -> KnownHosts:
    """Return the host key lookup of ssh for its command-line arguments and the configuration of this machine.

    Raises subprocess.CalledProcessError: ssh rejects the arguments.
    """
    argv = [executable, "-G", *shlex.split(arguments), *(["-p", str(port)] if port else []), "--", host]
    out = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    settings = dict(line.partition(" ")[::2] for line in out.splitlines())
    files = [*settings.get("userknownhostsfile", "").split(), *settings.get("globalknownhostsfile", "").split()]
    number = int(settings.get("port", 22))
    address = settings.get("hostname", host)
    name = settings.get("hostkeyalias") or (address if number == 22 else f"[{address}]:{number}")
    return KnownHosts(name, number, tuple(Path(file).expanduser() for file in files))
