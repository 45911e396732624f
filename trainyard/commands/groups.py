"""Groups of options: what a command takes, with the classes that declare it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, get_origin

from pydantic.fields import FieldInfo

from trainer.config import FIELDS, is_known
from trainer.config.aliases import field_of, takes_no_value
from trainer.config.fields import expected_value, is_switch, names_in
from trainyard.commands.command_options import COMMON_OPTIONS
from trainyard.run.launch_options import OPTIONS as LAUNCH_OPTIONS
from trainyard.run.launch_options import REMOVED as REMOVED_OPTIONS


class Group:
    """The flags of one class of options. `title`: heading of the group in `--help`. `fields`: the options by name."""

    def __init__(self, title: str, fields: Mapping[str, FieldInfo], removed: Collection[str] = ()) -> None:
        """Take the options of a class that declares them with `declare`, and names that it declared once."""
        self.title, self.fields, self._removed = title, fields, removed
        self._others = names_in(fields, "deprecated_names")

    def knows(self, name: str) -> bool:
        """Return whether `name` is an option or another name of one."""
        return name in self.fields or name in self._others or name in self._removed

    def field_name(self, name: str) -> str:
        """Return the option of a known name."""
        return self._others.get(name, name)

    def takes_no_value(self, name: str) -> bool:
        """Return whether the flag may have no value."""
        option = self.fields.get(self.field_name(name))
        return option is not None and is_switch(option)

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
LAUNCH = Group("launch options", LAUNCH_OPTIONS, REMOVED_OPTIONS)
