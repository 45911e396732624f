"""The conditions under which a standby process may serve a start: a comparison of the inputs of its modules."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.supervise.link_free import link_free
from trainer.supervise.standby import LATE, LAUNCHER, Imports, installed_packages, may_serve
from trainer.supervise.start import may_reach
from trainer.supervise.start_request import StartRequest

BASE = Imports("/venv/bin/python", "p", "t", {"OMP_NUM_THREADS": "2", "LD_PRELOAD": "/lib/a.so", "TOKEN": "secret-one"})


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (BASE, ""),
        (replace(BASE, interpreter="/other/python"), "the interpreter changed"),
        (replace(BASE, packages="q"), "the installed packages changed"),
        (replace(BASE, trainer="u"), "the trainer changed"),
        (replace(BASE, variables={**BASE.variables, "TOKEN": "secret-two"}), "the variable TOKEN changed"),
    ],
)
def test_the_first_difference_is_named_without_a_value(other: Imports, says: str) -> None:
    assert BASE.difference(other) == says and other.difference(BASE) == says
    assert "secret" not in says


@pytest.mark.parametrize("seed", range(10))
def test_any_variable_counts_but_those_that_are_read_late(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    names = [f"V{n}" for n in range(8)] + sorted(LATE)
    before = {name: str(draw.randrange(3)) for name in names if draw.random() < 0.7}
    after = {name: str(draw.randrange(3)) for name in names if draw.random() < 0.7}
    if draw.random() < 0.5:
        after = {**before, **{name: "new" for name in LATE if draw.random() < 0.5}}
    differs = {name for name in names if before.get(name) != after.get(name)} - LATE
    found = Imports.now("python", link_free(tmp_path), before).difference(
        Imports.now("python", link_free(tmp_path), after)
    )
    assert found == (f"the variable {min(differs)} changed" if differs else "")


def test_a_changed_trainer_or_package_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site-packages"
    (site / "torch-2.0.dist-info").mkdir(parents=True)
    metadata = site / "torch-2.0.dist-info/METADATA"
    metadata.write_text("Version: 2.0")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site), str(tmp_path / "missing")])
    first = installed_packages()
    assert installed_packages() == first
    os.utime(metadata, (1, 1))  # installed again
    second = installed_packages()
    (site / "peft-1.0.dist-info").mkdir()
    (site / "extra.pth").write_text("/srv/more")
    assert len({first, second, installed_packages()}) == 3
    (site / "torch").mkdir()  # a cache of compiled modules changes folders, but no package
    assert installed_packages() == installed_packages()
    (tmp_path / "trainer.zip").write_bytes(b"one")
    one = Imports.now("python", link_free(tmp_path), {})
    (tmp_path / "trainer.zip").write_bytes(b"two")
    assert one.difference(Imports.now("python", link_free(tmp_path), {})) == "the trainer changed"


def test_only_torchrun_of_this_interpreter_is_served() -> None:
    assert may_serve([sys.executable, *LAUNCHER, "--nnodes=1"])
    assert not may_serve(["/other/python", *LAUNCHER])
    assert not may_serve([sys.executable, "-m", "trainer.other", "spec.yml"])


def test_a_unit_serves_starts_that_need_no_other_addresses() -> None:
    assert may_reach(["a", "b", "c"], ["a", "c"]) and may_reach(["a"], ["a"]) and may_reach([], [])
    assert not may_reach(["a", "b"], ["a", "d"])
    assert not may_reach(["a"], []), "the start needs other machines"
    assert not may_reach([], ["a"]), "the unit has no limit, the start wants one"


def test_what_a_start_hands_over_survives_the_command_line() -> None:
    request = StartRequest(
        "/r", ["python", "-m", "x", "--flag"], standby=180.0, settings="ab12", reachable=["10.0.0.1", "fe80::1"]
    )
    assert StartRequest.read(request.to_json()) == request
