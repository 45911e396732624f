"""The claim of one controller on a run folder: of several that start a run at the same time, one succeeds.

A controller claims the run on every host when it writes the small files of the run folder, and the start that follows
consumes the claim. Both happen under the lock that every start on the host takes. Standard library only.
"""

from __future__ import annotations

import time
from typing import Any

from trainer.supervise.link_free import LinkFreePath
from trainer.supervise.run_files import SupervisorError, read_json, write_json

CLAIM_LIMIT = 30.0  # s that a claim lasts without a start, so that a stopped controller does not block the run
START_LOCK = ".start"  # beside the run folders; locked during a start and while a run folder is written


def write_claim(run_dir: LinkFreePath, token: str) -> None:
    """Claim the run for the controller that has this token. Raises OSError."""
    write_json(run_dir / "claim.json", {"token": token, "time": time.time()})


def release_claim(run_dir: LinkFreePath, token: str) -> None:
    if read_claim(run_dir).get("token") == token:
        (run_dir / "claim.json").remove(missing_ok=True)


def read_claim(run_dir: LinkFreePath) -> dict[str, Any]:
    """Return `token` and `time` of the claim, or an empty dict."""
    return read_json(run_dir / "claim.json") or {}


def claimed_by_another(run_dir: LinkFreePath, token: str) -> bool:
    claim = read_claim(run_dir)
    made = claim.get("time")
    # A clock that was set back must not make the claim last longer.
    valid = isinstance(made, (int, float)) and abs(time.time() - made) < CLAIM_LIMIT
    return valid and claim.get("token") != token


def consume_claim(run_dir: LinkFreePath, token: str) -> None:
    """Remove the claim of the controller that starts the run now.

    `token`: token of the controller's claim; empty if it starts files that were staged before. Raises SupervisorError:
    another controller has claimed the run.
    """
    if claimed_by_another(run_dir, token) or (token and read_claim(run_dir).get("token") != token):
        raise SupervisorError(
            f"another controller stages run {run_dir.name} at the same time: run the same command again"
        )
    (run_dir / "claim.json").remove(missing_ok=True)
