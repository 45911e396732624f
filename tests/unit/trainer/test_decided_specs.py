"""The same command follows, and resumes, the run that it has started, whatever its hosts and its ranks have decided."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tables import table
from test_decisions import EIGHT, ONE, SMALL, answer, card, cpu

from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainer.planner.agreement import agree
from trainer.planner.decisions import as_before, decide
from trainer.spec import changed_fields, make_spec
from trainer.strategy import AUTO
from trainyard.preflight.host_state import HostState
from trainyard.run.plan.choose_fields import staged_spec
from trainyard.run.plan.make_plan import check_running_spec
from trainyard.run.types import PreparedRun
from trainyard.wire.connection import Host

FIELDS: dict[str, tuple[Any, ...]] = table("decided_specs")["fields"] | {
    "strategy": (AUTO, "ddp", "fsdp", "pipeline", "diloco", "deepspeed")
}
SHAPES = {"one": ONE, "eight": EIGHT, "small": SMALL}
CARDS = [card(8, 8.6), card(24, 8.9), card(12, 7.5), card(80, 9.0, 2), card(6, 6.1)]
HOSTS = st.lists(st.sampled_from(CARDS), min_size=1, max_size=3) | st.lists(
    st.sampled_from([*CARDS, cpu(8), cpu(16, True), cpu(64, True)]), min_size=1, max_size=3
)


class Ranks:
    """The world of one rank: what all ranks have decided."""

    rank = 1

    def __init__(self, *gathered: list[Any]) -> None:
        self._gathered = list(gathered)

    def gather(self, _: Any) -> list[Any]:
        return self._gathered.pop(0)


def settle(spec: RunSpec, hosts: list[dict[str, Any]]) -> RunSpec:
    """Return what the ranks of these hosts agree on, each of which decides for hosts like its own."""
    own = [
        (decide(spec, [host] * len(hosts))[0], False) if spec.strategy == AUTO or spec.automatic else (spec, True)
        for host in hosts
        for _ in range(host["processes"])
    ]
    answers = [answer(*each) for each in own]
    worlds: list[Any] = [Ranks(answers) for _ in own]
    found = [agree(*each, world) for each, world in zip(own, worlds, strict=True)]
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in SHAPES.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in FIELDS.items()}),
    HOSTS,
    st.sampled_from(sorted(SHAPES)),
    st.booleans(),
    st.booleans(),
)
def test_the_same_command_has_the_spec_of_the_run(
    models: Path, fields: dict[str, Any], hosts: list[dict[str, Any]], model: str, compiled: bool, controller: bool
) -> None:
    """`compiled`: what the ranks decide by their steps; `controller`: whether one has decided before them, as where no Slurm starts them."""
    staged = []
    try:
        asked = make_spec({"run": "r", "model": str(models / model)} | fields, "here")
        if controller and (asked.strategy == AUTO or asked.automatic):
            staged.append(decide(asked, hosts)[0])
        staged.append(settle(staged[0] if staged else asked, hosts))
    except UserError:  # of a spec, or of hosts, with which nothing starts
        assume(False)
    if "torch_compile" in staged[-1].automatic:
        staged.append(staged[-1].model_copy(update={"torch_compile": compiled, "automatic": ()}))
    assert not staged[-1].automatic
    for spec in staged:
        head = HostState(Host("node1", "10.0.0.1", "/data", "/python"), facts={"spec": spec.to_yaml()})
        before = staged_spec(head)
        now = as_before(asked, before)[0] if asked.strategy == AUTO or asked.automatic else asked
        assert before == spec and not changed_fields(before, now)
        check_running_spec(head, PreparedRun(now, [], {}), "/data", now)
