"""Documentation of the action plugin of this name. It runs on the controller, once for all hosts of the play."""

from __future__ import annotations

DOCUMENTATION = r"""
module: trainyard_deploy
short_description: Deploy a run to the Ollama servers of all hosts
description:
  - Creates the model of a finished run in the Ollama server of every host, over the host's own addresses.
  - A host gets the model under its name only if it answers as the trained model. Otherwise the model that had the name stays.
  - A host that has the same model is unchanged.
  - A model that trainyard has not deployed is neither replaced nor removed.
options:
  state:
    description: C(present) deploys, C(absent) removes a deployed model.
    type: str
    required: true
    choices: [present, absent]
  run:
    description: Name of the run. It has finished. C(absent) does not need it.
    type: str
    default: ""
  deploy_name:
    description: Name of the model in Ollama, such as C(mine:latest).
    type: str
    default: ""
  deploy_base:
    description:
      - Model of the hosts that is the base of the adapter, such as C(llama3.1:8b).
      - Without it, every host searches its models for one with the architecture, vocabulary and shape of the run's base model.
    type: str
    default: ""
  deploy_as:
    description:
      - C(auto) deploys the adapter where the base fits and the version of Ollama takes adapters, else the merged model.
      - If the base is searched for, C(auto) deploys adapters only if every host has one.
    type: str
    default: auto
    choices: [auto, adapter, merged]
  deploy_quantize:
    description: Type of the weights of a merged model.
    type: str
    default: f16
    choices: [f16, q8_0]
  deploy_replace:
    description: Replace a model of this name that trainyard has not deployed.
    type: bool
    default: false
  template:
    description: File on the controller with a Go template, instead of the one that is derived from the chat template.
    type: str
    default: ""
attributes:
  check_mode:
    support: partial
    description: No Ollama server is changed. The host of the run converts the model.
author: trainyard
"""

EXAMPLES = r"""
- name: Deploy a run
  trainyard_deploy:
    state: present
    run: my-run
    deploy_name: mine:latest
  run_once: true
"""

RETURN = r"""
hosts:
  description: For each host, whether the model was (or would be) deployed now.
  returned: present
  type: dict
lines:
  description: What the callback C(trainyard) prints.
  returned: always
  type: list
  elements: str
"""
