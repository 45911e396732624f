"""Flags of a command, generated from the classes that declare its options."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_origin

from pydantic.fields import FieldInfo

from trainer.config import FIELDS, is_known, plain_name, suggest
from trainer.config.aliases import field_of, takes_no_value
from trainer.config.fields import expected_value, is_switch, names_in
from trainer.config.yaml_text import YamlError, parse_yaml
from trainer.errors import UserError, nearest
from trainer.formats import printable, quoted
from trainyard.cli.options import COMMON_OPTIONS, SHORT
from trainyard.run.options import OPTIONS as LAUNCH_OPTIONS

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_SWITCH_VALUES = (*_TRUE, *_FALSE, "auto")
_SUGGESTION = re.compile(r"did you mean '([a-z_]+)'")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Group:
    """The flags of one class of options.

    Attributes:
        title: heading of the group in `--help`.
        fields: the options by name.
    """

    def __init__(self, title: str, fields: Mapping[str, FieldInfo]) -> None:
        """Take the options of a class that declares them with `declare`."""
        self.title, self.fields = title, fields
        self._others = names_in(fields, "deprecated_names")

    def knows(self, name: str) -> bool:
        """Return whether `name` is an option or another name of one."""
        return name in self.fields or name in self._others

    def field_name(self, name: str) -> str:
        """Return the option of a known name."""
        return self._others.get(name, name)

    def takes_no_value(self, name: str) -> bool:
        """Return whether the flag may have no value."""
        return is_switch(self.fields[self.field_name(name)])

    def kind(self, name: str) -> Any:
        """Return the type of the option: `tuple` for a list, `dict` for names and values."""
        option = self.fields.get(self.field_name(name))
        return get_origin(option.annotation) if option else None

    def expected(self, name: str) -> str:
        """Describe the values that the flag takes."""
        option = self.fields.get(self.field_name(name))
        return expected_value(option) if option else "text"


class SpecGroup(Group):
    """The flags of the run spec, with the names of other tools.

    Attributes:
        hidden: fields that the command's own options of the same name hide.
    """

    def __init__(self, hidden: Collection[str] = ()) -> None:
        super().__init__("run spec", {name: option for name, option in FIELDS.items() if name not in hidden})
        self.hidden = hidden

    def knows(self, name: str) -> bool:
        """Return whether `name` is a field or another name that is understood."""
        return is_known(name) and field_of(name) not in self.hidden

    def field_name(self, name: str) -> str:
        """Return the field of a known name, or the name of a setting that is converted."""
        return field_of(name)

    def takes_no_value(self, name: str) -> bool:
        """Return whether the flag may have no value."""
        return takes_no_value(name)


COMMON = Group("common options", COMMON_OPTIONS)
SPEC = SpecGroup()
LAUNCH = Group("launch options", LAUNCH_OPTIONS)


@dataclass
class Arguments:
    """The parsed words of a command line.

    Attributes:
        values: the values of the flags, by group and then by the name as given, with underscores.
        rest: the words after `--`.
    """

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)

    def of(self, group: Group) -> dict[str, Any]:
        """Return the values of a group, by name."""
        return self.values.setdefault(group.title, {})

    def switch(self, name: str) -> bool:
        """Return the value of a common switch. Raises UserError."""
        value = str(self.of(COMMON).get(name, "false"))
        if value.lower() not in _TRUE + _FALSE:
            raise UserError(f"--{name}: expected true or false, got {quoted(value)}")
        return value.lower() in _TRUE


def parse(command: str, groups: Sequence[Group], positional: str, words: Sequence[str]) -> Arguments:
    """Parse the words after the command's name. The classes of the options check the values.

    Args:
        groups: the command's flags; the first group that knows a name has it.
        positional: name of the option that words without a flag set; empty for none.

    Raises:
        UserError: an unknown flag, an unexpected word, or a flag without a value.
    """
    return _Parser(command, groups, positional, list(words)).parse()


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
        of_spec = any(isinstance(group, SpecGroup) for group in self.groups)
        found = suggest(name, names) if of_spec else nearest(name, names)
        return _with_flags(found) or (variable if _VARIABLE.fullmatch(name) else "")


def _with_flags(text: str) -> str:
    return _SUGGESTION.sub(lambda match: f"did you mean --{match[1].replace('_', '-')}", text)


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
