"""Which hosts of a run import before its next start."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from trainyard.connection import FanOut
from trainyard.run.early_imports import RETURN_LIMIT, EarlyImports
from trainyard.run.options import make_options
from trainyard.run.types import PlanEntry


class Hosts:
    """Hosts a, b and c of a run, which record what they are asked."""

    def __init__(self, **options: Any) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self._lock = threading.Lock()
        self.early = EarlyImports(lambda name: Asked(name, self), make_options({"max_restarts": 3} | options))  # type: ignore[arg-type, return-value]
        self.early.note_start(
            PlanEntry(name, rank, [rank], run_dir="/d/runs/r", command=["torchrun"]) for rank, name in enumerate("abc")
        )

    def names(self) -> list[str]:
        FanOut.join_all(10)
        return sorted(name for name, _, _ in self.asked)


class Asked:
    def __init__(self, name: str, hosts: Hosts) -> None:
        self.name, self.hosts = name, hosts

    def start_run(self, request: dict[str, Any], verb: str) -> dict[str, Any]:
        with self.hosts._lock:
            self.hosts.asked.append((self.name, verb, request))
        raise OSError("a host that does not answer is no concern of the run")


FAILED = {"status": "failed"}


@pytest.mark.parametrize(
    ("hosts", "lost", "asked"),
    [
        ({"a": FAILED, "b": FAILED, "c": FAILED}, [], []),  # a rank died: all supervisors wait
        ({"a": FAILED, "b": {"status": "lost"}, "c": FAILED}, [], ["b"]),  # its supervisor died
        ({"a": FAILED, "b": FAILED, "c": {"status": "running"}}, ["c"], []),  # it does not answer
        ({"a": FAILED, "b": FAILED}, [], ["c"]),  # it took no part, and may have returned
        ({}, [], []),  # the start failed, and not the run
    ],
)
def test_hosts_without_a_standby_process_are_asked_after_a_failure(
    hosts: dict[str, Any], lost: list[str], asked: list[str]
) -> None:
    found = Hosts()
    found.early.begin_after({"msg": "failed", "hosts": hosts, "lost": lost})
    assert found.names() == asked == sorted(found.early.requested)


def test_the_request_is_that_of_the_start() -> None:
    found = Hosts(unit_properties=["MemoryMax=1G"])
    found.early.begin(["b", "unknown"])
    assert found.names() == ["b"]
    _, verb, request = found.asked[0]
    assert verb == "prepare" and request["run_dir"] == "/d/runs/r" and request["properties"] == ["MemoryMax=1G"]
    assert request["standby"] == RETURN_LIMIT


@pytest.mark.parametrize("options", [{"standby": "off"}, {"max_restarts": 0}, {"launcher": "slurm"}], ids=str)
def test_nothing_is_asked_where_no_standby_process_may_run(options: dict[str, Any]) -> None:
    found = Hosts(**options)
    found.early.begin(["b"])
    assert found.names() == [] == list(found.early.requested)
