"""The role `nvidia` on a real host with simulated GPUs: sysfs trees, packages and nvidia-smi are replaced.

apt and dpkg are real: they find, reject and install packages with these names. Light hosts have no GPU, no kernel module and no
initial ramdisk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from lab_hosts import NEEDS_LAB, Host, Lab, Played, remove_role, run_playbook

pytestmark = [*NEEDS_LAB, pytest.mark.slow]

ADA, PASCAL, BLACKWELL = "0x2684", "0x1b06", "0x2b85"
# A repository of packages with Debian's names, which the login user can read; the driver package contains an nvidia-smi that prints its version.
REPOSITORY = r"""
rm -rf /opt/nvidia; mkdir -p /opt/nvidia; cd /opt/nvidia
pack() {
    mkdir -p $1/DEBIAN
    printf 'Package: %s\nVersion: %s\nArchitecture: all\nMaintainer: a stand-in\nDescription: a stand-in\n' $1 $2 >$1/DEBIAN/control
    dpkg-deb --build --root-owner-group $1 >/dev/null
    { cat $1/DEBIAN/control; printf 'Filename: ./%s.deb\nSize: %s\nSHA256: %s\n\n' \
        $1 $(stat -c %s $1.deb) $(sha256sum $1.deb | cut -d' ' -f1); } >>Packages
}
mkdir -p nvidia-driver/usr/bin nvidia-driver/usr/sbin
printf '#!/bin/sh\necho VERSION.1\n' >nvidia-driver/usr/bin/nvidia-smi
printf '#!/bin/sh\necho "$@" >>/root/ramdisks\n' >nvidia-driver/usr/sbin/update-initramfs
chmod 755 nvidia-driver/usr/*/*
pack nvidia-driver VERSION.1-1
for name in nvidia-kernel-dkms nvidia-open-kernel-dkms linux-headers-$(uname -r); do pack $name 1; done
echo 'deb [trusted=yes] file:/opt/nvidia ./' >/etc/apt/sources.list.d/nvidia.list
apt-get -qq update -o Dir::Etc::sourcelist=/etc/apt/sources.list.d/nvidia.list -o Dir::Etc::sourceparts=-
"""
CLEAN = r"""
rm -rf /opt/nvidia /opt/sys /root/ramdisks /etc/apt/sources.list.d/nvidia.list
apt-get -qq purge -y nvidia-driver nvidia-kernel-dkms nvidia-open-kernel-dkms "linux-headers-$(uname -r)" >/dev/null 2>&1 || :
"""


@pytest.fixture
def host(lab: Lab, hosts: list[Host]) -> Iterator[Host]:
    yield hosts[1]
    lab.inside(hosts[1], CLEAN + "rm -f /etc/modprobe.d/trainyard-nvidia.conf /var/lib/trainyard/read/initramfs")


def cards(lab: Lab, host: Host, *devices: str) -> None:
    """Create PCI devices under /opt/sys, as /sys shows them. The module reads it as the login user, who may not read /root."""
    lab.inside(host, "rm -rf /opt/sys; mkdir -p /opt/sys/bus/pci/devices")
    for place, device in enumerate(devices):
        folder = f"/opt/sys/bus/pci/devices/0000:0{place + 1}:00.0"
        lab.inside(
            host, f"mkdir {folder}; cd {folder}; echo 0x10de >vendor; echo 0x030000 >class; echo {device} >device"
        )


def play(lab: Lab, *arguments: str, **variables: Any) -> Played:
    return run_playbook(
        "site.yml", lab.inventory, {"nvidia_sysfs": "/opt/sys", **variables}, "--tags nvidia", *arguments
    )


@pytest.mark.long
def test_gpu_whose_driver_apt_does_not_have_is_an_error(lab: Lab, host: Host) -> None:
    cards(lab, host, ADA)
    played = play(lab, nvidia_install=True)
    assert played.rc != 0 and played.count("changed") == 0, played.stdout
    assert "no nvidia-driver: add contrib, non-free and non-free-firmware to the apt sources" in played.stdout


def test_driver_that_does_not_support_the_gpu_is_rejected(lab: Lab, host: Host) -> None:
    cards(lab, host, BLACKWELL)
    lab.inside(host, REPOSITORY.replace("VERSION", "535.54"))
    played = play(lab, nvidia_install=True)
    assert played.rc != 0 and played.count("changed") == 0, played.stdout
    assert "apt has driver 535, and a GPU of this host needs 570 or later" in played.stdout


@pytest.mark.long
def test_driver_is_installed_only_on_hosts_with_a_gpu(lab: Lab, host: Host, tmp_path: Any) -> None:
    cards(lab, host, PASCAL)
    lab.inside(host, REPOSITORY.replace("VERSION", "580.65"))
    checked = play(lab, "--check", nvidia_install=True)
    assert checked.rc == 0 and set(checked.stats["changed"]) == {host.name}, checked.stdout
    assert "absent" in lab.inside(
        host, "command -v nvidia-smi || echo absent; ls /etc/modprobe.d | grep trainyard || :"
    )

    played = play(lab, nvidia_install=True)
    assert played.rc == 0 and set(played.stats["changed"]) == {host.name}, played.stdout
    installed = lab.inside(host, "dpkg-query -W -f '${Package} ' 'nvidia-*' 'linux-headers-*'").split()
    assert (
        "nvidia-kernel-dkms" in installed
        and "nvidia-driver" in installed
        and "nvidia-open-kernel-dkms" not in installed
    )
    assert "blacklist nouveau" in lab.inside(host, "cat /etc/modprobe.d/trainyard-nvidia.conf")
    again = play(lab, nvidia_install=True)
    assert again.rc == 0 and again.count("changed") == 0 and "driver 580.65.1 is loaded" in again.stdout, again.stdout

    # The driver stopped answering, and a previous play was killed before it wrote the ramdisk: this play writes it.
    lab.inside(host, "rm /var/lib/trainyard/read/initramfs; mv /usr/bin/nvidia-smi /opt/nvidia/; rm -f /root/ramdisks")
    refused = play(lab, nvidia_install=True, nvidia_reboot=False)
    assert refused.rc != 0 and "this host needs a reboot to load it" in refused.stdout, refused.stdout
    assert lab.inside(host, "cat /root/ramdisks") == "-u\n"

    for changed in (2, 0):
        removed = remove_role("nvidia", lab.inventory, tmp_path)
        assert removed.rc == 0 and removed.count("changed") == changed, removed.stdout
    assert lab.inside(host, "cat /root/ramdisks; ls /etc/modprobe.d | grep trainyard || :") == "-u\n-u\n"
