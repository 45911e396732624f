"""Datasets copied to every host; a real Ollama: fetched once, passed on, upgraded, removed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from lab_hosts import NEEDS_LAB, Host, Lab, run_playbook, with_ollama
from tables import table

pytestmark = [*NEEDS_LAB, pytest.mark.slow]

DATASETS = "/home/tester/trainyard/datasets"
OLLAMA = shutil.which("ollama")


@pytest.fixture(scope="module")
def keys(lab: Lab) -> None:
    """Install the keys with which the hosts copy files from the head, as site.yml does."""
    made = run_playbook(
        "site.yml", lab.inventory, {"nfs_dataset_delivery": "copy", "ollama_state": "present"}, "--tags ssh"
    )
    assert made.rc == 0, made.stdout


def digests(lab: Lab, host: Host) -> str:
    return lab.inside(host, f"cd {DATASETS}; find . -type f -print0 | sort -z | xargs -0 sha256sum")


def play(lab: Lab, tag: str, **variables: Any) -> Any:
    return run_playbook("site.yml", lab.inventory, variables, f"--tags {tag}")


@pytest.mark.long
def test_datasets_are_copied_and_only_differences_are_transferred(
    lab: Lab, hosts: list[Host], keys: None, tmp_path: Path
) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "one.jsonl").write_text('{"text": "one"}\n' * 1000)
    (tmp_path / "two.jsonl").write_text('{"text": "two"}\n' * 1000)
    variables = {"nfs_dataset_delivery": "copy", "nfs_copy_from": str(tmp_path)}
    played = play(lab, "nfs", **variables)
    assert played.rc == 0, played.stdout
    first = digests(lab, hosts[0])
    assert "a b/one.jsonl" in first and {digests(lab, host) for host in hosts} == {first}

    # Damage that changes neither size nor time, and a file that the head does not have.
    lab.inside(
        hosts[2],
        f"cd {DATASETS}; touch -r two.jsonl /tmp/time; sed -i s/two/bad/ two.jsonl; touch -r /tmp/time two.jsonl; touch extra",
    )
    repaired = play(lab, "nfs", **variables)
    assert repaired.rc == 0 and repaired.stats["changed"] == {"node3": 1}, repaired.stdout
    assert digests(lab, hosts[2]) == first

    # In a folder that the role did not create, the role does not delete such a file.
    lab.inside(hosts[2], f"rm /var/lib/trainyard/datasets; echo mine > {DATASETS}/extra")
    left = play(lab, "nfs", **variables)
    assert left.rc == 0, left.stdout
    assert lab.inside(hosts[2], f"cat {DATASETS}/extra") == "mine\n"


def test_missing_nfs_support_is_reported(lab: Lab) -> None:
    played = play(lab, "nfs", nfs_dataset_delivery="nfs")
    assert played.rc != 0 and "kernel of this host does not support NFS" in played.stdout and "copy" in played.stdout


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real Ollama in the layout of the official archives: bin/ollama and lib/."""
    if OLLAMA is None:
        pytest.skip("needs `ollama` on PATH")
    top = Path(os.path.realpath(OLLAMA)).parents[1]
    if not (top / "tiny.gguf").exists():
        pytest.skip("creating a model needs tiny.gguf next to this ollama")
    made = tmp_path_factory.mktemp("ollama") / "ollama-linux-amd64.tgz"
    with tarfile.open(made, "w:gz", compresslevel=1) as tar:
        for part in ("bin", "lib"):
            tar.add(top / part, f"./{part}")
    return made


def tags(host: Host) -> dict[str, str]:
    """Return the digest of every model of Ollama on a host, by name."""
    with urllib.request.urlopen(f"http://{host.address}:11434/api/tags", timeout=10) as answer:
        return {model["name"]: model["digest"] for model in json.load(answer)["models"]}


@pytest.mark.long
def test_ollama_install_upgrade_pull_and_removal(lab: Lab, hosts: list[Host], keys: None, archive: Path) -> None:
    wanted = {"ollama_state": "present", "ollama_version": "0.5.4", "ollama_archive": str(archive)}
    wanted["ollama_sha256"] = hashlib.sha256(archive.read_bytes()).hexdigest()
    before = [state(lab, host) for host in hosts]
    checked = run_playbook("site.yml", lab.inventory, wanted, "--tags ollama", "--check")
    assert checked.rc == 0, checked.stdout
    assert [state(lab, host) for host in hosts] == before

    wrong = play(lab, "ollama", **wanted | {"ollama_sha256": "0" * 64})
    assert wrong.rc != 0 and "nothing was installed" in wrong.stdout, wrong.stdout
    assert "not-found" in lab.inside(hosts[1], "systemctl show --property=LoadState ollama.service")

    made = play(lab, "ollama", **wanted)
    assert made.rc == 0, made.stdout
    for host in hosts:
        assert tags(host) == {}
        listening = lab.inside(host, "ss -Htln 'sport = 11434'").split()
        assert listening[3] == f"{host.address}:11434"
        assert lab.inside(host, "ps -o user= -p $(systemctl show -P MainPID ollama)").strip() == "ollama"

    weights = Path(os.path.realpath(str(OLLAMA))).parents[1] / "tiny.gguf"
    for host in hosts:
        subprocess.run(
            ["scp", *(str(word) for word in lab.ssh(host)[1:-1]), weights, f"tester@{host.address}:/tmp/"], check=True
        )
        at = f"OLLAMA_HOST={host.address}:11434"
        lab.inside(host, f"cd /tmp; echo FROM /tmp/tiny.gguf > Modelfile; HOME=/tmp {at} ollama create tiny")
    # An upgrade with a model that the servers have: the old build is removed, and a second run changes nothing.
    newer = wanted | {"ollama_version": "0.5.5", "ollama_pull": ["tiny"]}
    passed = play(lab, "ollama", **newer)
    assert passed.rc == 0, passed.stdout
    assert all("tiny:latest" in tags(host) for host in hosts)
    again = play(lab, "ollama", **newer)
    assert again.rc == 0 and again.count("changed") == 0, again.stdout
    # A server pulls what it lacks; the lab has no registry.
    lacking = play(lab, "ollama", **newer | {"ollama_pull": ["tiny", "absent"]})
    assert lacking.rc != 0 and "Pull missing models" in lacking.stdout, lacking.stdout
    builds = lab.inside(hosts[1], "ls /opt/trainyard/ollama").split()
    assert len(builds) == 2 and builds[0].startswith("0.5.5-") and builds[1] == "current"

    assert play(lab, "ollama", ollama_state="absent").rc == 0
    assert [state(lab, host) for host in hosts] == before


def state(lab: Lab, host: Host) -> str:
    """Return the entries of a host at the paths that the role writes to."""
    return lab.inside(
        host,
        """for path in /opt /etc/systemd/system /usr/local/bin /var/lib/ollama /var/lib/trainyard/ollama; do
               [ ! -e $path ] || find $path | sort
           done
           getent passwd ollama || getent group ollama || systemctl list-unit-files --no-legend 'ollama*' || :""",
    )


# Answers like Ollama, and says what the unit allows: its environment, and where it can write.
STAND_IN = table("services")["stand_in"]
HOSTILE = table("services")["hostile"]


def test_ollama_runs_in_a_sandbox(lab: Lab, hosts: list[Host], keys: None, tmp_path: Path) -> None:
    """The unit has an exposure below 5, a server works in it, and values of the operator are only values."""
    store = "/home/models of 100%/$ollama"
    variables = with_ollama(tmp_path, STAND_IN) | {"ollama_models": store, "ollama_environment": HOSTILE}
    made = play(lab, "ollama --limit node1", **variables)
    try:
        assert made.rc == 0, made.stdout
        exposure = lab.inside(hosts[0], "systemd-analyze security --no-pager ollama.service | tail -1")
        level = re.search(r"exposure level for ollama.service: ([0-9.]+)", exposure)
        assert level and float(level[1]) < 3, exposure
        with urllib.request.urlopen(f"http://{hosts[0].address}:11434/", timeout=10) as answer:
            seen = json.load(answer)
        assert {name: seen["environment"].get(name) for name in HOSTILE} == HOSTILE
        assert "LD_PRELOAD" not in seen["environment"] and seen["environment"]["OLLAMA_MODELS"] == store
        assert seen["write"]["models"] == seen["write"]["tmp"] == seen["null"] == seen["child"] == "ok", seen
        denied = (seen["write"]["var"], seen["write"]["etc"], seen["packets"], seen["disks"])
        assert "ok" not in denied, seen
        # The service has a temporary /home of its own, with the store and what an earlier request wrote there.
        assert set(seen["homes"]) <= {"models of 100%", "written"}, seen
        written = lab.inside(hosts[0], "ls -d /*/written /home/*/*/written /evil 2>/dev/null || :").split("\n")[:-1]
        assert written == [f"{store}/written"]
    finally:
        gone = play(lab, "ollama --limit node1", ollama_state="absent")
        lab.inside(hosts[0], "rm -rf '/home/models of 100%'")
    assert gone.rc == 0, gone.stdout


def test_unmanaged_ollama_is_not_changed(lab: Lab, hosts: list[Host], archive: Path) -> None:
    lab.inside(hosts[1], "printf '#!/bin/sh\\n' > /usr/local/bin/ollama")
    try:
        for wanted in ("present", "absent"):
            variables = {"ollama_version": "0.5.4", "ollama_archive": str(archive), "ollama_sha256": "0" * 64}
            played = run_playbook(
                "site.yml", lab.inventory, variables | {"ollama_state": wanted}, "--tags ollama --limit node2"
            )
            assert (played.rc != 0) == (wanted == "present"), played.stdout
        assert "/usr/local/bin/ollama" in lab.inside(hosts[1], "ls /usr/local/bin/ollama")
    finally:
        lab.inside(hosts[1], "rm /usr/local/bin/ollama")
