"""Build and check a run spec from a YAML file, flags or ``-e`` values, and compare two specs. Importable without torch."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from trainer.common.errors import UserError, nearest
from trainer.common.formats import printable, quoted
from trainer.config.aliases import FSDP_IMPLIED, MUTABLE, is_of_a_run, resolve_aliases, suggest
from trainer.config.combinations import check_combinations
from trainer.config.dataset_source import DatasetSource
from trainer.config.fields import as_text, is_off, metadata, mismatch
from trainer.config.reward_source import RewardSource
from trainer.config.run_spec import FIELDS, RunSpec
from trainer.config.tool_files import as_options, read_tool_files
from trainer.config.yaml_text import read_yaml
from trainer.method import method_of
from trainer.strategy import AUTO, plan_of
from trainer.strategy.deepspeed_file import LOSS_SCALE, derived_fields, leaves

MAX_LISTED = 5  # unknown names in an error message


def and_more(names: Sequence[object]) -> list[str]:
    """Return ``and N more`` for the names that a message leaves out, or an empty list."""
    return [f"and {len(names) - MAX_LISTED} more"] if len(names) > MAX_LISTED else []


def check_spec(spec: RunSpec) -> None:
    """Check that the fields of a spec can be combined, with each other and with its strategy. Raises ValueError."""
    check_combinations(spec)
    method_of(spec).validate(spec)
    plan_of(spec).validate(spec)


def make_spec(values: Mapping[str, Any], source: str, ranks: int | None = None) -> RunSpec:
    """Build a spec from `values`; error messages name their `source`.

    With strategy=deepspeed, `deepspeed_config` sets the fields that `values` does not. `ranks`: number of ranks of the
    run, if it is known. Raises UserError: an unknown name (with the closest known one), or an invalid value (with the
    expected one).
    """
    values, _ = resolve_aliases(values, source=source)
    if unknown := [name for name in values if name not in FIELDS]:
        # The search for similar names takes a millisecond for each.
        listed = [f"unknown name {name!r} in {source}{suggest(str(name))}" for name in unknown[:MAX_LISTED]]
        raise UserError(f"run spec: {'; '.join([*listed, *and_more(unknown)])}")
    derived: dict[str, tuple[Any, str]] = {}
    if values.get("strategy") == "deepspeed" and values.get("deepspeed_config"):
        try:
            derived = derived_fields(as_options(values["deepspeed_config"]), values, ranks)
        except ValueError as error:
            raise UserError(f"run spec: {error} ({source})") from None
    try:
        spec = RunSpec.model_validate(dict(values) | {name: value for name, (value, _) in derived.items()})
    except ValidationError as error:
        lines = []
        # Names that the entries of a list do not have.
        strange = {
            str(problem["loc"][0]): problem["loc"]
            for problem in error.errors()
            if problem["type"] == "extra_forbidden" and len(problem["loc"]) > 1
        }
        for problem in error.errors():
            name = str(problem["loc"][0])
            if name in strange:
                key = str(strange[name][-1])
                known = RewardSource.model_fields if name == "reward" else DatasetSource.model_fields
                lines.append(f"{name}: unknown name {quoted(key)} in an entry{nearest(key, known)}")
                continue
            value, option = derived.get(name, (values.get(name), ""))
            where = f"deepspeed_config: {option}" if option else name
            lines.append(f"{where}: {mismatch(FIELDS[name], value)}")
        raise UserError(f"run spec: {'; '.join(dict.fromkeys(lines))} ({source})") from None
    try:
        check_spec(spec)
    except ValueError as error:
        raise UserError(f"run spec: {error} ({source})") from None
    return spec


def check_given(spec: RunSpec, given: Iterable[str], source: str) -> None:
    """Check that every field that a user gave has an effect, unless it is off or has its default. Raises UserError.

    `given`: names of fields. Most of them are in the file of a run, which is not checked.
    """
    given = [name for name in given if name in FIELDS]
    for name in () if is_of_a_run(given) else given:
        if missing := missing_for(spec, name):
            raise UserError(f"run spec: {name} has no effect {missing[0]}: {missing[1]}, or omit {name} ({source})")


def missing_for(spec: RunSpec, name: str) -> tuple[str, str] | None:
    """Return without what a field has no effect in a run, and what to do; None if it has one, or asks for nothing.

    The declaration of a field says what it `needs`. What strategy=auto will choose is not known.
    """
    if (value := getattr(spec, name)) == FIELDS[name].default or is_off(value):
        return None
    for need in metadata(FIELDS[name])["needs"].split():
        left, _, right = need.partition("=")
        values = {other: as_text(getattr(spec, other)) for other in left.split("|")}
        found, words = {*values.values()}, {*right.split("|")}
        if left == "strategy":
            words |= {AUTO}
            found |= {spec.replica_strategy} if spec.strategy == "diloco" else set()
        # The least value that a number may have, such as one iteration, asks for nothing.
        least = {f"{limit.ge}" for other in values for limit in FIELDS[other].metadata if hasattr(limit, "ge")}
        if found.isdisjoint(words) if right else all(is_off(said) or said in least for said in found):
            shown = [
                f"with {other}={said}" if said not in ("", "()") else f"without {other}"
                for other, said in values.items()
            ]
            return " and ".join(shown), f"set {need.replace('|', ' or ')}"
    return None


def read_spec(
    path: Path | None,
    overrides: Mapping[str, Any],
    source: str,
    *,
    ranks: int | None = None,
    report: Callable[[str], None] = lambda line: None,
    strict: bool = False,
) -> RunSpec:
    """Read a spec from a YAML file (or none) and apply `overrides`.

    Args:
        source: source of the overrides, for error messages.
        ranks: number of ranks of the run, if it is known.
        report: receives a line for each name whose meaning differs.
        strict: see `check_given`.

    Raises UserError: the file cannot be read, or has an unknown name or an invalid value; or the overrides have.
    """
    of_file, given = read_tool_files(read_yaml(path) if path else {}), read_tool_files(overrides)
    values, notes = resolve_aliases(of_file, source=str(path), ranks=ranks)
    if path:
        make_spec(values, str(path), ranks)
    resolved, more = resolve_aliases(given, values, source=source, ranks=ranks)
    spec = make_spec({**values, **resolved}, source, ranks)
    if strict:
        check_given(spec, values, str(path))
        check_given(spec, resolved, source)
    for note in notes + more + idle_options(of_file | given):
        report(note)
    return spec


def idle_options(values: Mapping[str, Any]) -> list[str]:
    """Return a note for each file of DeepSpeed or FSDP, whose options are a value, with options that ask for nothing here."""
    notes = []
    for name in ("fsdp_config", "deepspeed", "deepspeed_config"):
        options = as_options(values.get(name))
        idle = [
            printable(option, 80)
            for option, value in (leaves(options) if isinstance(options, Mapping) else ())
            if not is_off(value) and {option, option.lower().removeprefix("fsdp_")} & {*LOSS_SCALE, *FSDP_IMPLIED}
        ]
        notes += [f"{name}: without effect here: {', '.join(idle)}"] if idle else []
    return notes


def has_begun(run_dir: Path) -> bool:
    """Return whether the spec in a run folder is that of a run with checkpoints, or one that has finished."""
    return (run_dir / "spec.yml").exists() and any((run_dir / name).exists() for name in ("checkpoints", "result.json"))


def changed_fields(before: RunSpec, now: RunSpec, *, resumes: bool = True) -> list[str]:
    """Return ``name: was X, now Y`` for every field that differs although a run must not change it.

    `resumes`: whether the run starts anew, which may change some fields; one that waits or runs takes no change.
    """
    may_differ = MUTABLE if resumes else {"run", "resume"}
    return _changes(before.model_dump(mode="json"), now.model_dump(mode="json"), may_differ)


def fixed_values(spec: RunSpec) -> dict[str, Any]:
    """Return the fields that a resumed run must not change, as JSON data that is the same on every host: of a path, its name."""
    paths = {name: Path(getattr(spec, name)).name for name in ("model", "teacher", "script")}
    named = spec.model_copy(update=paths).with_dataset_paths([Path(source.path).name for source in spec.sources])
    named = named.with_reward_files([Path(file).name for file in spec.reward_files])
    return named.model_dump(mode="json", exclude={*MUTABLE, "automatic"})


def changed_since(fixed: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences of two `fixed_values` as `changed_fields` does; a field that an earlier version did not have had its default."""
    return _changes({name: to_jsonable_python(FIELDS[name].default) for name in now} | dict(fixed), dict(now), MUTABLE)


def _changes(old: dict[str, Any], new: dict[str, Any], may_differ: Collection[str]) -> list[str]:
    if (old["packing"], new["packing"]) in ((True, "auto"), ("auto", True), ("auto", False)):
        old["packing"] = new["packing"]  # RunState.restore compares what auto chose
    names = [name for name in FIELDS if name not in may_differ and old[name] != new[name]]
    return [f"{name}: {_change(old[name], new[name])}" for name in names]


def _change(old: Any, new: Any) -> str:
    """Return ``was X, now Y``; for a list of as many datasets or rewards as before, only the first change."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for one, other in zip(old, new, strict=True):
            if one != other and isinstance(one, dict) and isinstance(other, dict):
                key = next(key for key in one if one[key] != other.get(key))
                first = next(iter(one))  # a path, or a name
                what = f"{key} of {printable(one[first])}: " if key != first else ""
                return f"{what}was {quoted(one[key], 200)}, now {quoted(other.get(key), 200)}"
    return f"was {quoted(old)}, now {quoted(new)}"
