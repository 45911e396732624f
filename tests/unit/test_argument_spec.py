"""The argument spec that a module derives from its DOCUMENTATION equals what PyYAML reads there."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tables import table

from plugins.module_utils.argument_spec import KEYS, argument_spec

FOLDER = Path(__file__).resolve().parents[2] / "plugins/modules"
# The other files only document action plugins, which have PyYAML.
MODULES = sorted(path for path in FOLDER.glob("*.py") if "AnsibleModule(" in path.read_text())
TYPES = {"str", "int", "float", "bool", "list", "dict", "path", "raw"}


def documentation(module: Path) -> str:
    """Return the DOCUMENTATION string of a module."""
    found = re.search(r"^DOCUMENTATION = (r?\"\"\".*?\"\"\")", module.read_text(), re.M | re.S)
    assert found, f"{module} has no DOCUMENTATION"
    return str(ast.literal_eval(found[1]))


def from_yaml(options: dict[str, Any]) -> dict[str, Any]:
    """Return the argument spec of documented options."""
    return {
        name: {key: value for key, value in option.items() if key in KEYS}
        | ({"options": from_yaml(option["suboptions"])} if "suboptions" in option else {})
        for name, option in options.items()
    }


@pytest.mark.parametrize("module", MODULES, ids=[module.stem for module in MODULES])
def test_spec_equals_documentation(module: Path) -> None:
    text = documentation(module)
    spec = argument_spec(text)
    assert spec == from_yaml(yaml.safe_load(text).get("options") or {})
    assert all(option["type"] in TYPES for option in spec.values())


@pytest.mark.parametrize("module", MODULES, ids=[module.stem for module in MODULES])
def test_no_second_argument_spec(module: Path) -> None:
    assert "argument_spec=argument_spec(DOCUMENTATION)" in module.read_text()


def test_values_and_nested_options() -> None:
    spec = argument_spec(table("argument_spec")["values_and_nested_options"])
    assert spec["name"] == {"type": "str", "required": True}
    assert spec["files"]["options"]["mode"] == {"type": "str", "default": "0644"}
    assert spec["files"]["default"] == [] and spec["limit"]["default"] == 2.0
    assert spec["state"] == {"type": "str", "choices": ["present", "absent"], "default": "present"}


def test_no_options() -> None:
    assert argument_spec("module: example\noptions: {}\nattributes:\n  check_mode:\n    support: full\n") == {}
