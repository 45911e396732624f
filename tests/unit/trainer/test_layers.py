"""The layers of the trainer: what may import what, imports inside functions included.

Imports for type checkers alone do not count. Neither does the registry of strategies, which imports a strategy by its name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
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


GRAPH = {name: imports(name, path) for name, path in MODULES.items()}


def test_no_module_imports_itself_through_others() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_a_package_imports_lower_layers_only() -> None:
    for place, layer in enumerate(LAYERS):
        above = tuple(f"trainer.{other}" for other in LAYERS[place + 1 :])
        for name in GRAPH:
            if f"{name}.".startswith(f"trainer.{layer}."):
                upwards = {other for other in GRAPH[name] if other.startswith(above)}
                assert not upwards, f"{name} imports {', '.join(sorted(upwards))}"


def test_names_of_strategies_are_those_of_their_modules() -> None:
    from trainer.strategy import STRATEGIES, StrategyPlan, plan_named

    assert all(isinstance(plan_named(name), StrategyPlan) for name in STRATEGIES)
    assert len({type(plan_named(name)) for name in STRATEGIES}) == len(STRATEGIES)
