"""What a resumed run keeps of its start: the date that the chat template prints, and the meaning of max_steps."""

import contextlib
import datetime
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.config import RunSpec
from trainer.distributed.world import World
from trainer.records.checkpoint import MANIFEST, STATE

_DAMAGED = (OSError, ValueError, LookupError, TypeError, RecursionError)


def prints_date(tokenizer: Any) -> bool:
    return "strftime_now" in str(tokenizer.chat_template)  # with which a template asks for the date


def run_date(checkpoints: Path, world: World) -> datetime.date:
    """Return the date of the run: that of its newest checkpoint, else today on rank 0. Every rank calls it."""
    # Another host may have the newest checkpoint, and another time zone.
    step, date = recorded_date(checkpoints) or (-1, datetime.date.today())
    found: list[Any] = world.gather([step, date.isoformat()])
    return datetime.date.fromisoformat(max(found, key=lambda entry: int(entry[0]))[1])


def recorded_date(checkpoints: Path) -> tuple[int, datetime.date] | None:
    """Return the step and the date of the newest checkpoint on this host that has a date, or None."""
    for state in _states(checkpoints):
        with contextlib.suppress(*_DAMAGED):
            return int(state["step"]), datetime.date.fromisoformat(state["template_date"])
    return None


def _states(checkpoints: Path) -> Iterator[Any]:
    """Yield the states of checkpoints on this host, the newest first, as far as they are what was written."""
    for folder in sorted(checkpoints.glob("step-*"), reverse=True):
        with contextlib.suppress(*_DAMAGED):
            digest = json.loads((folder / MANIFEST).read_bytes())["files"][STATE]["sha256"]
            text = (folder / STATE).read_bytes()
            if hashlib.sha256(text).hexdigest() == digest:
                yield json.loads(text)


def ends_with_epochs(spec: RunSpec, checkpoints: Path, world: World) -> bool:
    """Return whether the run began under a version in which `max_steps` did not repeat the data. Every rank calls it."""
    here = ["repeats" in state for state in _states(checkpoints)]
    found = [repeats for host in world.gather(here) for repeats in host]
    return bool(spec.max_steps and found) and not any(found)
