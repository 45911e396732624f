"""The rewards of a run: files of the user and built-in ones, with weights. A part of the run spec."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from trainer.common.errors import UserError
from trainer.common.formats import quoted
from trainer.config.json_schema import schema_error
from trainer.config.yaml_text import parse_structure

# The built-in rewards, and the options that each of them has.
BUILT_IN: Mapping[str, tuple[str, ...]] = {
    "exact": ("column",),
    "regex": ("pattern",),
    "length": ("limit",),
    "format": (),
    "json": ("json_schema",),
}
_REQUIRED = ("pattern", "limit")
MAX_WEIGHT = 1000.0
EXPECTED = (
    "Python files (NAME.py) and built-in rewards (exact, regex, length, format, json), such as my_reward.py,format:0.5 "
    "or [exact, {use: regex, pattern: '^[A-Z]', weight: 0.1}]"
)

NOTHING_LEARNED = (
    "in no step did two completions of a prompt have different rewards, so the run learned nothing from them: "
    "look at completions.jsonl in the run folder, and give a reward for a part of the answer, or begin with easier prompts"
)


class RewardSource(BaseModel):
    """One reward of a run.

    Attributes:
        use: the path of a Python file, each of whose functions that begin with ``reward`` is a reward, or a name of BUILT_IN.
        weight: the factor of its rewards in the sum.
        limit: length: the number of characters up to which the reward is 1; it falls to 0 at twice as many.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    use: str = Field(min_length=1)
    weight: float = Field(default=1.0, ge=-MAX_WEIGHT, le=MAX_WEIGHT, allow_inf_nan=False)
    column: str = ""  # exact: the column of the dataset with the right answer
    pattern: str = ""  # regex: the pattern that must occur in the completion
    limit: int = Field(default=0, ge=0, le=10**9)
    json_schema: dict[str, Any] = {}  # json: what the completion must match; empty: any JSON

    @field_validator("use")
    @classmethod
    def _check_use(cls, use: str) -> str:
        if use not in BUILT_IN and not use.endswith(".py"):
            raise ValueError("neither a built-in reward nor a Python file")
        return use

    @property
    def is_file(self) -> bool:
        return self.use not in BUILT_IN


def _entry(value: Any) -> Any:
    """Return ``NAME:WEIGHT`` as a mapping; other values unchanged."""
    if not isinstance(value, str):
        return value
    name, colon, weight = value.strip().rpartition(":")
    if colon and name and re.fullmatch(r"[-+.0-9eE]+", weight):
        return {"use": name, "weight": weight}
    return {"use": value.strip()}


def _entries(value: Any) -> Any:
    """Return the rewards as a list of mappings, from such a list, from its text, or from ``NAME:WEIGHT,NAME``."""
    value = parse_structure(value)
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if isinstance(value, Mapping):
        value = [value]
    return [_entry(each) for each in value] if isinstance(value, list | tuple) else value


Rewards = Annotated[tuple[RewardSource, ...], BeforeValidator(_entries)]


def rewards_error(rewards: Sequence[RewardSource]) -> str:
    """Return why the rewards of a run are not valid, or an empty string."""
    for reward in rewards:
        options = BUILT_IN.get(reward.use, ())
        given = reward.model_fields_set - {"use", "weight"}
        for name in sorted(given):
            if name not in options and getattr(reward, name):
                return f"reward: {quoted(reward.use)} has no option {name}: omit it"
        for name in options:
            if name in _REQUIRED and not getattr(reward, name):
                return f"reward: {reward.use} needs {name}, as in {{use: {reward.use}, {name}: ...}}"
        if reward.pattern:
            try:
                re.compile(reward.pattern)
            except (re.error, RecursionError, OverflowError) as error:
                return f"reward: the pattern {quoted(reward.pattern)} is not valid: {error}"
        if reason := schema_error(reward.json_schema):
            return f"reward: json_schema: {reason}"
    if rewards and not any(reward.weight for reward in rewards):
        return "reward: every weight is 0, so that nothing would be learned: give one reward another weight"
    names = [reward.use for reward in rewards if reward.is_file]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        return f"reward: {quoted(twice)} is given twice: remove one"
    return ""


def with_reward_paths(rewards: Sequence[RewardSource], paths: Sequence[str]) -> tuple[RewardSource, ...]:
    """Return the rewards with other paths of their files, one for each file in order."""
    left = iter(paths)
    return tuple(each.model_copy(update={"use": next(left)}) if each.is_file else each for each in rewards)


def check_columns(rewards: Sequence[RewardSource], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Check that a dataset has the columns of the built-in rewards; return a line for each that only some of its records have.

    `records`: the columns of each prompt. Raises UserError: no record has a column.
    """
    lines = []
    for reward in rewards:
        column = reward.column or "answer"
        missing = sum(record.get(column) is None for record in records) if reward.use == "exact" else 0
        if missing and missing == len(records):
            raise UserError(
                f"reward: exact: the dataset has no column {column!r}: name the one with the answers as its column"
            )
        if missing:
            lines.append(
                f"reward: exact: {missing} of {len(records)} prompts have no column {column!r}, and get no reward from it"
            )
    return lines
