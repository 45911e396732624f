"""The layers of the trainer: what may import what, imports inside functions included.

Imports for type checkers alone do not count. Neither does the registry of strategies, which imports a strategy by its name.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from tables import table
from trainer_runs import TOP

# A package may import those to its left.
LAYERS = ("supervise", "config", "data", "costs", "strategy", "planner")
MODULES = {
    ".".join(path.relative_to(TOP).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (TOP / "trainer").rglob("*.py")
}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module, without those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from (found for other in child.orelse for found in [other, *statements(other)])
        else:
            yield child
            yield from statements(child)


def imports(name: str, path: Path) -> set[str]:
    """Return the modules of the trainer that a module imports, with the packages that contain them."""
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & MODULES.keys() or {node.module}
    packages = {each.rpartition(".")[0] for each in found if each.count(".") > 1}
    return {each for each in found | packages if each in MODULES and each != name and not name.startswith(f"{each}.")}


@functools.cache
def graph() -> dict[str, set[str]]:
    return {name: imports(name, path) for name, path in MODULES.items()}


def test_no_module_imports_itself_through_others() -> None:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_a_package_imports_lower_layers_only() -> None:
    for place, layer in enumerate(LAYERS):
        above = tuple(f"trainer.{other}" for other in LAYERS[place + 1 :])
        for name in graph():
            if f"{name}.".startswith(f"trainer.{layer}."):
                upwards = {other for other in graph()[name] if other.startswith(above)}
                assert not upwards, f"{name} imports {', '.join(sorted(upwards))}"


def test_names_of_strategies_are_those_of_their_modules() -> None:
    from trainer.strategy import STRATEGIES, StrategyPlan, plan_named

    assert all(isinstance(plan_named(name), StrategyPlan) for name in STRATEGIES)
    assert len({type(plan_named(name)) for name in STRATEGIES}) == len(STRATEGIES)


# Imports without torch -----------------------------------------------------------------------------------------------

TORCH_FREE = tuple(table("torch_free")["torch_free"])
CHECK = table("torch_free")["check"]


def without_torch(code: str) -> subprocess.CompletedProcess[str]:
    blocked = f"import sys; sys.modules['torch'] = None\n{code}"
    return subprocess.run([sys.executable, "-c", blocked], cwd=TOP, capture_output=True, text=True, check=False)


def test_modules_import_without_torch() -> None:
    done = without_torch(f"import {', '.join(TORCH_FREE)}")
    assert done.returncode == 0, done.stderr


def test_auto_is_resolved_without_torch() -> None:
    done = without_torch(CHECK)
    assert done.returncode == 0, done.stderr
    assert '"ddp"' in done.stdout


def test_the_run_spec_needs_no_package_but_pydantic_and_yaml() -> None:
    """An environment without torch has neither numpy nor transformers."""
    blocked = "import sys\nfor name in ('torch', 'numpy', 'transformers', 'safetensors'): sys.modules[name] = None\n"
    code = "from trainer.spec import make_spec\nfrom trainer.strategy import STRATEGIES\n"
    code += "[make_spec({'strategy': name}, 'here') for name in ('auto', *STRATEGIES)]\n"
    code += "from trainer.method import METHODS, method_named\n[method_named(name) for name in METHODS]"
    done = subprocess.run([sys.executable, "-c", blocked + code], cwd=TOP, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
