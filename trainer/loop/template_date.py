"""What a resumed run keeps of its start: the date that the chat template prints, and the meaning of max_steps."""

import contextlib
import datetime
import json
from pathlib import Path
from typing import Any

from trainer.config import RunSpec
from trainer.distributed.world import World


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
    for file in sorted(checkpoints.glob("step-*/state.json"), reverse=True):
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
            return int(state["step"]), datetime.date.fromisoformat(state["template_date"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged, or of a template without a date
    return None


def ends_with_epochs(spec: RunSpec, checkpoints: Path, world: World) -> bool:
    """Return whether the run began under a version in which `max_steps` did not repeat the data. Every rank calls it."""
    here = []
    for file in checkpoints.glob("step-*/state.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            here.append("repeats" in json.loads(file.read_text(encoding="utf-8")))
    found = [repeats for host in world.gather(here) for repeats in host]
    return bool(spec.max_steps and found) and not any(found)
