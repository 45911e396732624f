"""Documentation of the action plugin of this name, which runs on the controller, once for all hosts of the play."""

from __future__ import annotations

DOCUMENTATION = r"""
module: python_env_plan
short_description: Plan the Python environment of every host
description:
  - Checks that every host can have the requested environment.
  - Selects one build of torch for all hosts. The first host of each kind fetches the wheels for the hosts of its kind.
  - Builds pip's archive and the trainer's wheel on the controller if any host changes.
options:
  environments:
    description: Result of M(python_env_info) for every host of the play, by host name.
    type: dict
    required: true
  torch:
    description: Whether the environment is for training, with the extra C(node) of pyproject.toml.
    type: bool
    default: true
  extras:
    description: Additional extras of pyproject.toml.
    type: list
    elements: str
    default: []
  lock:
    description: Constraints file on the controller; empty for the one of C(packages).
    type: str
    default: ""
  flavour:
    description: Build of torch, or C(auto) for the newest one that all drivers and GPUs support.
    type: str
    default: auto
  packages:
    description: Set of packages, with its own constraints file.
    type: str
    choices: [standard, unsloth]
    default: standard
  conda_lock:
    description: Explicit conda lock on the controller; empty for conda.lock in the project's folder.
    type: str
    default: ""
  conda_installer:
    description: Installer of conda, as a URL or a file on the controller; empty for the one that the lock names.
    type: str
    default: ""
  conda_sha256:
    description: SHA-256 of the installer.
    type: str
    default: ""
  port:
    description: TCP port at which a host serves its wheels to other hosts.
    type: int
    required: true
attributes:
  check_mode:
    support: full
    description: Nothing is built on the controller.
author: trainyard
"""

EXAMPLES = r"""
- name: Plan the environments
  python_env_plan:
    environments: "{{ hostvars | python_environments(ansible_play_hosts) }}"
    port: 29490
  register: plan
  run_once: true
"""

RETURN = r"""
hosts:
  description: For every host C(key), C(todo) (none, trainer or all), C(builder), C(fetches), C(serves), C(source), C(fresh), C(flavour).
  returned: success
  type: dict
todo:
  description: Whether any host changes.
  returned: success
  type: bool
trainer:
  description: Version of the trainer's wheel.
  returned: success
  type: str
requirements:
  description: Requirements of the environment, in pip's format.
  returned: success
  type: list
  elements: str
constraints:
  description: Pinned versions, as lines of a constraints file.
  returned: success
  type: list
  elements: str
torch:
  description: The pinned requirement of torch; empty without torch.
  returned: success
  type: str
locked:
  description: Whether the constraints have a digest for every package.
  returned: success
  type: bool
kit:
  description: Paths of C(pip) and C(trainer) on the controller; empty if no host changes.
  returned: success
  type: dict
installer:
  description: C(source) and C(digest) of the installer of conda; empty without conda.
  returned: success
  type: dict
conda:
  description: C(url), C(file), C(digest) and C(subdir) of every package of the conda lock.
  returned: success
  type: list
  elements: dict
"""
