"""Copy the logs and state files of a run from all its hosts to the controller. Code of a rank may still write them."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from trainer.common.formats import mib
from trainyard import front_end
from trainyard.run.follow.run_status import no_such_run
from trainyard.run.plan.gather_facts import Connect
from trainyard.run.types import StepResult
from trainyard.wire.connection import FanOut, Host, HostConnection, RemoteError
from trainyard.wire.copy_files import PATIENCE, check_space, fetch_file, in_time, lent_files, split_run
from trainyard.wire.run_errors import RunError

FILES = [f"{folder}*.{kind}" for folder in ("", "logs/", "state/") for kind in ("log", "json", "jsonl")]
FILES_LIMIT = 2000  # of one host
TIME_LIMIT = 86_400.0  # s for all hosts; each part of a copy has a limit of its own
# Only names that runs write: they come from the host, and become names on the controller.
_NAME = re.compile(r"(?:(?:logs|state)/)?([A-Za-z0-9][A-Za-z0-9._-]{0,200})")


def copy_logs(
    run: str, hosts: Iterable[Host], connect: Connect, folder: Path, limit: int, check: bool = False
) -> StepResult:
    """Copy the logs of a run to `folder`/HOST; only the last `limit` bytes of a larger file.

    `check`: copy nothing. Raises RunError: no host has the run, or a host does not answer or sends something else; the
    logs of the others are copied. Returns `run`; `folder`; `files`, the paths below it; `lines`, the folder and the
    files that are not complete.
    """
    requests = {
        host.name: functools.partial(
            _copy, connect(host.name), f"{host.data_dir}/runs/{run}", folder / host.name, limit, check
        )
        for host in hosts
    }
    done = FanOut(requests).wait(TIME_LIMIT)
    sizes = dict(sorted(done.answers.items()))
    if not any(sizes.values()) and not done.errors:
        raise no_such_run(run)
    cut = [
        f"{host}: {Path(name).name} has {mib(size)} MiB: only its last {mib(limit)} MiB are copied; "
        f"set {front_end.option('logs_max_mib', 'SIZE')}"
        for host, found in sizes.items()
        for name, size in found.items()
        if size > limit
    ]
    files = sorted({f"{host}/{Path(name).name}" for host, found in sizes.items() for name in found})
    result = {"run": run, "folder": str(folder), "files": files, "lines": [*cut, str(folder)], "changed": not check}
    if done.errors:
        raise RunError("; ".join(f"{host}: {why}" for host, why in sorted(done.errors.items())), **result)
    return result


def _copy(connection: HostConnection, run_dir: str, folder: Path, limit: int, check: bool) -> dict[str, int]:
    """Copy the logs of one host; return their sizes there, by name. Raises RemoteError and OSError."""
    request = {"run_dir": run_dir, "sizes": FILES}
    answer = in_time(connection, lambda: connection.call("read_files", request), PATIENCE)
    sizes = {name: size for name, size in answer["sizes"].items() if _NAME.fullmatch(name)}
    if len(sizes) > FILES_LIMIT:
        raise RemoteError(f"{run_dir} has {len(sizes)} logs: remove those that are not of the run")
    if check or not sizes:
        return sizes
    folder.mkdir(parents=True, exist_ok=True)
    check_space(folder, sum(min(size, limit) for size in sizes.values()), "logs")
    root, run = split_run(run_dir)
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as aside,
        lent_files(connection, root, [f"{run}/{name}" for name in sizes], end=limit) as lent,
    ):
        for name in sizes:
            arrived = Path(aside) / "file"
            # A log grows while it is copied.
            fetch_file(connection, lent[f"{run}/{name}"], arrived, 2 * limit)
            arrived.replace(folder / Path(name).name)
    return sizes
