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
  head:
    description: The host that is rank 0. By default the first of the inventory; when it is left out, the first that is left.
    type: str
    default: ""
  nodes_min:
    description: Plan with so many hosts at least, when others do not answer or cannot take part. 0 for none less.
    type: int
    default: 0
  retries:
    description: Above 0, a run of which only a part is alive is started again instead of refused.
    type: int
    default: 0
  elastic:
    description: Let torchrun itself start the ranks again, with at least I(nodes_min) hosts (its c10d rendezvous).
    type: bool
    default: false
  again:
    description: It ran before in this session. What is still alive of it is marked C(stale), and stopped by M(ranks).
    type: bool
    default: false
  attempt:
    description: With I(again), the number of the session's last start. A newer one that runs is followed.
    type: int
    default: 0
  lost:
    description: Hosts that did not answer a moment ago, and are not waited for long.
    type: list
    elements: str
    default: []
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
  description: C(new) to stage and launch, C(running) to follow, C(finished) when nothing is left to do, C(stopped) when
    somebody stopped what was to be started I(again).
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
