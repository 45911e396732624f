"""Logs of a run are limited by its supervisor, which follows no link of a rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.supervise.link_free import LinkFreePath
from trainer.supervise.logs import limit_logs
from trainer.supervise.ranks import RankMonitor

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


def test_no_service_of_a_host_touches_folders_of_runs() -> None:
    """Programs such as logrotate follow a link in place of a folder."""
    for path in TOP.glob("roles/*/templates/*.j2"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        assert not any("/runs" in line for line in lines), path
