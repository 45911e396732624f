"""What code in a rank may write, read and reach, in a unit of the system's service manager."""

from __future__ import annotations

import base64
import json
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab_hosts import NEEDS_LAB, Host, Lab, inventory_with, run_playbook
from queued_runs import tiny_spec
from ranks_site import DATA, RUN_DIR, UNIT, Site, as_user, export, site
from run_hosts import TOP, questions, until
from tables import table

from trainer.common.files import sha256_file
from trainyard.wire.remote_archive import remote_command, remote_input

__all__ = ["site"]

pytestmark = NEEDS_LAB

# It prints the outcome of each attempt: the name of the error, or "works". Processes of other namespaces of users are invisible.
PROBE = table("sandbox_hosts")["probe"]
ATTEMPTS = table("sandbox_outcomes")
EXPECTED = {name: outcome for name, (outcome, _) in ATTEMPTS.items()}
# What lies beside a run, as roles, other runs and the login user have written it.
FILES = table("sandbox_hosts")["files"]
RESULTS = "/home/tester/results"
OUTSIDE = table("sandbox_hosts")["outside"]
SHIM = "/home/tester/.pyenv/shims/python"  # which the unit does not show


def attempts(rows: dict[str, list[str]]) -> str:
    """Return an expression: {name: outcome} of the attempts of a table of [outcome, attempt]."""
    return f"{{{', '.join(f'{name!r}: attempt(lambda: {does})' for name, (_, does) in rows.items())}}}"


@pytest.fixture
def beside(lab: Lab, site: Site) -> Iterator[dict[Host, str]]:
    """Write FILES on two hosts, and start a process of the login user outside of any unit; {host: its pid}."""
    pids = {}
    lab.in_lab("ip", "address", "replace", "fd79::ff/64", "dev", "br0", "nodad")
    for host in lab.hosts[:2]:
        lab.inside(host, f"ip address replace fd79::{host.index}/64 dev {host.nic} nodad")
        lines = [f"install -D -m 600 /etc/hostname {DATA}/{name}" for name in FILES]
        lines += [f"ln -sfn /usr {DATA}/venv", "rm -f /tmp/control /dev/shm/probe", f"mkdir -p {DATA}/store/models"]
        lines += [f"ln -sfn {DATA}/runs/finished/model {DATA}/store/models/own"]
        lines += [
            f"ln -sfn /home/tester/.cache {DATA}/runs/finished/link; ln -sfn ../.config/user /home/tester/results/link"
        ]
        lines += [
            "rm -rf /run/engine /run/user/$(id -u tester)/podman.sock; ln -sfn /run/engine/docker.sock /run/docker.sock"
        ]
        lines += ["rm -rf /home/tester/.docker /var/lib/lxd /var/lib/incus"]
        lines += ["install -d -o tester -m 700 /run/engine /run/user/$(id -u tester) /var/lib/lxd /var/lib/incus"]
        lines += ["mkdir -p /home/tester/.docker/run; touch /dev/shm/host"]
        lines += [f"install -D -m 755 /dev/null {SHIM}; printf '#!/bin/sh\\nexec {sys.executable} \"$@\"\\n' > {SHIM}"]
        lines += ["cd /home/tester/results; rm -f disk kvm fuse tun mem; mknod -m 666 disk b 254 0"]
        nodes = (("kvm", 10, 232), ("fuse", 10, 229), ("tun", 10, 200), ("mem", 1, 1))
        lines += [f"mknod -m 666 {name} c {major} {minor}" for name, major, minor in nodes]
        lab.inside(host, "\n".join(["set -e", *lines, "chown -hR tester: /home/tester"]))
        command = f"{sys.executable} -c {shlex.quote(OUTSIDE)} >/dev/null 2>&1 </dev/null & echo $!"
        pids[host] = as_user(lab, host, command)
        until(lambda host=host: lab.inside(host, "ls /tmp/control || :").strip(), 10, what="the socket")
    yield pids
    for host, pid in pids.items():
        lab.inside(
            host,
            f"kill {pid}; rm -rf /tmp/control /run/docker.sock /run/engine {DATA}/dashboard {DATA}/queue {DATA}/venv"
            " /home/tester/.docker /var/lib/lxd /var/lib/incus",
        )


def probe(lab: Lab, site: Site, pids: dict[Host, str], isolated: bool, properties: list[str]) -> list[dict[str, str]]:
    """Return the outcomes on two hosts."""
    addresses = [host.address for host in lab.hosts]
    outside = addresses[0].rpartition(".")[0] + ".1"  # the switch, where nothing listens
    program = f"{PROBE}print(json.dumps({attempts(ATTEMPTS)}))"
    plan = [
        entry
        | {"command": [SHIM, "-c", program, addresses[1 - place], outside, pids[lab.hosts[place]]]}
        | {"peers": addresses, "isolated": isolated, "writable": [RESULTS, "/etc"]}
        | {"reads": [f"{DATA}/store/models/own", "/etc/passwd", f"{RUN_DIR}/x", f"{DATA}/runs/finished/link"]}
        for place, entry in enumerate(site.plan()[:2])
    ]
    assert site.run(plan, unit_properties=properties).wait(90) == 0, site.read_output()
    logs = [lab.inside(host, f"cat {RUN_DIR}/logs/torchrun.{rank}.log") for rank, host in enumerate(lab.hosts[:2])]
    return [json.loads(log.splitlines()[-1]) for log in logs]


@pytest.mark.parametrize(
    ("isolated", "properties", "changed"),
    table("sandbox_hosts")["what_a_rank_may_do"],
    ids=["isolated", "open"],
)
def test_what_a_rank_may_do(
    lab: Lab, site: Site, beside: dict[Host, str], isolated: bool, properties: list[str], changed: dict[str, str]
) -> None:
    for found in probe(lab, site, beside, isolated, properties):
        assert found == EXPECTED | changed


@pytest.mark.parametrize(("isolated", "limit"), [(True, 3.0), (False, 3.5)])
def test_exposure_of_a_unit(lab: Lab, site: Site, isolated: bool, limit: float) -> None:
    plan = [site.plan()[0] | {"peers": [lab.hosts[0].address], "isolated": isolated}]
    site.run(plan)
    site.at_step(0)
    found = lab.inside(
        lab.hosts[0],
        f"systemd-analyze security --no-pager $(systemctl list-units --plain --no-legend {UNIT} | cut -d' ' -f1)",
    )
    exposure = re.search(r"Overall exposure level for .*: ([0-9.]+)", found)
    assert exposure and float(exposure[1]) < limit, found
    assert site.play("playbooks/stop.yml", "-e", "run=r", "-e", "force=true").wait(60) == 0, site.read_output()


# Programs that read what ranks wrote: merge and export -----------------------------------------------------------------------

APART = table("sandbox_hosts")["apart"]
ENCLOSED = table("sandbox_hosts")["enclosed"]


@pytest.fixture
def merge(lab: Lab, site: Site, beside: dict[Host, str], tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that begins a verb on the first host, with APART in place of the trainer."""
    archive, stored = tmp_path / "trainer.zip", f"{DATA}/store/trainers/{'1' * 16}.zip"
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr("trainer/__init__.py", "")
        content.writestr("trainer/launch/__init__.py", "")
        content.writestr("trainer/common/__init__.py", "")
        for name in ("__main__", "launch/gguf_export"):
            content.writestr(f"trainer/{name}.py", APART.replace("ATTEMPTS", attempts(ENCLOSED)))
        content.write(TOP / "trainer/common/lost_connection.py", "trainer/common/lost_connection.py")
    encoded = base64.b64encode(archive.read_bytes()).decode()
    lab.inside(lab.hosts[0], f"rm -rf {DATA}/runs/merged; base64 -d > {stored} <<'.'\n{encoded}\n.")

    def begin(seconds: float = 0, limit: int = 60, digest: str = "", verb: str = "merge") -> subprocess.Popen[str]:
        run_dir, part = f"{DATA}/runs/merged", f"{DATA}/runs/finished"
        request = {"trainer": stored, "digest": digest or sha256_file(archive), "run_dir": run_dir, "reads": [part]}
        outside = lab.hosts[0].address.rpartition(".")[0] + ".1"  # the switch
        values = {"run_dir": run_dir, "seconds": seconds, "outside": outside}
        request |= {"backend": "auto", "limit": limit, "input": values}
        with tempfile.TemporaryFile() as source:
            source.write(remote_input(request, verb))
            source.seek(0)
            command = [*map(str, lab.ssh(lab.hosts[0])), remote_command(verb, sys.executable)]
            return subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return begin


def units(lab: Lab) -> str:
    return lab.inside(lab.hosts[0], "systemctl list-units --plain --no-legend --all 'trainyard-apart-*'").strip()


@pytest.mark.parametrize("verb", ["merge", "gguf_export", pytest.param("evaluate", marks=pytest.mark.long)])
def test_a_merge_writes_its_output_only(lab: Lab, merge: Callable[..., subprocess.Popen[str]], verb: str) -> None:
    out, err = merge(verb=verb).communicate(timeout=60)
    assert out, err
    assert json.loads(out) == {name: outcome for name, (outcome, _) in ENCLOSED.items()} and not units(lab)


def test_a_merge_with_an_edited_trainer_is_refused(merge: Callable[..., subprocess.Popen[str]]) -> None:
    out, _ = merge(digest="0" * 64).communicate(timeout=60)
    assert "has changed; remove it" in json.loads(out)["error"]


@pytest.mark.parametrize("end", ["connection", "limit"])
def test_a_merge_ends_with_its_connection_or_its_limit(
    lab: Lab, merge: Callable[..., subprocess.Popen[str]], end: str
) -> None:
    client = merge(seconds=300, limit=300 if end == "connection" else 4)
    until(lambda: lab.inside(lab.hosts[0], f"ls {DATA}/runs/merged/began || :").strip(), 30, what="the merge")
    assert "running" in units(lab)
    if end == "connection":
        client.kill()
    until(lambda: not units(lab), 15, what="the end of the unit")
    out, _ = client.communicate(timeout=15)
    assert not out


def test_a_data_folder_with_special_characters_behind_a_link(lab: Lab, site: Site) -> None:
    data_dir = f'{DATA}/a b:c"d'
    code = f"""
import pathlib, subprocess, sys
sys.path.insert(0, {RUN_DIR!r} + "/trainer.zip")
from trainer.supervise import environment, sandbox
data_dir, named = pathlib.Path({data_dir!r}), pathlib.Path("/home/tester/li:nk")
run_dir = data_dir / "runs/r"
for name in ("runs/r", "queue", "store/d"):
    (data_dir / name).mkdir(parents=True, exist_ok=True)
named.unlink(missing_ok=True)
named.symlink_to(data_dir)
found = sandbox.unit_properties(run_dir, data_dir, str(named / "runs/r"), system=True, reads=[str(named / "store/d")])
command = [*environment.choose_backend("systemd"), "--pipe", "--wait", *(f"--property={{entry}}" for entry in found)]
script = 'touch "$1/in" "$2/runs/r/also in" "$0/out" "$2/store/d/out"; ls -d "$0"/* "$2"/*'
command += ["/bin/sh", "-c", script, *map(str, (data_dir, run_dir, named))]
print(subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout)
print(*sorted(path for path in data_dir.rglob("*") if path.is_file()), sep="\\n")
"""
    found = as_user(lab, lab.hosts[0], f"{sys.executable} - <<'.'\n{code}\n.")
    shown = [f"{top}/{name}" for top in (data_dir, "/home/tester/li:nk") for name in ("runs", "store")]
    *listed, _, first, second = found.split("\n")
    assert sorted(listed) == sorted(shown) and [first, second] == [
        f"{data_dir}/runs/r/{each}" for each in ("also in", "in")
    ]


def test_the_login_user_sees_which_gpus_a_unit_uses(lab: Lab, site: Site) -> None:
    """Although the environment of its processes is closed."""
    site.run([site.plan()[0] | {"devices": ["GPU-1"]}])
    site.at_step(0)
    code = "from trainer.supervise.processes import held_gpus; print(held_gpus('other'), held_gpus('r'))"
    found = as_user(lab, lab.hosts[0], f'PYTHONPATH={RUN_DIR}/trainer.zip {sys.executable} -c "{code}"')
    assert found == "{'GPU-1': 'r'} {}"
    assert site.play("playbooks/stop.yml", "-e", "run=r", "-e", "force=true").wait(60) == 0, site.read_output()


@pytest.mark.long
def test_runs_are_trained_merged_and_exported_in_units(lab: Lab, hosts: list[Host], tmp_path: Path) -> None:
    inventory = inventory_with(lab, tmp_path)
    stored = run_playbook("site.yml", inventory, {}, "--tags", "storage")
    assert stored.rc == 0, stored.stdout
    for run, host in (("one", "node1"), ("two", "node2")):  # the adapter of the second one is copied
        spec = tiny_spec(run, questions(tmp_path, 600), 3) | {"lora_r": 4}
        trained = run_playbook("train.yml", inventory, spec, "--limit", host)
        assert trained.rc == 0, trained.stdout
    merged = run_playbook("playbooks/merge.yml", inventory, {"runs": "one,two", "run": "both"})
    assert merged.rc == 0 and "merged 2 runs by cat" in merged.stdout, merged.stdout
    first = hosts[0]
    assert lab.inside(first, f"ls {DATA}/runs/both/adapter/adapter_model.safetensors").strip()
    assert "inductor" not in lab.inside(first, "ls -a /home/tester /home/tester/.cache || :")
    weights = lab.inside(first, f"sha256sum {DATA}/runs/one/adapter/adapter_model.safetensors").split()[0]
    done = export(lab, first, f"{DATA}/runs/one", weights, "f16")
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["gguf"]["bytes"] and answer["answers"]["prompts"], (answer, done.stderr)
