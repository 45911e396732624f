"""Limits the logs of a run. The supervisor does it, in the unit of the run, because ranks can put links in place of logs.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os

from trainer.supervise.link_free import LinkFreePath

LOG_SIZE = 100 << 20  # bytes of a log; its last part of that size is then kept beside it, as `<name>.1`


def limit_logs(folder: LinkFreePath, size: int = LOG_SIZE) -> None:
    """Move the end of each log in a folder that has more than `size` bytes to `<name>.1`, and empty the log.

    Writers keep their logs open and append. Lines that they write meanwhile are lost.
    """
    with contextlib.suppress(OSError):
        for path in [folder / name for name in folder.entries() if name.endswith(".log")]:
            with contextlib.suppress(OSError):  # not a regular file, or a full disk
                _limit_log(path, size)


def _limit_log(path: LinkFreePath, size: int) -> None:
    with path.open_read() as log:
        begin = os.fstat(log.fileno()).st_size - size
        if begin <= 0:
            return
        earlier = path.parent / f"{path.name}.1"
        earlier.remove(missing_ok=True)
        with earlier.create() as copy:
            os.sendfile(copy.fileno(), log.fileno(), begin, size)
    with path.open_append() as log:
        log.truncate(0)
