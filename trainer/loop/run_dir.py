"""The run folder: the spec that owns it, the result of a finished run, and the request to stop. No torch here."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.files import write_atomic
from trainer.config import RunSpec
from trainer.spec import changed_fields, has_begun, read_spec


class StopRequest:
    """True if the run must stop after the current step: after SIGTERM or Ctrl-C, or if the run folder has a file `stop`."""

    def __init__(self, run_dir: Path) -> None:
        self._file, self._signalled = run_dir / "stop", False
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, _: object) -> None:
        self._signalled = True
        if number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            # A second Ctrl-C interrupts immediately. Under torchrun a single one arrives twice: from the terminal and the launcher.
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def clear(self) -> None:
        """Remove the file, so that it does not stop the next start."""
        self._file.unlink(missing_ok=True)

    def __bool__(self) -> bool:
        return self._signalled or self._file.exists()


def finished_result(run_dir: Path) -> dict[str, Any] | None:
    try:
        # Older versions reported a model that is not finite as finished: `int` rejects NaN and Infinity.
        result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"), parse_constant=int)
    except (OSError, ValueError):
        return None
    return result if result.get("status") == "finished" else None


def check_owner(spec: RunSpec, run_dir: Path) -> None:
    """Check that the run folder does not belong to a different run.

    Raises UserError: the folder has checkpoints or the result of a different spec, or `resume: never` forbids to resume from them.
    """
    file = run_dir / "spec.yml"
    if has_begun(run_dir):
        changes = changed_fields(read_spec(file, {}, str(file)), spec)
        if changes:
            raise UserError(
                f"run {spec.run} exists with another spec ({'; '.join(changes)}): repeat the options with which it was started, set "
                f"another run name with run=, or delete {run_dir}"
            )
        if spec.resume == "never" and (run_dir / "checkpoints").exists():
            raise UserError(
                f"run {spec.run} has checkpoints in {run_dir}, but resume is never: set another run name with run="
            )


def claim(spec: RunSpec, run_dir: Path) -> None:
    """Write the spec into the run folder. Raises UserError as `check_owner`."""
    check_owner(spec, run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomic(run_dir / "spec.yml", spec.to_yaml())
