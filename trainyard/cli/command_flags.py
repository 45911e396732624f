"""Flags of a command, generated from the classes that declare its options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.common.errors import UserError, nearest
from trainer.common.formats import printable, quoted
from trainer.config import plain_name, suggest
from trainer.config.yaml_text import YamlError, parse_yaml
from trainyard.commands.command_options import SHORT
from trainyard.commands.groups import COMMON, LAUNCH, Group, SpecGroup

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_SWITCH_VALUES = (*_TRUE, *_FALSE, "auto")
_SUGGESTION = re.compile(r"did you mean '([a-z_]+)'")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass
class Arguments:
    """The parsed words of a command line.

    Attributes:
        values: the values of the flags, by group and then by the name as given, with underscores.
    """

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)  # the words after `--`

    def of(self, group: Group) -> dict[str, Any]:
        """Return the values of a group, by name."""
        return self.values.setdefault(group.title, {})

    @property
    def inventory(self) -> list[str]:
        """The inventory sources; empty for those of ansible.cfg."""
        return [str(source) for source in self.of(COMMON).get("inventory", [])]

    @property
    def extra_vars(self) -> list[str]:
        """The words of `-e`."""
        return [str(word) for word in self.of(COMMON).get("extra_vars", [])]

    def switch(self, name: str) -> bool:
        """Return the value of a common switch. Raises UserError."""
        value = str(self.of(COMMON).get(name, "false"))
        if value.lower() not in _TRUE + _FALSE:
            raise UserError(f"--{name}: expected true or false, got {quoted(value)}")
        return value.lower() in _TRUE


def parse(command: str, groups: Sequence[Group], positional: str, words: Sequence[str]) -> Arguments:
    """Parse the words after the command's name. The classes of the options check the values.

    The first group that knows a name has it. `positional`: the option that words without a flag set; empty for none.
    Raises UserError: an unknown flag, an unexpected word, or a flag without a value.
    """
    return _Parser(command, groups, positional, list(words)).parse()


def from_values(command: str, groups: Sequence[Group], values: Mapping[str, Any]) -> Arguments:
    """Return the arguments that a Python program passes by name. Raises UserError for an unknown name."""
    parser = _Parser(command, groups, "", [])
    for name, value in values.items():
        group = parser.group_of(plain_name(name))
        if group is None:
            raise UserError(f"{command}: unknown option {quoted(name)}{parser.nearest(name)}")
        parser.found.of(group)[plain_name(name)] = value
    return parser.found


class _Parser:
    def __init__(self, command: str, groups: Sequence[Group], positional: str, words: list[str]) -> None:
        self.command, self.groups, self.positional, self.words = command, groups, positional, words
        self.found = Arguments()

    def parse(self) -> Arguments:
        while self.words:
            word = self.words.pop(0)
            name, equals, value = word.removeprefix("--").partition("=")
            if word == "--":
                self.found.rest, self.words = self.words, []
            elif word.startswith("--"):
                self.add_flag(name, equals, value)
            elif word.startswith("-") and len(word) > 1:
                self.add_short(word)
            elif equals and self.group_of(plain_name(name)):
                self.add(plain_name(name), value)
            else:
                self.add_positional(word)
        return self.found

    def group_of(self, name: str) -> Group | None:
        return next((group for group in self.groups if group.knows(name)), None)

    def add_flag(self, flag: str, equals: str, value: str) -> None:
        name = plain_name(flag)
        group = self.group_of(name)
        positive = name.removeprefix("no_")
        if group is None and positive != name and not equals:
            other = self.group_of(positive)
            if other and other.takes_no_value(positive):
                self.add(positive, "false")
                return
        if group is None:
            raise UserError(f"{self.command}: unknown flag --{printable(flag, 80)}{self.nearest(name)}")
        if not equals:
            value = self.value_of(flag, name, group)
        self.add(name, value)

    def value_of(self, flag: str, name: str, group: Group) -> str:
        """Take the value of a flag from the words that follow it."""
        if group.takes_no_value(name):
            return self.words.pop(0) if self.words and self.words[0].lower() in _SWITCH_VALUES else "true"
        if not self.words or self.is_flag(self.words[0]):
            raise UserError(f"{self.command}: --{flag} has no value: expected {group.expected(name)}")
        if group.kind(name) is not tuple or group is COMMON:
            return self.words.pop(0)
        taken = []
        while self.words and not self.is_flag(self.words[0]) and not self.is_assignment(self.words[0]):
            taken.append(self.words.pop(0))
        return ",".join(taken)

    def is_flag(self, word: str) -> bool:
        return word.startswith("--") or (len(word) > 1 and word[0] == "-" and word[1] in SHORT)

    def is_assignment(self, word: str) -> bool:
        name, equals, _ = word.partition("=")
        return bool(equals) and self.group_of(plain_name(name)) is not None

    def add_short(self, word: str) -> None:
        name = SHORT.get(word[1], "")
        group = self.group_of(name) if name else None
        if group is None:
            raise UserError(f"{self.command}: unknown flag {quoted(word[:2])}: --help lists the flags")
        self.add(name, word[2:] or self.value_of(name, name, group))

    def add(self, name: str, value: str) -> None:
        """Record a value: mappings and the common lists grow, other values are replaced."""
        group = self.group_of(name)
        assert group is not None
        values = self.found.of(group)
        if group is LAUNCH and group.kind(name) is dict:
            values[name] = values.get(name, {}) | _names_and_values(name, value)
        elif group is COMMON and group.kind(name) is tuple:
            values[name] = [*values.get(name, []), value]
        else:
            values[name] = value

    def add_positional(self, word: str) -> None:
        group = self.group_of(self.positional) if self.positional else None
        if group is None:
            raise UserError(f"{self.command}: unexpected argument {quoted(word)}: a flag looks like --run NAME")
        values = self.found.of(group)
        if group.kind(self.positional) is tuple:
            values[self.positional] = ",".join(filter(None, [values.get(self.positional, ""), word]))
        elif self.positional in values:
            raise UserError(f"{self.command}: unexpected argument {quoted(word)}: {self.positional} is set already")
        else:
            values[self.positional] = word

    def nearest(self, name: str) -> str:
        """Return a hint at the known name that is closest to an unknown one."""
        variable = f"; set a variable of the inventory with -e '{name}=VALUE'"
        if name.startswith("cluster_"):
            return variable
        names = [other for group in self.groups for other in group.fields]
        if any(isinstance(group, SpecGroup) for group in self.groups):
            from trainyard.import_file.hints import meaning  # only a mistake needs the tables

            found = meaning(name) or suggest(name, names)
        else:
            found = nearest(name, names)
        found = _SUGGESTION.sub(lambda match: f"did you mean --{match[1].replace('_', '-')}", found)
        return found or (variable if _VARIABLE.fullmatch(name) else "")


def _names_and_values(name: str, text: str) -> dict[str, Any]:
    """Return `NAME=VALUE`, or a mapping in YAML or JSON. Raises UserError, which shows no value: it may be a secret."""
    expected = f"{name}: expected NAME=VALUE, or a mapping such as {{NAME: VALUE}}"
    if text.lstrip().startswith("{"):
        try:
            mapping = parse_yaml(text)
        except YamlError:
            raise UserError(f"{expected}, got text that is not YAML") from None
        if not isinstance(mapping, dict):
            raise UserError(expected)
        return {str(key): value for key, value in mapping.items()}
    variable, equals, value = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(variable):
        raise UserError(f"{expected}, got a text without a name")
    return {variable: value}
