"""Every text file is read and written as UTF-8, also where the locale says otherwise."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
# Methods and functions that open a text file, with the place of the mode; None: always text.
OPENERS = {"open": 0, "fdopen": 1, "NamedTemporaryFile": 0, "TemporaryFile": 0, "read_text": None, "write_text": None}


def text_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that open a text file without an encoding."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        function = call.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        owner = getattr(getattr(function, "value", None), "id", "")
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if name not in OPENERS or (owner == "os" and name == "open") or owner == "tarfile" or "encoding" in given:
            continue
        place = OPENERS[name]
        if isinstance(function, ast.Name) and name == "open":
            place = 1
        mode = given.get("mode") or (call.args[place] if place is not None and len(call.args) > place else None)
        if mode is None and name in ("NamedTemporaryFile", "TemporaryFile"):
            continue  # binary
        # A mode that is no constant is the argument of another function with this name.
        if mode is None or (isinstance(mode, ast.Constant) and "b" not in str(mode.value)):
            yield call


def test_every_text_file_has_an_encoding() -> None:
    found = [
        f"{path.relative_to(TOP)}:{call.lineno}: {ast.unparse(call)}"
        for folder in ("trainer", "trainyard", "plugins", "tools")
        for path in sorted((TOP / folder).rglob("*.py"))
        for call in text_calls(ast.parse(path.read_bytes()))
    ]
    assert not found, 'add encoding="utf-8"'


def test_the_search_finds_what_it_looks_for() -> None:
    bad = [
        "open(p)",
        "p.open()",
        "p.open('a')",
        "p.read_text()",
        "p.write_text(x)",
        "os.fdopen(f, 'w')",
        "open(p, mode='w')",
    ]
    good = ["open(p, 'rb')", "p.open('rb')", "os.open(p, 0)", "p.read_text(encoding='utf-8')", "NamedTemporaryFile()"]
    assert all(list(text_calls(ast.parse(text))) for text in bad)
    assert not any(list(text_calls(ast.parse(text))) for text in good)
