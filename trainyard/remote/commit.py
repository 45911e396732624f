"""The host's side of a start: write the small files of a run folder together, for one controller at a time.

Standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import os
import zlib
from typing import Any

from trainer.supervise.claim import START_LOCK, claimed_by_another, release_claim, write_claim
from trainer.supervise.link_free import LinkFreePath, run_folder
from trainer.supervise.run_files import hold_lock, is_alive, read_node
from trainyard.remote.trees import path_below

TRAINER_LIMIT = 64 << 20  # bytes
LOCK_LIMIT = 20.0  # s to wait for another start on this host; longer than a supervisor needs to start


def commit(request: dict[str, Any]) -> dict[str, Any]:
    """Claim a run folder and write its small files, or change nothing.

    `request`: `run_dir`; `token` of the controller; `trainer`, the staged archive of the trainer; `contents`, {name:
    [mode, compressed content in base64]}; `previous`, attempt and time of the start that the plan records, or None;
    `stop_wanted`, whether a user had stopped that start when it was planned; `stale`, whether it may still run here;
    `release`, remove the claim of this token and do nothing else. Returns `changed`, the paths that were written; or
    `claimed`, why another controller has precedence.
    """
    run_dir = run_folder(request["run_dir"])
    if request.get("release") and not run_dir.is_folder():
        return {"changed": []}
    run_dir.root.mkdir(parents=True, exist_ok=True)
    run_dir.make_folder()
    with hold_lock(run_dir.parent / START_LOCK, wait=LOCK_LIMIT) as locked:
        if request.get("release"):
            release_claim(run_dir, request["token"])
            return {"changed": []}
        if not locked:
            return {"error": f"another start on this host has not finished within {LOCK_LIMIT:.0f} s"}
        if why := claimed(run_dir, request):
            return {"claimed": why}
        write_claim(run_dir, request["token"])
        return {"changed": write_files(run_dir, request)}


def claimed(run_dir: LinkFreePath, request: dict[str, Any]) -> str:
    """Return why another controller has precedence, or an empty string."""
    if claimed_by_another(run_dir, request["token"]):
        return "another controller is starting the run"
    if is_alive(run_dir) and not request["stale"]:
        return "the run is active"
    if start_of(read_node(run_dir)) != request["previous"]:
        return "the run was started since it was planned"
    if not request["stop_wanted"] and (run_dir / "state/stop-wanted").exists():
        return "a user stopped the run since it was planned"
    return ""


def start_of(node: dict[str, Any] | None) -> list[Any] | None:
    """Return attempt and time of a start, from its node.json; None if there was none."""
    return [node.get("attempt"), node.get("started")] if node else None


def write_files(run_dir: LinkFreePath, request: dict[str, Any]) -> list[str]:
    """Write the files that differ; return their paths. Raises OSError."""
    given = request["contents"].items()
    contents = {name: (mode, zlib.decompress(base64.b64decode(content))) for name, (mode, content) in given}
    trainer = path_below(run_dir.root.parent / "store", request["trainer"])
    files = (contents | {"trainer.zip": (0o644, trainer.read(TRAINER_LIMIT))}).items()
    return [str(run_dir / name) for name, (mode, text) in files if write_if_changed(run_dir / name, text, mode)]


def write_if_changed(target: LinkFreePath, content: bytes, mode: int) -> bool:
    """Write a file unless it has this content and mode; return whether it was written. Raises OSError."""
    with contextlib.suppress(OSError), target.open_read() as file:
        if os.fstat(file.fileno()).st_mode & 0o777 == mode and file.read(len(content) + 1) == content:
            return False
    target.write(content, mode)
    return True
