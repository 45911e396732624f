"""Documentation of the action plugin of this name, which runs on the controller, once for all hosts of the play."""

from __future__ import annotations

DOCUMENTATION = r"""
module: check_training
short_description: Let every host train alone and compare the hosts
description:
  - Starts one run per host through C(trainyard.run.session.RunSession), with a small model and generated data unless C(-e)
    names others. The hosts train at the same time without a network between them; hosts that are one machine take turns.
  - Compares steps and tokens per second, the loss after the same steps, and the memory. Names the slowest host, and hosts
    whose loss differs.
  - Fails for a mistake in the spec. A host that cannot train is in RV(failed_hosts), so that a playbook can clean up.
options:
  run:
    description: Name of the run on every host. Its folder remains there.
    type: str
    required: true
attributes:
  check_mode:
    support: full
    description: Plans the run of every host, and starts nothing.
author: trainyard
"""

EXAMPLES = r"""
- name: Train on every host alone
  check_training:
    run: check-1
  run_once: true
"""

RETURN = r"""
hosts:
  description:
    - For every host C(device), C(ranks), C(steps_per_second), C(tokens_per_second), C(loss), C(memory_gb), and C(error)
      (empty if it trained).
  returned: always
  type: dict
failed_hosts:
  description: Names of the hosts that did not train.
  returned: always
  type: list
  elements: str
lines:
  description: The table and what it shows.
  returned: always but in check mode
  type: list
  elements: str
"""
