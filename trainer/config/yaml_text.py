"""Read and parse YAML of a bounded size: a small file cannot expand to gigabytes of values, and every error is one line."""

import io
from pathlib import Path
from typing import Any

import yaml

from trainer.common.errors import UserError
from trainer.common.formats import printable, quoted
from trainer.common.inputs import read_regular
from trainer.common.text_encoding import first_not_utf8

MAX_YAML = 256 * 1024  # bytes of a spec, and characters that its aliases may stand for

_MERGE = "tag:yaml.org,2002:merge"  # of `<<`
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class YamlError(ValueError):
    """The text is not YAML, or expands too far. `line`: where, from 1; 0 if unknown."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a name that is given twice, of which PyYAML takes the last one silently.

    It also refuses a number that YAML reads as another one than it looks like, such as 010 (8) and 1:30 (90). An alias stands for a single value: aliases of lists and mappings expand exponentially.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._aliased = 0  # characters that aliases stand for

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark
        node = super().compose_node(parent, index)
        if is_alias:
            if not isinstance(node, yaml.ScalarNode):
                raise YamlError(
                    "an alias (*name) of a list or a mapping is not allowed: write its values", mark.line + 1
                )
            self._aliased += len(node.value)
            if self._aliased > MAX_YAML:
                raise YamlError("its aliases (*name) stand for too much text: write the values", mark.line + 1)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        names = [name for name, _ in pairs if isinstance(name, yaml.ScalarNode) and name.tag != _MERGE]
        seen: set[str] = set()
        for name in names:
            if name.value in seen:
                raise YamlError(f"{quoted(name.value)} is given twice", name.start_mark.line + 1)
            seen.add(name.value)
        return super().construct_mapping(node, deep)


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    text = node.value
    value: int | float
    if node.tag == _INT:
        value = loader.construct_yaml_int(node)
        is_plain = str(value) == text
    else:
        value = loader.construct_yaml_float(node)
        is_plain = not set(":_") & set(text)
    if not is_plain:
        reason = f"YAML reads {quoted(text, 40)} as the number {value}: write {value}, or text in quotes"
        raise YamlError(reason, node.start_mark.line + 1)
    return value


for _tag in (_INT, _FLOAT):
    _Loader.add_constructor(_tag, _number)


def parse_yaml(text: str) -> Any:
    """Return the values of a YAML document.

    Raises YamlError: the text is too long or not YAML, a name is given twice, an alias stands for a list or a mapping,
    or a number is not written as a plain one.
    """
    if len(text) > MAX_YAML:
        raise YamlError(f"it is longer than {MAX_YAML // 1024} KiB")
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except YamlError:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or (str(error).splitlines() or [type(error).__name__])[0]
        raise YamlError(f"not YAML: {reason}", mark.line + 1 if mark else 0) from None
    except RecursionError:
        raise YamlError("not YAML: nested too deeply") from None
    except ValueError as error:  # 2024-99-99 is parsed as a date
        raise YamlError(f"not YAML: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError):  # of PyYAML, for values such as `!!bool x`
        raise YamlError("not YAML: a value does not match its type") from None


def parse_structure(value: Any) -> Any:
    """Return the list or mapping that the text of a flag or ``-e`` spells; other values unchanged. Raises YamlError."""
    text = value.strip() if isinstance(value, str) else ""
    return parse_yaml(text) if (text[:1], text[-1:]) in (("[", "]"), ("{", "}")) else value


def read_yaml(path: Path, what: str = "run spec") -> dict[str, Any]:
    """Read the names and values of a YAML file, which error messages call `what`.

    Raises UserError: the file is missing, is not a regular file, is too large, is not YAML (with the line), or is not a
    mapping.
    """
    try:
        data = read_regular(path, MAX_YAML)
    except OSError as error:
        raise UserError(f"{what}: cannot read {printable(path)}: {error.strerror}") from None
    line, reason = first_not_utf8(io.BytesIO(data), MAX_YAML + 1)
    if reason:
        raise UserError(f"{what}: {printable(path)}:{line}: {reason}")
    return parse_mapping(data.decode(), str(path), what)


def parse_mapping(text: str, source: str, what: str = "run spec") -> dict[str, Any]:
    """Return the names and values of a YAML text; error messages name its `source`. Raises UserError as `read_yaml`."""
    try:
        values = parse_yaml(text)
    except YamlError as error:
        line = f":{error.line}" if error.line else ""
        raise UserError(f"{what}: {source}{line}: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(
            f"{what}: {source}: expected names and values (model: tiny), got a value of type {type(values).__name__}"
        )
    return {str(name): value for name, value in values.items()}
