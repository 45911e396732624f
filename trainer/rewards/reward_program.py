"""The process that runs the rewards of a run. It answers the messages of RewardProcess."""

import asyncio
import contextlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.data.limited_process import answer_messages, limit_process
from trainer.distributed.worker_process import die_with_launcher
from trainer.rewards.built_in import Function, built_in
from trainer.rewards.reward_file import PREFIX


class RewardError(Exception):
    """A reward cannot be loaded, failed, or returned something else than rewards. The message is what follows its name."""


@dataclass(frozen=True)
class Reward:
    """A reward function. `name`: unique in the run; `file`: the name of its file, empty for a built-in one; `entry`: its place in the spec."""

    name: str
    file: str
    entry: int
    function: Function

    def rate(self, batch: Mapping[str, Any]) -> list[float | None]:
        """Return the rewards of a batch (the fields of RewardBatch); None for a completion that the function does not rate. Raises RewardError."""
        state = SimpleNamespace(global_step=batch["step"], max_steps=batch["steps"])
        given = {name: batch[name] for name in ("prompts", "completions", "completion_ids")} | batch["columns"]
        if not self.file:  # a built-in reward
            given["prompts"] = batch["endings"] or batch["prompts"]
        try:
            found: Any = self.function(**_accepted(self.function, given | {"trainer_state": state}))
            if inspect.iscoroutine(found):
                found = asyncio.run(found)
            return self._checked(found, len(batch["completions"]))
        except (RewardError, MemoryError):
            raise
        except BaseException as error:
            raise RewardError(f"{_place(error, self.file)}{_described(error)}") from None

    def _checked(self, found: Any, count: int) -> list[float | None]:
        if isinstance(found, str | bytes | dict) or not hasattr(found, "__iter__"):
            raise RewardError(f"returned a {type(found).__name__}: return a list with one reward per completion")
        values = list(found)
        if len(values) != count:
            raise RewardError(f"returned {len(values)} rewards for {count} completions: return one per completion")
        rewards = []
        for value in values:
            number = math.nan
            if value is not None and not isinstance(value, str | bytes):
                with contextlib.suppress(TypeError, ValueError, OverflowError):
                    number = float(value)
            if value is not None and not math.isfinite(number):
                raise RewardError(f"returned {value!r:.40}: return finite numbers, or None for what it does not rate")
            rewards.append(None if value is None else number)
        return rewards


def _accepted(function: Function, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that a function has. Raises RewardError if it requires others."""
    parameters = inspect.signature(function).parameters.values()
    keywords = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = {each.name for each in parameters if each.kind in keywords}
    required = {each.name for each in parameters if each.kind in keywords and each.default is each.empty}
    if missing := sorted(required - set(given)):
        shown = ", ".join(name for name in given if name != "trainer_state")
        raise RewardError(f"has the parameter {missing[0]!r}, which no column of the dataset is (there are {shown})")
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return {name: value for name, value in given.items() if takes_all or name in names}


def _place(error: BaseException, file: str) -> str:
    """Return ``line N: `` of the innermost frame in the file of a reward; empty if there is none."""
    if isinstance(error, SyntaxError) and Path(error.filename or "").name == file:
        return f"line {error.lineno}: "
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == file]
    return f"line {lines[-1]}: " if lines and file else ""


def _described(error: BaseException) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def load(entries: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[Reward]:
    """Return the rewards of the entries of a spec (RewardSource as JSON), in order.

    `columns`: of the dataset. Raises RewardError: a file cannot be imported, or a function needs other columns; the
    message names both.
    """
    found: list[tuple[str, str, int, Function]] = []
    for place, entry in enumerate(entries):
        if entry["is_file"]:
            file, functions = _import(Path(entry["use"]), place)
            found += [(name, file, place, function) for name, function in functions.items()]
        else:
            column = entry["column"] or "answer"
            if entry["use"] == "exact" and column not in columns:
                raise RewardError(
                    f"exact: the dataset has no column {column!r}: name the one with the answers as its column"
                )
            found.append((entry["use"], "", place, built_in(entry)))
    rewards = []
    names: list[str] = []
    for name, file, place, function in found:
        count = names.count(name)
        names.append(name)
        rewards.append(Reward(f"{name}_{count + 1}" if count else name, file, place, function))
    given = dict.fromkeys([*columns, "prompts", "completions", "completion_ids", "trainer_state"])
    for reward in rewards:
        try:
            _accepted(reward.function, given)
        except RewardError as error:
            raise RewardError(f"{reward.file}: {reward.name} {error}") from None
    return rewards


def _import(path: Path, place: int) -> tuple[str, dict[str, Function]]:
    """Return the name of a file, and its reward functions by name, in the order of their definition. Raises RewardError."""
    try:
        spec = importlib.util.spec_from_file_location(f"_reward_file_{place}", path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    except MemoryError:
        raise
    except BaseException as error:
        raise RewardError(f"{path.name}: {_place(error, path.name)}{_described(error)}") from None
    names = [name for name, value in vars(module).items() if name.startswith(PREFIX) and callable(value)]
    functions = {name: vars(module)[name] for name in names if not isinstance(vars(module)[name], type)}
    if not functions:
        raise RewardError(f"{path.name}: it defines no function whose name begins with {PREFIX!r}")
    return path.name, functions


def main() -> int:
    """Answer the messages on standard input: the entries and columns; then batches, and the number of a reward to rate them."""
    die_with_launcher()
    limit_process()
    # What the files print goes to the log of the rank, and what they read is empty.
    answers, messages = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    rewards: list[Reward] | None = None
    batch: Mapping[str, Any] = {}

    def answer(request: Any) -> tuple[str, Any]:
        nonlocal rewards, batch
        try:
            if rewards is None:
                rewards = load(*request)
                return "", [(each.name, each.file, each.entry) for each in rewards]
            if isinstance(request, int):
                return "", rewards[request].rate(batch)
            batch = request
            return "", None
        except RewardError as error:
            return str(error), None
        finally:
            sys.stdout.flush()

    return answer_messages(messages, answers, answer)


if __name__ == "__main__":
    os._exit(main())
