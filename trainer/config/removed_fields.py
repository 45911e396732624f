"""Fields of the run spec and launch options of earlier versions: what their default was, and what replaces them.

A file of an earlier version that has such a name with its default is read. Any other value is refused with one line. A name
that is still declared is not looked up here.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from trainer.common.formats import printable

_TEACHER = "set teacher, which every rank then loads, or let its answers be the dataset (distill.yml)"
_DILOCO = "set a larger local_steps, which sends less"
_MEMBERS = "set min_nodes and max_restarts, with which a run continues without a lost host"
_COMM_DTYPE = "set comm_dtype"
_SLURM = "write the script of a job with `python -m trainer config slurm`"

REMOVED_FIELDS: dict[str, tuple[Any, str]] = {
    "allow_dropped": (False, "set keep_going=dropped"),
    "automatic": ((), "set the fields to auto"),
    "ddp_larger_batches": ("auto", "every rank passes batch_size rows at once: omit it"),
    **dict.fromkeys(("diloco_comm_dtype", "diloco_wire"), ("bf16", _COMM_DTYPE)),
    **dict.fromkeys(("diloco_delay", "diloco_fragments"), (1, _DILOCO)),
    **dict.fromkeys(("diloco_members", "diloco_membership"), ("fixed", _MEMBERS)),
    "diloco_mixing": (0.5, _DILOCO),
    "gkd_lambda": (0.0, "run TRL's GKDTrainer as script, or let answers of the teacher be the dataset (distill.yml)"),
    **dict.fromkeys(("gradient_comm_dtype", "gradient_wire", "pipeline_comm_dtype"), ("32", _COMM_DTYPE)),
    "ignore_keys": ((), "set keep_going to these keys"),
    "pipeline_hosts": (0, "one pipeline takes all hosts of the run: select them with limit"),
    "teacher_host": ("", _TEACHER),
    "teacher_top_k": (0, "the student learns the probabilities of all tokens: omit it"),
    "template_date": ("", "a run has the date of its first start: omit it"),
    "wandb_project": ("trainyard", "set WANDB_PROJECT in run_env"),
}
"""Name of a field -> its default, and what to do instead."""

REMOVED_OPTIONS: dict[str, tuple[Any, str]] = {
    "eval_questions": ((), "evaluate the run when it has finished: evaluate.yml"),
    "launcher": ("ssh", _SLURM),
    "quick": (False, "preflight runs no all-reduce any more: omit it"),
    **{f"slurm_{name}": ("", _SLURM) for name in ("account", "gres", "mem", "partition", "prologue", "time")},
    "slurm_cpus": (0, _SLURM),
    "slurm_nodes": (1, _SLURM),
    "standby": ("run", "a restart starts the ranks anew: omit it"),
}
"""Name of a launch option -> its default, and what to do instead."""


REMOVED_DASHBOARD_OPTIONS: dict[str, tuple[Any, str]] = {
    "dashboard_password_file": ("", "the token is the login; set certfile and keyfile for an address of the network")
}
"""Name of an option of the dashboard -> its default, and what to do instead."""


def removed(table: Mapping[str, tuple[Any, str]], live: Iterable[str]) -> dict[str, tuple[Any, str]]:
    """Return the entries of a table whose names are not declared any more."""
    names = set(live)
    return {name: entry for name, entry in table.items() if name not in names}


def replacement(value: Any, entry: tuple[Any, str]) -> str:
    """Return what to do instead of giving a removed name, or an empty string if the value is the default that it had."""
    default, instead = entry
    read = {_text(default), *(["false"] if default == "auto" else [])}  # what hosts decided for auto
    return "" if value is None or _text(value) in read else f"no longer exists: {instead}"


def _text(value: Any) -> str:
    """Return a value as text, because flags and ``-e`` carry only text."""
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    text = printable(value, 1000).strip().lower()
    try:
        return str(float(text))
    except ValueError:
        return text
