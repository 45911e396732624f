"""The root file system that all hosts of a lab share: mmdebstrap builds it once, and the digest of its recipe names it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from .machine import CACHE, LabError, apt_options, apt_sources, locked

USER = "tester"  # the user that Ansible logs in as, with sudo
DATA_DIR = f"/home/{USER}/trainyard"  # cluster_data_dir of every host

# The packages of a server after its installer has finished.
PACKAGES = """
    systemd-sysv systemd udev dbus dbus-user-session libpam-systemd openssh-server sudo ca-certificates
    python3 python3-apt iproute2 iputils-ping netplan.io nftables ufw procps kmod less logrotate
"""
# The image includes NFS, not started: installing it inside an emulated machine takes minutes.
METAL = "linux-image-cloud-amd64 initramfs-tools nfs-kernel-server nfs-common"

RECIPE = "3"  # increment after a change of the build that the other parts of the digest do not show

CUSTOMIZE = f"""
set -eu
inside() {{ chroot "$1" sh -euc "$2"; }}
inside "$1" 'useradd --create-home --uid 1000 --shell /bin/bash --groups sudo {USER}'
echo '{USER} ALL=(ALL) NOPASSWD:ALL' > "$1/etc/sudoers.d/90-cloud-init-users"
chmod 440 "$1/etc/sudoers.d/90-cloud-init-users"
echo 'PasswordAuthentication no' > "$1/etc/ssh/sshd_config.d/50-cloud-init.conf"
echo 'LANG=C.UTF-8' > "$1/etc/default/locale"
rm -f "$1"/etc/ssh/ssh_host_*
: > "$1/etc/machine-id"
inside "$1" 'systemctl enable systemd-networkd'
# A lab host downloads nothing on its own.
inside "$1" 'systemctl mask apt-daily.timer apt-daily-upgrade.timer systemd-timesyncd.service'
inside "$1" 'systemctl set-default multi-user.target'
# Debian 13 mounts a tmpfs, which would hide what the lab mounts below /tmp.
inside "$1" 'systemctl mask tmp.mount'
if [ -e "$1/usr/sbin/exportfs" ]; then inside "$1" 'systemctl disable nfs-server.service rpcbind.service rpcbind.socket'; fi
"""


def packages(kind: str) -> str:
    """Return the packages of a root file system of this kind ("light" or "metal"), separated by commas."""
    return ",".join(f"{PACKAGES} {METAL if kind == 'metal' else ''}".split())


def build(kind: str, codename: str) -> Path:
    """Return the folder of the root file system of the release `codename` for hosts of this kind; build it if it is missing (30 s).

    Raises LabError with the last lines of mmdebstrap if the build fails.
    """
    sources = apt_sources(codename)
    options = apt_options()
    recipe = "\n".join([RECIPE, codename, sources, *options, packages(kind), CUSTOMIZE])
    root = CACHE / "roots" / f"{codename}-{kind}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    root.parent.mkdir(parents=True, exist_ok=True)
    with locked(root.with_suffix(".lock")):
        if not root.exists():
            print(f"building the root file system of the hosts ({codename}, once)", flush=True)
            _mmdebstrap(codename, sources, options, packages(kind), root)
    return root


def _mmdebstrap(codename: str, sources: str, options: list[str], include: str, root: Path) -> None:
    unfinished = root.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    hook, listing = root.with_suffix(".hook"), root.with_suffix(".sources" if "\nURIs:" in sources else ".list")
    hook.write_text(f"#!/bin/sh\n{CUSTOMIZE}")
    hook.chmod(0o755)
    listing.write_text(sources)
    argv = ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={include}"]
    argv += [f"--aptopt={option}" for option in options]
    argv += [f"--customize-hook={hook}", codename, str(unfinished), str(listing)]
    # A separate mount namespace: the mounts of mmdebstrap end with it, and this machine's mounts stay unchanged.
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", *argv],
        env={**os.environ, "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    hook.unlink()
    listing.unlink()
    if done.returncode:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise LabError(f"mmdebstrap cannot build the root file system of the hosts: {done.stdout.strip()[-800:]}")
    # Without package lists and with a current timestamp: a role that relies on the age of the lists fails on a new
    # host.
    unfinished.rename(root)
