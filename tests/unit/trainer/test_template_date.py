"""The date of a run, which chat templates print."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from trainer.distributed.world import World
from trainer.loop.template_date import ends_with_epochs, prints_date, recorded_date, run_date
from trainer.spec import make_spec

DATED = SimpleNamespace(chat_template="{{ strftime_now('%d %b %Y') }}")
PLAIN = SimpleNamespace(chat_template="{{ messages }}")


def world_of(*others: list[Any]) -> World:
    """Return a world whose other ranks, after this one, say `others`."""
    return cast(World, SimpleNamespace(gather=lambda mine: [mine, *others]))


def checkpoint(folder: Path, step: int, **state: Any) -> None:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"step": step, **state}))


def test_a_new_run_has_the_date_of_rank_0(tmp_path: Path) -> None:
    tomorrow = (datetime.date.today() + datetime.timedelta(1)).isoformat()
    assert run_date(tmp_path, world_of([-1, tomorrow])) == datetime.date.today()


def test_a_resumed_run_has_the_date_of_its_newest_checkpoint_on_any_host(tmp_path: Path) -> None:
    assert recorded_date(tmp_path) is None
    checkpoint(tmp_path, 5, template_date="2026-01-31")
    checkpoint(tmp_path, 9)  # of a version, or a template, without a date
    assert recorded_date(tmp_path) == (5, datetime.date(2026, 1, 31))
    checkpoint(tmp_path, 10, template_date="31 January")
    (tmp_path / "step-00000011").mkdir()
    assert run_date(tmp_path, world_of([-1, datetime.date.today().isoformat()])) == datetime.date(2026, 1, 31)
    assert run_date(tmp_path, world_of([20, "2026-02-01"])) == datetime.date(2026, 2, 1)
    assert run_date(tmp_path / "new host", world_of([5, "2026-01-31"])) == datetime.date(2026, 1, 31)


def test_templates_that_print_a_date() -> None:
    assert prints_date(DATED) and not prints_date(PLAIN) and not prints_date(SimpleNamespace(chat_template=None))
    assert prints_date(SimpleNamespace(chat_template={"default": DATED.chat_template}))


def test_a_run_of_an_earlier_version_ends_with_its_epochs(tmp_path: Path) -> None:
    """In transformers, and in runs that begin now, max_steps repeats the data."""
    spec = make_spec({"max_steps": 5}, "")
    assert not ends_with_epochs(spec, tmp_path, world_of([]))
    checkpoint(tmp_path, 3)
    assert ends_with_epochs(spec, tmp_path, world_of([])) and ends_with_epochs(
        spec, tmp_path / "new", world_of([False])
    )
    assert not ends_with_epochs(make_spec({"max_steps": 0}, ""), tmp_path, world_of([]))
    checkpoint(tmp_path, 4, repeats=True)
    assert not ends_with_epochs(spec, tmp_path, world_of([]))
