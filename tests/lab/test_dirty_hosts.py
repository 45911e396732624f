"""site.yml on hosts that are not fresh: each is configured, or says in one line what to do, and reset.yml leaves what was there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab_hosts import NEEDS_LAB, REPO, Host, Lab, Played, inventory_with, run_playbook
from tables import table
from test_site import differences, state

pytestmark = [*NEEDS_LAB, pytest.mark.slow]

SUDOERS = "/etc/sudoers.d/90-cloud-init-users"
DATA = "/home/tester/trainyard"
TINY = {"model": "tiny", "max_steps": 2}
DIRT: dict[str, dict[str, Any]] = table("dirt")
# Together in one test, on the same host.
COMBINED = ("dead apt source", "Latin-1 in /etc/hosts", "/etc/hosts is a mount", "ufw limits SSH")
SUDO = {
    "echo 'Defaults requiretty' > /etc/sudoers.d/zz": "sudo wants a terminal: add `Defaults:USER !requiretty`",
    "mv /usr/bin/sudo /usr/bin/sudo.off": "sudo is not installed: install it as root",
    f"echo 'tester ALL=(ALL) ALL' > {SUDOERS}": "sudo needs a password: give it with -K",
}


@pytest.fixture
def dirty(bare: Lab, request: pytest.FixtureRequest) -> Iterator[Host]:
    """Return the second host of a lab of its own with the named kinds of dirt on it, and clean it afterwards."""
    host = bare.hosts[1]
    for name in request.param:
        bare.inside(host, DIRT[name]["make"])
    yield host
    for name in request.param:
        bare.inside(host, DIRT[name]["undo"], check=False)


def site(inventory: Path) -> Played:
    return run_playbook("site.yml", inventory, {}, "--tags", "ssh,firewall,system")


@pytest.mark.parametrize("dirty", [COMBINED], indirect=True, ids=["combined"])
def test_a_dirty_host_is_configured_and_says_what_was_left_out(bare: Lab, dirty: Host, tmp_path: Path) -> None:
    inventory = inventory_with(bare, tmp_path, {"node1": {}, "node2": {}})
    played = site(inventory)
    assert played.rc == 0, played.stdout
    said = " ".join(played.stdout.split())
    assert DIRT["dead apt source"]["says"] in said and "run site.yml again" in said, played.stdout
    hosts_file = bare.inside(dirty, "cat -v /etc/hosts")
    assert "trainyard:node1" in hosts_file and "BM-|ro" in hosts_file, "the lines of others stay"
    rules = bare.inside(dirty, "ufw status numbered").splitlines()
    limit = next(number for number, line in enumerate(rules) if "LIMIT" in line)
    before = [line for line in rules[:limit] if "trainyard: SSH" in line]
    assert len(before) == 2, f"the controller and the peer come before the limit, which stays: {rules}"
    again = site(inventory)
    assert again.rc == 0 and again.count("changed") == 0, again.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", DIRT)
def test_each_kind_of_dirt(bare: Lab, name: str, tmp_path: Path) -> None:
    host, kind = bare.hosts[1], DIRT[name]
    check = kind.get("check")
    inventory = inventory_with(bare, tmp_path, {"node1": {}, "node2": {}}, **kind.get("variables", {}))
    bare.inside(host, kind["make"])
    try:
        before = state(bare, host)
        first = run_playbook("site.yml", inventory)
        assert (first.rc != 0) == bool(check) and kind.get("says", "") in " ".join(first.stdout.split()), first.stdout
        assert "fatal:" not in first.stdout and "[ERROR]" not in first.stdout, first.stdout
        assert first.stats.get("failures", {}).keys() <= {host.name}, first.stdout  # the other host is configured
        if check:
            run_playbook("playbooks/preflight.yml", inventory, {"json": str(tmp_path / "report.json")})
            report = json.loads((tmp_path / "report.json").read_text())
            found = [finding["host"] for finding in report["findings"] if finding["id"] == check]
            assert report["exit"] == 2 and host.name in found, report["findings"]
        else:
            again = run_playbook("site.yml", inventory)
            assert again.rc == 0 and again.count("changed") == 0, again.stdout
            trained = run_playbook("train.yml", inventory, TINY | {"run": "dirty"})
            assert trained.rc == 0, trained.stdout
        gone = run_playbook("playbooks/reset.yml", inventory, {"storage_remove_runs": True})
        assert gone.rc == 0, gone.stdout
        assert not differences(before, state(bare, host))
    finally:
        bare.inside(host, kind["undo"], check=False)


@pytest.mark.long
def test_sudo_that_refuses_is_one_line_before_any_change(bare: Lab) -> None:
    host = bare.hosts[1]
    bare.inside(host, f"cp -a {SUDOERS} /root/sudoers")
    for make, line in SUDO.items():
        bare.inside(host, make)
        played = site(bare.inventory)
        bare.inside(host, f"rm -f /etc/sudoers.d/zz; cp -a /root/sudoers {SUDOERS}")
        bare.inside(host, "mv /usr/bin/sudo.off /usr/bin/sudo", check=False)
        assert played.rc != 0 and f"error: {host.name}: {line}" in played.stdout, played.stdout
        assert "[ERROR]" not in played.stdout


def test_what_the_inventory_tells_is_said_first(bare: Lab, tmp_path: Path) -> None:
    document = yaml.safe_load(bare.inventory.read_text())
    cluster = document["all"]["children"]["cluster"]
    cluster["vars"]["queue_state"] = "present"
    cluster["hosts"]["GPU_Box"] = dict(cluster["hosts"]["node1"])
    (tmp_path / "inventory.yml").write_text(yaml.safe_dump(document))
    played = run_playbook("site.yml", tmp_path / "inventory.yml")
    output = played.stdout
    assert played.rc != 0 and "rename it in the inventory" in output and "both have the address" in output
    assert played.count("changed") == 0


BACK = 200  # commits


@pytest.mark.long
def test_hosts_of_an_older_version_take_this_one_and_a_run_of_it_resumes(bare: Lab, tmp_path: Path) -> None:
    old, run = tmp_path / "old", f"{DATA}/runs/older"
    git = ["git", "-C", REPO, "worktree"]
    if subprocess.run([*git, "add", "--detach", old, f"HEAD~{BACK}"], capture_output=True, check=False).returncode:
        pytest.skip("needs a repository with the commits of an older version")
    variables = TINY | {"run": "older", "max_steps": 5000, "save_steps": 5}
    before = {"ANSIBLE_CONFIG": str(old / "ansible.cfg"), "PYTHONPATH": str(old)}
    before["ANSIBLE_CALLBACK_PLUGINS"] = str(old / "plugins/callback")
    stop = f"(until grep -q '\"step\": 9,' {run}/metrics.jsonl; do sleep 1; done; touch {run}/stop) >/dev/null 2>&1 &"
    try:
        assert run_playbook(str(old / "site.yml"), bare.inventory, environment=before).rc == 0
        bare.inside(bare.hosts[0], stop)
        first = run_playbook(str(old / "train.yml"), bare.inventory, variables, environment=before)
        assert first.rc == 0, first.stdout
    finally:
        subprocess.run([*git, "remove", "--force", old], check=False)
    assert run_playbook("site.yml", bare.inventory).rc == 0
    again = run_playbook("site.yml", bare.inventory)
    assert again.rc == 0 and again.count("changed") == 0, again.stdout
    bare.inside(bare.hosts[0], stop.replace("9,", "40,"))
    resumed = run_playbook("train.yml", bare.inventory, variables)
    assert resumed.rc == 0 and "resum" in resumed.stdout, resumed.stdout
    gone = run_playbook("playbooks/reset.yml", bare.inventory, {"storage_remove_runs": True})
    assert gone.rc == 0, gone.stdout
