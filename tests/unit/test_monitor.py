"""The evaluation of the statuses of hosts: the cause among its consequences, a stall, progress lines, the status
table."""

from pathlib import Path
from typing import Any

import pytest

from trainyard.run.follow import monitor
from trainyard.run.follow.monitor import Progress, causes
from trainyard.run.follow.run_status import gpu_cell, status_rows
from trainyard.run.host_run import HostRun, killed_ranks


def part(host: str, rank: int, status: str = "running", **more: Any) -> HostRun:
    state = {"rank": rank, "status": "training", "step": 5, "steps": 80, "loss": 5.0, "time": 1.0, "pid": 1}
    state |= more.pop("state", {})
    silent, error = more.pop("silent", 0.0), more.pop("error", "")
    node = {"status": status, "failures": [], "exit_code": None, "node_rank": rank} | more.pop("node", {})
    answer = {"status": status, "node": node, "ranks": {str(rank): state}, "now": 100.0} | more
    return HostRun(host, "/d/runs/r", rank, [rank], answer, silent, error)


def failed(rank: int, code: int | None = 1, signal: str | None = None) -> dict[str, Any]:
    return {"failures": [{"rank": rank, "exit_code": code, "signal": signal, "pid": 1}]}


def error(message: str, secondary: bool = False, plain: bool = False) -> dict[str, Any]:
    told = {"type": "RuntimeError", "message": message, "traceback": "", "plain": plain, "secondary": secondary}
    return {"status": "failed", "error": told}


LOST_PEERS = error("Connection closed by peer", secondary=True)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (part("b", 1, node=failed(1, -9, "SIGKILL")), "rank 1 on b was killed by SIGKILL"),
        (
            part("b", 1, node=failed(1, -9, "SIGKILL") | {"oom": True}),
            "rank 1 on b was killed by SIGKILL, while its machine was out of memory",
        ),
        (part("b", 1, state=error("too big")), "rank 1 on b: RuntimeError: too big"),
        (part("b", 1, state=error("no file\nmore", plain=True)), "rank 1 on b: no file"),
        (part("b", 1, "lost", why="oom-kill"), "the supervisor on b has exited (oom-kill)"),
        (part("b", 1, "lost", why=""), "the supervisor on b has exited"),
        (part("b", 1, silent=12.0, error="No route to host"), "b has not answered for 12 s (No route to host)"),
        (part("b", 1, "failed", node={"exit_code": -9}), "torchrun on b was killed by SIGKILL"),
    ],
)
def test_the_cause_beats_its_consequences(broken: HostRun, says: str) -> None:
    others = [part("a", 0, "failed", state=LOST_PEERS, node=failed(0)), part("c", 2, node=failed(2, -6, "SIGABRT"))]
    found = causes([others[0], broken, others[1]], lost_limit=10)
    assert found[0].text == says
    assert found[0].sure


@pytest.mark.parametrize(
    "weak",
    [
        part("a", 0, state=LOST_PEERS),
        part("a", 0, node=failed(0, -15, "SIGTERM")),
        part("a", 0, node=failed(0, -6, "SIGABRT")),
        part("a", 0, node=failed(0, None)),
        part("a", 0, "failed", node={"exit_code": 1}),
    ],
)
def test_what_may_be_a_consequence_is_not_sure(weak: HostRun) -> None:
    (found,) = causes([weak, part("b", 1)], lost_limit=10)
    assert not found.sure


def test_a_full_disk_before_the_first_heartbeat_is_the_cause_and_not_the_errors_of_peers() -> None:
    silent = part("b", 1, node=failed(1), disk_full=True)
    silent.answer["ranks"] = {}  # type: ignore[index]
    found = causes([part("a", 0, state=LOST_PEERS, node=failed(0)), silent], lost_limit=10)
    assert (found[0].text, found[0].blocked_by) == ("b: the disk is full", "disk")
    assert causes([part("a", 0), part("b", 1, disk_full=True)], lost_limit=10) == [], "ranks may need no space"


def test_a_supervisor_that_is_halted_is_a_cause() -> None:
    halted = part("b", 1)
    assert causes([part("a", 0), halted], lost_limit=10) == []
    halted.halted = 11.0
    (found,) = causes([part("a", 0), halted], lost_limit=10)
    assert found.sure and found.text == "the supervisor on b is halted (SIGSTOP or a debugger)"


def test_a_healthy_run_has_no_cause() -> None:
    ended_badly = part(
        "a", 0, "finished", state={"status": "finished"}, node={"exit_code": 1} | failed(0, -6, "SIGABRT")
    )
    assert causes([ended_badly, part("b", 1, silent=3.0), part("c", 2, "stopped")], lost_limit=10) == []
    assert causes([part("a", 0, "finished", silent=99.0)], lost_limit=10) == [], "a part that has ended need not answer"


def test_torchrun_may_restart_its_ranks_itself() -> None:
    restarting = part("a", 0, node=failed(0, -9, "SIGKILL") | {"restarts": True}, state=error("x"))
    assert causes([restarting], lost_limit=10) == []
    assert causes([part("a", 0, "failed", node=failed(0, -9, "SIGKILL") | {"restarts": True})], lost_limit=10)


def test_progress_is_reported_at_most_once_per_interval() -> None:
    progress = Progress(world_size=4, interval=2.0, stall_limit=600)
    state = {"step": 12, "loss": 5.3123, "tokens_per_second": 1890.2, "eta": 42.0}
    lines = progress.lines([part("a", 0, state=state)], now=10.0)
    assert lines == ["step 12/80  loss 5.312  1.9k tok/s  ETA 0:42  (4 ranks)"]
    assert progress.lines([part("a", 0, state=state | {"step": 13})], now=11.0) == []
    assert len(progress.lines([part("a", 0, state=state | {"step": 14})], now=12.0)) == 1
    assert progress.lines([part("a", 0, state=state | {"step": 14})], now=15.0) == []


@pytest.mark.parametrize("status", ["training", "finished"])
def test_the_last_step_is_reported_at_once_and_without_an_eta(status: str) -> None:
    """A status may arrive between a rank's last step and its last heartbeat."""
    progress = Progress(world_size=4, interval=2.0, stall_limit=600)
    progress.shown_at = 15.0
    last = {"step": 80, "loss": 5.3123, "tokens_per_second": 1890.2, "eta": 0.0, "status": status}
    assert progress.lines([part("a", 0, state=last)], now=15.1) == ["step 80/80  loss 5.312  1.9k tok/s  (4 ranks)"]


def test_ranks_of_a_stopped_part_that_did_not_exit_by_themselves() -> None:
    assert killed_ranks(part("a", 3, "stopped")) == [3]
    assert killed_ranks(part("a", 3, "stopped", state={"status": "stopped"})) == []
    assert killed_ranks(part("a", 3, "stopped", state=LOST_PEERS)) == []
    assert killed_ranks(part("a", 3, "running")) == []


def test_a_phase_is_reported_once() -> None:
    progress = Progress(1, 2.0, 600)
    saving = part("a", 0, state={"status": "saving", "loss": None})
    assert progress.lines([saving], 0.0) == ["saving a checkpoint"]
    assert progress.lines([saving], 1.0) == []
    assert progress.lines([part("a", 0, state={"loss": None})], 1.5) == []
    noted = part("a", 0, state={"status": "starting", "loss": None, "note": "reading the model"})
    assert progress.lines([noted], 2.0) == ["starting: reading the model"]


def test_the_step_of_a_resumed_run_is_reported_once_per_start() -> None:
    progress = Progress(1, 2.0, 600)
    resumed = part("a", 0, state={"status": "starting", "loss": None, "resumed": 40})
    said = "resuming from the checkpoint of step 40"
    assert progress.lines([resumed], 0.0) == [said, "starting"]
    assert progress.lines([resumed], 1.0) == []
    # torchrun has restarted the rank, which has not read its checkpoint yet.
    assert said not in progress.lines([part("a", 0, state={"status": "starting", "loss": None})], 2.0)
    assert progress.lines([resumed], 3.0)[0] == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [([0.1, 0.2], ["rank 1 on b takes 0.2 s per step, the other ranks 0.1 s: they wait for it"]), ([0.1, 0.12], [])],
)
def test_a_slow_rank_is_reported_once(seconds: list[float], said: list[str]) -> None:
    progress, lines = Progress(2, 0.0, 600), []
    for step in range(1, 12):
        parts = [part("a", 0, state={"step": step, "step_seconds": seconds}), part("b", 1, state={"step": step})]
        lines += [line for line in progress.lines(parts, 0.0) if "per step" in line]
    assert lines == said


def test_a_stall_needs_all_ranks_to_make_no_progress() -> None:
    progress = Progress(2, 2.0, stall_limit=60)
    waiting = part("a", 0)
    assert progress.stalled([waiting, part("b", 1)], 0.0) is None
    evaluating = part("b", 1, state={"time": 2.0})
    assert progress.stalled([waiting, evaluating], 50.0) is None
    assert progress.stalled([waiting, evaluating], 109.0) is None
    found = progress.stalled([waiting, part("b", 1, state={"time": 2.0, "process": "T"})], 111.0)
    assert found and found.text == "no progress for 60 s: rank 1 on b is halted (SIGSTOP or a debugger) at step 5"


def test_waiting_for_a_rank_that_hangs_is_no_progress() -> None:
    """A DiLoCo replica that waits updates its heartbeat repeatedly."""
    said = (Path(__file__).parents[2] / "trainer/loop/train.py").read_text()
    assert f'note="{monitor.WAITING}"' in said, "the note of the trainer and the one of the monitor are the same"
    progress = Progress(2, 2.0, stall_limit=60)
    for now in (0.0, 30.0, 61.0):
        waiting = part("a", 0, state={"step": 10, "note": monitor.WAITING, "time": now})
        found = progress.stalled([waiting, part("b", 1)], now)
    assert found and found.text == "no progress for 60 s: rank 1 on b is the slowest rank, at step 5 (training)"


def test_a_rank_without_a_heartbeat_stalls_too() -> None:
    progress = Progress(1, 2.0, stall_limit=60)
    silent = HostRun("a", "/d", 0, [0], {"status": "running", "node": {}, "ranks": {}})
    assert progress.stalled([silent], 0.0) is None
    found = progress.stalled([silent], 61.0)
    assert found and "rank 0 on a has not written a heartbeat yet" in found.text


def test_status_table() -> None:
    (row,) = status_rows(
        "a", part("a", 0).answer | {"run_dir": "/d/runs/r", "node": {"ranks": [0], "status": "running"}}
    )
    assert row == ["r", "a", "0", "training", "5/80", "5", "-", "-", "1:39 ago"]
    rewarded = part("a", 0, state={"reward": 0.375})
    (row,) = status_rows("a", rewarded.answer | {"run_dir": "/d/runs/r", "node": {"ranks": [0], "status": "running"}})
    assert row[5] == "5, reward 0.375"
    assert monitor.progress_line(rewarded.state(0), 2).startswith("step 5/80  loss 5  reward 0.375  ")
    assert gpu_cell({"utilisation_percent": 87.2, "memory_peak_gb": 11.24}) == "87% 11.2GB"
    use = {
        "utilisation_percent": 87.2,
        "memory_gb": 12.0,
        "memory_peak_gb": 11.24,
        "temperature_c": 65,
        "power_w": 240.5,
    }
    assert gpu_cell(use) == "87% 12.0GB 65C 240W"


def test_the_gpus_are_shown_at_intervals_while_the_run_is_followed() -> None:
    progress = Progress(2, 0.0, stall_limit=60)
    lines: list[list[str]] = []
    for now, step in ((0.0, 5), (5.0, 6), (11.0, 7)):
        state = {"step": step, "gpu": {"utilisation_percent": 90, "power_w": 300}}
        lines.append(progress.lines([part("a", 0, state=state), part("b", 1, state=state | {"gpu": {}})], now))
    assert [line[1:] for line in lines] == [["GPU  rank 0 90% 300W"], [], ["GPU  rank 0 90% 300W"]]
    many = {rank: {"gpu": {"power_w": 1.0}} for rank in range(20)}
    assert monitor.gpu_line(many).endswith("rank 15 1W, 4 more ranks")


def test_the_imports_before_the_first_heartbeat_are_shown_once() -> None:
    progress, before = Progress(1, 2.0, stall_limit=60), part("a", 0)
    before.answer["ranks"] = {}
    assert progress.lines([before], 0.0) == ["starting: importing torch"]
    assert progress.lines([before], 1.0) == []
    first = part("a", 0, state={"status": "starting", "note": "importing torch", "step": None, "loss": None})
    assert progress.lines([first], 2.0) == []
    first.answer["ranks"]["0"]["note"] = "loading the model"
    assert progress.lines([first], 3.0) == ["starting: loading the model"]
