"""A script that runs in place of the trainer (`script` of the run spec): its process, its progress and its result.

docs/your-code.md describes the inputs of a script and the files that it may write. No torch here: the controller checks
scripts, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from trainer.common.errors import ScriptError
from trainer.common.files import to_json, write_atomic
from trainer.common.formats import printable, quoted
from trainer.common.inputs import read_regular
from trainer.common.python_file import parse_python_file
from trainer.config import OBSERVATORY, TINY, RunSpec
from trainer.distributed.worker_process import die_with_launcher
from trainer.loop.run_dir import StopRequest, claim
from trainer.records.telemetry import Heartbeat

MAX_RESULT = 1 << 20  # bytes of the result that a script writes
RESULT = "script-result.json"
POLL = 0.1  # s between two checks of the script
BEAT = 1.0  # s between two heartbeats of a script that reports no steps
_READ = 1 << 20  # bytes of metrics per check
_LOG_TAIL = 8192  # bytes
_PROGRESS = ("step", "steps", "loss", "tokens_per_second", "eta")
_FIXED = ("run", "status", "script", "world_size")  # keys of the result that a script does not set


def check_script(name: str) -> Path:
    """Return the absolute path of a script, after a check of its content. Raises UserError as `parse_python_file`."""
    return parse_python_file(name, "script")[0]


def run_script(spec: RunSpec, run_dir: Path, heartbeat: Heartbeat) -> dict[str, Any]:
    """Run the script of this rank to its end; return status, `step` and `steps`. One rank of a host writes result.json.

    A request to stop reaches the script as SIGTERM, once. Raises UserError: the script is missing, or the run folder
    belongs to another run; ScriptError: it failed, or its result is not valid.
    """
    script, leader = check_script(spec.script), os.environ.get("LOCAL_RANK", "0") == "0"
    if leader:
        claim(spec, run_dir)
        for earlier in ("result.json", RESULT):
            (run_dir / earlier).unlink(missing_ok=True)
        (run_dir / "checkpoints").mkdir(exist_ok=True)
    stop, progress = StopRequest(run_dir), ScriptSteps(run_dir / "metrics.jsonl", spec.max_steps)
    log = run_dir / "logs" / f"rank{os.environ.get('RANK', '0')}.log" if "TORCHELASTIC_RUN_ID" in os.environ else None
    before = log.stat().st_size if log and log.exists() else 0
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.DEVNULL,
        cwd=run_dir,
        env=os.environ | environment(spec, run_dir),
        start_new_session=True,  # torchrun signals its group, and this process passes the signal on
        preexec_fn=die_with_launcher,
    )
    stopped = _follow(process, stop, progress, heartbeat)
    code = process.returncode
    if code and not (stopped and code in (-signal.SIGTERM, 128 + signal.SIGTERM)):
        tail = _tail(log, before)
        last = next((line for line in reversed(tail.splitlines()) if line.strip()), "")
        name = Path(spec.script).name
        raise ScriptError(f"{_ending(name, code)}{': ' if last else ''}{printable(last.strip(), 500)}", tail)
    if leader and stopped:
        stop.clear()
    elif leader:
        write_atomic(run_dir / "result.json", to_json(result(spec, run_dir, progress), indent=1))
    return {"status": "stopped" if stopped else "finished", "step": progress.step, "steps": progress.steps}


def _follow(process: subprocess.Popen[bytes], stop: StopRequest, progress: ScriptSteps, heartbeat: Heartbeat) -> bool:
    """Report the progress of a script until it ends; return whether a stop was requested.

    Only rank 0 reports that a script is alive which reports no step. Afterwards a heartbeat is progress, as in a run of the
    trainer, so that a script that hangs is found.
    """
    asked, beaten, is_head = False, time.monotonic(), os.environ.get("RANK", "0") == "0"
    heartbeat("training", force=True, steps=progress.steps, note="")
    while process.poll() is None:
        time.sleep(POLL)
        alive = is_head and not progress.latest and time.monotonic() - beaten >= BEAT
        if progress.read() or alive:
            beaten = time.monotonic()
            heartbeat("training", force=alive, **progress.latest)
        if stop and not asked:
            asked = True
            process.send_signal(signal.SIGTERM)
    progress.read()
    heartbeat("training", force=True, **progress.latest)
    return asked


def environment(spec: RunSpec, run_dir: Path) -> dict[str, str]:
    """Return the variables that a script has besides those of torchrun. TRAINYARD_RUN_DIR is also set under a supervisor."""
    dataset = spec.dataset if isinstance(spec.dataset, str) else spec.sources[0].path
    return {
        "TRAINYARD_RUN_DIR": str(run_dir),
        "TRAINYARD_SPEC": str(run_dir / "spec.yml"),
        "TRAINYARD_CHECKPOINTS": str(run_dir / "checkpoints"),
        "TRAINYARD_RESULT": str(run_dir / RESULT),
        **({"TRAINYARD_MODEL": spec.model} if spec.model != TINY else {}),
        **({"TRAINYARD_DATASET": dataset} if dataset != OBSERVATORY else {}),
        "PYTHONUNBUFFERED": "1",
    }


class ScriptSteps:
    """The steps that a script reports in `metrics.jsonl` of this host during this start.

    Attributes:
        latest: fields of the heartbeat, of the newest line.
        step: the newest step; 0 before the first one.
        steps: number of steps; 0 if it is unknown.
        first_loss: the first loss of this start.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self.latest: dict[str, Any] = {}
        self.step, self.steps, self.first_loss = 0, steps, None
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> bool:
        """Read the lines that are new; return whether one of them has a step."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read(_READ)
        except OSError:
            return False
        complete = text.rfind(b"\n") + 1
        self._offset += complete or (len(text) if len(text) == _READ else 0)
        found = [fields for line in text[:complete].splitlines() if (fields := _fields(line))]
        for fields in found:
            self.latest |= fields
            self.step, self.steps = fields["step"], self.latest.get("steps") or self.steps
            if self.first_loss is None:
                self.first_loss = fields.get("loss")
        return bool(found)


def _fields(line: bytes) -> dict[str, Any]:
    """Return the fields of a line of metrics that a heartbeat has; empty if it has no step."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    known: dict[str, Any] = {name: value for name in _PROGRESS if type(value := record.get(name)) in (int, float)}
    counts = {name: int(count) for name in ("step", "steps") if 0 <= (count := known.pop(name, -1)) < 2**53}
    found = {name: value for name, value in known.items() if abs(value) <= sys.float_info.max}
    return found | counts if "step" in counts else {}


def result(spec: RunSpec, run_dir: Path, progress: ScriptSteps) -> dict[str, Any]:
    """Return the contents of result.json: the script's own result, and the data that does not depend on it.

    Raises ScriptError: the script wrote something else than one JSON object of at most MAX_RESULT bytes.
    """
    path = run_dir / RESULT
    try:
        own = json.loads(read_regular(path, MAX_RESULT)) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ScriptError(f"{RESULT} of the script is not JSON of at most {MAX_RESULT} bytes: {error}") from None
    if not isinstance(own, dict):
        raise ScriptError(f"{RESULT} of the script is a {type(own).__name__}, expected an object such as {{}}")
    known: dict[str, Any] = {
        "run": spec.run,
        "status": "finished",
        "script": Path(spec.script).name,
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "exit_code": 0,
        "step": progress.step,
        "steps": progress.steps or progress.step,
        "tokens": 0,
        "samples": 0,
        "tokens_per_second": progress.latest.get("tokens_per_second"),
        "loss_first": progress.first_loss,
        "loss_last": progress.latest.get("loss"),
    }
    return known | {name: value for name, value in own.items() if name not in _FIXED}


def _tail(log: Path | None, start: int) -> str:
    """Return the end of a log after an offset; empty without a log."""
    if log is None:
        return ""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - _LOG_TAIL))
        return file.read(_LOG_TAIL).decode(errors="replace")
    return ""


def _ending(name: str, code: int) -> str:
    if code >= 0:
        return f"{quoted(name)} ended with exit code {code}"
    try:
        return f"{quoted(name)} was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"{quoted(name)} was killed by signal {-code}"
