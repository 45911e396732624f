"""Twelve cases in which SOLLOL 0.9.66 gave a wrong answer; each test has the name of its case."""

import pytest
from fake_ollama import Server, model, serve

from trainyard.discovery.engine import discover
from trainyard.discovery.report import Report
from trainyard.discovery.settings import Settings

pytestmark = pytest.mark.lab


def found(report: Report) -> list[list[str]]:
    return [m.addresses for m in report.machines]


@pytest.fixture
def two(lab):
    """A controller and a node on 10.30.0.0/24, no default route."""
    lab.controller("10.30.0.1/24")
    lab.node("n", "10.30.0.5/24")
    lab.wait_for_links()
    return lab


def local_server(lab, address="10.30.0.1", **more):
    return Server(address, namespace=lab.control, models=[model("local")], **more)


def remote_server(lab, address="10.30.0.5", **more):
    return Server(address, namespace=f"{lab.tag}-n", models=[model("remote")], **more)


def test_1_a_local_ollama_is_one_entry(two):
    with serve([local_server(two), local_server(two, "127.0.0.1")]):
        report = two.run(lambda: discover(Settings()))
    assert found(report) == [["10.30.0.1", "127.0.0.1"]]
    assert report.machines[0].local


def test_2_a_local_ollama_does_not_end_the_search(two):
    with serve([local_server(two, "127.0.0.1"), remote_server(two)]):
        report = two.run(lambda: discover(Settings()))
    assert found(report) == [["10.30.0.5"], ["127.0.0.1"]]


def test_3_ollama_host_0_0_0_0_is_not_a_node(two, monkeypatch):
    monkeypatch.setenv("OLLAMA_HOST", "0.0.0.0")
    with serve([Server("0.0.0.0", namespace=two.control)]):
        report = two.run(lambda: discover(Settings()))
    assert found(report) == [["10.30.0.1", "127.0.0.1"]]


def test_4_a_default_route_is_not_required(two):
    with serve([remote_server(two)]):
        report = two.run(lambda: discover(Settings()))
    assert found(report) == [["10.30.0.5"]]


def test_5_localhost_is_a_node_only_if_it_answers(two):
    report = two.run(lambda: discover(Settings()))
    assert found(report) == []


def test_6_a_second_subnet_is_scanned(two):
    two.card(two.control, "eth1", "192.168.77.1/24")
    two.card(f"{two.tag}-n", "eth1", "192.168.77.5/24")
    two.wait_for_links()
    with serve([remote_server(two, "192.168.77.5")]):
        report = two.run(lambda: discover(Settings()))
    assert found(report) == [["192.168.77.5"]]
    assert report.networks == ("10.30.0.0/24", "192.168.77.0/24")


def test_7_the_netmask_of_the_network_is_used(lab):
    lab.controller("10.30.0.1/23", "10.40.0.1/28")
    lab.node("n", "10.30.1.5/23")
    beyond = lab.node("beyond", "10.40.0.200/24")
    lab.wait_for_links()
    with serve([remote_server(lab, "10.30.1.5"), Server("10.40.0.200", namespace=beyond)]):
        report = lab.run(lambda: discover(Settings()))
    assert found(report) == [["10.30.1.5"]]
    assert report.addresses == 510 + 14 + 1


def test_8_aliases_are_one_machine(two):
    two.ip(f"{two.tag}-n", "addr add 10.30.0.6/24 dev eth0", "addr add 10.30.0.7/24 dev eth0")
    with serve([remote_server(two), remote_server(two, "10.30.0.6"), remote_server(two, "10.30.0.7")]):
        report = two.run(lambda: discover(Settings()))
    assert found(report) == [["10.30.0.5", "10.30.0.6", "10.30.0.7"]]


def test_9_ten_slash_eight_is_not_docker(two):
    with serve([remote_server(two), local_server(two, "127.0.0.1")]):
        report = two.run(lambda: discover(Settings()))
    assert ["10.30.0.5"] in found(report)


def test_10_http_200_is_not_ollama(two):
    with serve([Server("10.30.0.5", namespace=f"{two.tag}-n", kind="html")]):
        report = two.run(lambda: discover(Settings()))
    assert found(report) == []
    assert report.rejected == (("10.30.0.5 port 11434", "/api/version is not JSON"),)


def test_11_a_server_slower_than_half_a_second_is_found(two):
    with serve([remote_server(two, delay=0.9)]):
        report = two.run(lambda: discover(Settings()))
    assert found(report) == [["10.30.0.5"]]


def test_12_the_order_is_the_same_every_time(lab):
    lab.controller("10.30.0.1/24")
    delays = {9: 0.2, 10: 0.0, 25: 0.1, 200: 0.05}
    servers = [
        Server(f"10.30.0.{i}", namespace=lab.node(f"n{i}", f"10.30.0.{i}/24"), delay=d, models=[model(f"m{i}")])
        for i, d in delays.items()
    ]
    lab.wait_for_links()
    with serve(servers):
        reports = [lab.run(lambda: discover(Settings())) for _ in range(3)]
    assert [found(r) for r in reports] == [[["10.30.0.9"], ["10.30.0.10"], ["10.30.0.25"], ["10.30.0.200"]]] * 3
