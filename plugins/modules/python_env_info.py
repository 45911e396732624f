"""Look at a host's Pythons: the one that an environment would be made with, and the environment that is there."""

from __future__ import annotations

DOCUMENTATION = r"""
module: python_env_info
short_description: Look at a host's Python environment
description: Says what an environment on this host could be made with, which one is there, and its versions. Changes nothing.
options:
  env:
    description: How the environment is made; passed on as it is.
    type: str
    required: true
  data_dir:
    description: The cluster's data dir on the host.
    type: path
    required: true
  python:
    description: Path of the environment's interpreter.
    type: str
    required: true
  base:
    description: The interpreter that a venv is made with.
    type: str
    required: true
attributes:
  check_mode:
    support: full
    description: It only looks.
author: trainyard
"""

EXAMPLES = r"""
- name: Look at the environment
  python_env_info:
    env: venv
    data_dir: /srv/trainyard
    python: /srv/trainyard/venv/bin/python
    base: /usr/bin/python3
"""

RETURN = r"""
look:
  description: >-
    C(env), C(python), C(base), C(link) (the path of the environment), C(version) of the base, C(has_venv), C(machine), C(driver),
    C(capabilities) (of the GPUs),
    C(serving) (wheels are shown to other hosts), C(blocked) (something else is at that path), C(target) (where the link leads), C(marker) (what made it), C(wheels)
    (keys of the wheels kept here), C(versions) of what is in the environment.
  returned: always
  type: dict
"""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpus import answers
from ansible.module_utils.package_versions import package_versions

# systemd keeps the file of a transient unit for as long as it runs.
SERVER = Path("/run/systemd/transient/trainyard-wheels.service")
_ASK = "import importlib.util as u, platform as p; print(p.python_version(), int(bool(u.find_spec('venv'))))"


def words_of(*argv: str) -> list[str]:
    """Return the words that a command prints, none if it fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split()


def marker_of(link: Path) -> dict[str, Any]:
    """Return what the environment's maker wrote last of all; {} for one that is not whole."""
    try:
        found = json.loads((link / "trainyard.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "env": {"type": "str", "required": True},
            "data_dir": {"type": "path", "required": True},
            "python": {"type": "str", "required": True},
            "base": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    a = module.params
    link = Path(a["data_dir"]) / "venv"
    # Somebody else's environment is made with nothing of ours.
    asked = words_of(a["base"], "-I", "-c", _ASK) if a["env"] != "as-is" else []
    version, has_venv = (asked + ["", "0"])[:2]
    driver = next(iter(answers("driver_version")), "")
    wheels = Path(a["data_dir"]) / "python" / "shared" / "wheels"
    look = {
        "env": a["env"],
        "python": a["python"],
        "base": a["base"],
        "link": str(link),
        "version": version,
        "has_venv": has_venv == "1",
        "machine": platform.machine(),
        "driver": driver,
        "capabilities": answers("compute_cap") if driver else [],
        "serving": SERVER.exists(),
        "blocked": os.path.lexists(link) and not link.is_symlink(),
        "target": str(link.readlink()) if link.is_symlink() else "",
        "marker": marker_of(link),
        "wheels": sorted(path.parent.name for path in wheels.glob("*/lock.txt")),
        "versions": package_versions(a["python"], ("trainyard",)),
    }
    module.exit_json(changed=False, look=look)


if __name__ == "__main__":
    main()
