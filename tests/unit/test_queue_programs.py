"""The programs that the role queue installs on a host are complete: they import nothing that is not installed with them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MODULES = yaml.safe_load((ROOT / "roles/queue/vars/main.yml").read_text())["_queue_modules"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    for name in MODULES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.parametrize("name", MODULES)
def test_a_program_of_the_queue_imports_only_what_is_installed_with_it(installed: Path, name: str) -> None:
    module = name.removesuffix(".py").replace("/", ".")
    program = f"import sys; sys.path.insert(0, {str(installed)!r}); import {module}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
