"""docs/grafana.json: every expression names metrics and labels that /metrics gives for a cluster with a GPU and a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dashboard_lines import cluster_with, gpu, host_line, run_line
from prometheus_client.parser import text_string_to_metric_families

from trainyard.dashboard.prometheus import exposition

BOARD = json.loads((Path(__file__).resolve().parents[2] / "docs/grafana.json").read_text())


def metrics() -> dict[str, set[str]]:
    """Return the labels of every metric that /metrics has for one host that answers, and one run."""
    numbers = ("utilisation_percent", "memory_used_mib", "memory_total_mib", "temperature_c")
    run = run_line()
    run["state"]["ranks"]["0"]["tokens_per_second"] = 900.0
    cluster = cluster_with(("node1", host_line(1000.0, gpu(300) | dict.fromkeys(numbers, 70))), ("node1", run))
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
