"""Run an Ansible module in this process, and act as an unprivileged user."""

import json
import os
import pwd
import tempfile
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import _internal
from ansible.module_utils.common import warnings
from ansible.module_utils.testing import patch_module_args

NEEDS_ROOT = pytest.mark.privileged


def run_module(module: Any, capsys: pytest.CaptureFixture[str], **arguments: Any) -> dict[str, Any]:
    """Call `main` of a module with these arguments, and return its result."""
    capsys.readouterr()
    # Ansible keeps warnings for the life of a process, which is one module on a host.
    warnings._global_warnings.clear()
    # Other tests of this process import Ansible's controller, to whose display a module would send its warnings.
    on_host = unittest.mock.patch.object(_internal, "is_controller", False)
    with on_host, patch_module_args(arguments), pytest.raises(SystemExit):
        module.main()
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.fixture
def user() -> pwd.struct_passwd:
    """An unprivileged user."""
    return pwd.getpwnam("nobody")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder of root that every user can reach, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="trainyard-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def home(place: Path, user: pwd.struct_passwd) -> Path:
    """The home of that user."""
    made = place / "home"
    made.mkdir()
    os.chown(made, user.pw_uid, user.pw_gid)
    return made


__all__ = ["NEEDS_ROOT", "home", "place", "run_module", "user"]
