"""Documentation of the action plugin of this name: it runs on the controller, for all hosts of the run at once."""

from __future__ import annotations

DOCUMENTATION = r"""
module: session
short_description: Follow a run to its end, and start it again when it breaks
description:
  - Follows as M(ranks) does. When the run broke, its cause is printed, all that is left of it is stopped, and after
    I(retry_delay) seconds it is planned, staged and started again; it goes on from the newest checkpoint that is whole.
  - A mistake in the run itself is not tried again, nor is a run that somebody stopped.
options:
  plan:
    description: The plan that M(run_plan) returned.
    type: list
    elements: dict
    default: []
  broken:
    description: What M(run_plan), M(stage) or M(ranks) returned when it failed, if the run has not begun for that. It is told,
      and tried again as a start that broke.
    type: dict
    default: {}
  run:
    description: What M(run_spec) returned.
    type: dict
    required: true
  environment:
    description: Environment variables for the ranks, as M(stage) takes them.
    type: dict
    default: {}
  properties:
    description: Properties of the systemd unit, as M(ranks) takes them.
    type: list
    elements: str
    default: []
  master_port:
    description: Rendezvous port on the head. By default the first free one from 29500.
    type: int
  head:
    description: The host that is rank 0 as long as it takes part. By default the first of the inventory.
    type: str
    default: ""
  retries:
    description: How many starts in a row may fail without a step further than all before.
    type: int
    default: 0
  retry_delay:
    description: Seconds before the first of such a row; doubled with every further one, up to 60.
    type: float
    default: 1.0
  nodes_min:
    description: Go on with so many hosts at least, when others are lost or cannot take part. 0 for none less.
    type: int
    default: 0
  elastic:
    description: As M(run_plan) takes it.
    type: bool
    default: false
  interval:
    description: Seconds between two progress lines, at least.
    type: float
    default: 2.0
  stall_limit:
    description: Seconds without progress of any rank after which the run counts as hung.
    type: float
    default: 600.0
  lost_limit:
    description: Seconds without an answer after which a host counts as lost.
    type: float
    default: 10.0
attributes:
  check_mode:
    support: full
    description: Does nothing.
author: trainyard
"""

EXAMPLES = r"""
- name: Follow
  session:
    plan: "{{ plan.plan }}"
    run: "{{ run }}"
    retries: 3
  run_once: true
"""

RETURN = r"""
plan:
  description: The plan of the last start, whose hosts have the result.
  returned: success
  type: list
  elements: dict
status:
  description: C(finished) or C(stopped).
  returned: success
  type: str
cause:
  description: As of M(ranks).
  returned: failure
  type: dict
"""
