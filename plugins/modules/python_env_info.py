#!/usr/bin/python
"""Return the Python environment of a host and the interpreter that a new one would use."""

from __future__ import annotations

DOCUMENTATION = r"""
module: python_env_info
short_description: Return the Python environment of a host
description: Returns the base interpreter, the current environment and its package versions.
options:
  env:
    description: How the environment is created (C(python_env) of the role C(python)); returned unchanged.
    type: str
    required: true
  data_dir:
    description: The data directory of the cluster on the host (C(cluster_data_dir)).
    type: path
    required: true
  python:
    description: Path of the environment's interpreter.
    type: str
    required: true
  base:
    description: Interpreter that creates the environment.
    type: str
    required: true
extends_documentation_fragment: [trainyard, trainyard.info]
"""

EXAMPLES = r"""
- name: Read the state of the Python environment
  python_env_info:
    env: venv
    data_dir: /srv/trainyard
    python: /srv/trainyard/venv/bin/python
    base: /usr/bin/python3
"""

RETURN = r"""
info:
  description: >-
    C(env), C(python) and C(base) as given; C(link) (path of the environment), C(version) of the base interpreter, C(has_venv),
    C(machine) (architecture), C(driver) (version of the NVIDIA driver), C(capabilities) (compute capability of every GPU),
    C(serving) (a wheel server is running), C(noexec) (the option of the file system of O(data_dir)), C(blocked) (something that is not a link exists at C(link)), C(target) (where
    the link points), C(marker) (contents of C(trainyard.json)), C(wheels) (keys of the wheel folders), C(versions) of the
    packages in the environment.
  returned: always
  type: dict
"""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from ansible.module_utils.argument_spec import argument_spec
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.nvidia_smi import query
from ansible.module_utils.package_versions import package_versions

# systemd keeps the unit file of a transient service while the service runs.
WHEEL_SERVER = Path("/run/systemd/transient/trainyard-wheels.service")
_VERSION = "import importlib.util as u, platform as p; print(p.python_version(), int(bool(u.find_spec('venv'))))"


def output_words(*argv: str) -> list[str]:
    """Return the words that a command prints, or an empty list if it fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split()


def read_marker(link: Path) -> dict[str, Any]:
    """Return trainyard.json of the environment, which is written last; empty if the environment is incomplete."""
    try:
        found = json.loads((link / "trainyard.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def environment_info(env: str, data_dir: Path, python: str, base: str) -> dict[str, Any]:
    """Return the dictionary that RETURN documents."""
    link = data_dir / "venv"
    # An existing environment (as-is) has no base interpreter.
    words = output_words(base, "-I", "-c", _VERSION) if env != "as-is" else []
    version, has_venv = (words + ["", "0"])[:2]
    driver = next((row[0] for row in query("driver_version")), "")
    wheels = data_dir / "python" / "shared" / "wheels"
    return {
        "env": env,
        "python": python,
        "base": base,
        "link": str(link),
        "version": version,
        "has_venv": has_venv == "1",
        "machine": platform.machine(),
        "driver": driver,
        "capabilities": [row[0] for row in query("compute_cap")] if driver else [],
        "serving": WHEEL_SERVER.exists(),
        "noexec": data_dir.exists() and bool(os.statvfs(data_dir).f_flag & os.ST_NOEXEC),
        "blocked": os.path.lexists(link) and not link.is_symlink(),
        "target": str(link.readlink()) if link.is_symlink() else "",
        "marker": read_marker(link),
        "wheels": sorted(path.parent.name for path in wheels.glob("*/lock.txt")),
        "versions": package_versions(python, ("trainyard-cluster",)),
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(DOCUMENTATION), supports_check_mode=True)
    params = module.params
    info = environment_info(params["env"], Path(params["data_dir"]), params["python"], params["base"])
    module.exit_json(changed=False, info=info)


if __name__ == "__main__":
    main()
