#!/usr/bin/python
"""Write down which wheels a folder holds, with their digests."""

from __future__ import annotations

DOCUMENTATION = r"""
module: wheel_lock
short_description: Lock a folder of wheels
description:
  - Writes C(lock.txt) into a folder of wheels, a line C(name==version --hash=sha256:...) a wheel, as pip's C(--require-hashes)
    takes it. A lock that is there is left as it is.
options:
  path:
    description: The folder.
    type: path
    required: true
attributes:
  check_mode:
    support: none
author: trainyard
"""

EXAMPLES = r"""
- name: Lock the wheels
  wheel_lock:
    path: /srv/trainyard/python/wheels
"""

RETURN = r"""
lock:
  description: What C(lock.txt) says.
  returned: success
  type: str
"""

import hashlib
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule


def line(wheel: Path) -> str:
    """Return a wheel's requirement; its file name begins with NAME-VERSION-, and neither has a dash in it."""
    name, version = wheel.name.split("-")[:2]
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{name}=={version} --hash=sha256:{digest}\n"


def main() -> None:
    module = AnsibleModule(argument_spec={"path": {"type": "path", "required": True}})
    folder = Path(module.params["path"])
    lock = folder / "lock.txt"
    if lock.exists():
        module.exit_json(changed=False, lock=lock.read_text())
    wheels = sorted(folder.glob("*.whl"))
    names = [wheel.name.split("-")[0].lower() for wheel in wheels]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not wheels:
        module.fail_json(msg=f"{folder}: {'two versions of ' + ', '.join(twice) if twice else 'no wheels'}")
    text = "".join(map(line, wheels))
    aside = lock.with_suffix(".tmp")
    aside.write_text(text)
    aside.replace(lock)
    module.exit_json(changed=True, lock=text)


if __name__ == "__main__":
    main()
