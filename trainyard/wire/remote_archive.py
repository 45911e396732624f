"""The programs of `trainyard/remote` as one archive, and the command that runs one of them on a host.

One calling convention for all of them: the verb is the only argument; standard input carries the archive and then the
request as JSON; standard output carries JSON objects, one per line, of which the last is the answer. A request that
cannot be carried out is answered with `{"error": "one line"}` and exit code 1.

The host needs nothing but Python: it loads the archive from memory and keeps no file. Secrets belong in the request,
never in the command line.
"""

from __future__ import annotations

import functools
import io
import json
import re
import shlex
import zipfile
import zlib
from pathlib import Path
from typing import Any

import trainer
import trainyard
from trainyard.remote.__main__ import VERBS

# Runs on the host. Reads the compressed archive's length in bytes, a newline, and the archive; the request follows.
BOOTSTRAP = (
    "import os, sys, zlib; source = sys.stdin.buffer; archive = zlib.decompress(source.read(int(source.readline()))); "
    "file = os.memfd_create('trainyard'); open(file, 'wb', closefd=False).write(archive); "
    "sys.path.insert(0, '/proc/self/fd/%d' % file); "
    "from trainyard.remote.__main__ import main; main()"
)
ENTRY = "trainyard.remote.__main__"  # the module that BOOTSTRAP runs
# No `ast`: in Python 3.11, several threads cannot parse at the same time.
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+((?:trainyard|trainer)[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)"
    r"|import[ \t]+((?:trainyard|trainer)[\w.]*))",
    re.MULTILINE,
)
_DOCSTRING = re.compile(rb'^([ \t]*)"""(?:[^"\\]|"(?!""))*"""$', re.MULTILINE)
# Verbs that import installed packages, or start programs that do; the others start without `site`.
PACKAGE_VERBS = frozenset({"evaluate", "gguf_export", "hub_fetch", "merge", "run_start"})


@functools.cache
def remote_archive(verb: str = "") -> bytes:
    """Return the archive of the modules that a verb imports; of all modules for an empty verb.

    The controller queries each host of a followed run every two seconds, so a request should be small. Equal sources
    give equal bytes.
    """
    sources = _sources()
    if verb in VERBS:
        names = _imported_by(VERBS[verb][0], sources) | _imported_by(ENTRY, sources)
        sources = {path: content for path, content in sources.items() if _module(path) in names}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, content in sorted(sources.items()):
            archive.writestr(zipfile.ZipInfo(path, date_time=(1980, 1, 1, 0, 0, 0)), content)
    return buffer.getvalue()


@functools.cache
def _compressed(verb: str) -> bytes:
    """Return the archive as it travels: compressed as a whole, which also shortens the headers of its files."""
    return zlib.compress(remote_archive(verb), 9)


@functools.cache
def _sources() -> dict[str, bytes]:
    """Return {path in the archive: content} of `trainyard/remote`, `trainer/supervise` and the client of Ollama."""
    controller, node = (Path(package.__path__[0]) for package in (trainyard, trainer))
    files = {f"{name}/__init__.py": b"" for name in ("trainyard", "trainer", "trainer/generation")}
    for package, names in ((controller, "remote/*.py"), (node, "supervise/*.py"), (node, "generation/ollama_*.py")):
        for path in package.glob(names):
            # The packages have only a docstring, which a host does not need.
            content = b"" if path.name == "__init__.py" else path.read_bytes()
            files[str(path.relative_to(package.parent))] = content
    # Without docstrings, a request is a quarter smaller. Lines keep their numbers, for tracebacks.
    return {path: _DOCSTRING.sub(_empty_lines, content) for path, content in files.items()}


def _empty_lines(docstring: re.Match[bytes]) -> bytes:
    return docstring[1] + b'""' + b"\n" * docstring[0].count(b"\n")


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported_by(name: str, sources: dict[str, bytes]) -> set[str]:
    """Return a module, what it imports from the archive, and the packages of these."""
    modules = {_module(path): content for path, content in sources.items()}
    found: set[str] = set()
    left = [name]
    while left:
        module = left.pop()
        if module in found or module not in modules:
            continue
        found.add(module)
        left.append(module.rpartition(".")[0])
        for package, names, alone in _IMPORT.findall(modules[module].decode()):
            left += [alone] if alone else [package, *(f"{package}.{name}" for name in re.findall(r"\w+", names))]
    return found


def remote_command(verb: str, python: str) -> str:
    """Return the shell command that runs a verb of the archive with the host's interpreter `python`."""
    isolated = "-I -X utf8" if verb in PACKAGE_VERBS else "-I -S -X utf8"
    return f"exec {shlex.quote(python)} {isolated} -c {shlex.quote(BOOTSTRAP)} {shlex.quote(verb)}"


def remote_input(request: dict[str, Any], verb: str = "") -> bytes:
    """Return the standard input of `remote_command`, with the modules that the verb needs; with all for an empty verb."""
    archive = _compressed(verb)
    return b"%d\n%b%b\n" % (len(archive), archive, json.dumps(request).encode())
