"""pyproject.toml declares the imports of the controller's code."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
# The package that provides or requires a module, where the names differ.
PACKAGES = {"ansible": "ansible-core", "yaml": "pyyaml", "pydantic_core": "pydantic", "typing_extensions": "pydantic"}
PACKAGES |= {"sse_starlette": "sse-starlette", "prometheus_client": "prometheus-client"}
# Programs for hosts use the installed packages; the environment of the nodes has these.
ON_HOSTS = {"torch", "huggingface_hub"}
DOWNLOADED = {"rattler"}  # by trainyard.python_env.conda_lock, with a digest


def imported(folder: Path) -> set[str]:
    """Return the names of all top-level packages that the modules below a folder import."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names


def test_the_controllers_imports_are_declared() -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["dashboard"]]
    declared = {re.split(r"[^A-Za-z0-9-]", line, maxsplit=1)[0].lower() for line in required}
    needed = imported(TOP / "trainyard") | imported(TOP / "plugins")
    ours = {"trainyard", "trainer"}
    assert {PACKAGES.get(name, name) for name in needed - ours - ON_HOSTS - DOWNLOADED} - declared == set()


# Filter plugins, which every worker of Ansible imports ---------------------------------------------------------------

PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"plugins.filter.{name}")
print(*sorted({"numpy", "pydantic", "requests", "safetensors", "torch"} & set(sys.modules)))
"""


def test_no_filter_plugin_imports_a_large_package() -> None:
    names = [file.stem for file in (TOP / "plugins/filter").glob("*.py")]
    assert "python_env" in names
    words = [sys.executable, "-P", "-c", PROGRAM, *names]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env={"PYTHONPATH": str(TOP)})
    assert done.stdout.split() == []
