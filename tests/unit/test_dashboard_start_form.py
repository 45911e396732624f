"""The form that starts a run: what it takes, what it refuses, and that nothing starts without a plan that was shown."""

import html
import re
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlencode

import pytest
from dashboard_lines import SCRIPT, hosts
from tables import table
from test_dashboard_http import Served, served

from trainer.common.errors import UserError
from trainer.config import FIELDS
from trainer.spec import make_spec
from trainyard.dashboard import start_form
from trainyard.dashboard.actions import Actions
from trainyard.dashboard.start_form import FILES, HOST, LAUNCH, NewRuns, words_of_field
from trainyard.extra_vars import read_run_spec
from trainyard.run.launch.start_record import keep_start
from trainyard.run.launch_options import OPTIONS, LaunchOptions
from trainyard.run.types import PreparedRun

__all__ = ["served"]
BOTH = {f"{HOST}node1": "1", f"{HOST}node2": "1"}


@pytest.fixture
def form(tmp_path: Path) -> NewRuns:
    """The form of a project with a model, a dataset and two starts."""
    for file in ("models/mine/config.json", "models/notes.txt", "datasets/a.jsonl", "datasets/b.py", "secret.jsonl"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    for number, values in enumerate(({"model": "org/name", "dataset": "host:/d.jsonl"}, {"script": "/x.py"})):
        spec = make_spec({"run": f"r{number}", **values}, "-e")
        keep_start(tmp_path, PreparedRun(spec, [], {}), LaunchOptions(), ["node1"])
    return NewRuns(tmp_path, hosts(), LaunchOptions(max_restarts=2, unit_properties="MemoryMax=20G"))


@pytest.mark.slow
def test_no_field_takes_text_but_the_name_of_the_run(form: NewRuns, tmp_path: Path) -> None:
    """A new field of the run spec that takes text, or of the launch options, is not in the form before a developer adds it."""
    fields = {field.name: field for field in form.fields()}
    assert {*fields} == {
        "run",
        *FILES,
        *LAUNCH,
        *(name for name, info in FIELDS.items() if words_of_field(info) is not None),
    }
    never = {"script", "teacher", "deepspeed_config", "columns", "loggers"}
    never |= {*OPTIONS} - {*LAUNCH}
    assert not never & {*fields} and {"run_env", "unit_properties", "collect_to"} <= never
    for name in fields:
        text = "/etc/x" if name != "run" else "/etc/x\n"
        with pytest.raises(UserError, match=name):
            form.draft({**BOTH, name: text}, form.fields())
    assert words_of_field(FIELDS["packing"]) == ("auto", "true", "false") and words_of_field(FIELDS["lr"]) == ()


def test_models_and_datasets_come_from_the_lists_of_the_server(form: NewRuns, tmp_path: Path) -> None:
    fields = {field.name: field.choices for field in form.fields()}
    assert {*fields["model"]} == {"tiny", "smollm2", f"{tmp_path}/models/mine", "org/name"}
    assert {*fields["dataset"]} == {"observatory", f"{tmp_path}/datasets/a.jsonl", "host:/d.jsonl"}
    for name in FILES:
        for value in (
            "/etc/passwd",
            "../x",
            "host:/etc",
            "org/other",
            "~/.ssh/id_rsa",
            f"{tmp_path}/secret.jsonl",
            "Tiny",
            "[",
        ):
            with pytest.raises(UserError, match=f"^{name}: .* is not in the list of the page"):
                form.draft({**BOTH, name: value}, form.fields())


REFUSED, NO_HOST = table("dashboard_start_form"), (dict.fromkeys(BOTH, ""), "no host is chosen")


@pytest.mark.parametrize(
    ("values", "why"), [*REFUSED, ({"epochs": "9" * 5000}, "epochs: expected an integer"), NO_HOST]
)
def test_what_is_refused(form: NewRuns, values: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=re.escape(why)):
        form.draft({**BOTH, **values}, form.fields())


def test_a_form_is_checked_as_the_command_line(form: NewRuns, tmp_path: Path) -> None:
    given = {"run": "mine", "epochs": "3", "lr": "2e-3", "packing": "true", "eval_interval": "epoch", "merge": "true"}
    draft = form.draft(
        {**BOTH, **given, f"{HOST}node2": " ", "max_restarts": "7", "seed": " ", "csrf": "x"}, form.fields()
    )
    assert draft.spec == read_run_spec("", given, tmp_path) and [host.name for host in draft.hosts] == ["node1"]
    assert draft.options == LaunchOptions(max_restarts=7, unit_properties="MemoryMax=20G"), (
        "the rest is of the inventory"
    )
    wrong = {"epochs": "none", "lr": "0", "strategy": "pipeline", "run": "a b"}
    with pytest.raises(UserError) as here:
        form.draft({**BOTH, **wrong}, form.fields())
    with pytest.raises(UserError) as there:
        read_run_spec("", wrong, tmp_path, source="the form")
    assert str(here.value) == str(there.value)


def test_the_number_of_plans_is_limited(form: NewRuns) -> None:
    ids = []
    for _ in range(start_form.DRAFTS + 3):
        draft = form.draft(BOTH, form.fields())
        ids.append(form.keep(draft))
        draft.action.state = "running" if len(ids) == 1 else "done"
    assert len(form.drafts) == start_form.DRAFTS and ids[0] in form.drafts and ids[1] not in form.drafts
    form.keep(form.draft(BOTH, form.fields()))
    with pytest.raises(UserError, match="two other plans are being made"):
        form.keep(form.draft(BOTH, form.fields()))


def test_a_run_starts_once_and_only_as_planned(form: NewRuns) -> None:
    actions = Actions(hosts(), Mock(), LaunchOptions(), Mock(actions={}), Mock())
    draft = form.draft(BOTH, form.fields())
    assert actions.start_new(draft) is False, "there is no plan"
    draft.prepared, draft.start = PreparedRun(draft.spec, [], {}), draft.action
    assert actions.start_new(draft) is False, "it was started"


def test_the_page(served: Served, form: NewRuns) -> None:
    session = served.session()
    get = lambda path: served.ask("GET", path, Cookie=session)  # noqa: E731

    def post(path: str, **values: str) -> tuple[int, str, str]:
        csrf = {"csrf": served.csrf(session)}
        how = {"Cookie": session, "Content_Type": "application/x-www-form-urlencoded"}
        status, headers, text = served.ask("POST", path, urlencode(csrf | values), **how)
        return status, headers.get("location", ""), html.unescape(text)

    assert "/start" not in get("/runs")[2] and get("/start")[0] == post("/start", **BOTH)[0] == 404, "as a service"
    served.pages.new_runs = form
    assert "/start" in get("/runs")[2] and f"{form._home}/datasets/a.jsonl" in get("/start")[2]
    for more in ({"csrf": "wrong"}, {"csrf": ""}):
        assert post("/start", **BOTH, **more)[0] == 403
    status, _, page = post("/start", **BOTH, run=SCRIPT, lr="0.5")
    assert (status, form.drafts) == (400, {}) and "run spec: run: expected letters" in page and 'value="0.5"' in page
    assert SCRIPT not in served.ask("GET", "/start?plan=" + SCRIPT, Cookie=session)[2]
    status, where, _ = post("/start", **BOTH, run="mine")
    [(plan, draft)] = form.drafts.items()
    assert (status, where) == (303, f"/start?plan={plan}") and get("/start/" + plan)[0] == 405
    served.actions.plan.assert_called_once_with(draft)
    assert "in progress" in get(where)[2] and 'value="mine"' in get(where)[2] and "start-run" not in get(where)[2]
    draft.action.state, draft.prepared = "done", PreparedRun(draft.spec, [], {})
    served.pages.cluster.change()
    assert "start-run" in get(where)[2]
    served.actions.start_new.assert_not_called()
    assert post(f"/start/{plan}", csrf="wrong")[0] == 403 and post("/start/none")[0] == 404
    served.actions.start_new.assert_not_called()
    assert post(f"/start/{plan}")[:2] == (303, where)
    served.actions.start_new.assert_called_once_with(draft)
