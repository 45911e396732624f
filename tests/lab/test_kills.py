"""Random kills of what a run consists of, on hosts with systemd and their own tables of processes."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from kill_trial import RUN_DIR, VICTIMS, Trials
from lab_hosts import NEEDS_LAB, Host, Lab
from test_ranks_systemd import Site, site

pytestmark = NEEDS_LAB
__all__ = ["site"]
SEEDS = (1, 2, 3)  # one for each host


@pytest.mark.parametrize("count", [pytest.param(int(os.environ.get("KILLS", "100")), marks=pytest.mark.long)])
def test_random_kills_leave_no_process(lab: Lab, site: Site, hosts: list[Host], count: int) -> None:
    site.stage(f"FAKE_RANK={RUN_DIR}/fake_rank.py\n")

    def trials(place: int) -> Trials:
        mine = Trials(lab, hosts[place], SEEDS[place])
        while sum(mine.kills.values()) < count:
            mine.run(sum(mine.kills.values()))
        return mine

    with ThreadPoolExecutor(len(SEEDS)) as pool:
        done = list(pool.map(trials, range(len(SEEDS))))
    for one in done:
        print(f"seed {one.seed}: {sum(one.kills.values())} kills {dict(one.kills)}, slowest trial {one.slowest:.1f} s")
    assert {*sum((one.kills for one in done), Counter())} == {*VICTIMS}
