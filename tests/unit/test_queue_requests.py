"""Reading the runs that a user adds, and their time limits, before any host receives a request."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_queue import HOSTS, FakeQueue
from fake_slurm import FakeSlurm
from tables import table

from trainer.common.errors import UserError
from trainer.planner.recommend import estimate_seconds
from trainer.spec import make_spec
from trainyard.inventory import ClusterHosts
from trainyard.queue.manage import change_options, check_verb, manage_queue
from trainyard.queue.new_runs import NewRun, read_runs
from trainyard.queue.queue_client import QueueState, SlurmNode, queue_host
from trainyard.queue.request import QueueOptions, Request
from trainyard.queue.requests import add_runs, time_limit
from trainyard.run.launch_options import LaunchOptions, make_options
from trainyard.run.prepare.spec_files import PreparedRun, prepare
from trainyard.wire.connection import HostConnection
from trainyard.wire.openssh import LocalTransport
from trainyard.wire.run_errors import RunError

TOP = Path(__file__).resolve().parents[2]
HOST = HOSTS[0]


def launch_of(values: Mapping[str, Any]) -> LaunchOptions:
    return make_options(values)


def read(**values: Any) -> list[NewRun]:
    return read_runs(values, launch_of, TOP, lambda line: None)


def test_values_are_options_of_the_queue_the_run_and_the_start() -> None:
    (run,) = read(model="tiny", lr="1e-4", gpus="2", after="a,b", max_restarts="3", run="r", priority="low")
    assert run.options == QueueOptions(priority="low", gpus=2, after=("a", "b"))
    assert run.spec.lr == 1e-4 and run.launch.max_restarts == 3
    assert run.request(["node1"]) == Request(
        run="r", priority="low", gpus=2, after=("a", "b"), max_restarts=3, hosts=("node1",)
    )


def test_a_sweep_is_read_in_the_order_in_which_its_runs_wait(tmp_path: Path) -> None:
    runs = [{"run": "second", "after": "first"}, {"run": "first", "max_restarts": 2, "gpus": 1}]
    (tmp_path / "s.yml").write_text(yaml.safe_dump({"model": "tiny", "lora_r": 8, "runs": runs}))
    found = read(file=str(tmp_path / "s.yml"), lora_r=16)
    assert [run.spec.run for run in found] == ["first", "second"]
    assert {run.spec.lora_r for run in found} == {16} and found[0].launch.max_restarts == 2


@pytest.mark.parametrize(("values", "said"), table("queue_requests")["mistakes_are_one_line"])
def test_mistakes_are_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        read(**({"model": "tiny"} | values))
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "said"), table("queue_requests")["mistakes_in_a_file_are_one_line"])
def test_mistakes_in_a_file_are_one_line(tmp_path: Path, content: dict[str, Any], said: str) -> None:
    (tmp_path / "s.yml").write_text(yaml.safe_dump({"model": "tiny"} | content))
    with pytest.raises(UserError) as caught:
        read(file=str(tmp_path / "s.yml"))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_after_names_a_grid_of_the_file(tmp_path: Path) -> None:
    listed = [{"run": "last", "after": ["base", "other"], "model": "tiny"}, {"run": "base", "grid": {"seed": [1, 2]}}]
    (tmp_path / "s.yml").write_text(yaml.safe_dump({"model": "tiny", "runs": listed}))
    found = read(file=str(tmp_path / "s.yml"))
    assert [run.spec.run for run in found] == ["base-seed1", "base-seed2", "last"]
    assert found[-1].options.after == ("base-seed1", "base-seed2", "other")
    assert [run.request().grid for run in found] == ["base", "base", ""]


def would_add(queue: FakeQueue, tmp_path: Path, **values: Any) -> list[str]:
    """Return what would be added for one run."""
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    runs = read(**{"model": "tiny", "dataset": str(tmp_path / "d.jsonl"), "time_limit": 5} | values)
    lines: list[str] = add_runs(runs, queue.site(tmp_path, check=True))["lines"]
    return lines


def test_after_names_a_grid_of_the_queue(tmp_path: Path) -> None:
    grid = {f"g-{number}": {"grid": "g"} for number in (1, 2, 3)}
    queue = FakeQueue(grid, **{"a": "waiting", "g-1": "waiting", "g-2": "waiting", "g-3": "finished"})
    assert " host after g-1, g-2; time" in would_add(queue, tmp_path, run="r", after="g")[0]
    (line,) = would_add(queue, tmp_path, after="a,g-2")  # its name is derived
    assert line.startswith("would add run tiny-") and " after a, g-2;" in line
    assert " after g;" in would_add(FakeQueue(grid, **{"g": "waiting", "g-1": "waiting"}), tmp_path, after="g")[0]
    with pytest.raises(UserError, match="after: the queue has no run and no grid gg; did you mean 'g'"):
        would_add(queue, tmp_path, after="gg")
    with pytest.raises(UserError, match="after: run g-2 has failed, so run r would never start"):
        would_add(FakeQueue(grid, **{"g-1": "finished", "g-2": "failed"}), tmp_path, run="r", after="g")


def test_a_finished_run_of_a_file_holds_up_no_other(tmp_path: Path) -> None:
    listed = [{"run": "a"}, {"run": "b", "after": "a"}]
    (tmp_path / "s.yml").write_text(yaml.safe_dump({"runs": listed}))
    lines = would_add(FakeQueue(a="finished"), tmp_path, file=str(tmp_path / "s.yml"))
    assert lines[0] == "run a is finished: nothing to do"
    assert lines[1].startswith("would add run b, priority normal, 1 host;")


@pytest.mark.parametrize(("before", "now", "said"), table("queue_requests")["a_changed_option_of_a_waiting_run"])
def test_a_changed_option_is_refused(before: dict[str, Any], now: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    common = {"run": "r", "model": "tiny", "dataset": str(tmp_path / "d.jsonl")}
    made = prepare(make_spec(common | before, "the test"), tmp_path, lambda line: None)
    spec = {"spec": made.spec.model_dump(mode="json"), "digests": [[file.kind, file.digest] for file in made.files]}
    queue = FakeQueue(r="waiting")
    queue.found = replace(queue.found, specs={"r": spec})
    if not said:
        assert would_add(queue, tmp_path, **common | now) == ["run r is waiting already, as job 50"]
        return
    with pytest.raises(UserError, match=re.escape(f"run r is in the queue with another spec ({said}")):
        would_add(queue, tmp_path, **common | now)


def test_a_run_that_loses_samples_is_named_when_it_is_added(tmp_path: Path) -> None:
    rows = [*['{"prompt": "a", "completion": "b"}'] * 4, '{"messages": [{"role": "user", "content": "a"}]}']
    (tmp_path / "lost.jsonl").write_text("\n".join(rows))
    added, warning = would_add(FakeQueue(), tmp_path, run="r", dataset=str(tmp_path / "lost.jsonl"))
    assert added.startswith("would add run r")
    assert warning.startswith("WARNING: 1 of 5 samples of the dataset are not trained") and warning.endswith("(run r)")


def test_verbs_and_their_options() -> None:
    with pytest.raises(UserError, match="unknown verb 'ad'; did you mean 'add'"):
        check_verb("ad")
    with pytest.raises(UserError, match=r"say what to do: do=add\|list"):
        check_verb(None)
    assert change_options("cancel", {"run": "a,b"}).run == ("a", "b")
    for verb, values, said in table("queue_requests")["verbs_and_their_options"]:
        with pytest.raises(UserError, match=said):
            change_options(verb, values)  # type: ignore[arg-type]


def test_the_queue_host_is_that_of_the_role() -> None:
    assert queue_host({"cluster": ["a", "b"], "head": ["b"], "queue": ["c"]}) == "b"
    with pytest.raises(UserError, match="no group cluster"):
        queue_host({})


def test_the_host_is_asked_whether_it_has_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(HOST, data_dir=str(tmp_path / "data"), python=sys.executable)
    connect = lambda name: HostConnection(here, LocalTransport())  # noqa: E731
    cluster = ClusterHosts([here], {"cluster": ["node1"]}, {"node1": {}}, connect, launch_of)
    conf = tmp_path / "slurm.conf"
    monkeypatch.setenv("SLURM_CONF", str(conf))
    slurm = FakeSlurm(tmp_path / "slurm", tmp_path / "data")
    with pytest.raises(RunError, match="queue host node1: Slurm is not installed: set queue_state: present"):
        manage_queue({"do": "list"}, cluster, TOP, print, False)
    monkeypatch.setenv("PATH", f"{slurm.programs}:{os.environ['PATH']}")
    # Its queue_state was given to site.yml with -e: the inventory does not have it.
    conf.write_text((TOP / "roles/queue/templates/slurm.conf.j2").read_text())
    assert manage_queue({"do": "list"}, cluster, TOP, print, False)["runs"] == []
    conf.write_text("ClusterName=other\n")
    with pytest.raises(RunError, match="queue host node1: its Slurm is not the queue of trainyard"):
        manage_queue({"do": "list"}, cluster, TOP, print, False)


def test_no_host_is_asked_before_mistakes_are_found() -> None:
    def connect(name: str) -> Any:
        raise AssertionError(f"{name} was asked")

    for values in table("queue_requests")["no_host_is_asked"]:
        cluster = ClusterHosts([HOST], {"cluster": ["node1"]}, {"node1": {}}, connect, launch_of)
        with pytest.raises(UserError):
            manage_queue(values, cluster, TOP, print, False)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[NewRun, PreparedRun]:
    folder = tmp_path_factory.mktemp("prepared")
    rows = '{"prompt": "a", "completion": "b"}\n' * 64
    (folder / "d.jsonl").write_text(rows)
    (run,) = read(model="tiny", dataset=str(folder / "d.jsonl"), run="r")
    return run, prepare(run.spec, folder, lambda line: None)


def test_the_time_limit_is_twice_the_estimate(prepared: tuple[NewRun, PreparedRun]) -> None:
    run, files = prepared
    queue = QueueState({}, {"node1": SlurmNode("node1", "idle", 2, 8192)})
    minutes, why = time_limit(run, files, queue)
    assert minutes == 10 and why == "time limit 10 minutes: twice the plan's estimate of 1 minute, at least 10 minutes"
    longer = replace(files, spec=files.spec.model_copy(update={"epochs": 3000}))
    host = {"processes": 1, "threads": 2, "gpu_mib": 0, "memory_mib": 8192, "link_mbit": 0}
    with_folder = run.spec.model_copy(update={"epochs": 3000, "model": files.files[1].src})
    seconds = estimate_seconds(with_folder, [host], 64)
    minutes, why = time_limit(run, longer, queue)
    assert minutes * 60 == pytest.approx(2 * seconds, abs=60) and minutes > 10 and "twice the plan's estimate" in why
    given = NewRun(QueueOptions(time_limit=7), run.spec, run.launch)
    assert time_limit(given, files, queue) == (7, "time limit 7 minutes")
    mamba = '{"model_type": "mamba"}'
    unknown = [replace(file, src="", config=mamba) if file.kind == "model" else file for file in files.files]
    other = replace(files, spec=files.spec.model_copy(update={"model": "org/x"}), files=unknown)
    minutes, why = time_limit(run, other, queue)
    assert minutes == 0 and why.startswith("no time limit, because the plan has no estimate (") and "mamba" in why
