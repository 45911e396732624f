"""A Python file with rewards: what the controller checks of it without importing it, and what a run calls."""

import ast
from pathlib import Path

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.common.python_file import parse_python_file

PREFIX = "reward"


def check_reward_file(name: str) -> Path:
    """Return the absolute path of a file with rewards, after a check of its content. It is not run.

    Raises UserError: it is missing, not a regular file, too large, not Python, or has no function whose name begins with ``reward``.
    """
    path, tree = parse_python_file(name, "reward")
    if not any(map(_defines_reward, tree.body)):
        raise UserError(
            f"reward: {printable(path)} has no function whose name begins with {PREFIX!r}: define one, as in "
            "def reward(prompts, completions, **columns)"
        )
    return path


def _defines_reward(node: ast.stmt) -> bool:
    """Return whether a statement at the top level of a module binds a name that begins with ``reward``."""
    names: list[str] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        names = [node.name]
    elif isinstance(node, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    elif isinstance(node, ast.ImportFrom):
        names = [alias.asname or alias.name for alias in node.names]
    return any(name.startswith(PREFIX) for name in names)
