"""The scan with real servers, hostile servers, timeouts and kernel tables."""

import asyncio
import time

import pytest
from fake_ollama import HOSTILE, Server, model, serve

from trainyard.discovery import scan as scanning
from trainyard.discovery.engine import discover
from trainyard.discovery.networks import Target
from trainyard.discovery.scan import scan
from trainyard.discovery.scan_result import ScanReport
from trainyard.discovery.settings import Settings


def calls(lab, settings: Settings, limit: float) -> list[ScanReport]:
    """Repeat the call until one takes at most `limit` seconds, because the machine may be busy."""
    reports: list[ScanReport] = []
    while not any(r.seconds <= limit for r in reports):
        assert len(reports) < 20, f"{[r.seconds for r in reports]} s, not one within {limit} s"
        reports.append(lab.run(lambda: discover(settings)))
    return reports


def found(report: ScanReport) -> list[str]:
    return [m.addresses[0] for m in report.machines]


@pytest.mark.lab
@pytest.mark.parametrize("live", [8, 40])
def test_a_24_is_scanned_within_120_percent_of_the_timeout(lab24, live):
    # 40 namespaces exist; those without a server must be silent, not refuse.
    quiet = [] if live == 40 else [f"10.9.0.{i}" for i in range(11 + live, 51)]
    servers = [
        Server(f"10.9.0.{i}", namespace=f"{lab24.tag}-n{i}", models=[model(f"m{i}")]) for i in range(11, 11 + live)
    ]
    settings = Settings(networks=("10.9.0.0/24",), exclude=tuple(quiet), this_machine=False)
    with serve(servers):
        reports = calls(lab24, settings, 1.2 * settings.connect_timeout)
    assert all(found(r) == [s.address for s in servers] for r in reports)


@pytest.mark.lab
def test_servers_that_answer_in_450_ms_are_all_found_in_under_600_ms(lab24):
    servers = [Server(f"10.9.0.{i}", namespace=f"{lab24.tag}-n{i}", delay=0.45) for i in range(11, 19)]
    with serve(servers):
        reports = calls(lab24, Settings(this_machine=False), 0.6)
    assert all(len(r.machines) == 8 for r in reports)


@pytest.mark.lab
def test_all_attached_networks_are_scanned_with_their_netmask(lab, monkeypatch):
    """Without a default route. A local Ollama at two addresses is one machine, and does not end the search."""
    monkeypatch.setenv("OLLAMA_HOST", "0.0.0.0")
    lab.controller("10.30.0.1/23", "10.40.0.1/28")
    lab.card(lab.control, "eth1", "192.168.77.1/24")
    node, other = lab.node("n", "10.30.1.5/23", "10.30.1.6/23"), lab.node("other", "192.168.77.5/24")
    beyond = lab.node("beyond", "10.40.0.200/24")
    lab.wait_for_links()
    servers = [Server(a, namespace=node) for a in ("10.30.1.5", "10.30.1.6")]
    servers.append(Server("192.168.77.5", namespace=other))
    with serve([*servers, Server("0.0.0.0", namespace=lab.control), Server("10.40.0.200", namespace=beyond)]):
        report = lab.run(lambda: discover(Settings()))
    local = ["10.30.0.1", "10.40.0.1", "192.168.77.1", "127.0.0.1"]
    assert [m.addresses for m in report.machines] == [local, ["10.30.1.5"], ["10.30.1.6"], ["192.168.77.5"]]
    assert [m.local for m in report.machines] == [True, False, False, False]
    assert report.addresses == 510 + 14 + 254 + 1


@pytest.mark.lab
def test_the_second_pass_scans_silent_addresses_only(lab):
    lab.controller("10.21.0.1/28")
    node = lab.node("n", "10.21.0.5/28")
    lab.wait_for_links()
    settings = {"connect_timeout": 0.2, "this_machine": False}
    with serve([Server("10.21.0.5", namespace=node)]):
        once = lab.run(lambda: discover(Settings(**settings)))
        twice = lab.run(lambda: discover(Settings(**settings, passes=2, second_timeout=0.5)))
    assert once.silent == twice.silent == 12  # 14 addresses without the controller's and the server's
    assert once.refused == twice.refused == 0
    assert once.seconds < 0.4 <= twice.seconds < 1.1
    assert len(twice.machines) == 1


@pytest.mark.parametrize("kind", ["ollama", "segments", "to_the_end", "without_ps"])
def test_replies_are_read_to_their_end(kind):
    models = [model("qwen2.5:0.5b"), model("llama3.2:1b", "llama")]
    loaded = [{"name": "qwen2.5:0.5b", "size": 900, "size_vram": 700}]
    with serve([Server("127.0.4.1", 18434, kind=kind, models=models, loaded=loaded)]):
        [answer] = asyncio.run(scan([Target("127.0.4.1", 18434)], Settings(), {})).answers
    assert [(m.name, m.family, m.parameters, m.quantisation) for m in answer.server.models] == [
        ("llama3.2:1b", "llama", "494.03M", "Q4_K_M"),
        ("qwen2.5:0.5b", "qwen2", "494.03M", "Q4_K_M"),
    ]
    assert [(m.name, m.size, m.vram) for m in answer.server.loaded] == (
        [] if kind == "without_ps" else [("qwen2.5:0.5b", 900, 700)]
    )


def test_results_are_in_the_order_of_addresses():
    delays = {"127.0.4.9": 0.0, "127.0.4.10": 0.3, "127.0.4.2": 0.15}
    with serve([Server(a, 18434, delay=d) for a, d in delays.items()]):
        targets = [Target(a, 18434) for a in ("127.0.4.2", "127.0.4.9", "127.0.4.10")]
        answers = asyncio.run(scan(targets, Settings(), {})).answers
    assert [a.server.address for a in answers] == ["127.0.4.2", "127.0.4.9", "127.0.4.10"]


def test_a_large_network_is_scanned_with_pauses(monkeypatch):
    monkeypatch.setattr(scanning, "UNPACED", 3)
    monkeypatch.setattr(scanning, "RATE", 10)
    targets = [Target(f"127.0.4.{i}", 18435) for i in range(1, 5)]
    start = time.perf_counter()
    assert len(asyncio.run(scan(targets, Settings(concurrency=2), {})).refused) == 4
    assert 0.2 <= time.perf_counter() - start < 1


@pytest.mark.slow
def test_many_open_ports_do_not_exhaust_files():
    """600 open ports in a process that may open 512 files."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    targets = [Target(f"127.0.{5 + i // 200}.{1 + i % 200}", 18434) for i in range(600)]
    with serve([Server(t.address, 18434) for t in targets]):
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        try:
            findings = asyncio.run(scan(targets, Settings(answer_timeout=10), {}))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(findings.answers) == 600


def test_a_refused_port_takes_no_time():
    start = time.perf_counter()
    findings = asyncio.run(
        scan([Target(f"127.0.4.{i}", 18435) for i in range(1, 200)], Settings(connect_timeout=5), {})
    )
    assert len(findings.refused) == 199
    assert time.perf_counter() - start < 1


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
    bad = [*map(model, ["bell\x07", "right-to-left\u202e", "two\nlines", "x" * 300, ""]), {"size": 3}, "text"]
    bad += [model("size", size="big"), model("negative", size=-1), model("family", details={"family": 1})]
    with serve([Server("127.0.7.1", 18434, models=[*bad, model("good"), model("bare", details=None)])]):
        [answer] = asyncio.run(scan([Target("127.0.7.1", 18434)], Settings(), {})).answers
    assert [m.name for m in answer.server.models] == ["bare", "good"]
    assert answer.left_out == len(bad)


def test_verification_can_be_disabled():
    with serve([Server("127.0.7.1", 18434, kind="html")]):
        findings = asyncio.run(scan([Target("127.0.7.1", 18434)], Settings(verify=False), {}))
    assert [(a.server.version, a.server.models) for a in findings.answers] == [("", ())]
