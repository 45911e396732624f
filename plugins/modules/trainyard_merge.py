"""Documentation of the action plugin of this name. It runs on the controller, once for all hosts of the play."""

from __future__ import annotations

DOCUMENTATION = r"""
module: trainyard_merge
short_description: Merge the results of finished runs, or let them vote on answers
description:
  - An adapter to C(trainyard.run.merge.merge_runs). It reads its options from C(-e). docs/distill.md lists them.
  - The merge is done on the host of the first run, to which the adapters of the others are copied. It is evaluated on the
    held-out samples of the first run, beside each part and the base model.
options: {}
attributes:
  check_mode:
    support: full
    description: Finds the runs, and merges nothing.
author: trainyard
"""

EXAMPLES = r"""
- name: Merge
  trainyard_merge:
  run_once: true
"""

RETURN = r"""
lines:
  description: The losses, and where the result is.
  returned: success
  type: list
  elements: str
result:
  description: The merged run's result.json, or the summary of a vote.
  returned: success
  type: dict
"""
