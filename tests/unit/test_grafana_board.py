"""docs/grafana.json: every expression names metrics and labels that /metrics gives for a cluster with a GPU and a run."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from trainyard.connection import Host
from trainyard.dashboard.prometheus import exposition
from trainyard.dashboard.state import Cluster
from trainyard.dashboard.streams import _parse

BOARD = json.loads((Path(__file__).resolve().parents[2] / "docs/grafana.json").read_text())
GPU = {
    "uuid": "GPU-1",
    "name": "RTX 3090",
    "utilisation_percent": 97,
    "memory_used_mib": 20000,
    "memory_total_mib": 24576,
}
HOST = {
    "cpu_percent": 12.5,
    "memory_total": 64e9,
    "memory_available": 48e9,
    "disk_free": 5e11,
    "received": 1e6,
    "sent": 2e6,
}


def metrics() -> dict[str, set[str]]:
    """Return the labels of every metric that /metrics has for one host that answers, and one run."""
    cluster = Cluster([Host("node1", "127.0.0.1", "/data", "/usr/bin/python3")])
    now = time.time()
    rank = {
        "rank": 0,
        "status": "training",
        "step": 7,
        "steps": 40,
        "loss": 5.3,
        "tokens_per_second": 900.0,
        "time": now,
    }
    node = {"run": "r", "node_rank": 0, "ranks": [0], "hosts": ["node1"], "attempt": 1, "started": now, "ended": None}
    state = {"status": "running", "alive": True, "now": now, "run_dir": "/d", "ranks": {"0": rank}}
    state["node"] = node | {"status": "running", "failures": []}
    more = {"cores": 8, "disk_total": 1e12, "disk_read": 0, "disk_written": 0, "uptime": 5.0, "load": 1.0}
    sample = HOST | more | {"interface": "eth0", "link_mbit": 1000}
    lines: list[dict[str, Any]] = [
        {"kind": "host", "now": now}
        | sample
        | {"gpus": [GPU | {"temperature_c": 70, "power_w": 300, "power_limit_w": 350}]},
        {"kind": "run", "name": "r", "state": state, "checkpoints": [], "result": None},
    ]
    for line in lines:
        kind, content = _parse(json.dumps(line).encode()) or ("", {})
        assert kind == line["kind"], content
        cluster.receive("node1", kind, content)
    families = text_string_to_metric_families(exposition(cluster).decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_the_board_names_what_the_dashboard_gives() -> None:
    known = metrics()
    targets = [(panel["title"], target) for panel in BOARD["panels"] for target in panel["targets"]]
    used: set[str] = set()
    for title, target in targets:
        names = set(re.findall(r"\btrainyard_\w+", target["expr"]))
        assert names and names <= set(known), (title, names - set(known))
        labels = set(re.findall(r"(\w+)=~?\"", target["expr"])) | set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert all(labels <= known[name] for name in names), (title, labels)
        used |= names
    for variable in BOARD["templating"]["list"]:
        found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
        assert found and found[2] in known[found[1]], variable["query"]
    assert set(known) == used  # a new metric gets its place on the board


def test_the_panels_do_not_overlap_and_ask_the_chosen_source() -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert {panel["datasource"]["uid"] for panel in BOARD["panels"]} == {"${DS_PROMETHEUS}"}
    assert [one["name"] for one in BOARD["__inputs"]] == ["DS_PROMETHEUS"]
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
