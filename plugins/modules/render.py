"""Documentation of the action plugin of this name: it runs on the controller, nothing of it on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: render
short_description: Write a plan as scripts instead of running it
description:
  - Writes a bash script for every host, with the exact command that M(ranks) would start there, and one that Slurm's
    C(sbatch) takes. The ranks' environment is read from the C(env) file that M(stage) put on the host; no value of it is
    in a script.
options:
  plan:
    description: The plan that M(run_plan) returned.
    type: list
    elements: dict
    required: true
  folder:
    description: Where to write them, on the controller.
    type: path
    required: true
attributes:
  check_mode:
    support: full
    description: Nothing is written.
author: trainyard
"""

EXAMPLES = r"""
- name: Write the scripts
  render:
    plan: "{{ plan.plan }}"
    folder: ~/scripts
  run_once: true
"""

RETURN = r"""
files:
  description: The scripts, by host in the order of ranks, and the one for Slurm.
  returned: success
  type: list
  elements: str
"""
