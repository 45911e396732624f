"""Python 3.10, which Ubuntu 22.04 has: the code that runs with the Python of a host's distribution needs nothing newer.

These are Ansible modules, their utilities, the remote programs of preflight, and the service of the queue. A run itself needs Python 3.11.
"""

import ast
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from interpreters import interpreter
from tables import table

from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.openssh import LocalTransport
from trainyard.wire.remote_archive import _sources, remote_archive

TOP = Path(__file__).resolve().parents[2]
FOLDERS = ("plugins/modules", "plugins/module_utils", "trainyard/remote", "trainer/supervise")
QUEUE = [TOP / "trainyard/queue" / name for name in ("queue_service.py", "lease_step.py")]
SOURCES = sorted([*itertools.chain.from_iterable((TOP / folder).glob("*.py") for folder in FOLDERS), *QUEUE])
# Staging runs with the Python of the cluster's environment.
RUN_ONLY = {"receive.py", "digests.py", "relay.py", "local_files.py"}
# Names that the standard library has since Python 3.11 or 3.12, by module; an empty name is the whole module.
NEWER = table("python_310")["newer"]
NEWER_KEYWORDS = {("rmtree", "onexc"), ("copytree", "onexc")}


def too_new(text: str) -> list[str]:
    """Return the uses of the standard library that Python 3.10 does not have."""
    found = []
    for node in ast.walk(ast.parse(text, feature_version=(3, 10))):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if "" in NEWER.get(name.name, ())]
        elif isinstance(node, ast.ImportFrom):
            newer = NEWER.get(node.module or "", set())
            found += [f"{node.module}.{name.name}" for name in node.names if name.name in newer or "" in newer]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [f"{node.value.id}.{node.attr}"] if node.attr in NEWER.get(node.value.id, ()) else []
        elif isinstance(node, ast.Name) and node.id in NEWER["builtins"]:
            found.append(node.id)
        elif isinstance(node, ast.TryStar):
            found.append("except*")
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found += [f"{called}({word.arg}=)" for word in node.keywords if (called, word.arg) in NEWER_KEYWORDS]
    return found


def test_nothing_newer_than_python_310_is_used() -> None:
    assert len(SOURCES) > 50
    sources = [path for path in SOURCES if path.name not in RUN_ONLY]
    assert {path.name: names for path in sources if (names := too_new(path.read_text()))} == {}


@pytest.mark.parametrize("text", table("python_310")["newer_names_are_found"])
def test_newer_names_are_found(text: str) -> None:
    assert too_new(text)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_the_remote_programs_run_with_the_python_of_a_distribution(version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    if not python:
        pytest.skip(f"this machine has no Python {version}")
    done = subprocess.run(
        [python, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == version
    host = Host("here", "127.0.0.1", str(tmp_path), python)
    connection = HostConnection(host, LocalTransport())
    about = {"data_dir": str(tmp_path), "run": "", "ollama_urls": []}
    health = about | {"peers": [], "sudo": False, "services": [], "ssh_port": 22, "memory_mib": 16}
    facts = {"head": "127.0.0.1", "address": "127.0.0.1", "ports": [], "python": python, "data_dir": str(tmp_path)}
    mesh = {"name": "a", "names": ["a"], "address": "127.0.0.1", "peers": {}, "head": "a", "ports": [], "limit": 1}
    found = connection.call("host_facts", facts | {"run_dir": f"{tmp_path}/runs/r"})
    assert found["versions"]["python"].startswith(version)
    assert connection.call("health", health)["hardware"]["cores"] >= 1
    assert connection.call("mesh", mesh | {"device": "lo", "token": "x", "data_dir": ""})["taken"] == []
    assert connection.call("run_list", {"data_dir": str(tmp_path)})["runs"] == []
    # Every module of the archive can be imported for every verb.
    (tmp_path / "archive.zip").write_bytes(remote_archive())
    names = [
        f"{path.parent.parent.name}.{path.parent.name}.{path.stem}"
        for path in SOURCES
        if path.parent.name in ("remote", "supervise") and not path.stem.startswith("__")
    ]
    program = f"import sys, importlib; sys.path.insert(0, {str(tmp_path / 'archive.zip')!r}); [importlib.import_module(n) for n in {names}]"
    subprocess.run([python, "-I", "-S", "-c", program], check=True)


def test_the_archive_for_hosts_lacks_docstrings_only() -> None:
    """The end of a constant is not taken for the start of a docstring."""

    def shape(code: bytes) -> str:
        tree = ast.parse(code)
        for each in ast.walk(tree):
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                each.value.value = ""
        return ast.dump(tree)

    assert [path for path, code in _sources().items() if code and shape(code) != shape((TOP / path).read_bytes())] == []


@pytest.mark.slow
def test_every_module_compiles_and_its_utilities_import_with_python_310() -> None:
    python = interpreter("3.10")
    if not python:
        pytest.skip("this machine has no Python 3.10")
    modules = [str(path) for path in SOURCES if "plugins" in path.parts]
    program = "import json, sys\nfor path in json.load(sys.stdin): compile(open(path).read(), path, 'exec')"
    subprocess.run([python, "-I", "-c", program], input=json.dumps(modules), text=True, check=True)
    alone = [
        path.stem
        for path in sorted((TOP / "plugins/module_utils").glob("*.py"))
        if "import yaml" not in (text := path.read_text()) and "ansible.module_utils.basic" not in text
    ]
    assert len(alone) > 5
    program = (
        "import sys, types, importlib\n"
        "for name in ('ansible', 'ansible.module_utils'):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        f"sys.modules['ansible.module_utils'].__path__ = [{str(TOP / 'plugins/module_utils')!r}]\n"
        f"for name in {alone}: importlib.import_module('ansible.module_utils.' + name)"
    )
    subprocess.run([python, "-I", "-c", program], check=True)
    assert sys.version_info >= (3, 11), "the tests themselves run on the controller's Python"
