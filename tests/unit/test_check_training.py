"""The comparison of hosts that each trained alone: the spec, the turns, and the contents of the table."""

import json
from pathlib import Path
from typing import Any

from trainer.spec import make_spec
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.session import RunSession
from trainyard.wire.connection import Host, HostConnection, RemoteError
from trainyard.workflows.check_training import (
    HostCheck,
    check_spec,
    check_training,
    read_metrics,
    result_table,
    turns,
    verdict,
)

OPTIONS = LaunchOptions()


def one(name: str, speed: float = 100.0, loss: float | None = 5.0, error: str = "", address: str = "") -> HostCheck:
    host = Host(name, address or f"10.0.0.{len(name)}", "/d", "/p")
    session = RunSession([host], lambda host: None, OPTIONS)  # type: ignore[arg-type,return-value]
    return HostCheck(host, session, error, "CPU, 4 threads", 1, speed / 50, speed, loss, 0.5)


def test_the_user_changes_what_is_trained() -> None:
    small = check_spec(make_spec({}, "-e"), "r")
    assert (small.model, small.max_steps, small.fake_data, small.run) == ("tiny", 20, True, "r")
    own = check_spec(make_spec({"model": "/m", "max_steps": 50, "dataset": "/d.jsonl", "run": "mine"}, "-e"), "r")
    assert (own.model, own.max_steps, own.fake_data, own.dataset, own.run) == ("/m", 50, False, "/d.jsonl", "r")


def test_hosts_that_are_one_machine_take_turns() -> None:
    checks = [one("a", address="127.0.0.1"), one("b", address="127.0.0.1"), one("c", address="10.0.0.3")]
    assert [[check.host.name for check in turn] for turn in turns(checks)] == [["a", "c"], ["b"]]


def test_the_table_names_the_slowest_host_and_losses_that_differ() -> None:
    checks = [
        one("fast", 200),
        one("slow", 50),
        one("odd", 190, 5.2),
        one("none", 190, None),
        one("broken", error="no"),
    ]
    lines = [line.split() for line in result_table(checks)]
    assert lines[1] == ["fast", "CPU,", "4", "threads", "1", "4.00", "200", "5.0000", "0.50", "GB", "100%"]
    assert [line[-1] for line in lines[1:]] == ["100%", "25%", "95%", "95%", "failed"]
    slowest, odd, none, broken = verdict(checks)
    assert (slowest, broken) == ("warning: slowest: slow, 25% of the tokens/s of fast", "failed: broken: no")
    assert odd.startswith("warning: odd: loss 5.2000 after the same steps, the other hosts have 5.0000: ")
    assert none.startswith("warning: none: no loss after the same steps, the other hosts have 5.0000: ")
    assert verdict([one("fast", 200), one("slow", 190, 5.05)]) == [
        "slowest: slow, 95% of the tokens/s of fast",
        "the losses of 2 hosts are equal within 2%",
    ]
    assert verdict([one("alone")]) == [] and result_table([one("x", error="no")])[1].endswith("failed")


def metrics(*speeds: Any) -> str:
    rows = [
        {"step": n + 1, "loss": 9.0 - n, "tokens": 50, "tokens_per_second": speed} for n, speed in enumerate(speeds)
    ]
    return "".join(json.dumps(record) + "\n" for record in rows)


def test_speed_is_that_of_the_second_half_of_the_steps() -> None:
    check = one("a")
    assert read_metrics(check, metrics(1, 2, 100, 200, 300)) == ""
    assert (check.tokens_per_second, check.steps_per_second, check.loss) == (200, 4, 5.0)
    for text in ("", "[]", "{", metrics(float("nan")), metrics("x"), '{"step": -1}\n', "[" * 10_000):
        assert read_metrics(check, text).isprintable() and read_metrics(check, text)


def test_a_host_that_does_not_answer_is_named_and_the_call_goes_on(tmp_path: Path) -> None:
    class Away:
        kind = "ssh"

        def execute(self, command: str, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
            raise RemoteError("No route to host")

    hosts = [Host(name, f"10.0.0.{len(name)}", "/d", "/p") for name in ("a", "bb")]
    lines: list[str] = []
    spec = check_spec(make_spec({"max_steps": 2}, "-e"), "r")
    how: dict[str, Any] = {"home": tmp_path, "report": lines.append}
    result = check_training(hosts, lambda host: HostConnection(host, Away()), OPTIONS, spec, **how)  # type: ignore[arg-type]
    assert result["failed_hosts"] == ["a", "bb"]
    assert lines == [f"{name}: failed: {name} does not answer: No route to host" for name in ("a", "bb")]
    assert "failed: bb: bb does not answer: No route to host" in result["lines"]
