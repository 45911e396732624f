"""Documentation of the action plugin of this name: it runs on the controller, for all hosts of the play at once."""

from __future__ import annotations

DOCUMENTATION = r"""
module: python_env_consistency
short_description: See that all hosts have the same Python environment
description:
  - Compares Python, torch, CUDA, NCCL, the trainer and what it imports, as M(python_env_info) found them on every host of the play and
    registered as C(__python_created), or C(__python_info).
  - Fails with a table of what differs.
options: {}
attributes:
  check_mode:
    support: full
    description: Hosts that have no environment yet are left out.
author: trainyard
"""

EXAMPLES = r"""
- name: See that all environments are alike
  python_env_consistency:
  run_once: true
"""

RETURN = r"""
versions:
  description: What every host has.
  returned: success
  type: dict
"""
