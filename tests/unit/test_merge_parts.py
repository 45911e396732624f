"""The parts of a merge on their way to the host of the first one. The hosts are folders of this machine."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tables import table

from trainyard.run.launch_options import LaunchOptions
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.openssh import LocalTransport
from trainyard.wire.run_errors import RunError
from trainyard.workflows import merge_runs as merge
from trainyard.workflows.merge_runs import make_merge_options, merge_runs

LOSSES = table("merge_parts")["losses"]


class Connection(HostConnection):
    """Records the requests to merge, which need torch, and answers them."""

    asked: list[dict[str, Any]]

    def call(self, verb: str, request: dict[str, Any], *, python: str = "") -> dict[str, Any]:
        if verb != "merge":
            return super().call(verb, request, python=python)
        self.asked.append(request)
        return LOSSES


class Site:
    """Two hosts with a finished run each, `one` and `two`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[dict[str, Any]]()
        self.hosts = [Host(name, "127.0.0.1", str(folder / name), sys.executable) for name in ("node1", "node2")]
        self.write("node1", "one", "first")
        self.write("node2", "two", "second")

    def write(self, host: str, run: str, weights: str) -> None:
        path = self.folder / host / "runs" / run
        shutil.rmtree(path, ignore_errors=True)
        (path / "adapter").mkdir(parents=True)
        (path / "adapter/adapter_model.safetensors").write_text(weights)
        (path / "spec.yml").write_text(f"run: {run}\n")

    def connect(self, host: Host) -> HostConnection:
        connection = Connection(host, LocalTransport())
        connection.asked = self.asked
        return connection

    def merge(self) -> dict[str, Any]:
        options = make_merge_options({"runs": "one,two", "run": "both"})
        home = self.folder / "controller"
        return merge_runs(options, self.hosts, self.connect, LaunchOptions(), home=home, report=lambda line: None)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    places = {run: (host, str(tmp_path / host / "runs" / run)) for run, host in (("one", "node1"), ("two", "node2"))}
    monkeypatch.setattr(merge, "_place", lambda run, *_: places[run])
    return Site(tmp_path)


def test_a_run_of_another_host_is_copied_to_the_run_folder_of_the_result(site: Site) -> None:
    """A second merge replaces the copy, and the private folder of the copies is removed."""
    both = site.folder / "node1/runs/both"
    for weights in ("second", "again"):
        site.write("node2", "two", weights)
        site.merge()
        request = site.asked.pop()
        folders = [str(site.folder / "node1/runs/one"), str(both / "parts/two")]
        assert [part["folder"] for part in request["input"]["parts"]] == request["reads"] == folders
        files = {str(path.relative_to(both)) for path in both.rglob("*") if path.is_file()}
        assert files == {"parts/two/spec.yml", "parts/two/adapter/adapter_model.safetensors"}
        assert (both / "parts/two/adapter/adapter_model.safetensors").read_text() == weights
        assert Path(request["trainer"]).is_file()
        assert list((site.folder / "node1/runs/.exchange").iterdir()) == []


def test_a_link_in_the_run_folder_of_the_result_is_not_followed(site: Site) -> None:
    """An earlier program of this run, which may write its folder, has made it."""
    (site.folder / "node1/runs/both").mkdir()
    (site.folder / "outside").mkdir()
    (site.folder / "node1/runs/both/parts").symlink_to(site.folder / "outside")
    with pytest.raises(RunError, match=r"it is a symbolic link: remove it: .*both/parts"):
        site.merge()
    assert not list((site.folder / "outside").iterdir()) and not site.asked


def test_a_merge_of_equal_runs_warns(site: Site) -> None:
    """The host says which; a number without a run is left out."""
    assert site.merge()["lines"][0].startswith("WARNING: one, two have the same weights: the merge gains nothing")
