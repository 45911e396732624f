"""Documentation of the action plugin of this name: it runs on the controller, for all hosts of the play at once."""

from __future__ import annotations

DOCUMENTATION = r"""
module: run_plan
short_description: Plan the ranks of a run over the hosts of the play
description:
  - Asks every host at once what it is - route and device towards the head, CPUs, GPUs, versions, disk, the run as it stands.
  - Refuses hosts that cannot run this together, by name and with the remedy. Changes nothing.
  - A rank is a host's place in the play. The rendezvous port is below 32768, where the kernel hands out none.
options:
  run:
    description: What M(run_spec) returned.
    type: dict
    required: true
  master_port:
    description: Rendezvous port on the head. By default the first free one from 29500.
    type: int
attributes:
  check_mode:
    support: full
    description: The same in check mode.
author: trainyard
"""

EXAMPLES = r"""
- name: Plan the run
  run_plan:
    run: "{{ run }}"
  register: plan
  run_once: true
"""

RETURN = r"""
plan:
  description:
    - For every host, by node rank - C(host), C(node_rank), C(ranks), C(address), C(interface), C(threads), C(run_dir),
      C(data_dir), C(command), C(backend), C(properties), C(versions), C(gpus) and C(spec) with paths as they are there.
  returned: success
  type: list
  elements: dict
state:
  description: C(new) to stage and launch, C(running) to follow, C(finished) when nothing is left to do.
  returned: success
  type: str
port:
  description: The rendezvous port.
  returned: success
  type: int
lines:
  description: The plan as a table.
  returned: success
  type: list
  elements: str
"""
