"""The datasets of a run: one, or several with weights. A part of the run spec."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from trainer.common.formats import quoted
from trainer.config.fields import Words
from trainer.config.yaml_text import parse_structure

# The shapes of a record, in order of precedence: the names that it must have, and those that it may have.
SHAPES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("messages",), ("system", "tools")),
    (("conversations",), ("system", "tools")),
    (("instruction", "output"), ("input", "system", "history", "tools")),
    (("prompt", "completion"), ("system", "tools")),
    (("text",), ()),
)
PAIR = ("chosen", "rejected")  # answers of a record of preferences
LABEL_NAMES = ("label", "kto_tag")  # of an answer
# Those of preferences (see trainer.data.preferences), which a method can require.
PREFERENCES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (PAIR, ("prompt", "system", "tools")),
    ((*PAIR, "conversations"), ("system", "tools")),
    ((*PAIR, "messages"), ("system", "tools")),
    ((*PAIR, "instruction"), ("input", "system", "history", "tools")),
    *((required, (*optional, "label")) for required, optional in SHAPES),
)
MESSAGE_KEYS = ("role", "content")  # of a message in `messages` or `conversations`
COLUMNS = tuple(
    dict.fromkeys([name for shape in (*SHAPES, *PREFERENCES) for names in shape for name in names] + [*MESSAGE_KEYS])
)
MAX_WEIGHT = 1000
EXPECTED = {
    "dataset": "a path, a hub id, or a list such as [a.jsonl, {path: b.csv, weight: 0.3}]",
    "columns": "names of a shape and of columns, such as {prompt: question, completion: answer}",
}


def _pairs(value: Any) -> Any:
    """Return a mapping from a mapping, from its text, or from ``prompt=question,completion=answer``."""
    value = parse_structure(value)
    if isinstance(value, str):
        parts = [part.partition("=") for part in value.split(",") if part.strip()]
        if not all(equals for _, equals, _ in parts):
            raise ValueError("expected NAME=COLUMN")
        value = {name.strip(): column.strip() for name, _, column in parts}
    return value


def _sources(value: Any) -> Any:
    value = parse_structure(value)
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list | tuple):
        return [{"path": entry} if isinstance(entry, str) else entry for entry in value]
    return value


Columns = Annotated[dict[str, Annotated[str, Field(min_length=1)]], BeforeValidator(_pairs)]


class DatasetSource(BaseModel):
    """One dataset of a run.

    Attributes:
        weight: how many times an epoch uses each sample: 2 uses each twice, 0.3 uses 30 % of the samples.
        split, config: of a hub dataset or a folder; empty: `dataset_split` and `dataset_config` of the run.
        ignore_keys: keys of records and messages that the run ignores; empty: those in `keep_going` of the run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    path: str = Field(min_length=1)  # a file, a folder or a hub id
    weight: float = Field(1.0, gt=0, le=MAX_WEIGHT, allow_inf_nan=False)
    split: str = ""
    config: str = ""
    columns: Columns = {}  # names of a shape and the columns that have these meanings; empty: `columns` of the run
    ignore_keys: Words = ()


_Path = Annotated[str, Field(min_length=1, coerce_numbers_to_str=True)]
Datasets = Annotated[_Path | Annotated[tuple[DatasetSource, ...], Field(min_length=1)], BeforeValidator(_sources)]


def resolve(dataset: str | tuple[DatasetSource, ...], **defaults: Any) -> tuple[DatasetSource, ...]:
    """Return the sources of a run; `defaults` (split, config, columns, ignore_keys) replace what a source leaves empty."""
    listed = (DatasetSource.model_validate({"path": dataset}),) if isinstance(dataset, str) else dataset
    return tuple(
        source.model_copy(update={name: getattr(source, name) or value for name, value in defaults.items()})
        for source in listed
    )


def columns_error(columns: Mapping[str, str]) -> str:
    """Return why a mapping of columns is invalid, or an empty string."""
    for name, column in columns.items():
        if name not in COLUMNS:
            turned = f": did you mean {{{column}: {name}}}?" if column in COLUMNS else ""
            known = "" if turned else f": expected one of {', '.join(COLUMNS)}"
            return f"columns: unknown name {quoted(name)}{turned}{known}"
    mapped = set(columns).difference(MESSAGE_KEYS)
    if not any(mapped <= {*required, *optional} for required, optional in (*SHAPES, *PREFERENCES)):
        shapes = "; ".join(", ".join(required + optional) for required, optional in SHAPES)
        return f"columns: {', '.join(sorted(mapped))} are of different shapes: map the names of one shape: {shapes}"
    return ""


def with_paths(dataset: Any, paths: Sequence[str]) -> Any:
    """Return the value of `dataset` (of a spec, or of its JSON form) with other paths, one for each source in order."""
    if isinstance(dataset, str):
        (path,) = paths
        return path
    changed = []
    for source, path in zip(dataset, paths, strict=True):
        new = {"path": path}
        changed.append({**source, **new} if isinstance(source, Mapping) else source.model_copy(update=new))
    return type(dataset)(changed)
