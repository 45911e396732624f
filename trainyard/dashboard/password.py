"""The password of the dashboard: its salted hash, and the limit of attempts.

    python -m trainyard.dashboard.password [FILE]

reads a password from standard input, or asks for it on a terminal. It prints the salted hash, which `dashboard_password_file` may have
in place of the password. With FILE, it writes the hash there, unless the file has a hash of this password, and prints what it did.
"""

from __future__ import annotations

import contextlib
import getpass
import re
import secrets
import stat
import sys
import time
from collections import deque
from pathlib import Path

from cryptography.exceptions import InvalidKey
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

from trainer.common.errors import UserError
from trainer.common.files import write_atomic
from trainer.common.inputs import read_regular, user_path

SHORTEST = 12  # characters
FILE_LIMIT = 4096  # bytes of a file with a password
MEMORY, PASSES = 32 << 10, 2  # KiB and passes of Argon2id: about 0.1 s for each attempt
ATTEMPTS = 5  # wrong passwords of one address in WINDOW
ALL_ATTEMPTS = 30  # of all addresses
WINDOW = 300.0  # s
_HASH = re.compile(rf"\$argon2id\$v=19\$m={MEMORY},t={PASSES},p=1\$[A-Za-z0-9+/]{{22}}\$[A-Za-z0-9+/]{{43}}")


def hash_password(password: str) -> str:
    """Return the hash of a password with a new salt, as a line. Raises UserError for a short one."""
    if len(password) < SHORTEST:
        raise UserError(f"the password of the dashboard has {len(password)} characters: give it {SHORTEST} or more")
    how = Argon2id(salt=secrets.token_bytes(16), length=32, iterations=PASSES, lanes=1, memory_cost=MEMORY)
    return how.derive_phc_encoded(_encoded(password))


def matches(hashed: str, password: str) -> bool:
    """Return whether a hash is that of a password; the time reveals nothing about either."""
    try:
        Argon2id.verify_phc_encoded(_encoded(password), hashed)
    except InvalidKey:
        return False
    return True


def _encoded(password: str) -> bytes:
    return password.encode(errors="surrogatepass")


class AttemptLimit:
    """Counts wrong passwords: a few of one address, and some of all addresses, within a time."""

    def __init__(self) -> None:
        """Begin without attempts."""
        self._attempts: deque[tuple[float, str]] = deque()

    def begin(self, address: str) -> float:
        """Count an attempt and return 0, or return the seconds until the address may try again."""
        now = time.monotonic()
        while self._attempts and self._attempts[0][0] <= now - WINDOW:
            self._attempts.popleft()
        own = [at for at, of in self._attempts if of == address]
        if len(own) >= ATTEMPTS:
            return own[0] + WINDOW - now
        if len(self._attempts) >= ALL_ATTEMPTS:
            return self._attempts[0][0] + WINDOW - now
        self._attempts.append((now, address))
        return 0.0

    def withdraw(self, address: str) -> None:
        """Forget the newest attempt of an address: the password was right."""
        for place in reversed(range(len(self._attempts))):
            if self._attempts[place][1] == address:
                del self._attempts[place]
                return


def read_password(variable: str, file: str) -> str | None:
    """Return the hash of the password that a user has set, or None without one.

    Args:
        variable: the variable `dashboard_password`; empty without it.
        file: the option `dashboard_password_file`: a file whose first line is the password, or its hash; empty without it.

    Raises:
        UserError: both are set, the password is too short, or the file is unreadable or readable by other users.
    """
    if variable and file:
        raise UserError("dashboard_password and dashboard_password_file are set: remove one of them")
    if not file:
        return hash_password(variable) if variable else None
    path = user_path(file, "dashboard_password_file")
    try:
        mode = path.stat().st_mode
        line = read_regular(path, FILE_LIMIT).decode().partition("\n")[0].rstrip("\r")
    except (OSError, ValueError) as error:
        raise UserError(f"dashboard_password_file: cannot read {path}: {getattr(error, 'strerror', error)}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UserError(f"dashboard_password_file: other users may read {path}: run chmod 600 {path}")
    if not line.startswith(("$argon2id$", "scrypt:")):
        return hash_password(line)
    if not _HASH.fullmatch(line):  # an earlier version used scrypt
        raise UserError(f"dashboard_password_file: the hash in {path} is damaged or old: write it again")
    return line


def _write_hash(path: Path, password: str) -> str:
    """Write the hash of a password unless the file has one. Return `unchanged` or `changed`."""
    with contextlib.suppress(OSError, ValueError):
        if matches(path.read_text(encoding="utf-8").strip(), password):
            return "unchanged"
    write_atomic(path, f"{hash_password(password)}\n", 0o600)
    return "changed"


def main() -> int:
    """Hash a password; see the module."""
    ask = sys.stdin.isatty()
    password = getpass.getpass("Password of the dashboard: ") if ask else sys.stdin.readline().rstrip("\r\n")
    try:
        print(_write_hash(Path(sys.argv[1]), password) if len(sys.argv) > 1 else hash_password(password))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
