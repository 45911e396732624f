"""The role `python` on stock hosts: one host fetches for all; interrupted plays, air-gapped and inconsistent hosts.

The tests set python_torch: false, because installing torch takes minutes. `make bench NAME=environment` includes torch.
"""

from __future__ import annotations

import hashlib
import http.server
import os
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lab_hosts import NEEDS_LAB, REPO, Host, Lab, Played, inventory_with, remove_role, run_playbook, small_wheels
from run_hosts import kill_playbook, start_playbook, until

from trainyard.python_env.bundle import trainer_version

pytestmark = [*NEEDS_LAB, pytest.mark.slow]
DATA = "/home/tester/trainyard"


@dataclass
class PythonCluster:
    """Two stock hosts, a folder of wheels, and a package index of that folder that records the requests for files."""

    lab: Lab
    wheels: Path
    folder: Path
    requested: list[str] = field(default_factory=list)
    address: str = ""

    def play(self, **variables: Any) -> Played:
        return run_playbook("site.yml", self.inventory(), variables, "--tags", "storage,python")

    def inventory(self, **variables: Any) -> Path:
        variables = {"python_torch": False, "python_index": f"http://{self.address}/simple"} | variables
        return inventory_with(self.lab, self.folder, **variables)

    def python(self, host: Host, code: str) -> str:
        command = [*self.lab.ssh(host), f'{DATA}/venv/bin/python -I -c "{code}"']
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PythonCluster]:
    folder = tmp_path_factory.mktemp("python")
    wheels = small_wheels(folder / "wheels")
    one = Lab(f"python-{os.getpid()}")
    one.up(hosts=2, persistent=False)
    here = PythonCluster(one, wheels, folder)
    server = http.server.ThreadingHTTPServer((f"10.231.{one.running.net}.254", 0), index(here))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = here.address = f"{server.server_address[0]}:{server.server_port}"
    for host in one.hosts:
        settings = f"[global]\nindex-url = http://{address}/simple\ntrusted-host = {address}\n"
        one.inside(host, f"cat > /etc/pip.conf <<'E'\n{settings}E")
    yield here
    server.shutdown()
    one.down()


@pytest.fixture(scope="module")
def installed(cluster: PythonCluster) -> PythonCluster:
    """The cluster with its environment, for the nightly tests, which continue one after another."""
    played = cluster.play()
    assert played.rc == 0, played.stdout
    return cluster


def index(cluster: PythonCluster) -> type[http.server.SimpleHTTPRequestHandler]:
    """Serve a package index: /simple/NAME/ lists the wheels of a package, /NAME.whl is a wheel, NAME.whl.metadata its metadata."""

    class Index(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(cluster.wheels))

        def do_GET(self) -> None:
            if self.path.endswith(".metadata"):
                with zipfile.ZipFile(cluster.wheels / self.path[1:].removesuffix(".metadata")) as wheel:
                    self.answer(
                        wheel.read(next(each for each in wheel.namelist() if each.endswith(".dist-info/METADATA")))
                    )
                return
            if not self.path.startswith("/simple/"):
                cluster.requested.append(f"{self.client_address[0]} {self.path}")
                super().do_GET()
                return
            name = self.path.split("/")[2]
            body = ""
            for one in cluster.wheels.glob("*.whl"):
                if one.name.split("-")[0].lower() == name.replace("-", "_"):
                    digest = hashlib.sha256(one.read_bytes()).hexdigest()
                    body += f'<a href="/{one.name}#sha256={digest}" data-core-metadata="true">{one.name}</a>'
            self.answer(body.encode())

        def answer(self, body: bytes) -> None:
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    return Index


def test_one_host_fetches_for_both(cluster: PythonCluster) -> None:
    one, two = cluster.lab.hosts
    dry = run_playbook("site.yml", cluster.inventory(), None, "--tags", "storage,python", "--check")
    assert dry.rc == 0, dry.stdout
    assert not cluster.requested and "absent" in cluster.lab.inside(one, f"test -e {DATA} || echo absent")

    played = cluster.play()
    assert played.rc == 0, played.stdout
    assert len(cluster.requested) == len(list(cluster.wheels.glob("*.whl"))), "every wheel is fetched once"
    assert {entry.split()[0] for entry in cluster.requested} == {one.address}, "by the same host"
    for host in (one, two):
        output = cluster.python(
            host,
            "import trainer.config.run_spec, importlib.metadata as m, sys; print(m.version('trainyard-cluster'), sys.prefix)",
        )
        assert output == f"{trainer_version()} {DATA}/venv"
    digests = {cluster.lab.inside(host, f"sha256sum {DATA}/venv/lock.txt | cut -d' ' -f1") for host in (one, two)}
    assert len(digests) == 1
    # The wheel server has stopped, and the second host keeps no wheels.
    assert "inactive" in cluster.lab.inside(one, "systemctl is-active trainyard-wheels || :")
    assert cluster.lab.inside(two, f"find {DATA}/python -name '*.whl' ! -name 'trainyard_cluster-*'") == ""

    again = cluster.play()
    assert again.rc == 0 and again.count("changed") == 0, again.stdout


@pytest.mark.long
def test_a_wheel_that_another_host_edited_is_not_installed(installed: PythonCluster) -> None:
    one, two = installed.lab.hosts
    wheel = installed.lab.inside(one, f"ls {DATA}/python/shared/wheels/*/annotated*.whl").strip()
    installed.lab.inside(one, f"cp -p {wheel} /root/kept.whl && echo edited >> {wheel}")
    installed.lab.inside(two, f"mv $(readlink -f {DATA}/venv) /root/environment")
    refused = installed.play()
    assert refused.rc != 0 and "Failed to download `annotated-types" in refused.stdout, refused.stdout
    assert installed.lab.inside(two, f"find {DATA}/python/envs -name 'annotated*'") == ""
    installed.lab.inside(one, f"mv /root/kept.whl {wheel}")
    played = installed.play()
    assert played.rc == 0, played.stdout
    installed.python(two, "import trainer.config.run_spec")


@pytest.mark.long
def test_play_after_a_kill_converges(installed: PythonCluster) -> None:
    lock = installed.folder / "lock.txt"
    # Another lock requires another environment.
    lock.write_text((REPO / "constraints.txt").read_text() + "left-pad==1.0\n")
    before = installed.lab.inside(installed.lab.hosts[1], f"readlink {DATA}/venv")
    output = installed.folder / "killed.txt"
    with output.open("w") as sink:
        words = ["site.yml", "--tags", "storage,python", "-e", f"python_lock={lock}"]
        play = start_playbook(installed.inventory(), *words, stdout=sink)
    try:
        until(lambda: "TASK [python : Install the wheels" in output.read_text(), 400, "pip to start")
    finally:
        kill_playbook(play)
    assert installed.lab.inside(installed.lab.hosts[1], f"readlink {DATA}/venv") == before, (
        "the old environment is in use until the end"
    )

    played = installed.play(python_lock=str(lock))
    assert played.rc == 0, played.stdout
    for host in installed.lab.hosts:
        assert installed.lab.inside(host, f"readlink {DATA}/venv") != before
        installed.python(host, "import trainer.config.run_spec")
        assert len(installed.lab.inside(host, f"ls {DATA}/python/envs").split()) == 2, (
            "the current and the previous environment"
        )
    assert installed.play(python_lock=str(lock)).count("changed") == 0


@pytest.mark.long
def test_install_without_network(installed: PythonCluster) -> None:
    lock = installed.folder / "other.txt"
    lock.write_text((REPO / "constraints.txt").read_text() + "left-pad==2.0\n")
    requested = len(installed.requested)
    incomplete = installed.folder / "incomplete"
    incomplete.mkdir()
    for wheel in installed.wheels.glob("*.whl"):
        if not wheel.name.startswith("annotated"):
            (incomplete / wheel.name).symlink_to(wheel)
    refused = installed.play(python_lock=str(lock), python_wheelhouse=str(incomplete))
    assert refused.rc != 0
    assert f"from {incomplete}: " in refused.stdout and "annotated-types" in refused.stdout, refused.stdout
    played = installed.play(python_lock=str(lock), python_wheelhouse=str(installed.wheels))
    assert played.rc == 0, played.stdout
    assert len(installed.requested) == requested
    for host in installed.lab.hosts:
        installed.python(host, "import trainer.config.run_spec")


@pytest.mark.long
def test_differences_are_reported_as_a_table_and_remove_cleans_up(installed: PythonCluster) -> None:
    one, two = installed.lab.hosts
    lock = installed.folder / "other.txt"
    installed.lab.inside(
        two, f"sed -i 's/^Version: .*/Version: 1.9/' {DATA}/venv/lib/python3*/site-packages/pydantic-*/METADATA"
    )
    # The trainer on node2 differs: the role replaces its wheel.
    installed.lab.inside(two, f'sed -i \'s/"trainer": "[^"]*/"trainer": "0/\' {DATA}/venv/trainyard.json')
    played = installed.play(python_lock=str(lock))
    assert played.rc != 0
    table = [line.split() for line in played.stdout.splitlines()]
    assert ["node1", "node2"] in table, played.stdout
    assert any(row[:1] == ["pydantic"] and row[-1] == "1.9" for row in table), played.stdout
    assert played.stats["changed"].get("node1", 0) == 0 and played.stats["changed"]["node2"] > 0

    for changed in (4, 0):
        removed = remove_role("python", installed.inventory(), installed.folder)
        assert removed.rc == 0 and removed.count("changed") == changed, removed.stdout
    assert installed.lab.inside(one, f"ls {DATA}") == ""


# The stand-ins: a driver without a GPU, and an unsloth that only has a version.
SMI = """#!/bin/sh
case "$1" in *driver_version*) echo 580.65.06;; *compute_cap*) echo 8.9;; *) exit 9;; esac
"""
CODE = "import importlib.metadata as m; print(m.version('unsloth'))"


def fake_wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel with an empty module."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.mark.long
def test_the_environment_of_unsloth(cluster: PythonCluster) -> None:
    """site.yml installs exactly the wheels of a lock with digests; a wheel with another digest is refused."""
    one, two = cluster.lab.hosts
    fake_wheel(cluster.wheels, "unsloth", "2026.10")
    lock = cluster.folder / "unsloth.txt"
    digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(cluster.wheels.glob("*.whl"))}
    pinned = {path: "==".join(path.name.split("-")[:2]) for path in digests}
    lock.write_text("".join(f"{pinned[path]} --hash=sha256:{digest}\n" for path, digest in digests.items()))
    variables = {"python_flavour": "unsloth", "python_lock": str(lock)}

    refused = cluster.play(**variables)
    assert refused.rc != 0 and "no host has a driver" in refused.stdout, refused.stdout
    cluster.lab.inside(one, f"cat > /usr/bin/nvidia-smi <<'E'\n{SMI}E\nchmod +x /usr/bin/nvidia-smi")
    played = cluster.play(**variables)
    assert played.rc == 0, played.stdout
    assert [cluster.python(host, CODE) for host in (one, two)] == ["2026.10", "2026.10"]
    again = cluster.play(**variables)
    assert again.rc == 0 and again.count("changed") == 0, again.stdout

    lock.write_text(lock.read_text().replace(digests[next(reversed(digests))], "0" * 64))
    tampered = cluster.play(**variables)
    assert tampered.rc != 0 and "DO NOT MATCH THE HASHES" in tampered.stdout, tampered.stdout
    assert cluster.python(two, CODE) == "2026.10", "the former environment stays"
