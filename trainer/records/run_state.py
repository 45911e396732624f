"""The progress of a run, and its state in a checkpoint in addition to the weights. No torch here."""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.config import RunSpec


@dataclass(frozen=True)
class RunHistory:
    """The starts of a run: those that its newest checkpoint lists, and the current one. It decides which records are valid.

    A start that failed leaves records of steps that a later start repeats, possibly on other hosts. Every record has the
    name of its start. It is valid up to the step from which the next start in the list resumed; records of a start that is
    not in the list are invalid.

    Each entry of `starts` has `start` (a unique name), `step` (from which it resumed) and `head` (host and folder of
    rank 0).
    """

    starts: list[dict[str, Any]] = field(default_factory=list)

    def is_valid(self, record: dict[str, Any]) -> bool:
        """Return whether the step of the record is part of the run as it is now."""
        for this, following in pairwise(self.starts):
            if record.get("start") == this["start"]:
                return bool(record["step"] <= following["step"])
        return False

    @property
    def step(self) -> int:
        return int(self.starts[-1]["step"])

    @property
    def start(self) -> str:
        return str(self.starts[-1]["start"])

    @property
    def head_moved(self) -> bool:
        """Whether rank 0 runs on another host or in another folder than in the previous start."""
        return len(self.starts) > 1 and self.starts[-1]["head"] != self.starts[-2]["head"]


# `mfu_seconds`: seconds x share of the peak; `mfu_measured`: seconds in which it was known.
_NO_TOTALS: dict[str, Any] = {
    **dict.fromkeys(("tokens", "trained_tokens", "samples"), 0),
    **dict.fromkeys(("seconds", "mfu_seconds", "mfu_measured"), 0.0),
    **dict.fromkeys(("loss_first", "loss_last")),
}


@dataclass
class RunState:
    """The progress of a run: steps, totals and starts.

    `step` counts the steps that this rank has finished; `synced_step` is the newest step after which all ranks had the same
    model. `data` is the digest of the encoded dataset; `packing` says whether rows are packed; `template_date` is the date that the chat
    template prints, empty if it prints none; `base` is the digest of the base model's files, empty if it is unknown; `spec` are its
    `fixed_values`; `repeats` is false for a run of an earlier version, whose `max_steps` does not repeat the data.
    """

    steps: int
    world_size: int
    data: str
    packing: bool = True
    backend: str = "peft"
    template_date: str = ""
    base: str = ""
    spec: dict[str, Any] = field(default_factory=dict)
    repeats: bool = True
    step: int = 0
    synced_step: int = 0
    totals: dict[str, Any] = field(default_factory=_NO_TOTALS.copy)
    history: RunHistory = field(default_factory=RunHistory)

    def restore(self, checkpoint: Path, spec: RunSpec) -> None:
        """Read the progress from a checkpoint folder.

        Raises UserError: the run started with other data or another base model, or with another packing or backend.
        """
        stored = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        if stored.get("data") != self.data:
            raise UserError(
                f"dataset: {spec.dataset_name} or its encoding has changed since run {spec.run} started: "
                "restore the original dataset, or set another run name with run="
            )
        base = stored.get("base", "")  # older versions did not store it
        if base and self.base and base != self.base:
            raise UserError(
                f"model: the config.json or the weights of {spec.model} have changed since run {spec.run} started: "
                "restore the original model, or set another run name with run="
            )
        self.base = self.base or base
        if stored.get("packing", self.packing) != self.packing:
            raise UserError(
                f"packing: auto chose {str(stored['packing']).lower()} when run {spec.run} started, and now "
                f"{str(self.packing).lower()}: install the same versions of torch and transformers as before"
            )
        if stored.get("backend", self.backend) != self.backend:
            raise UserError(
                f"backend: auto chose {stored['backend']} when run {spec.run} started, and now {self.backend}: install the "
                "same packages on all hosts as before, or set another run name with run="
            )
        self.step = self.synced_step = stored["step"]
        self.history = RunHistory(stored.get("starts", []))
        self.totals.update(stored["totals"])

    def checkpoint_state(self) -> dict[str, Any]:
        """Return what a checkpoint of `synced_step` stores in state.json."""
        return {
            "step": self.synced_step,
            "starts": self.history.starts,
            "totals": dict(self.totals),
            "world_size": self.world_size,
            "data": self.data,
            **({"base": self.base} if self.base else {}),
            **({"repeats": True} if self.repeats else {}),
            "packing": self.packing,
            "backend": self.backend,
            **({"template_date": self.template_date} if self.template_date else {}),
            **({"spec": self.spec} if self.spec else {}),
        }

    def begin(self, start: dict[str, str]) -> None:
        """Begin the training of this start from the current step. `start`: its `start` and `head` (see RunHistory)."""
        self.history = RunHistory([*self.history.starts, {**start, "step": self.step}])

    def add(self, record: dict[str, Any], seconds: float) -> float:
        """Add the metrics of one step to the totals, and complete the record with the mean loss and the speed.

        `record`: the counts over all ranks (see StepMetrics.reduce). `seconds`: duration of the step on the slowest
        rank. Returns the estimated seconds until the last step.
        """
        weight = record.pop("weight")
        mean_loss = record["loss"] / max(1, weight)
        for name in ("tokens", "trained_tokens", "samples"):
            self.totals[name] += record[name]
        self.totals["seconds"] += seconds
        if record.get("mfu"):
            self.totals["mfu_seconds"] += seconds * sum(record["mfu"]) / len(record["mfu"])
            self.totals["mfu_measured"] += seconds
        if weight:
            self.totals |= {"loss_last": mean_loss, "loss_first": self.totals["loss_first"] or mean_loss}
        metrics, counted = record.get("metrics", {}), self.totals.get("learning_steps", 0)
        # Steps with unlike rewards of a prompt, which an earlier version did not count.
        if "completion_length" in metrics and (record["step"] == 1 or "learning_steps" in self.totals):
            self.totals["learning_steps"] = counted + (metrics.get("flat_groups", 1) < 1)
            if "reward" in metrics:
                first = self.totals.get("reward_first", metrics["reward"])
                self.totals |= {"reward_last": metrics["reward"], "reward_first": first}
        record |= {"loss": mean_loss, "tokens_per_second": record["tokens"] / seconds}
        return float(self.totals["seconds"] / record["step"] * (self.steps - record["step"]))
