"""Documentation of the action plugin of this name. It runs on the controller, once for all hosts of the play."""

from __future__ import annotations

DOCUMENTATION = r"""
module: trainyard_run
short_description: Do one step of a training run on all hosts of the play
description:
  - An adapter to C(trainyard.run.session.RunSession). Each step takes the I(session) that the previous one returned.
  - C(prepare) reads the run spec from C(-e) and its file, and checks dataset and model on the controller.
  - C(plan) asks every host for its facts, and plans ranks, devices and ports. It changes nothing.
  - C(preflight) checks that every host reaches every other one.
  - C(stage) copies to every host what differs - trainer, spec, dataset, model.
  - C(launch) starts all ranks at once, or none. With the launch option C(render_only) it writes scripts instead.
  - C(follow) prints progress until the run ends, and restarts a failed run as the launch options allow. The first failure
    anywhere stops all ranks. A run that is not followed continues.
  - C(collect) gathers logs and artifacts, and summarizes the run.
  - Launch options are variables of the play or the inventory. docs/launch-options.md lists them.
  - A host needs the variables C(cluster_address), C(cluster_data_dir) and C(cluster_python).
options:
  step:
    description: The step to do.
    type: str
    required: true
    choices: [prepare, plan, preflight, stage, launch, follow, collect]
  session:
    description: RV(session) of the previous step. C(launch) and C(follow) need at least its C(plan).
    type: dict
    default: {}
  options:
    description: Launch options that override the variables of the same name.
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    description: Nothing is copied, started or kept. The first three steps do the same as outside of check mode.
author: trainyard
"""

EXAMPLES = r"""
- name: Plan the run
  trainyard_run:
    step: plan
    session: "{{ run.session }}"
  register: run
  run_once: true
"""

RETURN = r"""
session:
  description:
    - State of the session after the step, for the next one - the prepared run, C(plan) (by node rank), C(phase), C(port),
      C(failure) of a first start that C(follow) retries, and C(status) (finished, stopped, or empty).
  returned: success
  type: dict
lines:
  description: What the callback C(trainyard) prints - the plan, the summary, or the evidence of a failure.
  returned: if there is something to print
  type: list
  elements: str
hosts:
  description: The answer of each host (C(launch)), or how its part of the run ended (C(follow)).
  returned: launch and follow
  type: dict
skew_seconds:
  description: Time between the first and the last start, by the hosts' clocks.
  returned: launch
  type: float
cause:
  description: Where a failure began - C(host), C(rank) (null if the cause is not one rank), C(kind) (rank, torchrun,
    supervisor, host, lost, stall), and C(blocked_by), what must be fixed before a restart can succeed (C(user) for a mistake
    in the run, C(disk) of the host, or empty).
  returned: follow, on failure
  type: dict
lost:
  description: Hosts that do not answer.
  returned: follow, on failure
  type: list
  elements: str
stop_wanted:
  description: Whether a user stopped the run.
  returned: follow, on failure
  type: bool
result:
  description: The head's result.json.
  returned: collect
  type: dict
files:
  description: Paths that changed on each host (C(stage)), or the scripts (C(launch) with C(render_only)).
  returned: stage and launch
  type: raw
"""
