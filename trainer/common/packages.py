"""What to install for a run that needs a package which its environment does not have."""

import sys

# The versions of constraints.txt. trackio is not there: it requires other versions of what a node has.
PINNED = {
    "bitsandbytes": "==0.50.2",
    "datasets": "==5.2.0",
    "deepspeed": "==0.19.8",
    "mlflow-skinny": "==3.17.2",
    "pyarrow": "==26.0.1",
    "wandb": "==0.31.0",
}


def how_to_install(package: str, extra: str = "") -> str:
    """Return the remedy for a missing package, as part of a message.

    `package`: its name. `extra`: the extra of the project that has it; empty if every environment of site.yml has the
    package.
    """
    role = f"add {extra} to python_extras and run site.yml" if extra else "run site.yml"
    return f"{role}, or {sys.executable} -m pip install {package}{PINNED.get(package, '')}"
