"""Command-line flags of the run spec, and the table of its fields."""

from collections.abc import Sequence
from typing import get_origin

from trainer.common.errors import UserError
from trainer.common.formats import quoted
from trainer.config.aliases import MUTABLE, field_of, is_known, plain_name, suggest, takes_no_value
from trainer.config.fields import default_of, expected_value
from trainer.config.methods import METHODS
from trainer.config.run_spec import FIELDS
from trainer.config.strategies import STRATEGIES


def expects(name: str) -> str:
    return expected_value(FIELDS[name])


def parse_flags(argv: Sequence[str]) -> dict[str, str]:
    """Parse ``--lr 1e-3 --packing --no-packing --loggers=none`` into names and texts. `make_spec` validates the values.

    Raises UserError: an unknown flag, a positional argument, or a flag without a value.
    """
    values: dict[str, str] = {}
    rest = list(argv)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise UserError(f"trainer: unexpected argument {quoted(flag)}: a flag looks like --lr 1e-3")
        name, has_value, value = flag[2:].partition("=")
        name = plain_name(name)
        negated = name.removeprefix("no_")
        if not is_known(name) and negated != name and is_known(negated) and takes_no_value(negated):
            values[negated] = "false"
            continue
        if not is_known(name):
            raise UserError(f"run spec: unknown name {quoted(name)} in the flags{suggest(name)}")
        if not has_value:
            if takes_no_value(name) and (not rest or rest[0].startswith("--")):
                value = "true"
            elif rest:
                value, listed = rest.pop(0), FIELDS.get(field_of(name))
                # The words of a list may also be separate arguments: ``--lora-targets q_proj v_proj``.
                while listed and get_origin(listed.annotation) is tuple and rest and not rest[0].startswith("--"):
                    value += f",{rest.pop(0)}"
            else:
                field = field_of(name)
                raise UserError(
                    f"run spec: --{name} has no value: expected {expects(field) if field in FIELDS else 'text'}"
                )
        values[name] = value
    return values


def describe(name: str) -> str:
    """Return the description of a field. Those of `strategy` and `method` list what is registered."""
    summaries = {"strategy": STRATEGIES, "method": {each: entry.summary for each, entry in METHODS.items()}}
    listed = "; ".join(f"{each}: {summary}" for each, summary in summaries.get(name, {}).items())
    return f"{FIELDS[name].description}{'; ' if listed else ''}{listed}"


def table() -> str:
    """Return the run spec as a Markdown table, as in docs/run-spec.md."""
    lines = ["| name | value | default | description |", "| --- | --- | --- | --- |"]
    for name, field in FIELDS.items():
        default = default_of(field)
        shown = ",".join(default) if isinstance(default, tuple) else "" if default in (None, "", {}) else str(default)
        shown = shown.lower() if isinstance(default, bool) else shown
        mark = " *" if name in MUTABLE else ""
        lines.append(f"| `{name}`{mark} | {expects(name)} | {f'`{shown}`' if shown else ''} | {describe(name)} |")
    return "\n".join(lines)
