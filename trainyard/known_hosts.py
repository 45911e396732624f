"""Which host keys OpenSSH has pinned for a host, and the same for its new address. Runs on the controller."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple


class Pins(NamedTuple):
    """What ssh would look up: the name in known_hosts, and the files, the user's own first."""

    name: str
    port: int
    files: tuple[Path, ...]

    def named(self, address: str) -> str:
        """Return an address as known_hosts writes it."""
        return address if self.port == 22 else f"[{address}]:{self.port}"

    def keys(self, name: str) -> set[str]:
        """Return the keys (`type key`) that are pinned for a name; authorities' and revoked ones are none."""
        found = set()
        for file in self.files:
            if file.exists():
                done = subprocess.run(["ssh-keygen", "-F", name, "-f", str(file)], capture_output=True, text=True)
                lines = (line.split() for line in done.stdout.splitlines() if line and line[0] not in "#@")
                found |= {" ".join(words[1:3]) for words in lines if len(words) >= 3}
        return found

    def pin(self, address: str) -> bool:
        """Let the host's keys count for its new address, too; tell whether that was new. Raises OSError."""
        name = self.named(address)
        new = sorted(self.keys(self.name) - self.keys(name))
        if new:
            file = self.files[0]
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            torn = file.exists() and file.read_bytes()[-1:] not in (b"", b"\n")
            text = "".join(f"{name} {key}\n" for key in new)
            # In one write: other hosts' keys are added at the same time.
            with file.open("a") as out:
                out.write(("\n" if torn else "") + text)
        return bool(new)


def pins_of(executable: str, arguments: str, host: str, port: int | None) -> Pins:
    """Return what ssh would look up for a host, given its arguments and the settings of this machine."""
    argv = [executable, "-G", *shlex.split(arguments), *(["-p", str(port)] if port else []), host]
    out = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    said = dict(line.partition(" ")[::2] for line in out.splitlines())
    files = [*said.get("userknownhostsfile", "").split(), *said.get("globalknownhostsfile", "").split()]
    number = int(said.get("port", 22))
    address = said.get("hostname", host)
    name = said.get("hostkeyalias") or (address if number == 22 else f"[{address}]:{number}")
    return Pins(name, number, tuple(Path(file).expanduser() for file in files))
