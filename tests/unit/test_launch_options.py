"""Launch options: one schema with names, defaults, checks and documentation; and the names given with -e."""

from pathlib import Path
from typing import Any

import pytest
from ansible.vars.reserved import get_reserved_names
from hostile import HOSTILE_STRINGS, UNENCODABLE_STRINGS
from tables import table

from trainer.common.errors import UserError
from trainer.config import FIELDS
from trainer.config.automatic import AUTOMATIC
from trainer.spec import make_spec
from trainer.supervise.environment import run_environment
from trainer.supervise.link_free import link_free
from trainyard.extra_vars import check_names, known_variables, plain_data, read_run_spec
from trainyard.run.answer_times import LONGEST
from trainyard.run.launch_options import ALIASES, OPTIONS, LaunchOptions, make_options, options_from_variables
from trainyard.run.plan.nodes import environment
from trainyard.run.types import PlanEntry

TOP = Path(__file__).resolve().parents[2]


def test_no_name_is_one_that_ansible_reserves() -> None:
    reserved = get_reserved_names()
    assert set(OPTIONS) & reserved == {"notify"}
    assert set(ALIASES) & reserved == {"hosts", "retries"}, "deprecated names of earlier releases"
    assert set(FIELDS) & reserved == {"strategy"}


def test_no_name_has_two_meanings() -> None:
    assert not (set(OPTIONS) | set(ALIASES)) & set(FIELDS)
    assert not set(OPTIONS) & set(ALIASES)


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [("nodes_min", "min_nodes", 2), ("retries", "max_restarts", 3), ("retry_delay", "restart_delay", 0.5)],
)
def test_former_names_are_accepted(alias: str, name: str, value: Any) -> None:
    assert getattr(make_options({alias: str(value)}), name) == value
    assert make_options({alias: value, name: value}) == make_options({name: value})
    with pytest.raises(UserError, match=f"{alias} and {name} set the same option in -e: set only {name}"):
        make_options({alias: value, name: value + 1}, "-e")


def test_values_may_be_text() -> None:
    given = {
        "elastic": "true",
        "master_port": "29501",
        "unit_properties": "MemoryMax=1G,CPUQuota=50%",
        "run_env": {"N": 1},
    }
    options = make_options(given | {"render_to": None, "collect_to": ""})
    assert options.elastic is True and options.master_port == 29501
    assert options.unit_properties == ("MemoryMax=1G", "CPUQuota=50%") and options.run_env == {"N": "1"}
    assert options.answer_limit == LONGEST and make_options({"lost_limit": "20"}).answer_limit == 20
    assert make_options({"master_port": ""}) == make_options({"run_env": ""}) == LaunchOptions()


@pytest.mark.parametrize(("given", "error"), table("launch_options")["a_bad_option_is_one_line"])
def test_a_bad_option_is_one_line(given: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError) as raised:
        make_options(given, "-e")
    assert str(raised.value) == error


def test_a_secret_is_not_in_an_error() -> None:
    with pytest.raises(UserError) as raised:
        make_options({"run_env": "HF_TOKEN=secret"}, "-e")
    assert str(raised.value) == "run_env: expected names and values, got str (-e)"


def test_any_text_in_run_env_reaches_the_ranks_unchanged_or_is_refused(tmp_path: Path) -> None:
    node = PlanEntry("h", 0, [0], "10.0.0.1", "lo", 1, str(tmp_path), "/data", ["python3"])
    refused = set()
    for number, text in enumerate([*HOSTILE_STRINGS, *UNENCODABLE_STRINGS]):
        try:
            given = make_options({"run_env": {"TOKEN": text, "AFTER": "x"}}).run_env
        except UserError as error:
            assert str(error).isprintable() and "the value of TOKEN" in str(error)
            assert not text[:20].strip() or text[:20] not in str(error), "it may be a secret"
            refused.add(text)
            continue
        (tmp_path / "env").touch(mode=0o600)
        (tmp_path / "env").write_bytes(environment(node, given).encode())
        found = run_environment(link_free(tmp_path))
        assert (found["TOKEN"], found["AFTER"]) == (text, "x"), number
    hostile = [*HOSTILE_STRINGS, *UNENCODABLE_STRINGS]
    assert refused == {text for text in hostile if set(text) & set("\n\0\ud800\udfff\udc80")}


def test_names_in_run_env_are_names_of_variables() -> None:
    for name in ("a b", "A=B", "1A", "", "A\x1b[2J", "É"):
        with pytest.raises(UserError, match="is not a name: use letters, digits and '_'"):
            make_options({"run_env": {name: "secret"}})


def test_options_come_from_variables_of_the_inventory() -> None:
    variables = {"min_nodes": "{{ two }}", "ansible_host": "a", "retries": 5, "head": None}
    resolve = {"{{ two }}": 2}
    options = options_from_variables(variables, lambda value: resolve.get(value, value), {"max_restarts": 1})
    assert (options.min_nodes, options.max_restarts, options.head) == (2, 1, "")


def test_no_other_file_declares_a_launch_option() -> None:
    """A default stands in one place: neither variables of the project nor a role's argument_specs repeat it."""
    names = set(OPTIONS) | set(ALIASES)
    sources = [*TOP.glob("group_vars/all/*.yml"), TOP / "roles/train/meta/argument_specs.yml", TOP / "train.yml"]
    sources += TOP.glob("roles/train/*/*.yml")
    for path in sources:
        declared = {line.strip().partition(":")[0] for line in path.read_text().splitlines()} & names - {"hosts"}
        assert not declared, f"{path} declares {declared}"


def test_known_names_hold_options_and_role_variables() -> None:
    known = known_variables(TOP)
    assert {"min_nodes", "nodes_min", "hosts", "run_env", "cluster_python"} <= known
    with pytest.raises(UserError, match="-e master_prt: unknown name; did you mean 'master_port'"):
        read_run_spec("", {"master_prt": 1}, TOP)
    assert read_run_spec("", {"lr": "1e-3", "min_nodes": 2, "ansible_user": "x"}, TOP).lr == 1e-3


def test_a_value_beside_the_file_of_a_run_decides_a_field_that_the_file_leaves_to_the_hosts(tmp_path: Path) -> None:
    file = tmp_path / "spec.yml"
    file.write_text(make_spec({"model": "x"}, "here").to_yaml())
    spec = read_run_spec(str(file), {"precision": "32-true", "batch_size": 1}, TOP)
    assert spec.automatic == tuple(name for name in AUTOMATIC if name not in ("precision", "batch_size"))
    file.write_text(make_spec({}, "here").model_copy(update={"automatic": ()}).to_yaml())
    assert read_run_spec(str(file), {"precision": "auto"}, TOP).automatic == ("precision",)


def test_plain_data_has_no_subclasses() -> None:
    class Tagged(str):
        pass

    plain = plain_data({Tagged("a"): [Tagged("b"), 1, True, None, 1.5], "c": (Tagged("d"),)})
    assert plain == {"a": ["b", 1, True, None, 1.5], "c": ["d"]}
    assert type(next(iter(plain))) is str and type(plain["a"][0]) is str and plain["a"][2] is True


def test_names_given_to_other_playbooks_are_checked() -> None:
    check_names(["master_port", "hosts", "run", "ansible_user"], TOP, ["run"])
    with pytest.raises(UserError, match=r"^-e forse: unknown name; did you mean 'force'\?$"):
        check_names(["forse"], TOP, ["force"])
