"""Documentation of the action plugin of this name. It runs on the controller, once for all hosts of the play."""

from __future__ import annotations

DOCUMENTATION = r"""
module: trainyard_distill
short_description: Let the Ollama servers of the cluster teach, and train students on their answers
description:
  - An adapter to C(trainyard.ollama.distill.distill). It reads its options, the run spec and the launch options from
    C(-e) and the inventory. docs/distill.md lists them.
  - Prompts go to the hosts of the group C(cluster) whose Ollama has the model, and with C(teachers=all) to machines of the
    group C(discovered). The students train on the hosts of the play. With C(queue=true), they are added to the queue, whose host
    trains them.
  - Answers are kept on the controller. A second call asks only what is missing.
options: {}
attributes:
  check_mode:
    support: full
    description: Asks the servers which models they have. Nothing is pulled, answered, trained or added to the queue.
author: trainyard
"""

EXAMPLES = r"""
- name: Teach and train
  trainyard_distill:
  run_once: true
"""

RETURN = r"""
lines:
  description: The counts of the filters, the dataset, and the table of the students.
  returned: success
  type: list
  elements: str
students:
  description: The head's result.json of each student that has finished, by run.
  returned: success
  type: dict
runs:
  description: The students that wait or run in the queue.
  returned: with C(queue=true)
  type: list
  elements: dict
"""
