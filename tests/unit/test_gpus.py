"""Finding NVIDIA GPUs in a sysfs tree and selecting their driver."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tables import table

from plugins.modules.nvidia_info import find_cards, select_driver
from trainyard.remote.host_facts import gpus

TOP = Path(__file__).resolve().parents[2]
NVIDIA, VGA, COMPUTE, AUDIO = "0x10de", "0x030000", "0x030200", "0x040300"


def card(sysfs: Path, slot: str, device: str, vendor: str = NVIDIA, kind: str = VGA, module: str = "") -> None:
    """Create a PCI device as in sysfs: a link into /sys/devices, with a link to its driver."""
    real = sysfs / "devices/pci0000:00" / slot
    real.mkdir(parents=True)
    for name, text in (("vendor", vendor), ("device", device), ("class", kind)):
        (real / name).write_text(text + "\n")
    shown = sysfs / "bus/pci/devices"
    shown.mkdir(parents=True, exist_ok=True)
    (shown / slot).symlink_to(real)
    if module:
        driver = sysfs / "bus/pci/drivers" / module
        driver.mkdir(parents=True, exist_ok=True)
        (real / "driver").symlink_to(driver)


def test_only_gpus_are_found_also_without_a_driver(tmp_path: Path) -> None:
    card(tmp_path, "0000:01:00.0", "0x2684", module="nouveau")
    card(tmp_path, "0000:01:00.1", "0x22ba", kind=AUDIO)
    card(tmp_path, "0000:41:00.0", "0x2330", kind=COMPUTE)
    card(tmp_path, "0000:00:02.0", "0x9bc5", vendor="0x8086", module="i915")
    assert find_cards(tmp_path) == [
        {"slot": "0000:01:00.0", "device": "0x2684", "module": "nouveau"},
        {"slot": "0000:41:00.0", "device": "0x2330", "module": ""},
    ]
    assert find_cards(tmp_path / "nothing") == []


@pytest.mark.parametrize(("device", "branch", "modules"), table("gpus")["driver_of_each_generation"])
def test_driver_of_each_generation(device: str, branch: int, modules: str, tmp_path: Path) -> None:
    card(tmp_path, "0000:01:00.0", device)
    driver = select_driver(find_cards(tmp_path), 590)
    assert (driver["branch"], driver["modules"], driver["error"]) == (branch, modules, "")


def test_gpus_without_a_suitable_driver() -> None:
    kepler, pascal, blackwell = ({"device": number} for number in ("0x102d", "0x1b06", "0x2b85"))
    assert "train without this GPU" in select_driver([kepler], 580)["error"]
    assert "no driver supports all GPUs of this host" in select_driver([pascal, blackwell], 580)["error"]
    assert select_driver([], 580)["error"] == ""
    assert select_driver([blackwell], 535)["branch"] == select_driver([blackwell], 535)["minimum"] == 570


@pytest.mark.slow
def test_the_role_reports_the_driver_and_changes_nothing(tmp_path: Path) -> None:
    card(tmp_path / "sys", "0000:01:00.0", "0x1b06", module="nouveau")
    variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"cluster": {"hosts": {"localhost": variables}}}))
    for name, sysfs, install in (("with", tmp_path / "sys", True), ("without", tmp_path / "none", False)):
        play = {
            "hosts": "all",
            "gather_facts": False,
            "roles": [{"role": "nvidia", "nvidia_sysfs": str(sysfs), "nvidia_install": not install}],
        }
        file = tmp_path / f"{name}.yml"
        file.write_text(yaml.safe_dump([play]))
        done = subprocess.run(
            [Path(sys.executable).with_name("ansible-playbook"), "-i", tmp_path / "hosts.yml", file],
            env={**os.environ, "ANSIBLE_CONFIG": str(TOP / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
            capture_output=True,
            text=True,
            check=False,
            cwd=TOP,
        )
        assert done.returncode == 0, json.dumps([done.stdout, done.stderr])
        assert "changed=0" in done.stdout
        wants = "0000:01:00.0  10de:1b06  kernel module nouveau" in done.stdout and "branch 580 with" in done.stdout
        assert wants == install, done.stdout


@pytest.mark.parametrize(("known", "capability"), [(True, 8.9), (False, 0.0)], ids=["new driver", "old driver"])
def test_the_capability_of_a_gpu_is_a_fact_if_the_driver_knows_it(
    known: bool, capability: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "nvidia-smi"
    asked = "echo 'GeForce RTX 4090, 24564, GPU-1, 8.9'" if known else "exit 2"
    file.write_text(
        f"#!/bin/sh\ncase \"$1\" in *compute_cap*) {asked} ;; *) echo 'GeForce RTX 4090, 24564, GPU-1' ;; esac\n"
    )
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus() == [{"name": "GeForce RTX 4090", "memory_mib": 24564, "uuid": "GPU-1", "capability": capability}]
