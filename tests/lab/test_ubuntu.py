"""Differences of Ubuntu, simulated on a lab host: the name of the distribution, and a package under another name.

The host is Debian 12 with /etc/os-release of Ubuntu 24.04, and with one repository, in which libtcmalloc-minimal4t64 provides
libtcmalloc-minimal4. Debian's own packages are out of reach.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_hosts import NEEDS_LAB, Host, Lab, run_playbook

pytestmark = [*NEEDS_LAB, pytest.mark.slow, pytest.mark.long]

OS_RELEASE = """PRETTY_NAME="Ubuntu 24.04.1 LTS"
NAME="Ubuntu"
VERSION_ID="24.04"
VERSION="24.04.1 LTS (Noble Numbat)"
VERSION_CODENAME=noble
ID=ubuntu
ID_LIKE=debian
UBUNTU_CODENAME=noble
"""
IMITATE = rf"""
mkdir -p /root/aside /root/noble; cd /root/noble
cp -a --remove-destination $(readlink -f /etc/os-release) /root/aside/os-release; ls -l /etc/os-release >/root/aside/link
rm /etc/os-release; cat >/etc/os-release <<'END'
{OS_RELEASE}END
printf 'DISTRIB_ID=Ubuntu\nDISTRIB_RELEASE=24.04\nDISTRIB_CODENAME=noble\n' >/etc/lsb-release
mv /etc/apt/sources.list* /root/aside/
apt-get -qq purge -y libtcmalloc-minimal4 >/dev/null 2>&1 || :
name=libtcmalloc-minimal4t64; folder=$name/usr/lib/$(uname -m)-linux-gnu
mkdir -p $name/DEBIAN $folder; : >$folder/libtcmalloc_minimal.so.4
printf 'Package: %s\nVersion: 2.15\nArchitecture: all\nProvides: libtcmalloc-minimal4 (= 2.15)\n' $name >$name/DEBIAN/control
printf 'Maintainer: a stand-in\nDescription: a stand-in\n' >>$name/DEBIAN/control
dpkg-deb --build --root-owner-group $name >/dev/null
{{ cat $name/DEBIAN/control; printf 'Filename: ./%s.deb\nSize: %s\nSHA256: %s\n\n' \
    $name $(stat -c %s $name.deb) $(sha256sum $name.deb | cut -d' ' -f1); }} >Packages
mkdir -p /etc/apt/sources.list.d
echo 'deb [trusted=yes] file:/root/noble ./' >/etc/apt/sources.list.d/noble.list
rm -rf /var/lib/apt/lists/*
"""
RESTORE = r"""
apt-get -qq purge -y libtcmalloc-minimal4t64 >/dev/null 2>&1 || :
rm -rf /etc/apt/sources.list* /etc/lsb-release /etc/os-release /root/noble /var/lib/apt/lists/*
mv /root/aside/sources.list* /etc/apt/
ln -s ../usr/lib/os-release /etc/os-release
rm -rf /root/aside
"""


@pytest.fixture
def noble(lab: Lab, hosts: list[Host]) -> Iterator[Host]:
    lab.inside(hosts[1], IMITATE)
    yield hosts[1]
    lab.inside(hosts[1], RESTORE)


def test_roles_on_a_host_that_says_it_is_ubuntu(lab: Lab, noble: Host, tmp_path: Path) -> None:
    ansible = Path(sys.executable).with_name("ansible")
    facts = [ansible, "-i", lab.inventory, noble.name, "-m", "setup", "-a", "filter=ansible_distribution*"]
    shown = subprocess.run(facts, capture_output=True, text=True, check=True).stdout
    assert "ansible_distribution: Ubuntu" in shown and "ansible_distribution_version: '24.04'" in shown
    tags = "--tags ssh,firewall,system,storage,nvidia"
    first = run_playbook("site.yml", lab.inventory, {}, tags, f"--limit {noble.name}")
    assert first.rc == 0, first.stdout
    assert "install ok" in lab.inside(noble, "dpkg-query -W -f '${Status}' libtcmalloc-minimal4t64")
    second = run_playbook("site.yml", lab.inventory, {}, tags, f"--limit {noble.name}")
    assert (second.rc, second.count("changed")) == (0, 0), second.stdout
