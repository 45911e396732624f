"""The rewards of completions, as a rank asks for them. They are computed in a process with limits: see `reward_program`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, FiniteFloat, Strict, TypeAdapter, ValidationError

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.config.reward_source import RewardSource
from trainer.data.limited_process import LimitError
from trainer.rewards.guard import GuardedProcess

MEMORY = 4 << 30  # bytes
DAMAGED = "sent a damaged answer: a reward must not write to the pipe of its process"
_MAX_NAME = 100  # characters


def _reply(kind: Any) -> TypeAdapter[tuple[str, Any]]:
    """Return the form of an answer of this kind, or of an error."""
    return TypeAdapter(tuple[Literal[""], kind] | tuple[Annotated[str, Field(min_length=1)], None])


_NOTHING, _NAMES, _REWARDS = map(
    _reply, (None, list[tuple[str, str, int]], list[Annotated[FiniteFloat, Strict()] | None])
)


@dataclass(frozen=True)
class RewardFunction:
    """A reward function: its name, the name of its file (empty for a built-in one), and its weight in the sum."""

    name: str
    file: str
    weight: float

    def __str__(self) -> str:
        return f"{self.file}: {self.name}" if self.file else self.name


@dataclass(frozen=True)
class RewardBatch:
    """Completions that are rated together.

    Attributes:
        prompts, completions: a text or a list of messages each, as TRL has them.
        step, steps: number of the step, from 0, and of all steps.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]  # the tokens of every completion
    columns: Mapping[str, Sequence[Any]]  # the other columns of the dataset, by name, one value for every completion
    step: int = 0
    steps: int = 0
    endings: Sequence[str] = ()  # the last characters of every prompt as the model gets it; none: unknown


class RewardProcess:
    """The reward functions of a run in their process. `functions`: in the order of the spec."""

    def __init__(
        self, rewards: Sequence[RewardSource], columns: Sequence[str], seconds: float, patience: float = math.inf
    ) -> None:
        """Start the process and import the files.

        `columns`: of the dataset, without prompt. `seconds`: time limit of one call of a function. `patience`: seconds
        that the other ranks wait for all rewards of a step. Raises UserError: a file cannot be imported in time, the
        functions together may take too long, or a function needs a column that the dataset lacks.
        """
        self._process = GuardedProcess("trainer.rewards.reward_program", MEMORY, seconds)
        entries = [{**reward.model_dump(mode="json"), "is_file": reward.is_file} for reward in rewards]
        files = ", ".join(reward.use.rpartition("/")[2] for reward in rewards)
        found = self._ask(_NAMES, (entries, list(columns)), f"{files}: importing", "")
        self.functions = [
            RewardFunction(printable(name, _MAX_NAME), printable(file, _MAX_NAME), rewards[entry].weight)
            for name, file, entry in found
            if 0 <= entry < len(rewards)
        ]
        # Importing and reading have the limit, too; the other ranks wait for all of them.
        if (longest := (len(self.functions) + 2) * seconds) >= patience:
            self.close()
            raise UserError(
                f"reward_timeout: {len(self.functions)} rewards may take {longest:g} s, but other ranks wait only {patience:g} s for "
                "them (collective_timeout): increase collective_timeout, or decrease reward_timeout"
            )

    def __call__(self, rollouts: RewardBatch) -> np.ndarray:
        """Return the rewards of completions by function, float64 [n, functions]; NaN where a function does not rate one.

        Raises UserError: a function failed, exceeded a limit, or returned something else; the message names it.
        """
        self._ask(_NOTHING, vars(rollouts), "reading the completions", "")
        parts = np.full((len(rollouts.completions), len(self.functions)), math.nan)
        for place, function in enumerate(self.functions):
            answer = self._ask(_REWARDS, place, f"{function}:", f"{function} ")
            if len(answer) != len(parts):
                raise UserError(f"reward: {function} {DAMAGED}")
            parts[:, place] = [math.nan if value is None else value for value in answer]
        return parts

    def close(self) -> None:
        self._process.close()

    def _ask(self, form: TypeAdapter[tuple[str, Any]], request: object, doing: str, who: str) -> Any:
        """Return the answer of the process. Raises UserError.

        `form`: of its error and its answer. `doing`: what it does, for the message about a limit. `who`: what begins the
        message of an error that it reports.
        """
        try:
            error, answer = form.validate_python(self._process.ask(request))
        except LimitError as limit:
            self._process.close()
            remedy = ", see reward_timeout: make it faster, or increase the limit" if str(limit).endswith(" s") else ""
            raise UserError(f"reward: {doing} {limit}{remedy}") from None
        except (ValidationError, OverflowError):
            self._process.close()
            raise UserError(f"reward: {doing} {DAMAGED}") from None
        if error:
            self._process.close()
            raise UserError(f"reward: {who}{error}")
        return answer


def total(parts: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Return the weighted sums of rewards, float64 [n]; NaN for a completion that no function rates, as in TRL.

    `parts`: float64 [n, functions]. `weights`: of the functions.
    """
    sums = np.nansum(parts * np.array(weights), axis=1)
    return np.where(np.isnan(parts).all(axis=1), math.nan, sums)
