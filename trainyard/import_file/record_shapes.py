"""The datasets of other tools: their entries, and which columns have which meaning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.data.dataset_files import needs_library
from trainer.data.samples import read_records
from trainer.spec import make_spec
from trainyard.import_file.config_file import find_file, read_names
from trainyard.import_file.translation import Row, Rows, Translation, checked, is_empty, shown

_CHATS = ("messages", "conversations")
_SHAPES = "the names of the columns say which shape the records have"
_TEMPLATE = "the chat template of the model is used"
# Columns and keys of messages by their names in dataset_info.json.
_FACTORY_COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "tools": "tools",
    "messages": "messages",
    "role_tag": "role",
    "content_tag": "content",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "label",
}
_PREFERENCES = "training on rewards of answers or of steps"
# The columns of axolotl's prompt strategies, by their last word and by whether records are pairs.
_STRATEGIES: Mapping[tuple[str, bool], Mapping[str, str]] = {
    ("intel", True): {"prompt": "question"},
    ("argilla", True): {"instruction": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
    ("ultra", True): {},
    ("intel", False): {"prompt": "question"},
    ("argilla", False): {"prompt": "instruction"},
    ("ultra", False): {},
}
_MEDIA = "training on images, video or sound"


def _rows(table: str) -> Rows:
    from trainyard.import_file.tables import rows_of  # whose rows name functions of this module

    return rows_of(table)


class _Entry:
    """One dataset while its names are read."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.columns: dict[str, str] = {}

    def as_source(self) -> dict[str, Any]:
        """Return the entry of `dataset`. Columns that have the names of a shape need no mapping."""
        if (column := self.columns.get("messages")) in _CHATS:
            self.columns[column] = self.columns.pop("messages")
        chat = next((name for name in _CHATS if name in self.columns), "")
        usual = {"role": ("role", "from"), "content": ("content", "value")}
        columns = {name: column for name, column in self.columns.items() if column not in (name, *usual.get(name, ()))}
        if chat and columns.keys() & {"role", "content"}:
            columns[chat] = self.columns[chat]
        return self.fields | ({"columns": columns} if columns else {})


def entries(found: Translation, key: str, value: Any) -> None:
    """Handle `datasets` of axolotl and TRL: a list of mappings."""
    listed = [value] if isinstance(value, Mapping | str) else value
    if not isinstance(listed, list):
        found.refuse(key, value, "expected a list of datasets")
        return
    sources = []
    for number, given in enumerate(listed):
        entry = _Entry()
        names = given if isinstance(given, Mapping) else {"path": given}
        for name, each in names.items():
            _read_entry(found, entry, f"{key}[{number}].{name}", str(name), each)
        if "path" in entry.fields:
            sources.append(entry.as_source())
    if sources:
        set_sources(found, sources)


def set_sources(found: Translation, sources: list[dict[str, Any]]) -> None:
    """Set `dataset` to one path, or to a list of sources. Raises UserError if a path is none."""
    plain = len(sources) == 1 and sources[0].keys() == {"path"}
    found.values["dataset"], wrong = checked("dataset", sources[0]["path"] if plain else sources)
    if wrong:
        raise UserError(f"import: {printable(found.where)}: dataset: {wrong}")


def _read_entry(found: Translation, entry: _Entry, key: str, name: str, value: Any) -> None:
    """Account for one name of an entry."""
    if is_empty(value):
        found.unset.append(printable(key))
    elif name in _ENTRY_FIELDS:
        entry.fields[_ENTRY_FIELDS[name]] = str(value)
        found.note("dataset", key, value)
    elif name in _ENTRY_COLUMNS:
        entry.columns[_ENTRY_COLUMNS[name]] = str(value)
        found.note("dataset", key, value)
    elif name in ("message_property_mappings", "columns") and isinstance(value, Mapping):
        for part, column in value.items():
            entry.columns[str(part)] = str(column)
        found.note("dataset", key, value)
    elif name == "type":
        _read_type(found, entry, key, value)
    elif row := _rows("entry").get(name):
        found.apply(row, key, value)
    else:
        found.unknown.append(shown(key, value))


def _read_type(found: Translation, entry: _Entry, key: str, value: Any) -> None:
    """Handle the prompt strategy of an entry: a word, or columns and formats of a prompt."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            _read_entry(found, entry, f"{key}.{name}", str(name), each)
        return
    word = str(value)
    base = word.split(".")[0].split(":")[0]
    kind = str(found.seen.get("rl") or "")
    columns = _STRATEGIES.get((word.rpartition(".")[2], kind != "kto"))
    if base in ("bradley_terry", "stepwise_supervised"):
        found.apply(Row("missing", _PREFERENCES), key, value)
    elif kind and columns is not None:
        for name, column in columns.items() if kind != "orpo" else ():
            entry.columns.setdefault(name, column)
        found.note("dataset", key, value)
    elif kind:
        found.ignore(key, value, _SHAPES)
    elif base in ("completion", "pretrain", "chat_template", "sharegpt"):
        if base in ("completion", "pretrain"):
            entry.columns.setdefault("text", "text")
        found.ignore(key, value, _SHAPES)
    elif base == "alpaca":
        found.note(
            "dataset", key, value, f"records have instruction and output; {_TEMPLATE} instead of the prompts of {base}"
        )
    else:
        found.refuse(
            key,
            value,
            f"the names of the columns say which shape the records have, and {_TEMPLATE}: check them with trainyard data",
        )


_ENTRY_FIELDS = {"path": "path", "split": "split", "name": "config", "subset": "config", "fraction": "weight"}
_ENTRY_COLUMNS = {
    "field": "text",
    "text_column": "text",
    "field_messages": "messages",
    "message_field_role": "role",
    "message_field_content": "content",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
    "field_tools": "tools",
    "field_prompt": "prompt",
    "field_completion": "completion",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_label": "label",
}


def first_columns(found: Translation) -> set[str]:
    """Return the names of the shape that the first record of the dataset has; empty if this machine cannot read it."""
    given: dict[str, Any] = {
        name: found.values[name]
        for name in ("dataset", "dataset_split", "dataset_config", "columns")
        if name in found.values
    }
    dataset = given.get("dataset") or found.seen.get("dataset_name")
    try:
        source = make_spec({**given, "dataset": dataset}, "import").sources[0]
        if dataset and not needs_library(source.path):
            _, record = next(read_records(source))
            return {*record, *(name for name, column in source.columns.items() if column in record)}
    except (UserError, StopIteration, TypeError):
        pass
    return set()


# LLaMA-Factory -------------------------------------------------------------------------------------------------------------


def factory_datasets(found: Translation, key: str, value: Any) -> None:
    """Handle `dataset` of LLaMA-Factory: names in dataset_info.json, which is looked for beside the file and above it."""
    names = value if isinstance(value, list) else [word.strip() for word in str(value).split(",") if word.strip()]
    folder = str(found.seen.get("dataset_dir") or "data")
    found.note("dataset", key, value)
    _factory_sources(found, key, names, find_file(found, f"{folder}/dataset_info.json"))


def _factory_sources(found: Translation, key: str, names: list[Any], file: Path | None) -> None:
    """Set `dataset` to the datasets of these names, which a file describes."""
    known = read_names(file) if file else {}
    sources = []
    for name in names:
        info = known.get(str(name))
        if file and isinstance(info, Mapping):
            sources.append(_factory_source(found, f"{key} {name}", info, file))
        else:
            sources.append({"path": str(name)})
            if not str(name).endswith((".json", ".jsonl")):
                found.refuse(key, name, "no file describes it here: set dataset to its path or its name on the hub")
    set_sources(found, sources)


def _factory_source(found: Translation, key: str, info: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the source of a dataset that a file describes, beside which it lies."""
    entry = _Entry()
    for name, value in info.items():
        part = f"{key}.{name}"
        if is_empty(value):
            found.unset.append(printable(part))
        elif name == "file_name" and "hf_hub_url" not in info:
            entry.fields["path"] = str(file.parent / str(value))
            found.note("dataset", part, value)
        elif name in ("hf_hub_url", "path"):
            local = find_file(found, str(value)) if info.get("source") == "local" else None
            entry.fields["path"] = str(local or value)
            found.note("dataset", part, value)
        elif name in ("split", "subset"):
            entry.fields["config" if name == "subset" else name] = str(value)
            found.note("dataset", part, value)
        elif name in ("columns", "tags") and isinstance(value, Mapping):
            _factory_columns(found, entry, part, value)
        else:
            found.apply(_rows("dataset-info").get(name, Row("impossible", "a dataset has no such option")), part, value)
    entry.fields.setdefault("path", key.rpartition(" ")[2])
    return entry.as_source()


def _factory_columns(found: Translation, entry: _Entry, key: str, names: Mapping[str, Any]) -> None:
    for name, column in names.items():
        if name in ("images", "videos", "audios"):
            found.apply(Row("missing", _MEDIA), f"{key}.{name}", column)
        elif name in _FACTORY_COLUMNS:
            entry.columns[_FACTORY_COLUMNS[name]] = str(column)
            found.note("dataset", f"{key}.{name}", column)
        else:
            found.ignore(f"{key}.{name}", column, "the roles of ShareGPT and of messages are known")
