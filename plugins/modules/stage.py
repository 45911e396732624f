"""Documentation of the action plugin of this name: it runs on the controller, for all hosts of the play at once."""

from __future__ import annotations

DOCUMENTATION = r"""
module: stage
short_description: Bring trainer, spec, dataset and model to all hosts of a plan at once
description:
  - Compares checksums and copies only what differs; a file arrives aside, is checked and renamed.
  - Writes C(spec.yml), C(plan.json), C(origin.json) and C(env) (mode 0600) into the run folder.
options:
  plan:
    description: The plan that M(run_plan) returned.
    type: list
    elements: dict
    required: true
  files:
    description: The files that M(run_spec) returned.
    type: list
    elements: dict
    required: true
  origin:
    description: What model and dataset are called here, and their checksums, for the model card.
    type: dict
    default: {}
  environment:
    description: Environment variables for the ranks. They may be secrets - they travel on stdin, into a file of mode 0600.
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    description: Compares only, and says what would travel.
author: trainyard
"""

EXAMPLES = r"""
- name: Bring what changed to the hosts
  stage:
    plan: "{{ plan.plan }}"
    files: "{{ run.files }}"
  run_once: true
"""

RETURN = r"""
files:
  description: For every host, the paths that changed there.
  returned: success
  type: dict
"""
