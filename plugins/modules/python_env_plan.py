"""Documentation of the action plugin of this name: it runs on the controller, for all hosts of the play at once."""

from __future__ import annotations

DOCUMENTATION = r"""
module: python_env_plan
short_description: Settle which Python environment every host of the play is to have
description:
  - Reads what M(python_env_info) registered as C(__python_info) on every host, and refuses what cannot be made.
  - Chooses one build of torch for all hosts, and for every kind of host the first one to fetch for its like.
  - Makes pip's archive and the trainer's wheel on the controller, if any host has to be changed.
options:
  torch:
    description: Whether the environment is for training, with the extra C(node) of pyproject.toml.
    type: bool
    default: true
  extras:
    description: More extras of pyproject.toml.
    type: list
    elements: str
    default: []
  lock:
    description: File of exact versions on the controller. Empty for constraints.txt.
    type: str
    default: ""
  flavour:
    description: Build of torch, or C(auto) for what the drivers run.
    type: str
    default: auto
  conda_lock:
    description: Explicit conda lock on the controller, empty for none.
    type: str
    default: ""
  port:
    description: Port at which a host shows its wheels to the others.
    type: int
    required: true
attributes:
  check_mode:
    support: full
    description: Nothing is made on the controller.
author: trainyard
"""

EXAMPLES = r"""
- name: Settle which environment every host gets
  python_env_plan:
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
  description: Whether any host has to be changed.
  returned: success
  type: bool
trainer:
  description: The version of the trainer's wheel.
  returned: success
  type: str
"""
