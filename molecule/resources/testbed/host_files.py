"""The files of lab hosts: copies from this machine, and the name, address, keys and disk of each host."""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from . import machine, metal, root
from .machine import run

if TYPE_CHECKING:
    from .lab import Lab, LabHost

DISK = "16G"  # sparse: unwritten blocks take no space


def create_key(file: Path, comment: str) -> None:
    """Create an ed25519 key pair without a passphrase."""
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", file)


def binds(kind: str, venv: Path | None) -> list[Path]:
    """Return the folders of this machine that hosts mount, read-only, at the same path."""
    if kind == "metal":  # each folder is copied into a disk image: only what a run needs
        return machine.python_binds(venv) if venv else []
    folders = machine.pip_settings(venv / "bin/python" if venv else Path(sys.executable))[1]
    return list(dict.fromkeys([*(machine.python_binds(venv) if venv else []), *folders]))


def write_shared(lab: Lab, kind: str, venv: Path | None) -> None:
    """Write the files that every host copies from this machine: name servers, certificates, pip's settings and their files."""
    files = lab.folder / "files"
    pip, _ = machine.pip_settings(venv / "bin/python" if venv else Path(sys.executable))
    _write(files / "etc/resolv.conf", "".join(f"nameserver {address}\n" for address in machine.resolvers()))
    _write(files / "etc/pip.conf", pip)
    named = [word for word in pip.split() if word.startswith("/") and Path(word).is_file()]  # such as constraints
    for path in ("/etc/ssl/certs/ca-certificates.crt", "/usr/local/share/ca-certificates", *named):
        copy = files / path[1:]
        copy.parent.mkdir(parents=True, exist_ok=True)
        if Path(path).is_dir():
            shutil.copytree(path, copy)
        elif Path(path).exists():
            shutil.copy(path, copy)
    if kind == "light":
        # sysfs shows all devices of this machine; the devices of a light host are its NICs.
        _write(
            files / "etc/systemd/system/systemd-udev-trigger.service.d/lab.conf",
            "[Service]\nExecStart=\nExecStart=udevadm trigger --type=devices --subsystem-match=net --action=add\n",
        )
        return
    mounts = []
    for number, folder in enumerate(binds(kind, venv)):
        metal.share(folder, lab.folder / f"folder{number}.img", f"folder{number}")
        mounts.append(f"LABEL=folder{number} {folder} ext4 ro 0 0\n")
    _write(files / "etc/fstab", "".join(mounts))


def write_host(lab: Lab, kind: str, host: LabHost) -> None:
    """Write the files of one host, and create the disk of a light host."""
    folder = lab.folder / host.name
    files = folder / "files"
    _write(files / "etc/hostname", f"{host.name}\n")
    _write(
        files / "etc/hosts",
        f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n\n::1 localhost ip6-localhost ip6-loopback\n",
    )
    _write(files / "etc/machine-id", f"{uuid.uuid4().hex}\n", mode=0o444)
    _write_netplan(files / "etc/netplan/50-cloud-init.yaml", kind, host)
    key = files / "etc/ssh/ssh_host_ed25519_key"
    key.parent.mkdir(parents=True)
    create_key(key, f"root@{host.name}")
    home = files / f"home/{root.USER}"
    _write(home / ".ssh/authorized_keys", (lab.folder / "id_ed25519.pub").read_text(), mode=0o600)
    (home / ".ssh").chmod(0o700)
    for path in (home, *home.rglob("*")):
        os.chown(path, 1000, 1000)
    if kind == "light":
        image = folder / "disk.img"
        with image.open("wb") as file:
            file.truncate(int(DISK[:-1]) << 30)
        # No journal: the disk does not outlive a boot of this machine. No reserved blocks: a full disk is also full for root.
        run("mke2fs", "-q", "-t", "ext4", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1", image)


def _write_netplan(file: Path, kind: str, host: LabHost) -> None:
    # A veth has no permanent hardware address for netplan to match; a NIC of qemu has, and gets its name from it.
    match = f'\n      match: {{macaddress: "{host.mac}"}}\n      set-name: {host.nic}' if kind == "metal" else ""
    _write(
        file,
        f"""network:
  version: 2
  renderer: networkd
  ethernets:
    {host.nic}:{match}
      addresses: [{host.address}/24]
      routes: [{{to: default, via: 10.231.{host.net}.1}}]
      nameservers: {{addresses: [{", ".join(machine.resolvers())}]}}
""",
        mode=0o600,
    )


def write_known_hosts(lab: Lab) -> None:
    """Write the host keys of all hosts to the known_hosts file of the lab."""
    lines = []
    for host in lab.hosts:
        key = (lab.folder / host.name / "files/etc/ssh/ssh_host_ed25519_key.pub").read_text().split()
        lines.append(f"{host.address} {key[0]} {key[1]}\n")
    lab.known_hosts.write_text("".join(lines))


def _write(file: Path, text: str, mode: int = 0o644) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)
