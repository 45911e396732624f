"""tools/as_user.py: root runs a command as an ordinary user, in a copy of the checkout, and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
_REPORT = """
import getpass, json, os, sys, trainer
from pathlib import Path
Path('written').touch()
print(json.dumps([os.getuid(), getpass.getuser(), str(Path.cwd()), trainer.__file__, str(Path.home())]))
sys.exit(7)
"""


def permits_mounts() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.privileged
@pytest.mark.skipif(not permits_mounts(), reason="this machine permits no mount namespace")
def test_a_command_runs_as_an_ordinary_user_in_a_copy() -> None:
    changed = TOP / "not-committed"
    changed.write_text("new")
    try:
        words = [
            sys.executable,
            TOP / "tools/as_user.py",
            sys.executable,
            "-c",
            f"open('not-committed').read(){_REPORT}",
        ]
        done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=120, check=False)
    finally:
        changed.unlink()
    assert done.returncode == 7, done.stderr
    uid, name, folder, package, home = json.loads(done.stdout)
    assert uid and name == "trainyard-tests" and name not in Path("/etc/passwd").read_text(encoding="utf-8")
    assert package == f"{folder}/trainer/__init__.py" and folder != str(TOP)
    assert not Path(folder).exists() and not Path(home).exists() and not (TOP / "written").exists()
