"""site.yml on this machine with another /etc/os-release: a distribution without apt is refused before the first change."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_hosts import Played, run_playbook
from run_hosts import write_inventory

pytestmark = pytest.mark.slow


def site(folder: Path, text: str, managed: bool = True) -> Played:
    """Run site.yml with the role storage alone, which creates a folder."""
    (folder / "os-release").write_text(text)
    inventory = write_inventory(folder, {"data": {}}, cluster_managed=managed)
    extra = {"_cluster_os_release": str(folder / "os-release")}
    return run_playbook("site.yml", inventory, extra, "--tags storage")


def test_a_distribution_without_apt_is_refused_before_the_first_change(tmp_path: Path) -> None:
    played = site(tmp_path, 'ID=fedora\nPRETTY_NAME="Fedora Linux 41 {{ 6 * 7 }}\x1b[2J"\n')
    assert played.rc != 0 and played.count("changed") == 0
    (line,) = [line for line in played.stdout.splitlines() if line.startswith("error: ")]
    assert line.startswith(
        "error: data: site.yml does not support Fedora Linux 41 {{ 6 * 7 }}\\x1b[2J: its roles install"
    )
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(("text", "managed"), [("ID=linuxmint\nID_LIKE=ubuntu\n", True), ("ID=fedora\n", False)])
def test_a_derivative_of_ubuntu_and_a_host_that_is_not_managed_are_accepted(
    tmp_path: Path, text: str, managed: bool
) -> None:
    played = site(tmp_path, text, managed)
    assert played.rc == 0 and (tmp_path / "data").is_dir(), played.stdout
