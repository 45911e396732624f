"""`--help` and the completion of shells, by tyro, from the same options as the parser."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_origin

import tyro
from pydantic.fields import FieldInfo

from trainer.config import describe
from trainer.config.fields import expected_value, metadata
from trainyard.commands.groups import Group, SpecGroup
from trainyard.commands.options import SHORT
from trainyard.commands.table import COMMANDS, COMPLETION, Command

PROGRAM = "trainyard"
QUEUE_SUMMARY = "add runs to the queue, list or change them"
COMPLETION_SUMMARY = "print the script that completes commands and flags in a shell"


def show(words: Sequence[str]) -> None:
    """Let tyro answer `--help` or `--tyro-print-completion`, and exit."""
    commands: list[Any] = [_subcommand(name, command) for name, command in COMMANDS.items() if " " not in name]
    commands.append(_queue())
    completion = dataclasses.make_dataclass("completion", _group_fields([COMPLETION]))
    commands.append(
        Annotated[completion, tyro.conf.subcommand("completion", description=COMPLETION_SUMMARY, prefix_name=False)]
    )
    program: Any = Union[tuple(commands)]  # noqa: UP007
    tyro.cli(
        program,
        prog=PROGRAM,
        description="Train language models on a few Linux machines. docs/command-line.md describes the commands, "
        f"and {PROGRAM} COMMAND --help their options.",
        args=words,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


def _queue() -> Any:
    """Return the command `queue`, whose verbs are commands of their own."""
    verbs: list[Any] = [_subcommand(name, command) for name, command in COMMANDS.items() if " " in name]
    fields: list[Any] = [("verb", Union[tuple(verbs)])]  # noqa: UP007
    queue = dataclasses.make_dataclass("queue", fields)
    return Annotated[queue, tyro.conf.subcommand("queue", description=QUEUE_SUMMARY, prefix_name=False)]


def _subcommand(name: str, command: Command) -> Any:
    flags = dataclasses.make_dataclass(re.sub("[- ]", "_", name), _group_fields(command.all_groups))
    usage = f"{PROGRAM} {name} [{command.positional.upper()}]: " if command.positional else ""
    same = f" The same as {command.playbook}." if command.playbook else ""
    text = f"{usage}{command.summary}.{same}"
    return Annotated[flags, tyro.conf.subcommand(name.split(" ")[-1], description=text, prefix_name=False)]


def _group_fields(groups: Sequence[Group]) -> list[Any]:
    """Return the fields of a class with one class for each group, which is one section of the help."""
    found = []
    for group in groups:
        name = group.title.removesuffix(" options").replace(" ", "_")  # tyro appends "options"
        section = dataclasses.make_dataclass(name, _flags(group))
        found.append((name, section, dataclasses.field(default_factory=section)))
    return found


def _flags(group: Group) -> list[Any]:
    """Return the fields of a class whose flags are those of the options. Values other than choices are text."""
    short = {name: f"-{letter}" for letter, name in SHORT.items()}
    found = []
    for name, option in group.fields.items():
        kind = option.annotation if option.annotation is bool or get_origin(option.annotation) is Literal else str
        shown = tyro.conf.arg(
            help=describe(name) if isinstance(group, SpecGroup) else option.description,
            metavar=_metavar(option) if kind is str else None,
            aliases=[short[name]] if name in short else None,
            help_behavior_hint=f"(default: {_text(option.default)})" if _text(option.default) else "",
        )
        default = option.default if kind is not str else _text(option.default)
        found.append((name, Annotated[kind, shown], dataclasses.field(default=default)))  # type: ignore[valid-type]
    return found


def _metavar(option: FieldInfo) -> str:
    """Return the placeholder of a flag's value in the help."""
    if expected := metadata(option)["expected"]:
        return str(expected)
    kind = get_origin(option.annotation) or option.annotation
    if kind is str:
        return "TEXT"
    if kind is tuple:
        return "WORD[,WORD...]"
    return expected_value(option).removeprefix("an ").removeprefix("a ")


def _text(value: Any) -> str:
    """Return a default as the text of a flag."""
    if value in (None, (), {}, ""):
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()
