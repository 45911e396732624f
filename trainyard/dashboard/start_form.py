"""The form that starts a run: its fields, its values as a run spec, and the plans that a user may start.

Whoever has a session must not be able to execute a program or to read a file. So the form takes numbers, switches and words of fixed
lists, the name of the run, and models and datasets from lists that are made here. No value of the form is a path, a program, an
environment variable, a property of a unit, or an address.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from trainer.common.errors import UserError
from trainer.common.formats import quoted
from trainer.config import FIELDS, OBSERVATORY, PRESETS, SMOLLM2, TINY, RunSpec
from trainer.config.fields import default_of, expected_value, metadata
from trainer.data.dataset_files import COLUMNAR, JSON, TABLES, format_of
from trainer.supervise.run_files import newest_first
from trainyard.dashboard.views import Action
from trainyard.extra_vars import read_run_spec
from trainyard.run.launch.start_record import read_start
from trainyard.run.launch_options import OPTIONS, LaunchOptions, make_options
from trainyard.run.types import PreparedRun
from trainyard.wire.connection import Host

RUN, FILES = "run", ("model", "dataset")  # the text that the form takes, and what it chooses from a list
_NUMBERS = ["epochs", "max_steps", "seq_length", "total_batch_size", "lr", "lora_r", "eval_split", "seed"]
FIRST = (RUN, *FILES, "strategy", *_NUMBERS)
LAUNCH = ("min_nodes", "max_restarts")  # launch options of the form
HOST = "host "  # and the name of a host: a field that is set if the host takes part
LISTED = 100  # models and datasets of each kind
STARTS = 50  # records of starts that are read, the newest
DRAFTS = 16  # plans that are kept
SOURCE = "the form"


@dataclass(frozen=True)
class FormField:
    """A field of the form."""

    name: str
    help: str
    expected: str
    choices: tuple[str, ...]  # the values to choose from; empty for a number or a name
    default: str  # what an empty field means, as text


@dataclass
class Draft:
    """A start that was filled in, and its plan.

    Attributes:
        prepared: the run that the user may start; None before the plan is ready, and if there is nothing to start.
    """

    values: Mapping[str, str]  # the values of the form
    spec: RunSpec
    options: LaunchOptions
    hosts: Sequence[Host]
    action: Action  # the plan's progress
    prepared: PreparedRun | None = None
    start: Action | None = None  # the progress of the start; None before it


class NewRuns:
    """The form for a project and its hosts, and the newest plans by their id."""

    def __init__(self, home: Path, hosts: Sequence[Host], options: LaunchOptions) -> None:
        """Take the project's folder, the hosts of the dashboard, and the launch options of the inventory."""
        self._home, self.hosts, self._options = home, list(hosts), options
        self.drafts: dict[str, Draft] = {}

    def fields(self) -> list[FormField]:
        """Return the fields of the form, the most frequent ones first. Reads the lists of models and datasets."""
        models = sorted(path.parent for path in (self._home / "models").glob("*/config.json"))
        datasets = sorted(
            path for path in (self._home / "datasets").glob("*") if format_of(path) in (*JSON, *TABLES, *COLUMNAR)
        )
        files = {
            "model": [TINY, SMOLLM2, *map(str, models[:LISTED])],
            "dataset": [OBSERVATORY, *map(str, datasets[:LISTED])],
        }
        started = _of_starts(self._home)
        found = []
        for name in (*FIRST, *(name for name in FIELDS if name not in FIRST), *LAUNCH):
            info = FIELDS.get(name) or OPTIONS[name]
            choices = (*dict.fromkeys([*files[name], *started[name]]),) if name in files else words_of_field(info)
            if choices is not None or name == RUN:
                default = getattr(self._options, name) if name in LAUNCH else default_of(info)
                if any(name in preset for preset in PRESETS.values()):
                    default = "depends on the model"
                help = str(info.description)
                if name in files:
                    help = f"embedded, from the folder {name}s of the project, or of an earlier run of this project"
                found.append(FormField(name, help, expected_value(info), choices or (), _shown(default)))
        return found

    def draft(self, form: Mapping[str, str], fields: Sequence[FormField]) -> Draft:
        """Return a new draft of the form. The spec and the options are checked as those of the command line.

        Raises UserError: the form has a wrong value, or a field that the page does not have.
        """
        given = {name: value.strip() for name, value in form.items() if value.strip() and name != "csrf"}
        known = {field.name: field for field in fields}
        chosen = [host for host in self.hosts if given.pop(HOST + host.name, "")]
        if unknown := sorted(given.keys() - known.keys()):
            raise UserError(f"{quoted(unknown[0])} is no field of {SOURCE}: start this run with trainyard train")
        for name in FILES:
            if name in given and given[name] not in known[name].choices:
                where = "is not in the list of the page: reload it, or use trainyard train"
                raise UserError(f"{name}: {quoted(given[name])} {where}")
        if not chosen:
            raise UserError("no host is chosen: choose at least one")
        launch = {name: given.pop(name) for name in LAUNCH if name in given}
        values = self._options.model_dump() | {"spec": "", "render_only": False, "follow": True} | launch
        options, spec = make_options(values, SOURCE), read_run_spec("", given, self._home, source=SOURCE)
        return Draft(dict(form), spec, options, chosen, Action("Plan"))

    def keep(self, draft: Draft) -> str:
        """Keep a draft, and drop the oldest one that is not being planned; return its id. Raises UserError while others are planned."""
        busy = [id for id, one in self.drafts.items() if one.action.state == "running"]
        if len(busy) > 1:
            raise UserError("two other plans are being made: wait for one of them")
        while len(self.drafts) >= DRAFTS:
            del self.drafts[next(id for id in self.drafts if id not in busy)]
        id = secrets.token_hex(8)
        self.drafts[id] = draft
        return id


def words_of_field(info: FieldInfo) -> tuple[str, ...] | None:
    """Return the words that a field may have; none for a number, and None for a field that may have text or several values."""
    parts = _parts(info.annotation)
    if metadata(info).get("automatic"):
        parts = [Literal["auto"], *parts]
    if any(get_origin(part) is not Literal and part not in (bool, int, float, NoneType) for part in parts):
        return None
    if int in parts or float in parts:
        return ()
    words = [word for part in parts for word in (("true", "false") if part is bool else get_args(part))]
    return tuple(map(str, words))


def _parts(kind: Any) -> list[Any]:
    """Return the types that a type is composed of."""
    if get_origin(kind) is Literal or not get_args(kind):
        return [kind]
    parts = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
    return [part for each in parts for part in _parts(each)]


def _shown(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _of_starts(home: Path) -> dict[str, list[str]]:
    """Return the models and datasets of the newest starts of this project: whoever started them has named them."""
    found: dict[str, list[str]] = {name: [] for name in FILES}
    for path in newest_first((home / ".trainyard/starts").glob("*.json"))[:STARTS]:
        with contextlib.suppress(UserError):
            spec = read_start(home, path.stem).spec
            for name in FILES:
                if isinstance(value := getattr(spec, name), str):
                    found[name].append(value)
    return found
