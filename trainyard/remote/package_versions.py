"""Versions of the packages of a Python environment. Standard library only; Ansible modules also import it."""

from __future__ import annotations

import json
import subprocess

PACKAGES = ("torch", "transformers", "peft", "tokenizers", "safetensors", "numpy", "pydantic", "tensorboard")
OPTIONAL = (
    *("datasets", "unsloth", "bitsandbytes", "liger-kernel", "flash-attn", "deepspeed"),
    *("wandb", "trackio", "mlflow-skinny"),  # a part of mlflow, which has all that a run needs
)
FOREIGN = "trainyard of another project"  # a distribution of the package index, whose files have the names of ours
TIME_LIMIT = 60.0  # s
# Reads the versions of CUDA and NCCL without importing torch, which takes seconds.
_PROGRAM = """
import importlib.metadata, importlib.util, json, pathlib, platform, runpy
versions = {"python": platform.python_version()}
for name in %r:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
for found in importlib.metadata.distributions(name="trainyard"):
    files = {str(file) for file in found.files or ()}
    if "trainyard/__init__.py" in files and "trainer/__init__.py" not in files:
        versions[%r] = found.version
torch = importlib.util.find_spec("torch")
if torch and torch.origin:
    cuda = runpy.run_path(str(pathlib.Path(torch.origin).with_name("version.py"))).get("cuda")
    for found in importlib.metadata.distributions(name="nvidia-nccl-cu" + cuda.split(".")[0]) if cuda else ():
        versions["nccl"] = found.version
    versions |= {"cuda": cuda} if cuda else {}
print(json.dumps(versions))
"""


def package_versions(python: str, more: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the versions of Python, of the packages that a run imports, and of the packages `more`.

    `python`: path of the interpreter to ask. `more`: names of further packages. Returns {package: version}, without
    packages that are not installed; `cuda` is the version for which torch is built, and `nccl` the library beside it,
    and `FOREIGN` another project's `trainyard`. Empty if the interpreter does not run.
    """
    command = [python, "-I", "-c", _PROGRAM % (PACKAGES + OPTIONAL + more, FOREIGN)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT, check=True)
        versions: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return versions
