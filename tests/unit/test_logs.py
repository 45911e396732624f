"""Logs of a run are limited by its supervisor, which follows no link of a rank."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from trainer.supervise.link_free import LinkFreePath, run_folder
from trainer.supervise.logs import limit_logs
from trainer.supervise.ranks import REPORT_LIMIT, RankMonitor
from trainer.supervise.run_files import DEVICE_LIMIT, RANKS_LIMIT, RECORD_LIMIT, read_node, read_ranks, run_devices

TOP = Path(__file__).resolve().parents[2]


def test_a_large_log_is_emptied_and_its_end_is_kept(tmp_path: Path) -> None:
    (tmp_path / "small.log").write_text("12345678")
    (tmp_path / "rank0.log.1").write_text("earlier")
    with (tmp_path / "rank0.log").open("a") as rank:
        rank.write("the beginning")
        rank.flush()
        limit_logs(LinkFreePath(tmp_path), 8)
        rank.write("next")
    contents = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert contents == {"small.log": "12345678", "rank0.log": "next", "rank0.log.1": "eginning"}


@pytest.mark.parametrize("what", ["folder", "log", "earlier", "fifo"])
def test_no_link_of_a_rank_is_followed(what: str, tmp_path: Path) -> None:
    home, run = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    (home / "000003.log").write_text("a data base")
    (home / "000003.log.1").write_text("of the user")
    run.mkdir()
    if what == "folder":
        (run / "logs").symlink_to(home)
    else:
        (run / "logs").mkdir()
        log = run / "logs/000003.log"
        log.write_text("a large log")
        match what:
            case "log":
                log.unlink()
                log.symlink_to(home / "000003.log")
            case "earlier":
                (run / "logs/000003.log.1").symlink_to(home / "000003.log.1")
            case _:
                os.mkfifo(run / "logs/0.log")
    limit_logs(LinkFreePath(run, "logs"), 8)
    assert {path.name: path.read_text() for path in home.iterdir()} == {
        "000003.log": "a data base",
        "000003.log.1": "of the user",
    }
    assert what not in ("earlier", "fifo") or (run / "logs/000003.log.1").read_text() == "arge log"


def test_failures_are_read_from_a_log_that_was_emptied(tmp_path: Path) -> None:
    log = LinkFreePath(tmp_path, "torchrun.0.log")
    log.write(b"lines of the start before\n" * 10)
    ranks = RankMonitor(LinkFreePath(tmp_path), log, [3], renumbered=False)
    with log.open_append() as file:
        file.truncate(0)
        file.write(b"failed (exitcode: 7) local_rank: 0 (pid: 5)\n")
    ranks.read_log()
    assert [(entry["rank"], entry["exit_code"]) for entry in ranks.failures] == [(3, 7)]


def test_torchrun_has_a_moment_to_report_a_rank_that_has_exited(tmp_path: Path) -> None:
    log = LinkFreePath(tmp_path, "torchrun.0.log")
    log.write(b"")
    ranks = RankMonitor(LinkFreePath(tmp_path), log, [3], renumbered=False)
    with subprocess.Popen(["true"]) as rank:
        ranks._pids = {3: rank.pid}
    assert not ranks.update(0) and not ranks.failures
    ranks._gone[3] -= REPORT_LIMIT
    assert ranks.update(0) and [(entry["rank"], entry["exit_code"]) for entry in ranks.failures] == [(3, None)]


def test_no_service_of_a_host_touches_folders_of_runs() -> None:
    """Programs such as logrotate follow a link in place of a folder."""
    for path in TOP.glob("roles/*/templates/*.j2"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        assert not any("/runs" in line for line in lines), path


# Records in a run folder ---------------------------------------------------------------------------------------------

NODE = {"status": "running", "started": 1.0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "runs/r/state").mkdir(parents=True)
    return tmp_path / "runs/r"


def test_one_large_heartbeat_with_many_names_is_read_a_few_times(run: Path) -> None:
    first = run / "state/rank0.json"
    first.write_text(json.dumps({"rank": 0, "x": "a" * (RECORD_LIMIT - 40)}))
    for name in range(1, 200):
        os.link(first, run / f"state/rank{name}.json")
    (run / "state/rank-other.json").write_text("{}")
    assert len(read_ranks(run_folder(str(run)))) == RANKS_LIMIT // RECORD_LIMIT


@pytest.mark.parametrize(
    "more", [{"x": "a" * RECORD_LIMIT}, {"x": [[[[[[[0]]]]]]]}, {"x": {"a": {"b": {"c": {"d": {"e": {"f": {}}}}}}}}]
)
def test_a_large_or_deep_record_counts_as_none(run: Path, more: dict[str, object]) -> None:
    for name in ("node", "rank0"):
        (run / f"state/{name}.json").write_text(json.dumps(NODE | more))
    assert read_node(run_folder(str(run))) is None and read_ranks(run_folder(str(run))) == []


def test_a_record_names_few_devices(run: Path) -> None:
    named = [7, "x\n", *(f"GPU-{number}" for number in range(1000))]
    (run / "state/node.json").write_text(json.dumps(NODE | {"devices": named}))
    found = run_devices(run_folder(str(run)))
    assert found[0] == "GPU-0" and len(found) == DEVICE_LIMIT - 2
