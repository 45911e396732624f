"""Documentation of the action plugin of this name: it runs on the controller, nothing of it on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ranks
short_description: Start, follow and stop the ranks of a run on all hosts at once
description:
  - One task talks to all hosts of the run at the same time, from a thread each, over each host's own connection. Neither
    C(forks) nor the order of the hosts matters, and a task with I(run_once) is how it is called.
  - C(started) makes every host's part ready, then starts all at once; if one refuses, those that are ready are stopped
    and nothing runs.
  - C(followed) prints the progress of rank 0 until the run ended, and on the first failure anywhere stops all hosts and
    names host, rank and cause. When the playbook goes away the run stays, and can be followed again.
  - C(stopped) asks the ranks to write a checkpoint and leave, then sends SIGTERM, then SIGKILL. It returns when nothing
    is left.
  - C(status) changes nothing and returns every run of every host.
  - A host needs the variables C(cluster_data_dir) and C(cluster_python).
options:
  state:
    description: What is wanted.
    type: str
    required: true
    choices: [started, followed, stopped, status]
  plan:
    description:
      - The hosts of the run by node rank, each with C(host), C(node_rank), C(ranks) (by local rank), C(run_dir),
        C(command) (the launcher's argument list, interpreter first) and, if need be, C(backend) and C(properties).
      - Needed by C(started); without it the other states find the run on the hosts of the play.
    type: list
    elements: dict
  run:
    description: The run's name, where there is no plan. For C(status), only this run.
    type: str
  backend:
    description: What the ranks live in, on all hosts. By default as each host's plan says, else C(auto).
    type: str
    choices: [auto, systemd, process]
  properties:
    description: Properties of the systemd unit, such as C(MemoryMax=20G).
    type: list
    elements: str
    default: []
  attempt:
    description: Number of this start of the run. By default each host counts its own.
    type: int
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
  grace:
    description: Seconds that the ranks have to leave by themselves when they are stopped.
    type: float
    default: 60.0
  now:
    description: Stop by SIGKILL, without a checkpoint.
    type: bool
    default: false
  wanted:
    description: A person wants the stop, so that a session that follows the run does not start it again.
    type: bool
    default: true
attributes:
  check_mode:
    support: full
    description: Nothing is started or stopped; the result says what would be.
author: trainyard
"""

EXAMPLES = r"""
- name: Launch
  ranks:
    state: started
    plan: "{{ train_plan }}"
  run_once: true

- name: Follow
  ranks:
    state: followed
    plan: "{{ train_plan }}"
  run_once: true

- name: Stop with a checkpoint
  ranks:
    state: stopped
    run: my-run
  run_once: true
"""

RETURN = r"""
hosts:
  description: For each host what it answered (C(started)), or how its part is or ended.
  returned: all states but status
  type: dict
skew_seconds:
  description: Between the first and the last start, by the hosts' own clocks.
  returned: started
  type: float
status:
  description: C(finished) or C(stopped).
  returned: followed, when the run did not fail
  type: str
cause:
  description: Where a failure began - C(host), C(rank) (null if it is not one rank's) and C(kind) (rank,
    torchrun, supervisor, host, lost, stall) and C(mend), what has to be mended before the run can go on - C(user) (a
    mistake in the run), C(disk) (of that host), or nothing.
  returned: followed, on failure
  type: dict
lost:
  description: Hosts that do not answer any more.
  returned: followed, on failure
  type: list
  elements: str
stop_wanted:
  description: Somebody stopped the run, which may be why it failed.
  returned: followed, on failure
  type: bool
runs:
  description: Every run on every host, as C(trainer.supervise status) tells it, with C(host).
  returned: status
  type: list
  elements: dict
troubles:
  description: Hosts that did not answer or refused, and their word.
  returned: status, and when started or stopped failed
  type: dict
lines:
  description: What the callback C(trainyard) prints - the table, or the evidence of a failure.
  returned: status, and followed on failure
  type: list
  elements: str
"""
