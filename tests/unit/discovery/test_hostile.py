"""Malformed, slow, endless and silent servers: none hangs or crashes the scan, and none is accepted as Ollama."""

import asyncio
import time

import pytest
from fake_ollama import HOSTILE, Server, model, serve

from trainyard.discovery.networks import Target
from trainyard.discovery.scan import scan
from trainyard.discovery.settings import Settings


@pytest.mark.parametrize("kind", HOSTILE)
def test_each_hostile_server(kind):
    start = time.perf_counter()
    with serve([Server("127.0.7.1", 18434, kind=kind)]):
        findings = asyncio.run(scan([Target("127.0.7.1", 18434)], Settings(answer_timeout=0.5), {}))
    assert not findings.answers
    [(_, reason)] = findings.rejected
    assert reason.isprintable() and len(reason) < 80
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("kind", ["ollama", "drip_ps"])
def test_an_ssh_server_that_drips_takes_no_longer_than_the_limit_of_answers(kind):
    with serve([Server("127.0.7.1", 18434, kind=kind), Server("127.0.7.1", 18022, kind="drip")]):
        start = time.perf_counter()
        findings = asyncio.run(scan([Target("127.0.7.1", 18434)], Settings(answer_timeout=0.4, ssh_port=18022), {}))
        assert time.perf_counter() - start < 0.75, "the host keys are fetched while the other replies are read"
    assert [(answer.server.version, answer.host_keys) for answer in findings.answers] == [("0.12.3", ())]


@pytest.mark.slow
def test_all_hostile_servers_together_with_a_valid_one():
    servers = [Server(f"127.0.7.{i}", 18434, kind=kind) for i, kind in enumerate(HOSTILE, 2)]
    good = Server("127.0.7.200", 18434, models=[model("tiny")])
    targets = [Target(s.address, s.port) for s in (*servers, good)]
    start = time.perf_counter()
    with serve(servers), serve([good]):  # in another process, because the endless servers keep this one busy
        findings = asyncio.run(scan(targets, Settings(answer_timeout=3), {}))
    assert [a.server.address for a in findings.answers] == ["127.0.7.200"]
    assert len(findings.rejected) == len(HOSTILE)
    assert time.perf_counter() - start < 15


def test_malformed_entries_are_ignored_and_counted():
    bad = [
        model("bell\x07"),
        model("right-to-left\u202e"),
        model("two\nlines"),
        model("x" * 300),
        model(""),
        {"size": 3},
        "text",
        model("size", size="big"),
        model("negative", size=-1),
        model("family", details={"family": 1}),
    ]
    with serve([Server("127.0.7.1", 18434, models=[*bad, model("good"), model("bare", details=None)])]):
        [answer] = asyncio.run(scan([Target("127.0.7.1", 18434)], Settings(), {})).answers
    assert [m.name for m in answer.server.models] == ["bare", "good"]
    assert answer.left_out == len(bad)


def test_verification_can_be_disabled():
    with serve([Server("127.0.7.1", 18434, kind="html")]):
        findings = asyncio.run(scan([Target("127.0.7.1", 18434)], Settings(verify=False), {}))
    assert [(a.server.version, a.server.models) for a in findings.answers] == [("", ())]
