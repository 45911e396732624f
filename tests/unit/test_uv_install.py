"""`make setup` installs with uv from the package indexes that pip is configured for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.uv_install import variables_of_pip


def test_the_settings_of_pip_become_those_of_uv(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://user:secret@mirror.example/simple\nextra-index-url =\n  https://a.example\n"
        "  https://b.example\n[install]\nfind-links = /wheels /more\ntimeout = 7\n[download]\nno-index = true\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_FIND_LINKS": "/own", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = variables_of_pip(done.stdout.splitlines())
    assert (
        found.items()
        >= {
            "UV_DEFAULT_INDEX": "https://user:secret@mirror.example/simple",
            "UV_INDEX": "https://a.example https://b.example",
            "UV_FIND_LINKS": "/own",
            "UV_HTTP_TIMEOUT": "7",
        }.items()
    )
    assert "UV_NO_INDEX" not in found, "a setting of another command"
    assert variables_of_pip(["install.find-links='/wheels /more'"]) == {"UV_FIND_LINKS": "/wheels,/more"}
