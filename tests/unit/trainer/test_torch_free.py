"""The controller's imports work without torch: config, registry, planner, data reading and supervision."""

from __future__ import annotations

import subprocess
import sys

from trainer_runs import TOP

TORCH_FREE = (
    "trainer.config",
    "trainer.strategy",
    "trainer.strategy.diloco",
    "trainer.planner.recommend",
    "trainer.planner.plan_report",
    "trainer.model_files.model_shape",
    "trainer.data.samples",
    "trainer.data.encode",
    "trainer.data.order",
    "trainer.data.tiny",
    "trainer.supervise",
    "trainer.tools.tool_configs",
    "trainer.__main__",
)
CHECK = """
import json
from trainer.spec import make_spec
from trainer.planner.recommend import choose
from trainer.strategy import STRATEGIES, plan_of
host = {"processes": 1, "threads": 2, "gpu_mib": 0, "memory_mib": 8000, "link_mbit": 1000}
chosen = choose(make_spec({"strategy": "auto"}, "here"), [host] * 2)[0]
print(json.dumps([chosen, [type(plan_of(make_spec({"strategy": name}, "here"))).__name__ for name in STRATEGIES]]))
"""


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
