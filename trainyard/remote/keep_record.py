"""Keeps a record of a controller for the dashboard's service on this host. Standard library only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainer.supervise.link_free import link_free
from trainer.supervise.run_files import newest_first

# How a run was started; the result of an evaluation.
NAME = re.compile(r"(starts/[A-Za-z0-9][A-Za-z0-9._-]{0,63}|evaluations/[0-9a-f-]{1,30})\.json")
KEPT = 1000  # records of each folder, the newest


def keep_record(request: dict[str, Any]) -> dict[str, Any]:
    """Write a record below the folder of the service, if the service is installed here.

    Args:
        request: `folder` of the service; `name` of the record, such as `starts/RUN.json`; its `content`, which may be a secret.

    Returns:
        `kept`: whether the service is installed.
    """
    folder, name = Path(request["folder"]), str(request["name"])
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a record")
    if not (folder / "config.json").is_file():
        return {"kept": False}
    target = folder / ".trainyard/received" / name
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    link_free(target).write(str(request["content"]).encode(), 0o600)
    for path in newest_first(target.parent.glob("*.json"))[KEPT:]:
        path.unlink(missing_ok=True)
    return {"kept": True}
