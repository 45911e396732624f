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
import shlex
import zipfile
from pathlib import Path
from typing import Any

import trainer
import trainyard

# Runs on the host. Reads the archive's length in bytes, a newline, and the archive; the request follows.
BOOTSTRAP = (
    "import os, sys; source = sys.stdin.buffer; archive = source.read(int(source.readline())); "
    "file = os.memfd_create('trainyard'); open(file, 'wb', closefd=False).write(archive); "
    "sys.path.insert(0, '/proc/self/fd/%d' % file); "
    "from trainyard.remote.__main__ import main; main()"
)
PACKAGE_VERBS = frozenset(
    {"all_reduce", "hub_fetch"}
)  # verbs that import installed packages; the others start without `site`


@functools.cache
def remote_archive() -> bytes:
    """Return the archive of `trainyard/remote`, `trainer/supervise` and the client of Ollama. The same sources give the same bytes."""
    controller, node = (Path(package.__path__[0]) for package in (trainyard, trainer))
    files = {"trainyard/__init__.py": b"", "trainer/__init__.py": b"", "trainyard/ollama/__init__.py": b""}
    files["trainyard/ollama/client.py"] = (controller / "ollama" / "client.py").read_bytes()
    for package, folder in ((controller, "remote"), (node, "supervise")):
        for path in (package / folder).glob("*.py"):
            files[str(path.relative_to(package.parent))] = path.read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def remote_command(verb: str, python: str) -> str:
    """Return the shell command that runs a verb of the archive with the host's interpreter `python`."""
    isolated = "-I" if verb in PACKAGE_VERBS else "-I -S"
    return f"exec {shlex.quote(python)} {isolated} -c {shlex.quote(BOOTSTRAP)} {shlex.quote(verb)}"


def remote_input(request: dict[str, Any]) -> bytes:
    """Return the standard input of `remote_command`."""
    archive = remote_archive()
    return b"%d\n%b%b\n" % (len(archive), archive, json.dumps(request).encode())
