#!/usr/bin/python
"""Change the static address of a host with netplan, and roll back if the controller cannot reach the new address."""

from __future__ import annotations

DOCUMENTATION = r"""
module: netplan
short_description: Change the static address of a host without losing access
description:
  - Sets the address of one NIC in netplan's files. The definition of the NIC moves to C(60-trainyard.yaml); definitions of
    other NICs are unchanged. cloud-init's network configuration is disabled.
  - A change is applied from C(/run/netplan) first, with a rollback timer of O(timeout) seconds. The module writes
    C(/etc/netplan) after the controller has reached the host at its new address. Otherwise the host restores its former
    address when the timer expires or the host reboots.
  - The action plugin of this name runs on the controller. It accepts only the SSH host key that known_hosts has for the
    current address, and adds that key for the new address.
options:
  state:
    description: With C(absent), restore the former files and the former address.
    type: str
    choices: [present, absent]
    default: present
  address:
    description: Address with its prefix length; required for O(state=present).
    type: str
  gateway:
    description: Address of the router, or C(none). By default the current one.
    type: str
  dns:
    description: Addresses of name servers. By default the current ones.
    type: list
    elements: str
  mtu:
    description: MTU of the NIC in bytes; 0 keeps the current one.
    type: int
    default: 0
  nic:
    description: Name or MAC address of the NIC. By default the NIC of the current SSH connection.
    type: str
    default: ""
  timeout:
    description: Seconds within which the controller must reach the host at its new address.
    type: int
    default: 30
  step:
    description: Part of the change to run; set by the action plugin.
    type: str
    choices: [plan, try, confirm]
    default: plan
extends_documentation_fragment: [trainyard, trainyard.files]
"""

EXAMPLES = r"""
- name: Set the address of the host
  netplan:
    address: 192.168.1.11/24
    gateway: 192.168.1.1
  register: address
"""

RETURN = r"""
address: {description: "Address at which the controller reaches the host now; empty without an SSH connection.", returned: success, type: str}
before: {description: Address at which the controller reached the host before., returned: success, type: str}
nic: {description: Name of the NIC., returned: success, type: str}
"""

import hashlib
import ipaddress
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from ansible.module_utils.argument_spec import argument_spec
from ansible.module_utils.atomic_file import write_atomic
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ssh_session import ssh_session

try:
    import yaml  # a dependency of netplan
    from ansible.module_utils.netplan_files import MANAGED_FILE, AddressSettings, Nic, edit

    HAS_YAML = bool(yaml)
except ImportError:
    HAS_YAML = False

ETC = Path("/etc/netplan")
BACKUP = Path("/var/lib/trainyard/netplan/before.json")  # the former files
CLOUD = Path("/etc/cloud/cloud.cfg.d/99-trainyard-network.cfg")
CLOUD_TEXT = (
    "# trainyard: the role netplan manages the addresses; cloud-init would overwrite them at boot\n"
    "network: {config: disabled}\n"
)
TRIAL = Path("/run/netplan")
PENDING = Path("/run/trainyard-netplan")
ROLLBACK = "trainyard-netplan-rollback"
APPLY = "trainyard-netplan-apply"
EMPTY = "network: {version: 2}\n"
SECRETS = ("password", "key:", "psk", "private", "auth")


class NetplanChange:
    """The steps of a change on the host; an error ends the module with one line."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params

    def fail(self, message: str) -> NoReturn:
        """End the module with an error of one line."""
        self.module.fail_json(msg=message, plain=True)
        raise AssertionError  # fail_json ends the process

    def run(self, *argv: str, check: bool = True) -> tuple[int, str, str]:
        """Run a command and return exit code, stdout and stderr; with `check`, a failure ends the module."""
        code, out, err = self.module.run_command(list(argv))
        if code and check:
            self.fail(f"{' '.join(argv)}: {' '.join((err or out).split())[-300:]}")
        return code, out, err

    def ip(self, *argv: str) -> list[dict[str, Any]]:
        """Return the output of `ip -json`."""
        found: list[dict[str, Any]] = json.loads(self.run("ip", "-json", *argv)[1] or "[]")
        return found

    def saved(self) -> dict[str, Any] | None:
        """Return the backup of the former configuration, or None before the first change."""
        return json.loads(BACKUP.read_text(encoding="utf-8")) if BACKUP.exists() else None

    # The NIC

    def nic(self) -> Nic:
        """Return the NIC to configure, in its current state."""
        link = self.find_link()
        version = ipaddress.ip_interface(self.params["address"]).version
        default = self.ip(f"-{version}", "route", "show", "default", "dev", link["ifname"])
        gateways = [route["gateway"] for route in default if "gateway" in route]
        kind = Path("/sys/class/net", link["ifname"], "addr_assign_type")
        return Nic(
            name=link["ifname"],
            mac=link.get("address", ""),
            gateway=gateways[0] if gateways else "",
            dns=tuple(name_servers()),
            permanent=kind.exists() and kind.read_text(encoding="utf-8").strip() == "0",
        )

    def find_link(self) -> dict[str, Any]:
        """Return the link that `nic` names, or else the link of the current SSH connection."""
        links = self.ip("address")
        wanted = self.params["nic"].lower()
        if wanted:
            found = [link for link in links if wanted in (link["ifname"].lower(), link.get("address", "").lower())]
            if len(found) != 1:
                others = [link for link in links if link["ifname"] != "lo"]
                names = ", ".join(f"{link['ifname']} {link.get('address', '')}" for link in others)
                self.fail(f"netplan_nic is {self.params['nic']}: {len(found)} NICs match; this host has {names}")
            return found[0]
        session = ssh_session()
        current = session.address if session else ""
        found = [link for link in links if current and any(a.get("local") == current for a in link["addr_info"])]
        if not found:
            self.fail(f"no NIC has the address {current or 'of the connection'}: set netplan_nic")
        return found[0]

    # The files: {path: new text, or None to remove the file}

    def netplan_files(self) -> dict[str, str]:
        """Return name and text of every file in /etc/netplan."""
        return {path.name: path.read_text(encoding="utf-8") for path in sorted(ETC.glob("*.yaml"))}

    def new_files(self, nic: Nic) -> dict[str, str | None]:
        """Return the files to change for the new address; empty if the configuration is up to date."""
        params = self.params
        for folder in (TRIAL, Path("/lib/netplan"), Path("/usr/lib/netplan")):
            for path in folder.glob("*.yaml"):
                if f"{nic.name}:" in path.read_text(encoding="utf-8") and not PENDING.exists():
                    self.fail(f"{nic.name} is also defined in {path}: remove that definition")
        settings = AddressSettings(
            address=params["address"],
            gateway=params["gateway"],
            dns=None if params["dns"] is None else tuple(params["dns"]),
            mtu=params["mtu"],
            by_mac=":" in params["nic"],
        )
        try:
            files = {str(ETC / name): text for name, text in edit(self.netplan_files(), nic, settings).items()}
        except ValueError as error:
            self.fail(str(error))
        if CLOUD.parent.is_dir() and (not CLOUD.exists() or CLOUD.read_text(encoding="utf-8") != CLOUD_TEXT):
            files[str(CLOUD)] = CLOUD_TEXT
        return files

    def former_files(self) -> dict[str, str | None]:
        """Return the files to restore. A file that changed after this module wrote it stays, with a warning."""
        saved = self.saved() or {"files": {}, "wrote": {}}
        files: dict[str, str | None] = {}
        for name, text in saved["files"].items():
            path = Path(name)
            current = path.read_text(encoding="utf-8") if path.exists() else None
            if current == text:
                continue
            if digest(current) != saved["wrote"].get(name):
                self.module.warn(f"{name} changed after trainyard wrote it, and is not restored")
                continue
            files[name] = text
        return files

    # Steps

    def plan(self) -> dict[str, Any]:
        """Return the pending change: files, NIC, current and new address, and the diff."""
        session = ssh_session()
        current = session.address if session else ""
        if self.params["state"] == "absent":
            saved = self.saved()
            files = self.former_files()
            nic, target = (saved or {}).get("nic", ""), (saved or {}).get("address", "")
            changed = bool(files) or saved is not None
        else:
            if not shutil.which("netplan") or not HAS_YAML:
                self.fail(netplan_missing())
            found = self.nic()
            files, nic = self.new_files(found), found.name
            target = self.params["address"].partition("/")[0]
            changed = bool(files)
            if changed:
                self.reject_duplicate(target, nic)
        return {
            "changed": changed,
            "diff": [difference(name, text) for name, text in files.items()],
            "files": files,
            "nic": nic,
            "target": target or current,
            "present": current,
            "pending": (PENDING / "pending.json").exists(),
        }

    def reject_duplicate(self, address: str, nic: str) -> None:
        """End the module if another machine on the network uses the address."""
        if any(a.get("local") == address for link in self.ip("address") for a in link["addr_info"]):
            return
        self.run("ping", "-c", "1", "-W", "1", "-I", nic, address, check=False)
        for neighbour in self.ip("neigh", "show", address, "dev", nic):
            if neighbour.get("lladdr") and "FAILED" not in neighbour.get("state", []):
                self.fail(f"{address} is in use by the machine with the MAC address {neighbour['lladdr']}")

    def attempt(self) -> dict[str, Any]:
        """Apply the new files from /run/netplan, and start the rollback timer."""
        change = self.plan()
        files, nic = change.pop("files"), change["nic"]
        etc_files = {name: text for name, text in files.items() if name.startswith(f"{ETC}/")}
        self.validate(etc_files)
        mtu = int(Path("/sys/class/net", nic, "mtu").read_text(encoding="utf-8")) if nic else 0
        mtu = self.discard_attempt(mtu)
        PENDING.mkdir(mode=0o700, exist_ok=True)
        TRIAL.mkdir(exist_ok=True)
        pending = {"files": files, "nic": nic, "mtu": mtu, "present": change["present"]}
        write_atomic(PENDING / "pending.json", json.dumps(pending), 0o600)
        # netplan does not reset the MTU when its setting disappears.
        former_mtu = (self.saved() or {}).get("mtu", 0) if self.params["state"] == "absent" else 0
        trial = [str(TRIAL / Path(name).name) for name in etc_files]
        remove = f"rm -f {' '.join(trial)}; rmdir --ignore-fail-on-non-empty {TRIAL}"
        write_script(PENDING / "rollback", remove, "netplan apply", set_mtu(nic, mtu), f"rm -rf {PENDING}")
        write_script(PENDING / "apply", "netplan apply", set_mtu(nic, former_mtu), f"touch {PENDING}/applied")
        timer = ["systemd-run", "--quiet", "--collect", "--timer-property=AccuracySec=100ms"]
        timeout = f"--on-active={self.params['timeout']}"
        self.run(*timer, f"--unit={ROLLBACK}", timeout, "/bin/sh", str(PENDING / "rollback"))
        for name, text in etc_files.items():
            write_atomic(TRIAL / Path(name).name, EMPTY if text is None else text, 0o600)
        # Delayed and detached: this SSH connection returns the result of the module first.
        self.run(*timer, f"--unit={APPLY}", "--on-active=0.5", "/bin/sh", str(PENDING / "apply"))
        return change

    def discard_attempt(self, mtu: int) -> int:
        """Stop the timers and remove the files of an earlier attempt; return the MTU that a rollback restores."""
        if (PENDING / "pending.json").exists():
            earlier = json.loads((PENDING / "pending.json").read_text(encoding="utf-8"))
            mtu = earlier["mtu"] or mtu
            (PENDING / "applied").unlink(missing_ok=True)
            for name in earlier["files"]:
                (TRIAL / Path(name).name).unlink(missing_ok=True)
        self.run("systemctl", "stop", f"{ROLLBACK}.timer", f"{APPLY}.timer", check=False)
        return mtu

    def validate(self, etc_files: dict[str, str | None]) -> None:
        """End the module if netplan rejects the new files."""
        with tempfile.TemporaryDirectory() as top:
            folder = Path(top, "etc/netplan")
            folder.mkdir(parents=True)
            texts = {**self.netplan_files(), **{Path(name).name: text for name, text in etc_files.items()}}
            for name, text in texts.items():
                if text is not None:
                    write_atomic(folder / name, text, 0o600)
            code, out, err = self.run("netplan", "generate", "--root-dir", top, check=False)
            if code:
                self.fail(f"netplan rejects the new files: {' '.join((err or out).replace(top, '').split())}")

    def confirm(self) -> dict[str, Any]:
        """Make the change permanent. `waiting`: it is not applied yet; `lost`: the rollback timer expired."""
        file = PENDING / "pending.json"
        if not file.exists():
            return {"changed": False, "lost": True}
        pending = json.loads(file.read_text(encoding="utf-8"))
        if not (PENDING / "applied").exists():
            return {"changed": False, "waiting": True}
        self.run("systemctl", "stop", f"{ROLLBACK}.timer")
        if self.run("systemctl", "is-active", "--quiet", f"{ROLLBACK}.service", check=False)[0] == 0:
            return {"changed": False, "lost": True}
        if self.params["state"] == "present":
            self.save(pending)
        # The file with the address comes first: an interruption must not leave the host without an address.
        for name, text in sorted(pending["files"].items(), key=lambda item: not item[0].endswith(f"/{MANAGED_FILE}")):
            if text is None:
                Path(name).unlink(missing_ok=True)
            else:
                write_atomic(Path(name), text, 0o644 if name == str(CLOUD) else 0o600)
        for name in pending["files"]:
            if name.startswith(f"{ETC}/"):
                (TRIAL / Path(name).name).unlink(missing_ok=True)
        if self.params["state"] == "absent":
            BACKUP.unlink(missing_ok=True)
            if BACKUP.parent.is_dir() and not any(BACKUP.parent.iterdir()):
                BACKUP.parent.rmdir()
        if not any(TRIAL.iterdir()):
            TRIAL.rmdir()
        self.run("netplan", "generate")
        shutil.rmtree(PENDING)
        return {"changed": True}

    def save(self, pending: dict[str, Any]) -> None:
        """Store the current files before the change overwrites them, and digests of the new ones."""
        new = {"nic": pending["nic"], "mtu": pending["mtu"], "address": pending["present"]}
        saved = self.saved() or {"files": {}, "wrote": {}, **new}
        for name, text in pending["files"].items():
            path = Path(name)
            saved["files"].setdefault(name, path.read_text(encoding="utf-8") if path.exists() else None)
            saved["wrote"][name] = digest(text)
        write_atomic(BACKUP, json.dumps(saved), 0o600)


def name_servers() -> list[str]:
    """Return the addresses of the name servers in use."""
    for path in (Path("/run/systemd/resolve/resolv.conf"), Path("/etc/resolv.conf")):
        if path.exists():
            words = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
            found = [word[1] for word in words if len(word) > 1 and word[0] == "nameserver"]
            found = [server for server in found if "%" not in server and not server.startswith("127.")]
            if found:
                return list(dict.fromkeys(found))
    return []


def netplan_missing() -> str:
    """Return the error for a host without netplan."""
    if Path("/etc/network/interfaces").exists():
        return (
            "netplan is not installed, ifupdown (/etc/network/interfaces) manages the addresses: install netplan.io and move "
            "the addresses to netplan, or set the address in that file and remove netplan_address"
        )
    return "netplan is not installed: install netplan.io, or remove netplan_address and set the address by other means"


def digest(text: str | None) -> str:
    """Return the SHA-256 of a text, or an empty string for a file that does not exist."""
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()


def difference(name: str, text: str | None) -> dict[str, str]:
    """Return the change of a file for C(--diff)."""
    before = Path(name).read_text(encoding="utf-8") if Path(name).exists() else ""
    return {"before_header": name, "after_header": name, "before": redact(before), "after": redact(text or "")}


def redact(text: str) -> str:
    """Return the text of a netplan file without its secrets."""
    return "".join(
        f"{line.partition(':')[0]}: (hidden)\n" if any(word in line.lower() for word in SECRETS) else line
        for line in text.splitlines(keepends=True)
    )


def set_mtu(nic: str, mtu: int) -> str:
    """Return the shell command that sets the MTU, or one that does nothing."""
    return f"ip link set dev {nic} mtu {mtu}" if nic and mtu else ":"


def write_script(path: Path, *lines: str) -> None:
    """Write a shell script that stops at the first error."""
    write_atomic(path, "\n".join(["set -eu", *lines, ""]), 0o600)


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(DOCUMENTATION),
        required_if=[("state", "present", ["address"])],
        supports_check_mode=True,
    )
    change = NetplanChange(module)
    step = module.params["step"]
    if step == "plan":
        result = change.plan()
        result.pop("files")
    else:
        result = change.attempt() if step == "try" else change.confirm()
    module.exit_json(**result)


if __name__ == "__main__":
    main()
