"""Documentation of the action plugin of this name: it runs on the controller, for all hosts of the play at once."""

from __future__ import annotations

DOCUMENTATION = r"""
module: collect
short_description: Gather what a run left, and say what came of it
description:
  - Refuses a run whose hosts ended with different weights.
  - Brings the logs of all ranks to the head's run folder, and returns the result with a summary.
options:
  plan:
    description: The plan that M(run_plan) returned.
    type: list
    elements: dict
    required: true
  state:
    description: The state that M(run_plan) returned; C(finished) says that nothing was done.
    type: str
    default: new
  to:
    description: Folder on the controller; RUN below it gets what is worth having of the head's run folder. Empty for none.
    type: path
    default: ""
attributes:
  check_mode:
    support: full
    description: Does nothing.
author: trainyard
"""

EXAMPLES = r"""
- name: Gather the result
  collect:
    plan: "{{ plan.plan }}"
  run_once: true
"""

RETURN = r"""
result:
  description: The head's result.json.
  returned: success
  type: dict
lines:
  description: The summary.
  returned: success
  type: list
  elements: str
"""
