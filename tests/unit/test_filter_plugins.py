"""The filter plugins: every worker of Ansible that renders a template imports all of them."""

import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"plugins.filter.{name}")
print(*sorted({"numpy", "pydantic", "requests", "safetensors", "torch"} & set(sys.modules)))
"""


def test_no_filter_plugin_imports_a_large_package() -> None:
    names = [file.stem for file in (TOP / "plugins/filter").glob("*.py")]
    assert "python_env" in names
    words = [sys.executable, "-P", "-c", PROGRAM, *names]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env={"PYTHONPATH": str(TOP)})
    assert done.stdout.split() == []
