"""The list of runs: which ones it leaves out."""

from pathlib import Path
from typing import Any

import pytest
from lying_host import NOW, Cluster, node
from tables import table

from trainyard.run.follow.manage_runs import manage_runs
from trainyard.run.host_run import HostRun
from trainyard.run.launch.start_ranks import stop_lines
from trainyard.run.launch_options import make_options
from trainyard.wire.run_errors import RunError

OPTIONS = make_options({"lost_limit": 10.0})


def states(count: int, alive: str) -> list[dict[str, Any]]:
    """Return `count` ended runs, run0 being the oldest, except for the live one."""
    return [
        {
            "run_dir": f"/data/runs/run{n}",
            "now": NOW + 100,
            "alive": f"run{n}" == alive,
            "status": "running" if f"run{n}" == alive else "finished",
            "node": node(0) | {"run": f"run{n}", "started": NOW + n, "status": "running" if f"run{n}" == alive else "finished"},
            "ranks": {},
            "others": [],
        }
        for n in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("count", "every", "run", "hidden"),
    [(14, False, "", 3), (14, True, "", 0), (14, False, "run1", 0), (11, False, "", 0)],
)
def test_old_runs_are_listed_on_request(tmp_path: Path, count: int, every: bool, run: str, hidden: int) -> None:
    cluster = Cluster(tmp_path)
    for transport in cluster.transports.values():
        transport.lie = lambda verb, request, truth: (
            {"now": NOW, "runs": states(count, "run0"), "skipped": []} if verb == "run_list" else truth
        )
    found = manage_runs("listed", run, cluster.hosts, cluster.connect, OPTIONS, print, every=every)
    names = {line.split()[0] for line in found["lines"] if line.startswith("run") and not line.startswith("run ")}
    expected = {f"run{n}" for n in range(count)} if not run else {run}
    assert names == expected - {f"run{n}" for n in range(1, hidden + 1)}, "run0 is alive, and the others are old"
    said = [line for line in found["lines"] if "not listed" in line]
    assert said == ([f"{hidden} older runs not listed: -e all=true lists all runs, -e run=NAME one"] if hidden else [])
    assert len(found["runs"]) == 2 * (1 if run else count), "the result has all runs"


def test_a_run_whose_record_is_unreadable_is_listed_as_alive_and_can_be_stopped(tmp_path: Path) -> None:
    cluster, stopped, plain = Cluster(tmp_path), [], []
    wrong, renamed = states(2, "run0")
    wrong["node"] = {"status": "running", "attempt": "x"}
    renamed |= {"alive": True, "node": renamed["node"] | {"run": "another"}}

    def lie(verb: str, request: dict[str, Any], truth: Any) -> Any:
        if verb == "run_list":
            return {"now": NOW, "runs": [wrong, renamed], "skipped": []}
        if verb == "run_status" and request["run_dir"].endswith("run0"):
            if request.get("plain"):
                plain.append(request)
                return wrong | {"node": None, "status": "none" if stopped else "unreadable", "alive": not stopped}
            return wrong
        if verb == "run_status":
            return renamed
        if verb == "run_stop":
            stopped.append(request["run_dir"].rpartition("/")[2])
            return {"status": "none", "killed": 1}
        return truth

    cluster.transports["node1"].lie = lie
    here = cluster.hosts[:1]
    lines = manage_runs("listed", "", here, cluster.connect, OPTIONS, print)["lines"]
    assert any(line.split()[:5] == ["run0", "node1", "-", "alive,", "unreadable"] for line in lines), lines
    with pytest.raises(RunError, match=r"node1: run run0 is alive, but its record .*node\.json is unreadable: stop"):
        manage_runs("followed", "run0", here, cluster.connect, OPTIONS, print)
    said: list[str] = []
    done = manage_runs("stopped", "", here, cluster.connect, OPTIONS, said.append, every=True)
    assert list(done["runs"]) == stopped == ["run0", "run1"] and plain, "by the names of their folders"
    assert said[0].startswith("run run0: node1 stopped")


# What a stop reports -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "lease", "alive", "hints"), table("stop_lines")["a_run_that_may_wait_in_the_queue"])
def test_a_run_in_the_queue_is_not_said_to_be_over(status: str, lease: str | None, alive: bool, hints: int) -> None:
    part = HostRun("node1", "/srv/t/runs/r", answer={"status": status, "node": {"lease": lease}, "ranks": {}})
    lines = stop_lines("r", [part], alive, {"grace": 60.0})
    assert " step " not in lines[0]
    assert [line.partition(":")[0] for line in lines[1:]] == ["if it waits in the queue, it starts again"] * hints


@pytest.mark.parametrize(
    ("statuses", "step"),
    [(("stopped", "stopped"), " after step 12"), (("stopped", "training"), "")],  # rank 1 was killed
)
def test_the_step_is_named_if_all_ranks_stopped_by_themselves(statuses: tuple[str, str], step: str) -> None:
    parts = [
        HostRun(
            f"node{n + 1}",
            "/srv/t/runs/r",
            ranks=[n],
            answer={"status": "stopped", "ranks": {str(n): {"status": status, "step": 12}}},
        )
        for n, status in enumerate(statuses)
    ]
    assert stop_lines("r", parts, True, {"grace": 60.0})[0] == f"run r: node1 stopped, node2 stopped{step}"
