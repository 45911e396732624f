"""The variables and groups of discovered machines: their names, their limits, and that their cost is linear."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleParserError
from ansible.inventory.data import InventoryData
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import inventory_loader
from run_hosts import TOP

from trainer.config.run_spec import RunSpec
from trainyard.discovery.facts import (
    CONNECTION_VARIABLES,
    MAX_GROUP_NAME,
    MAX_GROUPS,
    PREFIX,
    machine_facts,
    model_groups,
    old_names,
    scan_facts,
)
from trainyard.discovery.ollama_replies import MAX_MODELS, Model, Server, models
from trainyard.discovery.scan import LanServer
from trainyard.discovery.scan_result import LanMachine, ScanReport, machines
from trainyard.discovery.trust import Trust
from trainyard.run.launch_options import LaunchOptions

KEY = "ssh-ed25519 " + "A" * 68


def model(name: str, family: str = "f") -> Model:
    return Model(name=name, size=1, family=family)


def machine_of(address: str, *models: tuple[Model, ...], key: str = "", local: bool = False) -> LanMachine:
    """Return a machine with one server for each tuple of models."""
    servers = tuple(
        Server(address=address, port=11434 + i, version="0.12.3", models=each) for i, each in enumerate(models)
    )
    return LanMachine(local=local, host_keys=(key,) if key else (), servers=servers)


def report(*found: LanMachine) -> ScanReport:
    empty: dict[str, Any] = dict.fromkeys(("networks", "skipped", "unresolved", "rejected", "own_addresses"), ())
    numbers = dict.fromkeys(("addresses", "passes", "seconds", "scanned_at", "silent", "refused", "left_out"), 0)
    return ScanReport(**empty, **numbers, ports=(11434,), machines=found)


def facts(*models: Model) -> dict[str, Any]:
    machine = machine_of("10.0.0.1", models)
    return machine_facts(machine, Trust(True, "known"), report(machine))


def declared_names(tree: Any) -> Iterator[str]:
    """Yield the variables that tasks and plays set: `vars`, `set_fact`, `register`, `loop_var`, parameters of roles."""
    if isinstance(tree, list):
        for entry in tree:
            yield from declared_names(entry)
    elif isinstance(tree, dict):
        for name, value in tree.items():
            if name in ("vars", "set_fact", "ansible.builtin.set_fact") and isinstance(value, dict):
                yield from value
            elif name in ("register", "loop_var"):
                yield value
            elif name == "roles":
                yield from (key for role in value if isinstance(role, dict) for key in role)
            yield from declared_names(value)


def parameters() -> set[str]:
    """Return every variable that an operator can set: of roles, group_vars, launch options and run specs."""
    names = {*LaunchOptions.model_fields, *RunSpec.model_fields}
    for pattern in ("roles/*/defaults/*.yml", "group_vars/*/*.yml", "playbooks/group_vars/*/*.yml"):
        for path in TOP.glob(pattern):
            names |= set(yaml.safe_load(path.read_text()) or {})
    for path in TOP.glob("roles/*/meta/argument_specs.yml"):
        for spec in yaml.safe_load(path.read_text())["argument_specs"].values():
            names |= set(spec.get("options", {}))
    return names


def other_names() -> set[str]:
    """Return every variable that roles and playbooks set."""
    names: set[str] = set()
    for path in TOP.glob("roles/*/vars/*.yml"):
        names |= set(yaml.safe_load(path.read_text()) or {})
    for pattern in ("roles/*/tasks/*.yml", "playbooks/**/*.yml", "*.yml"):
        for path in TOP.glob(pattern):
            names |= set(declared_names(yaml.safe_load(path.read_text())))
    return names


def test_discovered_variables_are_no_parameters() -> None:
    discovered = {*facts(model("m")), *scan_facts(report(), 0, "")}
    assert all(name.startswith(PREFIX) for name in discovered)
    assert {"ollama_version", "ollama_models", "cluster_address", "min_nodes", "lr"} <= parameters()
    assert not parameters() & {*discovered, *CONNECTION_VARIABLES}
    names = parameters() | other_names()
    assert {"firewall_openings", "_ollama_build", "__ollama_built", "identity_duplicates"} <= names
    assert not [name for name in names if name.startswith(PREFIX)]


def test_old_names_are_found_in_expressions() -> None:
    found = old_names([{"x": "ollama_models[0].name"}, {}, [{"key": "ollama_version"}]])
    assert found == ["ollama_models is now discovered_models", "ollama_version is now discovered_version"]
    assert not old_names([{"x": "discovered_models and ollama_pull and my_ollama_models"}])


def test_models_and_groups_are_limited() -> None:
    many = tuple(model(f"m{i:05}", f"family{i}") for i in range(900))
    more = tuple(model(f"n{i:05}", "f") for i in range(900))
    machine = machine_of("10.0.0.1", many, more)
    listed = machine_facts(machine, Trust(True, ""), report(machine))[f"{PREFIX}models"]
    assert len(listed) == MAX_MODELS and listed[0]["name"] == "m00000"
    assert len(model_groups(listed)) == MAX_GROUPS
    names = ["a" * MAX_GROUP_NAME, "b" * (MAX_GROUP_NAME + 1), "../..", "Q:1"]
    groups = model_groups([{"name": name, "family": ""} for name in names])
    assert groups == ["ollama_model_" + "a" * MAX_GROUP_NAME, "ollama_model_q_1"]


def test_a_model_of_a_cloud_is_marked_and_has_no_group() -> None:
    [cloud] = models({"models": [{"name": "big:cloud", "remote_host": "https://ollama.com:443"}]})[0]
    machine = machine_of("10.0.0.1", (model("own"), cloud))
    listed = machine_facts(machine, Trust(True, ""), report(machine))[f"{PREFIX}models"]
    assert [each["remote"] for each in listed] == ["https://ollama.com:443", ""]
    assert not [group for group in model_groups(listed) if "cloud" in group]


def count_calls(work: Callable[[], Any]) -> int:
    """Return how many Python and built-in functions `work` calls; unlike seconds, it does not depend on the machine."""
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        calls[event] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return sum(calls.values())


def test_grouping_is_linear_in_addresses() -> None:
    def group(count: int) -> int:
        servers = [Server(address=f"10.0.{i // 250}.{i % 250}", port=1, version="1") for i in range(count)]
        answers = [LanServer(server, 0, (KEY,)) for server in servers]
        return count_calls(lambda: machines(answers, set(), {}, 22))

    assert group(2000) < 15 * group(200)


def test_variables_are_linear_in_models() -> None:
    def variables(count: int) -> int:
        models = tuple(model(f"m{i}") for i in range(count))
        return count_calls(lambda: model_groups(facts(*models)[f"{PREFIX}models"]))

    assert variables(1000) < 13 * variables(100)


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., InventoryData]:
    """A function that lets the inventory plugin parse a file with these options, with a given report instead of a scan."""
    inventory_loader.add_directory(str(TOP / "plugins/inventory"))
    plugin = inventory_loader.get("ollama")

    def parsed(found: ScanReport, **options: Any) -> InventoryData:
        (tmp_path / "ollama.yml").write_text(yaml.safe_dump({"plugin": "ollama", **options}))
        monkeypatch.setattr(sys.modules[type(plugin).__module__], "discover", lambda *_: found)
        inventory = InventoryData()
        plugin.parse(inventory, DataLoader(), str(tmp_path / "ollama.yml"))
        inventory.reconcile_inventory()
        return inventory

    return parsed


def neighbours(count: int, models: int, local: bool = False) -> ScanReport:
    """Return a report of machines with different models and families."""
    return report(
        *(
            machine_of(
                f"10.0.0.{i + 1}", tuple(model(f"m{i}-{j}", f"f{i}-{j}") for j in range(models)), key=KEY, local=local
            )
            for i in range(count)
        )
    )


def test_host_variables_of_the_plugin(parse: Callable[..., InventoryData]) -> None:
    inventory = parse(report(*neighbours(1, 1).machines, *neighbours(2, 1, local=True).machines[1:]))
    set_by_plugin = {name for host in inventory.hosts.values() for name in host.vars}
    own = {"inventory_file", "inventory_dir", "inventory_hostname", "inventory_hostname_short", *CONNECTION_VARIABLES}
    assert {name for name in set_by_plugin if not name.startswith(PREFIX)} <= own
    assert {f"{PREFIX}models", f"{PREFIX}version", "ansible_host"} <= set_by_plugin
    assert set(inventory.groups["discovered"].vars) == {f"{PREFIX}scan"}
    assert set(inventory.groups["all"].vars) == set()


def test_untrusted_machines_have_no_groups(parse: Callable[..., InventoryData]) -> None:
    always = {"all", "ungrouped", "discovered", "cluster", "head", "workers", "untrusted"}
    assert set(parse(neighbours(3, 5)).groups) == always
    assert len(parse(neighbours(3, 5, local=True)).groups) == len(always) + 30
    # Groups that the operator's expressions make of what machines report.
    keyed = [{"key": f"{PREFIX}models | map(attribute='name') | list", "prefix": "", "separator": ""}]
    options = {"groups": {"every": f"{PREFIX}version != ''"}, "keyed_groups": keyed}
    assert not {"every", "m0_0"} & set(parse(neighbours(3, 5), **options).groups)
    assert {"every", "m0_0"} <= set(parse(neighbours(3, 5, local=True), **options).groups)


def test_an_old_variable_in_an_expression_is_an_error_with_strict(parse: Callable[..., InventoryData]) -> None:
    with pytest.raises(AnsibleParserError, match="ollama_models is now discovered_models"):
        parse(neighbours(1, 1), compose={"first": "ollama_models[0].name"}, strict=True)


@pytest.mark.parametrize("trusted", [False, True])
def test_the_inventory_is_linear_in_models(parse: Callable[..., InventoryData], trusted: bool) -> None:
    """Ten machines with a thousand models each, of which no two are the same."""
    few, many = neighbours(10, 100, local=trusted), neighbours(10, 1000, local=trusted)
    assert count_calls(lambda: parse(many)) < 13 * count_calls(lambda: parse(few))
    inventory = parse(many)
    assert len(inventory.groups) <= 10 * MAX_GROUPS + 7
    assert all(len(host.vars[f"{PREFIX}models"]) == 1000 for host in inventory.hosts.values())
