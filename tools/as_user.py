"""as_user.py COMMAND...: as root, run a command as an ordinary user, in a copy of this checkout.

The user exists for this command only, in a mount namespace, in which /etc/passwd and /etc/group have one more line. Python and the
environment of the checkout may lie in a folder that other users cannot search, such as /root: the namespace has a folder in its
place that holds nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
USER, UID = "trainyard-tests", 61357
INSIDE = "--inside"  # the second call of this program, in the namespace


def main() -> int:
    """Copy the checkout, run the command, and return its exit code."""
    if sys.argv[1:2] == [INSIDE]:
        become_user(Path(sys.argv[2]), sys.argv[3:])
    work = Path(tempfile.mkdtemp(prefix="as-user-"))
    try:
        prepare(work)
        words = [
            "unshare",
            "--mount",
            "--propagation=private",
            sys.executable,
            __file__,
            INSIDE,
            str(work),
            *sys.argv[1:],
        ]
        return subprocess.run(words, check=False).returncode
    finally:
        shutil.rmtree(work, ignore_errors=True)


def prepare(work: Path) -> None:
    """Copy what git knows or could add, with changes that are not committed, and write the list of users."""
    work.chmod(0o755)
    copy, home = work / "checkout", work / "home"
    copy.mkdir()
    home.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=TOP,
        capture_output=True,
        check=True,
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (TOP / name).is_symlink() or (TOP / name).is_file():  # neither deleted nor a repository
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TOP / name, copy / name, follow_symlinks=False)
    # The compiled files too: otherwise every worker of pytest compiles all tests again.
    for folder in {path.parent for path in copy.rglob("*.py")}:
        compiled = TOP / folder.relative_to(copy) / "__pycache__"
        if compiled.is_dir():
            shutil.copytree(compiled, folder / "__pycache__", ignore=shutil.ignore_patterns("*.pyc.*"))
    for file, line in (("passwd", f"{USER}:x:{UID}:{UID}::{home}:/bin/bash"), ("group", f"{USER}:x:{UID}:")):
        (work / file).write_text(
            f"{Path('/etc', file).read_text(encoding='utf-8').rstrip()}\n{line}\n", encoding="utf-8"
        )
    subprocess.run(["chown", "-R", "-h", f"{UID}:{UID}", str(copy), str(home)], check=True)


def become_user(work: Path, command: list[str]) -> None:
    """In the namespace: show Python to other users, and replace this process by the command."""
    for file in ("passwd", "group"):
        mount("--bind", str(work / file), f"/etc/{file}")
    show([Path(path) for path in dict.fromkeys((sys.prefix, sys.base_prefix))], work)
    copy, home = work / "checkout", work / "home"
    os.chdir(copy)
    os.environ |= {"HOME": str(home), "USER": USER, "LOGNAME": USER, "PWD": str(copy), "PYTHONPATH": str(copy)}
    if "ANSIBLE_CONFIG" in os.environ:
        os.environ["ANSIBLE_CONFIG"] = str(copy / "ansible.cfg")
    os.execvp("setpriv", ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--", *command])


def show(paths: list[Path], work: Path) -> None:
    """Make folders accessible to other users: replace the first folder above each that they cannot search."""
    hidden = {path: top for path in paths if (top := hidden_folder(path))}
    for number, path in enumerate(hidden):
        held = work / f"held{number}"
        held.mkdir()
        mount("--bind", str(path), str(held))
    for top in dict.fromkeys(hidden.values()):
        mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(top))
    for number, path in enumerate(hidden):
        path.mkdir(parents=True, exist_ok=True)
        mount("--bind", str(work / f"held{number}"), str(path))


def hidden_folder(path: Path) -> Path | None:
    """Return the first folder of a path, from the root, that other users cannot search, or None."""
    return next((each for each in [*reversed(path.parents), path] if not each.stat().st_mode & 0o001), None)


def mount(*words: str) -> None:
    """Mount in the namespace of this process."""
    subprocess.run(["mount", *words], check=True)


if __name__ == "__main__":
    sys.exit(main())
