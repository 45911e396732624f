"""Distributions that site.yml supports, and the line about others, from recorded texts of /etc/os-release."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plugins.filter.distribution import distribution_error

TOP = Path(__file__).resolve().parents[2]
SUPPORTED = {
    "Debian 12": """PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"
NAME="Debian GNU/Linux"
VERSION_ID="12"
VERSION="12 (bookworm)"
VERSION_CODENAME=bookworm
ID=debian
HOME_URL="https://www.debian.org/"
""",
    "Debian 13": """PRETTY_NAME="Debian GNU/Linux 13 (trixie)"
NAME="Debian GNU/Linux"
VERSION_ID="13"
VERSION="13 (trixie)"
VERSION_CODENAME=trixie
DEBIAN_VERSION_FULL=13.1
ID=debian
HOME_URL="https://www.debian.org/"
""",
    "Ubuntu 22.04": """PRETTY_NAME="Ubuntu 22.04.2 LTS"
NAME="Ubuntu"
VERSION_ID="22.04"
VERSION="22.04.2 LTS (Jammy Jellyfish)"
VERSION_CODENAME=jammy
ID=ubuntu
ID_LIKE=debian
UBUNTU_CODENAME=jammy
""",
    "Ubuntu 24.04": """PRETTY_NAME="Ubuntu 24.04.3 LTS"
NAME="Ubuntu"
VERSION_ID="24.04"
VERSION="24.04.3 LTS (Noble Numbat)"
VERSION_CODENAME=noble
ID=ubuntu
ID_LIKE=debian
UBUNTU_CODENAME=noble
LOGO=ubuntu-logo
""",
    "Linux Mint 21": """NAME="Linux Mint"
VERSION="21 (Vanessa)"
ID=linuxmint
ID_LIKE="ubuntu debian"
PRETTY_NAME="Linux Mint 21"
VERSION_ID="21"
VERSION_CODENAME=vanessa
UBUNTU_CODENAME=jammy
""",
    "Linux Mint 20.1": 'NAME="Linux Mint"\nID=linuxmint\nID_LIKE=ubuntu\nPRETTY_NAME="Linux Mint 20.1"\n',
    "Pop!_OS 22.04": """NAME="Pop!_OS"
VERSION="22.04 LTS"
ID=pop
ID_LIKE="ubuntu debian"
PRETTY_NAME="Pop!_OS 22.04 LTS"
VERSION_ID="22.04"
UBUNTU_CODENAME=jammy
LOGO=distributor-logo-pop-os
""",
}
OTHERS = {
    "Fedora Linux 41 (Forty One)": """NAME="Fedora Linux"
VERSION="41 (Forty One)"
RELEASE_TYPE=stable
ID=fedora
VERSION_ID=41
VERSION_CODENAME=""
PLATFORM_ID="platform:f41"
PRETTY_NAME="Fedora Linux 41 (Forty One)"
ANSI_COLOR="0;38;2;60;110;180"
CPE_NAME="cpe:/o:fedoraproject:fedora:41"
SUPPORT_END=2025-12-15
""",
    "Arch Linux": """NAME="Arch Linux"
PRETTY_NAME="Arch Linux"
ID=arch
BUILD_ID=rolling
ANSI_COLOR="38;2;23;147;209"
LOGO=archlinux-logo
""",
    "openSUSE Tumbleweed": """NAME="openSUSE Tumbleweed"
# VERSION="20240115"
ID="opensuse-tumbleweed"
ID_LIKE="opensuse suse"
VERSION_ID="20240115"
PRETTY_NAME="openSUSE Tumbleweed"
ANSI_COLOR="0;32"
""",
    "openSUSE Leap 15.2": """NAME="openSUSE Leap"
VERSION="15.2"
ID="opensuse-leap"
ID_LIKE="suse opensuse"
VERSION_ID="15.2"
PRETTY_NAME="openSUSE Leap 15.2"
""",
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_debian_ubuntu_and_their_derivatives_are_supported(name: str) -> None:
    assert distribution_error(SUPPORTED[name]) == ""


@pytest.mark.parametrize("name", OTHERS)
def test_another_distribution_is_refused_by_its_name(name: str) -> None:
    error = distribution_error(OTHERS[name])
    assert error.startswith(f"site.yml does not support {name}: ") and "set cluster_managed: false" in error


def test_what_the_line_says_is_missing_is_what_the_roles_install() -> None:
    error = distribution_error("ID=fedora\n")
    installing = {
        path.parts[-3] for path in TOP.glob("roles/*/tasks/*.yml") if "ansible.builtin.apt:" in path.read_text()
    }
    # pull serves nfs and ollama; python installs a compiler for the extra deepspeed only.
    assert installing - {"pull", "python"} == {role for role in installing if re.search(rf"\b{role}\b", error)}
    for role, package in (("firewall", "ufw"), ("system", "chrony"), ("system", "libtcmalloc-minimal4")):
        assert any(f"name: {package}\n" in path.read_text() for path in TOP.glob(f"roles/{role}/tasks/*.yml"))
        assert package in error


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "a distribution without /etc/os-release"),
        ("ID=void\n", "void"),
        ("ID='alpine'\nPRETTY_NAME='Alpine Linux v3.20'\n", "Alpine Linux v3.20"),
        ('ID=x\nPRETTY_NAME="\x1b[2J\u202eevil"\n', "\\x1b[2J\\u202eevil"),
        ("ID=x\nPRETTY_NAME=" + "A" * 4000, "A" * 77 + "..."),
        ('ID="debian-like"\nID_LIKE=not-debian\nPRETTY_NAME="Imitation of debian"\n', "Imitation of debian"),
        ('ID=x\nPRETTY_NAME="open quote\nID_LIKE="\n', '"open quote'),
    ],
)  # fmt: skip
def test_a_hostile_text_is_one_printable_line(text: str, shown: str) -> None:
    error = distribution_error(text)
    assert error.startswith(f"site.yml does not support {shown}: ")
    assert error.isprintable() and len(error) < 600
