"""Steps of roles that concern all hosts of the play at once. They are no commands: users do not call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from trainer.config.fields import Words, declare
from trainyard.commands.call import Call
from trainyard.playbook_options import PlaybookOptions
from trainyard.python_env.environment_plan import plan_environments


class EnvironmentOptions(PlaybookOptions):
    """The Python environment of the role `python`."""

    environments: dict[str, Any] = declare(..., "result of the module python_env_info for every host of the play")
    port: int = declare(..., "TCP port at which a host serves its wheels to other hosts", ge=1, le=65_535)
    torch: bool = declare(True, "whether it is for training, with the extra `node` of pyproject.toml")
    extras: Words = declare((), "further extras of pyproject.toml")
    index: str = declare("", "URL of the package index; empty for that which pip is configured for")
    torch_index: str = declare("", "URL of torch's indexes, without the build; empty for the package index")
    wheelhouse: str = declare("", "folder of wheels on the controller, in place of an index")
    lock: str = declare("", "constraints file on the controller; empty for that of `packages`")
    flavour: str = declare("auto", "build of torch, or auto for the newest one that all drivers and GPUs support")
    packages: Literal["standard", "unsloth"] = declare("standard", "set of packages, with its own constraints file")
    conda_lock: str = declare("", "explicit conda lock on the controller; empty for conda.lock in `conda_folder`")
    conda_folder: str = declare("", "folder of the inventory, where a lock is kept; empty for the project's folder")
    conda_channel: str = declare(
        "https://conda.anaconda.org/conda-forge", "channel of conda that is solved without a lock"
    )
    conda_python: Literal["3.11", "3.12", "3.13", "3.14"] = declare(
        "3.11", "version of Python that is solved without a lock"
    )


def plan_python(call: Call) -> dict[str, Any]:
    """Plan the Python environment of every host, and build what they get. Raises EnvironmentBuildError."""
    options = call.options(EnvironmentOptions)
    return plan_environments(
        call.top, call.cluster.hosts, options.environments, options.model_dump(), build=not call.check
    )


ROLE_STEPS: dict[str, Callable[[Call], dict[str, Any]]] = {"plan-python": plan_python}
