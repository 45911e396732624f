"""Programs on hosts touch files of runs and of the store through LinkFreePath only: no other call opens, lists or changes files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
SOURCES = [
    *sorted((TOP / "trainyard/remote").glob("*.py")),
    *sorted((TOP / "trainer/supervise").glob("*.py")),
    *(TOP / f"trainyard/queue/{name}.py" for name in ("lease_step", "queue_service", "carry")),
]
# Methods of pathlib.Path; those of LinkFreePath have other names.
METHODS = {
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "iterdir", "glob", "rglob", "unlink", "mkdir", "rmdir"),
    *("chmod", "touch", "rename", "symlink_to", "hardlink_to", "readlink"),
}  # fmt: skip
OS = {
    *("open", "listdir", "scandir", "walk", "unlink", "remove", "rename", "replace", "link", "symlink", "readlink"),
    *("mkdir", "makedirs", "rmdir", "chmod", "truncate", "utime"),
}  # fmt: skip
SHUTIL = {"copy", "copy2", "copyfile", "copytree", "move", "rmtree", "chown"}
# file: {function: why it may}. An empty name is the whole file.
KERNEL, ROOT = "reads /proc, /sys or /etc", "creates the trusted folder itself, whose links are followed"
ALLOWED: dict[str, dict[str, str]] = {
    "trainer/supervise/run_files.py": {"open_regular": "a path that a user names: its links are followed"},
    "trainer/supervise/link_free.py": {"": "the helper"},
    "trainer/supervise/interface.py": {"": KERNEL},
    "trainer/supervise/cpu.py": {"": KERNEL},
    "trainer/supervise/processes.py": {"": KERNEL},
    "trainer/supervise/sandbox.py": {
        "make_hidden": "folders in the data folder and the home, which no rank can write",
        "folder_of_ranks": "creates a folder of the store, which is no link afterwards",
        "follow": "the text of a link in a folder that no rank can write",
        "awaits_mount": KERNEL,
        "has_user_namespaces": KERNEL,
    },
    "trainer/supervise/status.py": {"why_lost": KERNEL},
    "trainer/supervise/supervisor.py": {"oom_kills": KERNEL},
    "trainyard/remote/apart.py": {"run_apart": ROOT},
    "trainyard/remote/commit.py": {"commit": ROOT},
    "trainyard/remote/digests.py": {"keep": ROOT},
    "trainyard/remote/exchange.py": {"exchange": ROOT},
    "trainyard/remote/folder_marker.py": {"": "names of its own in the folder of runs, which no rank can write"},
    "trainyard/remote/health.py": dict.fromkeys(("read", "processes", "torchruns", "gpu_state"), KERNEL),
    "trainyard/remote/host_facts.py": dict.fromkeys(("gather", "firewall", "first_line"), KERNEL),
    "trainyard/remote/host_use.py": {"": KERNEL},
    "trainyard/remote/hub_fetch.py": {"hub_fetch": ROOT},
    "trainyard/remote/local_files.py": {"_followed": "a path that a user names: its links are followed"},
    "trainyard/remote/network.py": {"": KERNEL},
    "trainyard/remote/ollama.py": {
        "_machine_server": KERNEL,
        "_listener": KERNEL,
        "_accept": "records of deployments, which no rank can write",
        "_remove": "records of deployments, which no rank can write",
    },
    "trainer/generation/ollama_client.py": {"put_blob": "a descriptor of a file that the caller has opened"},
    "trainyard/remote/queue.py": {"": "the folder of the queue, which no rank can reach"},
    "trainyard/remote/receive.py": {"prepare_incoming": ROOT},
    "trainyard/remote/relay.py": {"_umask": KERNEL},
    "trainyard/remote/verified_tree.py": {"": "programs of the queue, which no rank can reach"},
    "trainyard/remote/wsl.py": {
        "gather": "the home folders of Windows, which no rank can write",
        "text": "reads /proc, and a file in a home folder of Windows",
    },
    "trainyard/queue/carry.py": {
        "": "the folder of the queue, which no rank can reach; hosts are reached through verbs"
    },
    "trainyard/queue/lease_step.py": {"main": "the folder of leases, which no rank can write"},
    "trainyard/queue/queue_service.py": {"": "the folder of the queue, which no rank can reach"},
}


def touching_calls(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls that open, list or change files by their path, with the function that contains them."""
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, ast.FunctionDef) else function
        if isinstance(node, ast.Call) and touches(node):
            yield function, node
        yield from touching_calls(node, inner)


def touches(call: ast.Call) -> bool:
    """Return whether a call opens, lists or changes a file by its path."""
    if isinstance(call.func, ast.Name):
        return call.func.id == "open"
    if not isinstance(call.func, ast.Attribute):
        return False
    owner, name = getattr(call.func.value, "id", ""), call.func.attr
    if owner == "os":
        return name in OS and not any((word.arg or "").endswith("dir_fd") for word in call.keywords)
    if owner == "shutil":
        return name in SHUTIL
    # `replace` of a string has two arguments, that of a path has one.
    return name in METHODS or (name == "replace" and len(call.args) + len(call.keywords) == 1)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(TOP)))
def test_programs_on_hosts_open_files_through_the_helper(path: Path) -> None:
    allowed = ALLOWED.get(str(path.relative_to(TOP)), {})
    found = list(touching_calls(ast.parse(path.read_bytes())))
    wrong = [
        f"{call.lineno}: {ast.unparse(call)}"
        for name, call in found
        if (reason := allowed.get("") or allowed.get(name)) is None
        or (reason == ROOT and getattr(call.func, "attr", "") != "mkdir")
    ]
    assert not wrong, "use trainer.supervise.link_free, or say in ALLOWED why not"
    unused = {name for name in allowed if name} - {name for name, _ in found}
    assert not unused and (found or not allowed), "no longer needed"


def test_the_search_finds_what_it_looks_for() -> None:
    bad = [
        "open(p)",
        "p.open('rb')",
        "p.read_text()",
        "(a / b).unlink()",
        "p.glob('*')",
        "p.replace(q)",
        "os.open(p, 0)",
    ]
    bad += ["os.scandir(p)", "shutil.rmtree(p)", "shutil.copyfile(p, q)", "p.touch()", "os.rename(p, q)", "p.chmod(1)"]
    good = ["p.open_read()", "t.replace('a', 'b')", "os.open(p, 0, dir_fd=f)", "os.fdopen(h)", "shutil.which('x')"]
    good += ["p.remove(missing_ok=True)", "os.link(a, b, src_dir_fd=f, dst_dir_fd=g)", "shutil.copyfileobj(a, b)"]
    assert all(list(touching_calls(ast.parse(text))) for text in bad)
    assert not any(list(touching_calls(ast.parse(text))) for text in good)
