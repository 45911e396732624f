"""The Python interface: what its methods give to the commands, and make of their results."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tables import table

import trainyard
from trainer.common.errors import UserError
from trainyard import Cluster, TrainyardError
from trainyard.api import Event, HostInfo, Job, Machine, Merged, Run, RunResult
from trainyard.api.run import EventLog
from trainyard.commands.call import Call
from trainyard.commands.table import COMMANDS
from trainyard.wire.run_errors import RunError


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster.local()


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Call]]:
    """Lets a command return a result; returns the calls."""

    def replace(name: str, **result: Any) -> list[Call]:
        calls: list[Call] = []

        def run(call: Call) -> dict[str, Any]:
            calls.append(call)
            return result

        monkeypatch.setitem(COMMANDS, name, dataclasses.replace(COMMANDS[name], run=run))
        return calls

    return replace


def test_a_module_without_ansible_imports_the_package_only() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Clutser'"):
        trainyard.Clutser  # type: ignore[attr-defined]  # noqa: B018


def test_the_queue_takes_the_names_of_the_guides(cluster: Cluster, answer: Callable[..., list[Call]]) -> None:
    row = table("api_calls")["row"]
    added, listed = answer("queue add", runs=[{"run": "a", "job": 7}]), answer("queue history", runs=[row])
    options = table("api_calls")["options"]
    job = cluster.queue.add(model=Path("m"), priority="high", failover_enabled=True, dataset=None, **options)
    assert job == Job("a", 7, "high", "waiting", ("node2",), reason="busy")
    values = {"model": "m", "priority": "high", "gpu_memory": 16, "cores": 4, "memory": 32, "checkpoint_keep": 3}
    launch = {"max_restarts": 2, "restart_delay": 7.0, "min_nodes": 1}
    assert added[0].values == values | launch
    assert {name: getattr(added[0].launch, name) for name in launch} == launch
    assert listed[0].given == {"run": "a"}
    cancelled = answer("queue cancel")
    cluster.queue.cancel(job)
    cluster.queue.cancel("b")
    assert [call.given for call in cancelled] == [{"run": "a"}, {"run": "b"}]


def test_students_learn_from_the_answers_of_a_teacher(cluster: Cluster, answer: Callable[..., list[Call]]) -> None:
    asked = answer("distill", dataset="/d.jsonl", answers=9, students={"s-1": {}, "s-2": {}})
    answers = cluster.teach("llama3:8b", Path("p.jsonl"), samples=2)
    assert (answers.teacher, answers.dataset, answers.count) == ("llama3:8b", "/d.jsonl", 9)
    students = cluster.students(answers, model=["a", "b"], num_students=3, student_data="shard", lr=0.1)
    assert [run.name for run in students] == ["s-1", "s-2"]
    given = {"teacher": "llama3:8b", "prompts": "p.jsonl", "samples": 2}
    assert asked[0].values == given | {"students": 0}
    assert asked[1].values == given | {"model": ["a", "b"], "students": 3, "student_data": "shard", "lr": 0.1}


def test_results_of_merge_and_deploy(cluster: Cluster, answer: Callable[..., list[Call]]) -> None:
    parts = [{"run": "x", "eval_loss": 1.5}, {"run": "y", "eval_loss": None}]
    result = {"parts": parts, "base_loss": 2.0, "eval_loss": 1.0, "model": "/runs/both/model"}
    merge = answer("merge", result=result, lines=["WARNING: equal", "merged"])
    merged = cluster.merge([cluster.run("a"), "b"], run="both", method="soup")
    assert merged == Merged("both", "soup", 2.0, 1.0, {"a": 1.5, "b": None}, "/runs/both/model", ("WARNING: equal",))
    assert merge[0].given == {"runs": ["a", "b"], "run": "both", "method": "soup"}
    deploy = answer("deploy", hosts={"node1": True})
    assert cluster.deploy(merged, "mine", deploy_as="merged").hosts == {"node1": True}
    assert deploy[0].given == {"run": "both", "deploy_name": "mine", "deploy_as": "merged"}


def test_hosts_and_machines(answer: Callable[..., list[Call]], tmp_path: Path) -> None:
    """An untrusted discovered machine is a machine with models, and no host."""
    (tmp_path / "found.yml").write_text(
        "discovered: {hosts: {far: {discovered_addresses: [10.0.0.9], discovered_models: [{name: 'm:1'}]}}}"
    )
    top = Path(__file__).resolve().parents[2]
    cluster = Cluster([top / "inventory/local.yml", tmp_path / "found.yml"])
    about = {"gpus": [{"name": "A", "memory_mib": 9}], "cpu": "x", "cores": 4, "models": ["m:1"], "model_count": 1}
    answer("status", hardware={"node1": about | {"memory_mib": 5, "free_bytes": 6}})
    answer("identity", drop={"node2": ["node1", "same boot id"]}, warnings=["w"], verdict="1 machine", useful=False)
    first, second = cluster.hosts()
    assert (first.name, first.answers, first.cores, first.models) == ("node1", True, 4, ("m:1",))
    assert first.gpus[0].memory_mib == 9
    assert second == HostInfo("node2", "127.0.0.1")
    assert [(model.name, model.hosts) for model in cluster.models()] == [("m:1", ("node1", "far"))]
    machines = cluster.machines()
    assert [*machines] == [
        Machine("node1", ("node1", "node2"), ("127.0.0.1",)),
        Machine("far", ("far",), ("10.0.0.9",), trusted=False),
    ]
    assert (machines.useful, machines.verdict, machines.warnings) == (False, "1 machine", ("w",))


def test_a_limit_selects_hosts(cluster: Cluster, answer: Callable[..., list[Call]]) -> None:
    calls = answer("plan", plan=[])
    cluster.command("plan", limit="node2")
    cluster.command("plan")
    assert [[host.name for host in call.cluster.hosts] for call in calls] == [["node2"], ["node1", "node2"]]
    assert Cluster.local(variables={"lost_limit": 7}).call("plan", {}).launch.lost_limit == 7
    assert Cluster.local().call("plan", {}).launch.lost_limit is None, "variables belong to one cluster"
    second = Cluster.local(limit="node2")
    for name in ("plan", "data"):  # `data` has no option limit
        assert [host.name for host in second.call(name, {}).cluster.hosts] == ["node2"]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda cluster: cluster.train(lerning_rate=1), "train: unknown option 'lerning_rate'; did you mean"),
        (lambda cluster: cluster.train(lr="fast"), "lr: expected a number"),
        (lambda cluster: cluster.train(lost_limit=-1), "lost_limit: expected"),
        (lambda cluster: cluster.merge(["a"]), "runs: expected a list"),
        (lambda cluster: cluster.train(limit="node9"), "no host matches node9"),
        (lambda cluster: Cluster("nowhere.yml"), "nowhere.yml: no such file"),
    ],
)
def test_mistakes_are_one_line(cluster: Cluster, act: Callable[[Cluster], Any], message: str) -> None:
    with pytest.raises(TrainyardError) as caught:
        act(cluster)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_events_of_a_run(cluster: Cluster) -> None:
    log = EventLog()
    log.line("planned")

    def follow() -> Mapping[str, Any]:
        log.watch({"status": "training", "step": 3, "steps": 9, "loss": 0.5, "other": 1})
        log.line("step 3/9")
        return {"status": "finished", "loss_last": 0.5, "mine": 7}

    run = Run(cluster, "r", cluster.call("attach", {"run": "r"}), follow, log)
    assert [*run.follow()] == [Event("planned"), Event("step 3/9", "training", 3, 9, 0.5)]
    result = run.wait()
    assert result == run.result and result == RunResult("r", "finished", loss_last=0.5, values=result.values)
    assert result.values["mine"] == 7 and [*run.follow()] == []


def test_the_error_of_a_run_follows_its_events(cluster: Cluster) -> None:
    log = EventLog()

    def follow() -> Mapping[str, Any]:
        log.line("step 1/9")
        raise RunError("node1: rank 0 died", lines=["Traceback"])

    run = Run(cluster, "r", cluster.call("attach", {"run": "r"}), follow, log)
    events = run.follow()
    assert next(events) == Event("step 1/9")
    for _ in range(2):
        with pytest.raises(RunError, match="rank 0 died") as caught:
            run.wait()
    assert caught.value.details["lines"] == ["Traceback"] and run.result is None
    assert issubclass(UserError, TrainyardError)
