"""Programs on hosts touch files of runs and of the store through LinkFreePath only: no other call opens, lists or changes files."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tables import table

TOP = Path(__file__).resolve().parents[2]
SOURCES = [
    *sorted((TOP / "trainyard/remote").glob("*.py")),
    *sorted((TOP / "trainer/supervise").glob("*.py")),
    *(TOP / f"trainyard/queue/{name}.py" for name in ("lease_step", "queue_service", "carry")),
]
# Methods of pathlib.Path; those of LinkFreePath have other names.
METHODS = set(table("host_opens")["methods"])
OS = set(table("host_opens")["os"])
SHUTIL = {"copy", "copy2", "copyfile", "copytree", "move", "rmtree", "chown"}
# file: {function: why it may}. An empty name is the whole file.
ROOT = "creates the trusted folder itself, whose links are followed"
ALLOWED: dict[str, dict[str, str]] = table("host_opens")["allowed"]


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
    bad = table("host_opens")["bad"]
    bad += ["os.scandir(p)", "shutil.rmtree(p)", "shutil.copyfile(p, q)", "p.touch()", "os.rename(p, q)", "p.chmod(1)"]
    good = ["p.open_read()", "t.replace('a', 'b')", "os.open(p, 0, dir_fd=f)", "os.fdopen(h)", "shutil.which('x')"]
    good += ["p.remove(missing_ok=True)", "os.link(a, b, src_dir_fd=f, dst_dir_fd=g)", "shutil.copyfileobj(a, b)"]
    assert all(list(touching_calls(ast.parse(text))) for text in bad)
    assert not any(list(touching_calls(ast.parse(text))) for text in good)
