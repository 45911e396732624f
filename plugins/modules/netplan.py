#!/usr/bin/python
"""A host's own address, by netplan, tried under a fuse. The action plugin of this name is the controller's half."""

from __future__ import annotations

DOCUMENTATION = r"""
module: netplan
short_description: The static address of a host, changed without locking anyone out
description:
  - Gives one NIC, the one that the controller reaches unless told which, an address of its own in netplan's files. Its
    definition moves to C(60-trainyard.yaml); those of other NICs stay where they are. cloud-init is told to leave the
    network alone.
  - A change is tried first, from C(/run/netplan), and with a fuse of C(timeout) seconds. Only when the controller has
    reached the host at its new address is it written to C(/etc/netplan); otherwise the host goes back by itself, as it
    does by a reboot.
  - An action plugin does the controller's half. It takes the host's key that known_hosts has for its present address to
    be the key at the new one, and no other, and writes that down in known_hosts.
options:
  state:
    description: C(absent) brings back the files that were there before, and with them the former address.
    type: str
    choices: [present, absent]
    default: present
  address:
    description: Address with its prefix; required where C(state=present).
    type: str
  gateway:
    description: Address of the router; C(none) for none. By default the one that the host uses now.
    type: str
  dns:
    description: Addresses of name servers. By default those that the host uses now.
    type: list
    elements: str
  mtu:
    description: Largest packet of the NIC in bytes; 0 leaves it as it is.
    type: int
    default: 0
  nic:
    description: Name or MAC of the NIC. By default the one that has the address which this SSH connection came in by.
    type: str
    default: ""
  timeout:
    description: Seconds in which the controller must reach the host at its new address.
    type: int
    default: 30
  keep:
    description: Folder for what was there before.
    type: path
    default: /var/lib/trainyard/netplan
  step:
    description: Which part to do; set by the action plugin.
    type: str
    choices: [look, try, confirm]
    default: look
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author: trainyard
"""

EXAMPLES = r"""
- name: Give the host its address
  netplan:
    address: 192.168.1.11/24
    gateway: 192.168.1.1
  register: address
"""

RETURN = r"""
address:
  description: Where the controller reaches the host now; empty where that is no SSH connection.
  returned: success
  type: str
before:
  description: Where the controller reached it before.
  returned: success
  type: str
nic:
  description: Name of the NIC.
  returned: success
  type: str
"""

import hashlib
import ipaddress
import json
import os
import shutil
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ssh_session import ssh_session

try:
    import yaml  # netplan's own dependency
    from ansible.module_utils.netplan_files import OURS, Nic, Wish, edit

    HAS_YAML = bool(yaml)
except ImportError:
    HAS_YAML = False

ETC = Path("/etc/netplan")
CLOUD = Path("/etc/cloud/cloud.cfg.d/99-trainyard-network.cfg")
CLOUD_TEXT = "# trainyard: the role netplan has the addresses; cloud-init would write them anew at a boot\nnetwork: {config: disabled}\n"
TRIED = Path("/run/netplan")
PENDING = Path("/run/trainyard-netplan")
FUSE = "trainyard-netplan-fuse"
EMPTY = "network: {version: 2}\n"


class Host:
    """What the module does on its host; `fail` ends it with one plain line."""

    def __init__(self, module):
        self.module = module
        self.params = module.params
        self.kept = Path(self.params["keep"], "before.json")

    def fail(self, message, **more):
        self.module.fail_json(msg=message, plain=True, **more)

    def run(self, *argv, check=True):
        code, out, err = self.module.run_command(list(argv))
        if code and check:
            self.fail(f"{' '.join(argv)}: {' '.join((err or out).split())[-300:]}")
        return code, out, err

    def ip(self, *argv):
        return json.loads(self.run("ip", "-json", *argv)[1] or "[]")

    def before(self):
        """What was there before the first change, or None."""
        return json.loads(self.kept.read_text()) if self.kept.exists() else None

    # The NIC

    def nic(self):
        """The NIC that is meant, as it is now."""
        links = self.ip("address")
        said, present = self.params["nic"], (ssh_session() or ("", 0))[0]
        if said:
            found = [
                link for link in links if said.lower() in (link["ifname"].lower(), link.get("address", "").lower())
            ]
            if len(found) != 1:
                names = ", ".join(
                    f"{link['ifname']} {link.get('address', '')}" for link in links if link["ifname"] != "lo"
                )
                self.fail(f"netplan_nic is {said}, and {len(found) or 'none'} of its NICs is that: it has {names}")
        else:
            found = [link for link in links if present and any(a.get("local") == present for a in link["addr_info"])]
            if not found:
                self.fail(f"no NIC has the address {present or 'that it is reached at'}: say which with netplan_nic")
        link = found[0]
        version = ipaddress.ip_interface(self.params["address"]).version
        way = [r for r in self.ip(f"-{version}", "route", "show", "default", "dev", link["ifname"]) if "gateway" in r]
        kind = Path("/sys/class/net", link["ifname"], "addr_assign_type")
        return Nic(
            name=link["ifname"],
            mac=link.get("address", ""),
            gateway=way[0]["gateway"] if way else "",
            dns=tuple(resolvers()),
            permanent=kind.exists() and kind.read_text().strip() == "0",
        )

    def mtu(self, name):
        return int(Path("/sys/class/net", name, "mtu").read_text())

    # What has to become of which file: {path: text, or None to remove it}

    def files(self):
        return {path.name: path.read_text() for path in sorted(ETC.glob("*.yaml"))}

    def wanted(self, nic):
        p = self.params
        for folder in (TRIED, Path("/lib/netplan"), Path("/usr/lib/netplan")):
            for path in folder.glob("*.yaml"):
                text = path.read_text()
                if f"{nic.name}:" in text and not PENDING.exists():
                    self.fail(f"{nic.name} is also defined in {path}: take it out there")
        wish = Wish(
            address=p["address"],
            gateway=p["gateway"],
            dns=None if p["dns"] is None else tuple(p["dns"]),
            mtu=p["mtu"],
            by_mac=":" in p["nic"],
        )
        try:
            files = {str(ETC / name): text for name, text in edit(self.files(), nic, wish).items()}
        except ValueError as error:
            self.fail(str(error))
        if CLOUD.parent.is_dir() and (not CLOUD.exists() or CLOUD.read_text() != CLOUD_TEXT):
            files[str(CLOUD)] = CLOUD_TEXT
        return files

    def former(self):
        """The files as they were before; those that somebody has changed since are theirs."""
        before, files = self.before() or {"files": {}, "wrote": {}}, {}
        for name, text in before["files"].items():
            path = Path(name)
            now = path.read_text() if path.exists() else None
            if now == text:
                continue
            if digest(now) != before["wrote"].get(name):
                self.module.warn(f"{name} was changed since trainyard wrote it, and stays as it is")
                continue
            files[name] = text
        return files

    # Steps

    def look(self):
        present = (ssh_session() or ("", 0))[0]
        if self.params["state"] == "absent":
            before = self.before()
            files = self.former()
            nic, target = (before or {}).get("nic", ""), (before or {}).get("address", "")
            changed = bool(files) or before is not None
        else:
            if not shutil.which("netplan") or not HAS_YAML:
                self.fail(no_netplan())
            one = self.nic()
            files, nic = self.wanted(one), one.name
            target = self.params["address"].partition("/")[0]
            changed = bool(files)
            if changed:
                self.somebody_else(target, nic)
        diff = [
            {
                "before_header": name,
                "after_header": name,
                "before": shown(Path(name).read_text() if Path(name).exists() else ""),
                "after": shown(text or ""),
            }
            for name, text in files.items()
        ]
        return {
            "changed": changed,
            "diff": diff,
            "files": files,
            "nic": nic,
            "target": target or present,
            "present": present,
            "pending": (PENDING / "pending.json").exists(),
        }

    def somebody_else(self, address, nic):
        """Fail where another machine has the address already."""
        if any(a.get("local") == address for link in self.ip("address") for a in link["addr_info"]):
            return
        self.run("ping", "-c", "1", "-W", "1", "-I", nic, address, check=False)
        for near in self.ip("neigh", "show", address, "dev", nic):
            if near.get("lladdr") and "FAILED" not in near.get("state", []):
                self.fail(f"{address} is taken already, by the machine with the MAC {near['lladdr']}")

    def attempt(self):
        """Lay the new files over the old ones until a reboot or the fuse takes them away, and apply them."""
        seen = self.look()
        files, nic = seen.pop("files"), seen["nic"]
        ours = {name: text for name, text in files.items() if name.startswith(f"{ETC}/")}
        self.hold_against_netplan(ours)
        mtu = self.mtu(nic) if nic else 0
        if (PENDING / "pending.json").exists():
            # A try that nobody waits for any more: this one takes its place.
            last = json.loads((PENDING / "pending.json").read_text())
            mtu = last["mtu"] or mtu
            (PENDING / "applied").unlink(missing_ok=True)
            for name in last["files"]:
                (TRIED / Path(name).name).unlink(missing_ok=True)
        self.run("systemctl", "stop", f"{FUSE}.timer", "trainyard-netplan-apply.timer", check=False)
        PENDING.mkdir(mode=0o700, exist_ok=True)
        TRIED.mkdir(exist_ok=True)
        former_mtu = (self.before() or {}).get("mtu", 0) if self.params["state"] == "absent" else 0
        laid = [str(TRIED / Path(name).name) for name in ours]
        write(
            PENDING / "pending.json", json.dumps({"files": files, "nic": nic, "mtu": mtu, "present": seen["present"]})
        )
        # netplan does not take back an MTU that nothing says any more.
        gone = f"rm -f {' '.join(laid)}; rmdir --ignore-fail-on-non-empty {TRIED}"
        script(PENDING / "back", gone, "netplan apply", size(nic, mtu), f"rm -rf {PENDING}")
        script(PENDING / "apply", "netplan apply", size(nic, former_mtu), f"touch {PENDING}/applied")
        timer = ["systemd-run", "--quiet", "--collect", "--timer-property=AccuracySec=100ms"]
        self.run(*timer, f"--unit={FUSE}", f"--on-active={self.params['timeout']}", "/bin/sh", str(PENDING / "back"))
        for name, text in ours.items():
            write(TRIED / Path(name).name, EMPTY if text is None else text)
        # Detached, and a moment later: this connection has to bring the answer first.
        unit = ["--unit=trainyard-netplan-apply", "--on-active=0.5"]
        self.run(*timer, *unit, "/bin/sh", str(PENDING / "apply"))
        return seen

    def hold_against_netplan(self, ours):
        """Fail where netplan does not take the files."""
        with tempfile.TemporaryDirectory() as top:
            folder = Path(top, "etc/netplan")
            folder.mkdir(parents=True)
            texts = {**self.files(), **{Path(name).name: text for name, text in ours.items()}}
            for name, text in texts.items():
                if text is not None:
                    write(folder / name, text)
            code, out, err = self.run("netplan", "generate", "--root-dir", top, check=False)
            if code:
                self.fail(f"netplan does not take its new files: {' '.join((err or out).replace(top, '').split())}")

    def confirm(self):
        """Write down what was tried and reached; `waiting` while it is not applied yet, `lost` where the fuse burnt down."""
        file = PENDING / "pending.json"
        if not file.exists():
            return {"changed": False, "lost": True}
        pending = json.loads(file.read_text())
        if not (PENDING / "applied").exists():
            return {"changed": False, "waiting": True}
        self.run("systemctl", "stop", f"{FUSE}.timer")
        if self.run("systemctl", "is-active", "--quiet", f"{FUSE}.service", check=False)[0] == 0:
            return {"changed": False, "lost": True}
        if self.params["state"] == "present":
            self.remember(pending)
        # Ours first: whatever ends this half-way, there is an address.
        for name, text in sorted(pending["files"].items(), key=lambda item: not item[0].endswith(f"/{OURS}")):
            if text is None:
                Path(name).unlink(missing_ok=True)
            else:
                write(Path(name), text, 0o644 if name == str(CLOUD) else 0o600)
        for name in pending["files"]:
            if name.startswith(f"{ETC}/"):
                (TRIED / Path(name).name).unlink(missing_ok=True)
        if self.params["state"] == "absent":
            self.forget()
        if not any(TRIED.iterdir()):
            TRIED.rmdir()
        self.run("netplan", "generate")
        shutil.rmtree(PENDING)
        return {"changed": True}

    def remember(self, pending):
        """Keep what is there before anything is written."""
        kept = self.before() or {
            "files": {},
            "wrote": {},
            "nic": pending["nic"],
            "mtu": pending["mtu"],
            "address": pending["present"],
        }
        for name, text in pending["files"].items():
            path = Path(name)
            kept["files"].setdefault(name, path.read_text() if path.exists() else None)
            kept["wrote"][name] = digest(text)
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        write(self.kept, json.dumps(kept))

    def forget(self):
        self.kept.unlink(missing_ok=True)
        if self.kept.parent.is_dir() and not any(self.kept.parent.iterdir()):
            self.kept.parent.rmdir()


def resolvers():
    """The name servers that the host asks now."""
    for path in (Path("/run/systemd/resolve/resolv.conf"), Path("/etc/resolv.conf")):
        if path.exists():
            words = [line.split() for line in path.read_text().splitlines()]
            found = [word[1] for word in words if len(word) > 1 and word[0] == "nameserver"]
            found = [server for server in found if "%" not in server and not server.startswith("127.")]
            if found:
                return list(dict.fromkeys(found))
    return []


def no_netplan():
    if Path("/etc/network/interfaces").exists():
        return (
            "netplan is not installed, and ifupdown (/etc/network/interfaces) has the addresses: install netplan.io and move "
            "them there, or set the address in that file and leave netplan_address out"
        )
    return (
        "netplan is not installed: install netplan.io, or leave netplan_address out and set the address by other means"
    )


def digest(text):
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()


def shown(text):
    """A file as a diff may show it: without what is secret in it."""
    lines = text.splitlines(keepends=True)
    secret = ("password", "key:", "psk", "private", "auth")
    return "".join(
        f"{line.partition(':')[0]}: (hidden)\n" if any(word in line.lower() for word in secret) else line
        for line in lines
    )


def size(nic, mtu):
    return f"ip link set dev {nic} mtu {mtu}" if nic and mtu else ":"


def script(path, *lines):
    write(path, "\n".join(["set -eu", *lines, ""]))


def write(path, text, mode=0o600):
    """Write a file so that it is there whole or not at all."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.chmod(mode)
    new.rename(path)


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"choices": ["present", "absent"], "default": "present"},
            "address": {"type": "str"},
            "gateway": {"type": "str"},
            "dns": {"type": "list", "elements": "str"},
            "mtu": {"type": "int", "default": 0},
            "nic": {"type": "str", "default": ""},
            "timeout": {"type": "int", "default": 30},
            "keep": {"type": "path", "default": "/var/lib/trainyard/netplan"},
            "step": {"choices": ["look", "try", "confirm"], "default": "look"},
        },
        required_if=[("state", "present", ["address"])],
        supports_check_mode=True,
    )
    host = Host(module)
    step = module.params["step"]
    if step == "look":
        result = host.look()
        result.pop("files")
    else:
        result = host.attempt() if step == "try" else host.confirm()
    module.exit_json(**result)


if __name__ == "__main__":
    main()
