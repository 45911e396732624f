"""RunSession from Python, without Ansible: the same tests over local processes and over OpenSSH."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from receiver import receiver
from run_hosts import Bed, bed, free_port, parent_of, questions, until
from ssh_server import control_folder, server
from tables import table

from trainer.spec import make_spec
from trainyard.run.follow.manage_runs import manage_runs
from trainyard.run.launch_options import LaunchOptions, make_options
from trainyard.run.session import RunSession
from trainyard.run.types import PlanEntry, SessionState, plain, read
from trainyard.wire.connection import Host, HostConnection, Login
from trainyard.wire.openssh import LocalTransport, OpenSSHTransport
from trainyard.wire.run_errors import LaunchError, PlanError, RunError

__all__ = ["bed", "control_folder", "server"]

SMALL = {"seq_length": 64, "total_batch_size": 4, "checkpoint_interval": 2, "eval_interval": 0, "loggers": "none"}
Connect = Callable[[Host], HostConnection]


@pytest.fixture(params=["local", "ssh"])
def connect(request: pytest.FixtureRequest) -> Connect:
    login: Login | None = request.getfixturevalue("server").login if request.param == "ssh" else None
    return lambda host: HostConnection(host, OpenSSHTransport(login) if login else LocalTransport())


@pytest.fixture
def events() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    with receiver() as found:
        yield found


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def hosts(folder: Path, count: int = 2) -> list[Host]:
    return [
        Host(f"node{i + 1}", "127.0.0.1", str(folder / f"node{i + 1}"), sys.executable, backend="process")
        for i in range(count)
    ]


def local(host: Host) -> HostConnection:
    return HostConnection(host, LocalTransport())


def session_of_spec(
    bed: Bed, fields: dict[str, Any], lines: list[str], connect: Connect = local, **options: Any
) -> RunSession:
    """A session of a run of two hosts that are folders of this machine."""
    spec, chosen = make_spec(fields, "the test"), make_options({"progress_interval": 0.2} | options)
    return RunSession(hosts(bed.folder), connect, chosen, spec=spec, home=bed.folder, report=lines.append)


def session_of_plan(bed: Bed, connect: Connect, plan: list[PlanEntry], lines: list[str], **options: Any) -> RunSession:
    """A session whose plan is given, as between two processes: the state is JSON."""
    state = read(SessionState, json.loads(json.dumps(plain(SessionState(plan=plan)))))
    chosen = make_options({"progress_interval": 0.2} | options)
    return RunSession(hosts(bed.folder), connect, chosen, report=lines.append, state=state)


@pytest.mark.slow
def test_a_plan_is_launched_and_followed_to_its_end(bed: Bed, connect: Connect) -> None:
    bed.make_run(2)
    lines: list[str] = []
    session = session_of_plan(bed, connect, bed.plan(2, steps=6, pause=0.05), lines)
    started = session.launch()
    assert started["changed"] and started["skew_seconds"] < 5 and session.state.phase == "running"
    assert session.follow()["status"] == "finished"
    assert lines[0] == "following r: 2 ranks on node1, node2"
    assert "step 6/6  loss 5.31  1.9k tok/s  (2 ranks)" in lines
    assert not bed.live_processes()


FAULTS = table("rank_faults")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("connect", "fault"),
    [pytest.param(kind, one, id=f"{one['name']}-{kind}") for one in FAULTS for kind in one.get("over", ["local"])],
    indirect=["connect"],
)
def test_the_first_failure_stops_all_ranks_and_is_named(bed: Bed, connect: Connect, fault: dict[str, Any]) -> None:
    bed.make_run(2, environment=fault.get("environment", "").format(folder=bed.folder))
    plan = bed.plan(2, fault.get("steps", 1000), fault.get("pause", 0.1), torchrun="kills" in fault)
    session = session_of_plan(bed, connect, plan, [], **({"stall_limit": 2} if "stalls" in fault else {}))
    session.launch()
    if "kills" in fault:
        bed.at_step(0)
        worker = bed.at_step(1)["pid"]
        pids = {"worker": worker, "torchrun": parent_of(worker), "supervisor": bed.node(1)["pid"]}
        os.kill(pids[fault["kills"]], signal.SIGKILL)
    if "halts" in fault:
        os.kill(bed.at_step(fault["halts"])["pid"], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RunError) as raised:
        session.follow()
    assert time.monotonic() - began < 5 or "kills" not in fault
    details, message = raised.value.details, str(raised.value)
    assert message == fault["says"] or ("stalls" in fault and fault["says"] in message)
    assert details["cause"] == details["cause"] | fault["cause"]
    shown = "\n".join(details["lines"])
    assert all(words.format(run_dir=bed.run_dir(1)) in shown for words in fault.get("shows", [])), shown
    assert "Connection closed" not in message + shown and not bed.live_processes()


@pytest.mark.slow
def test_nothing_starts_if_a_host_refuses(bed: Bed, connect: Connect) -> None:
    bed.make_run(2)
    (bed.run_dir(1) / "env").chmod(0o644)
    with pytest.raises(LaunchError, match=r"^node2: .*chmod 600") as raised:
        session_of_plan(bed, connect, bed.plan(2), []).launch()
    assert list(raised.value.details["troubles"]) == ["node2"]
    assert not bed.live_processes()
    assert bed.node(0)["status"] == "stopped"


def test_check_mode_launches_nothing(bed: Bed, connect: Connect) -> None:
    bed.make_run(2)
    session = session_of_plan(bed, connect, bed.plan(2), [])
    session.check = True
    assert session.launch()["msg"] == "would start r on node1, node2"
    assert session.follow()["skipped"] and session.collect()["skipped"]
    assert not bed.live_processes()


@pytest.mark.slow
def test_runs_are_listed_followed_and_stopped(bed: Bed, connect: Connect) -> None:
    bed.make_run(2)
    session_of_plan(bed, connect, bed.plan(2), []).launch()
    bed.at_step(1)
    lines: list[str] = []

    def manage(state: str, run: str = "r", **how: Any) -> dict[str, Any]:
        return manage_runs(state, run, hosts(bed.folder), connect, LaunchOptions(lost_limit=60), lines.append, **how)

    training = [["r", "node1", "0", "training"], ["r", "node2", "1", "training"]]
    until(
        lambda: [line.split()[:4] for line in manage("listed", "")["lines"][1:]] == training,
        30,
        "both hosts in the list",
    )
    followed: list[dict[str, Any]] = []
    follower = threading.Thread(target=lambda: followed.append(manage("followed")), daemon=True)
    follower.start()
    until(lambda: any(line.startswith("step ") for line in lines), 30, "a progress line")
    assert manage("stopped", check=True)["msg"] == "would stop r on node1, node2"
    stopped = manage("stopped", grace=30)
    assert stopped["hosts"] == {"node1": "stopped", "node2": "stopped"}
    follower.join(30)
    assert followed[0]["status"] == "stopped"
    assert manage("stopped")["lines"] == ["run r: node1 stopped, node2 stopped (it was not running)"]
    for state in ("stopped", "listed"):
        with pytest.raises(
            RunError, match=r"^no host has a run nosuch; ansible-playbook playbooks/status.yml lists the runs$"
        ):
            manage(state, "nosuch")
    with pytest.raises(RunError, match=r"^name the run: -e run=NAME$"):
        manage("followed", "")
    assert not bed.live_processes()


@pytest.mark.long
def test_every_host_of_a_pipeline_receives_the_files_of_the_model(bed: Bed) -> None:
    fields = SMALL | {"run": "layers", "model": "tiny", "dataset": str(questions(bed.folder)), "max_steps": 2}
    lines: list[str] = []
    session = session_of_spec(bed, fields | {"strategy": "pipeline", "batch_size": 1}, lines)
    assert session.run()["result"]["step"] == 2, lines
    stores = [bed.folder / f"node{number}" / "store" / "models" for number in (1, 2)]
    assert [len(list(store.glob("*/model.safetensors"))) for store in stores] == [1, 1]


@pytest.mark.long
@pytest.mark.parametrize("connect", ["ssh"], indirect=True)
def test_a_run_from_spec_to_result_that_survives_a_killed_rank(
    bed: Bed, connect: Connect, events: tuple[str, list[dict[str, Any]]]
) -> None:
    fields = SMALL | {"run": "whole", "dataset": str(questions(bed.folder)), "epochs": 100, "max_steps": 40}
    lines: list[str] = []
    # A port that no other test can take between the plan of this run and its start, which would cost another restart.
    how: dict[str, Any] = {"max_restarts": 2, "restart_delay": 0.1, "master_port": free_port()}
    url, received = events
    how |= {"collect_to": str(bed.folder / "copy"), "notify": [url]}
    session = session_of_spec(bed, fields, lines, connect, **how)
    results: list[dict[str, Any]] = []
    running = threading.Thread(target=lambda: results.append(session.run()), daemon=True)
    running.start()
    os.kill(bed.at_step(1, 5, "whole")["pid"], signal.SIGKILL)
    running.join(180)
    assert results, lines
    assert results[0]["result"]["step"] == 40 and results[0]["result"]["world_size"] == 2
    assert any(line.startswith("rows: packed (several samples share a row of ") for line in lines)
    assert "failed: rank 1 on node2 was killed by SIGKILL" in lines
    assert "restarting in 0 s (restart 1 of 2 without progress in between)" in lines
    assert any("40 of 40 steps on 2 ranks, 2 hosts" in line for line in lines)
    assert (bed.folder / "copy/whole/adapter/adapter_model.safetensors").exists()
    config = json.loads((bed.folder / "copy/whole/adapter/adapter_config.json").read_text())
    base = Path(config["base_model_name_or_path"])
    assert (base / "model.safetensors").exists() and base.is_relative_to(bed.folder / ".trainyard"), "of the controller"
    assert bed.node(0, "whole")["attempt"] == 2, lines
    assert not bed.live_processes()
    assert [one["event"] for one in received] == ["started", "restarting", "finished"]
    assert {one["run"] for one in received} == {"whole"}
    assert received[1]["message"] == "rank 1 on node2 was killed by SIGKILL"
    assert url not in "".join(path.read_text() for path in bed.folder.rglob("*.json")) + "".join(lines)

    done = session_of_spec(bed, fields, lines, connect, **how).run()
    assert done["lines"][0] == "run whole is finished: nothing to do" and not done["changed"] and len(received) == 3
    preview = session_of_spec(bed, fields, [], connect, **how).plan(preview=True)
    assert preview["lines"][0].startswith("run whole is finished and will not start again: this is its plan")
    assert {"world size 2", "rows: packed"} <= {line[:12] for line in preview["lines"][1:]}, preview["lines"]
    for left in ("node1", "node2"):  # on the first host it is deleted then
        with pytest.raises(
            PlanError, match=rf"whole exists with another spec \(lr: was .*, now 0.001\) on {left}: repeat"
        ):
            session_of_spec(bed, fields | {"lr": 1e-3}, lines, connect, **how).plan()
        shutil.rmtree(bed.folder / left / "runs/whole")


@pytest.mark.slow
@pytest.mark.parametrize("connect", ["local"], indirect=True)
def test_a_host_without_its_python_is_named(
    bed: Bed, connect: Connect, events: tuple[str, list[dict[str, Any]]]
) -> None:
    here = hosts(bed.folder)
    here[1] = Host("node2", "127.0.0.1", str(bed.folder / "node2"), "/nonexistent/python", backend="process")
    spec = make_spec(SMALL | {"dataset": str(questions(bed.folder))}, "the test")
    options = LaunchOptions(notify=(events[0],))
    session = RunSession(here, connect, options, spec=spec, home=bed.folder, report=lambda line: None)
    for preview, announced in ((True, []), (False, ["failed"])):
        with pytest.raises(PlanError, match=r"^node2: there is no Python at /nonexistent/python: run site.yml"):
            session.plan(preview)
        assert [one["event"] for one in events[1]] == announced
    session.options = LaunchOptions(min_nodes=1)
    assert session.plan()["lines"][0].startswith("node2 is left out: there is no Python at")
    assert [entry.host for entry in session.state.plan] == ["node1"] and session.state.phase == "new"
    session.options = LaunchOptions(max_restarts=3)
    assert session.plan() == {"changed": False}, "follow restarts it"
    assert session.state.phase == "failed" and "there is no Python" in session.state.failure["msg"]
    assert session.stage()["skipped"] and session.launch()["skipped"]
