"""The progress of a run: totals, starts, checkpoints of them, and metrics reduced over ranks."""

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tables import table

from trainer.common.errors import UserError
from trainer.distributed.world import World
from trainer.loop.template_date import ends_with_epochs, prints_date, recorded_date, run_date
from trainer.method import MethodPlan
from trainer.model_files import base_digest as digests
from trainer.model_files.base_digest import base_digest
from trainer.records.checkpoint import sha256_file
from trainer.records.run_state import RunHistory, RunState
from trainer.records.step_metrics import RankUse, StepMetrics
from trainer.spec import changed_fields, changed_since, fixed_values, make_spec

SPEC = make_spec({"run": "r", "dataset": "d.jsonl"}, "")


def record(step: int, loss: float = 6.0, trained: int = 3) -> dict[str, Any]:
    return {"step": step, "loss": loss, "tokens": 10, "trained_tokens": trained, "weight": trained, "samples": 2}


def test_totals_and_the_estimated_time() -> None:
    state = RunState(4, 2, "digest")
    first = record(1)
    assert state.add(first, 2.0) == pytest.approx(6.0)
    assert (first["loss"], first["tokens_per_second"]) == (2.0, 5.0)
    assert state.add(record(2, loss=3.0), 4.0) == pytest.approx(6.0)
    without_loss = record(3, loss=0.0, trained=0)
    state.add(without_loss, 1.0)
    assert without_loss["loss"] == 0.0
    assert state.totals == table("run_state")["totals_and_the_estimated"]


def test_totals_of_a_run_with_rewards() -> None:
    state = RunState(4, 1, "digest")
    metrics = [
        {"completion_length": 3.0},  # nothing was rated
        {"completion_length": 3.0, "reward": 0.5, "flat_groups": 1.0},
        {"completion_length": 3.0, "reward": 0.75, "flat_groups": 0.5},
        {},
    ]
    for step, each in enumerate(metrics, 1):
        state.add(record(step) | {"metrics": each}, 1.0)
    found = {name: value for name, value in state.totals.items() if "reward" in name or "learning" in name}
    assert found == {"reward_first": 0.5, "reward_last": 0.75, "learning_steps": 1}


def test_a_checkpoint_restores_the_progress(tmp_path: Path) -> None:
    state = RunState(10, 2, "digest")
    state.begin({"start": "a", "head": "node1:/runs/r"})
    state.add(record(1), 2.0)
    state.step, state.synced_step = 3, 2
    stored = state.checkpoint_state()
    assert stored["step"] == 2, "of the newest synchronization"
    (tmp_path / "state.json").write_text(json.dumps(stored))

    resumed = RunState(10, 1, "digest")
    resumed.restore(tmp_path, SPEC)
    assert (resumed.step, resumed.synced_step, resumed.totals) == (2, 2, state.totals)
    resumed.begin({"start": "b", "head": "node2:/runs/r"})
    assert [entry["start"] for entry in resumed.history.starts] == ["a", "b"]
    assert resumed.history.step == 2 and resumed.history.head_moved
    assert resumed.checkpoint_state()["world_size"] == 1


def test_a_checkpoint_of_other_data_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps(RunState(10, 1, "other").checkpoint_state()))
    with pytest.raises(UserError, match=r"dataset: d\.jsonl or its encoding has changed since run r started"):
        RunState(10, 1, "digest").restore(tmp_path, SPEC)


def test_records_without_a_known_start_are_invalid() -> None:
    assert not RunHistory().is_valid({"start": "a", "step": 1})
    assert not RunHistory([{"start": "a", "step": 0, "head": ""}]).is_valid({"start": "a", "step": 1}), "not resumed"


class OtherRank:
    """A strategy whose second rank has the same counts as the first and takes twice as long."""

    def __init__(self) -> None:
        self.world = self
        self.size, self.rank = 2, 0
        self.calls: list[Any] = []
        self.waited: float | None = 0.6
        self.staged = False

    def sync(self, waiting: Callable[[], bool]) -> None:
        self.calls.append("sync")

    def sum(self, values: list[float]) -> list[float]:
        head, readings, times = values[:-20], values[-20:-10], values[-10:]
        doubled = [2 * value for value in head] + [*readings[:5], 7.0, -1.0, -1.0, -1.0, 9.0]
        for first in range(0, 10, 2):
            doubled += [times[first], 2 * times[first]]
        return doubled

    def rank_seconds(self) -> float:
        return 0.5

    def comm_seconds(self) -> float | None:
        return self.waited

    def update_shares(self, seconds: list[float]) -> None:
        self.calls.append(("shares", seconds))


def add(metrics: StepMetrics, step: int, loss: float, norm: float = 1.0) -> None:
    counts = {"tokens": 8, "trained_tokens": 4, "samples": 2, "weight": 4}
    metrics.add(step, 9, loss=loss, lr=0.1, grad_norm=norm, counts=counts, rows=[1, 1], seconds=float(step))


def test_metrics_are_summed_over_ranks_and_kept_per_step() -> None:
    metrics, strategy = StepMetrics(MethodPlan(), lambda tokens, trained, samples: tokens * 0.03), OtherRank()
    add(metrics, 1, 2.0, norm=float("inf"))
    add(metrics, 2, 4.0)
    assert metrics.local_loss() == {"loss": 1.0}
    reduced = metrics.reduce(strategy, lambda: (False, True), lambda: False, {"power_w": 5.0})  # type: ignore[arg-type]
    assert strategy.calls == ["sync", ("shares", [0.5, 1.0])]
    assert [one["loss"] for one in reduced.records] == [4.0, 8.0]
    assert [one["grad_norm"] for one in reduced.records] == [None, 1.0]
    assert all((one["tokens"], one["trained_tokens"], one["samples"]) == (16, 8, 4) for one in reduced.records)
    assert not reduced.stop and reduced.written
    assert reduced.step_seconds == [1.5, 3.0] and reduced.seconds >= 3.0
    assert reduced.gpus == [{"power_w": 5.0}, {"memory_peak_gb": 7.0, "power_w": 9.0}]
    assert reduced.comm_share == pytest.approx([0.1, 0.2], abs=0.01)
    assert reduced.mfu == pytest.approx([0.08, 0.16], abs=0.001), (
        "seconds at the peak in relation to those of the slowest rank"
    )
    assert metrics.use == RankUse(pytest.approx(0.48), pytest.approx(6.0, abs=0.01))
    add(metrics, 3, 1.0)
    strategy.waited = None
    again = metrics.reduce(strategy, lambda: (True, False), lambda: False, {})  # type: ignore[arg-type]
    assert [one["step"] for one in again.records] == [3], "reduced records are not repeated"
    assert again.stop and not again.written and again.comm_share is None
    assert metrics.use and metrics.use.at_peak == pytest.approx(0.24), "without the first ones"


def test_a_changed_base_model_is_refused(tmp_path: Path) -> None:
    def state(base: str) -> RunState:
        return RunState(10, 1, "digest", base=base)

    stored = tmp_path / "state.json"
    stored.write_text(json.dumps(state("one").checkpoint_state()))
    with pytest.raises(UserError, match=r"^model: .* have changed since run r started: restore the original model"):
        state("two").restore(tmp_path, SPEC)
    unknown = state("")  # this start's hosts lack files
    unknown.restore(tmp_path, SPEC)
    assert unknown.checkpoint_state()["base"] == "one"
    old = state("").checkpoint_state()
    assert "base" not in old
    stored.write_text(json.dumps(old))
    state("two").restore(tmp_path, SPEC)


def test_a_resume_keeps_what_auto_chose(tmp_path: Path) -> None:
    def state(packing: bool, backend: str) -> RunState:
        return RunState(10, 1, "digest", packing=packing, backend=backend)

    (tmp_path / "state.json").write_text(json.dumps(state(False, "unsloth").checkpoint_state()))
    state(False, "unsloth").restore(tmp_path, SPEC)
    for other, why in (
        (
            state(True, "unsloth"),
            "^packing: auto chose false when run r started, and now true: install the same versions",
        ),
        (state(False, "peft"), "^backend: auto chose unsloth when run r started, and now peft: "),
    ):
        with pytest.raises(UserError, match=why):
            other.restore(tmp_path, SPEC)
    packed, loose = (make_spec({"packing": value}, "") for value in (True, False))
    assert not changed_fields(make_spec({}, ""), packed)
    assert changed_fields(packed, loose) == ["packing: was True, now False"]


def test_the_digest_of_a_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_WHOLE", 1000)
    monkeypatch.setattr(digests, "_BLOCK", 64)
    config, small, large = (tmp_path / name for name in ("config.json", "a.safetensors", "b.safetensors"))
    config.write_text('{"a": 1, "transformers_version": "4"}')
    small.write_bytes(bytes(100))
    large.write_bytes(bytes(100_000))
    first = base_digest(str(tmp_path))
    assert first
    config.write_text('{"transformers_version": "5", "a": 1}')
    (tmp_path / "README.md").write_text("other")
    assert base_digest(str(tmp_path)) == first
    changes = [
        (config, b'{"a": 2}'),
        (small, bytes(99) + b"1"),
        (large, bytes(100_001)),
        (large, b"1" * 100_000),
        (large, bytes(99_999) + b"1"),
    ]
    for path, changed in changes:
        kept = path.read_bytes()
        path.write_bytes(changed)
        assert base_digest(str(tmp_path)) not in ("", first)
        path.write_bytes(kept)
    assert base_digest(str(tmp_path)) == first
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "lacking.safetensors"}}))
    assert base_digest(str(tmp_path)) == "", "a host that lacks a file does not know the model"
    assert base_digest("no/such-model") == ""


def test_the_spec_of_a_checkpoint_is_that_of_any_host_and_of_any_version() -> None:
    def fixed(home: str, **more: Any) -> dict[str, Any]:
        paths = {
            "model": f"{home}/m",
            "dataset": [{"path": f"{home}/d.jsonl"}],
            "reward": [f"{home}/r.py", {"use": "regex", "pattern": "a/b"}],
        }
        return fixed_values(make_spec({"method": "grpo", "run": home[1:], **paths, **more}, "the test"))

    here = fixed("/a")
    assert here == fixed("/b", checkpoint_keep=7) and json.loads(json.dumps(here)) == here
    without = {name: value for name, value in here.items() if name not in ("lora_targets", "grpo_beta", "packing")}
    assert changed_since(without, here) == [] == changed_since(here | {"packing": True}, here), "an earlier version"
    assert changed_since(without, fixed("/a", grpo_beta=0.1)) == ["grpo_beta: was 0.0, now 0.1"]
    assert changed_since(here, fixed("/a", reward="/c/r.py")) != []


# The date of a run ---------------------------------------------------------------------------------------------------

DATED = SimpleNamespace(chat_template="{{ strftime_now('%d %b %Y') }}")
PLAIN = SimpleNamespace(chat_template="{{ messages }}")


def world_of(*others: list[Any]) -> World:
    """Return a world whose other ranks, after this one, say `others`."""
    return cast(World, SimpleNamespace(gather=lambda mine: [mine, *others]))


def checkpoint(folder: Path, step: int, **state: Any) -> None:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"step": step, **state}))
    files = {"state.json": {"sha256": sha256_file(path / "state.json")}}
    (path / "manifest.json").write_text(json.dumps({"files": files}))


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
    for step, text in (
        (12, '{"step": 12, "template_date": "2027-01-31"}'),
        (13, "[" * 100_000),
    ):  # not what was written
        checkpoint(tmp_path, step)
        (tmp_path / f"step-{step:08d}/state.json").write_text(text)
    today = world_of([-1, datetime.date.today().isoformat()])
    assert run_date(tmp_path, today) == datetime.date(2026, 1, 31)
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
