"""A lab: hosts on a bridge of their own, a cable to this machine, and a way out to the package registries."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from . import inventory, machine, metal, root
from .machine import LABS, LabError, remove_cgroups, run

HERE = Path(__file__).parent
READY_SECONDS = {"light": 60, "metal": 400}
DISK = "16G"  # sparse: what a host does not write takes no room


@dataclass(frozen=True)
class Host:
    """One host of a lab. `index` counts from 1; `net` is the third octet of the lab's addresses."""

    index: int
    net: int

    @property
    def name(self) -> str:
        return f"node{self.index}"

    @property
    def address(self) -> str:
        # From .9 on: in the order of strings .10 comes before .9, and nothing may depend on that order.
        return f"10.231.{self.net}.{8 + self.index}"

    @property
    def nic(self) -> str:
        # Every host names its NIC differently, as unlike machines do.
        return f"enp{self.index}s0"

    @property
    def mac(self) -> str:
        return f"02:79:00:00:{self.net:02x}:{8 + self.index:02x}"


@dataclass
class State:
    """What is written down about a running lab, so that `down` finds it after any accident."""

    kind: str
    net: int
    hosts: int
    holder: int  # PID as the machine sees it
    started: int  # of the holder, in clock ticks since boot: a PID alone may be somebody else's by now


class Lab:
    """A lab by its name. Several may live side by side; `up` and `down` may be called at any time and again."""

    def __init__(self, name: str = "lab") -> None:
        if not name.replace("-", "").isalnum() or len(name) > 40:
            raise LabError(f"a lab's name is letters, digits and dashes, not {name!r}")
        self.name = name
        self.folder = LABS / name
        self._owner: int | None = None

    # What there is

    @property
    def state(self) -> State | None:
        """The state of the lab if it lives, else None."""
        file = self.folder / "state.json"
        if not file.exists():
            return None
        state = State(**json.loads(file.read_text()))
        return state if started(state.holder) == state.started else None

    @property
    def living(self) -> State:
        """The state of the lab. Raises LabError when it is not up."""
        if state := self.state:
            return state
        raise LabError(f"no lab named {self.name!r} is up: `make lab` starts one")

    @property
    def hosts(self) -> list[Host]:
        """Its hosts, in the order of the inventory."""
        state = self.living
        return [Host(index, state.net) for index in range(1, state.hosts + 1)]

    def host(self, name: str) -> Host:
        """The host of that name. Raises LabError when there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise LabError(f"no host {name!r} in lab {self.name!r}: it has {', '.join(host.name for host in self.hosts)}")

    @property
    def inventory(self) -> Path:
        """The lab's own inventory file."""
        return self.folder / "inventory.yml"

    @property
    def key(self) -> Path:
        """The private key that the hosts' user accepts."""
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The hosts' keys."""
        return self.folder / "known_hosts"

    @cached_property
    def cgroup_tops(self) -> list[Path]:
        """This lab's folder in every cgroup hierarchy that the lab uses."""
        tops = {machine.cgroup2()}
        for controller in ("cpu", "memory"):
            with contextlib.suppress(LabError):
                tops.add(machine.cgroup_of(controller)[0])
        return [top / f"trainyard-{self.name}" for top in sorted(tops)]

    def cgroups(self, host: Host) -> list[Path]:
        """The host's folder in every cgroup hierarchy that the lab uses."""
        return [top / host.name for top in self.cgroup_tops]

    def init_pid(self, host: Host) -> int | None:
        """PID, as this machine sees it, of the host's PID 1 (of its qemu on a whole machine); None when it is off."""
        group = machine.cgroup2() / f"trainyard-{self.name}" / host.name
        for file in (group / "init.scope/cgroup.procs", group / "cgroup.procs"):
            for pid in file.read_text().split() if file.exists() else []:
                with contextlib.suppress(OSError):
                    status = Path(f"/proc/{pid}/status").read_text()
                    if self.living.kind == "metal" or status.split("NSpid:")[1].split("\n")[0].split()[-1] == "1":
                        return int(pid)
        return None

    # Commands

    def in_lab(self, *argv: str | Path, check: bool = True) -> str:
        """Run a command in the lab's network namespace: where the switch is, and an outsider on the hosts' network."""
        return run("nsenter", f"--net=/proc/{self.living.holder}/ns/net", *argv, check=check)

    def inside(self, host: Host, script: str, check: bool = True) -> str:
        """Run a shell script as root inside a host, and return its output. Raises LabError when it fails or is off."""
        if self.living.kind == "metal":
            return run(*self.ssh(host), "sudo", "sh", "-euc", _quoted(script), check=check)
        pid = self.init_pid(host)
        if pid is None:
            raise LabError(f"{host.name} is off: `undo {host.name} crash` boots it")
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        enter = ["nsenter", "--target", str(pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--wd=/"]
        return run(*enter, "env", "-i", path, "sh", "-euc", script, check=check)

    def ssh(self, host: Host) -> list[str | Path]:
        """The command that logs in on a host as its user."""
        options = ["-o", f"UserKnownHostsFile={self.known_hosts}", "-o", "StrictHostKeyChecking=yes"]
        options += ["-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"]
        options += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4"]
        return ["ssh", "-F", "none", "-i", self.key, *options, f"{root.USER}@{host.address}"]

    # Life

    def up(self, hosts: int = 3, kind: str = "light", venv: Path | None = None, stay: bool = True) -> None:
        """Bring up the lab with this many hosts, or bring a living one to that number; hosts that are off are booted.

        `venv` is shown to light hosts, read-only at its own path. With `stay` the lab outlives this process once it is up;
        until then, and without `stay`, it dies with it. Raises LabError and leaves nothing behind when it cannot be had.
        """
        machine.require(kind)
        if not 1 <= hosts <= 200:
            raise LabError(f"a lab has 1 to 200 hosts, not {hosts}")
        LABS.mkdir(parents=True, exist_ok=True)
        lower = root.build(kind)
        if kind == "metal":
            metal.image(lower)
            venv = None
        with root.locked(LABS / f"{self.name}.lock"):
            if (state := self.state) and state.kind != kind:
                raise LabError(f"lab {self.name!r} is up with {state.kind} hosts: take it down first")
            try:
                self._up(hosts, kind, lower, venv)
                if stay:
                    self._let_go()
            except BaseException:
                if not state:
                    self._down()
                raise

    def down(self) -> None:
        """End the lab and everything of it. Nothing happens when there is none."""
        if LABS.exists():
            with root.locked(LABS / f"{self.name}.lock"):
                self._down()

    def boot(self, host: Host) -> None:
        """Switch a host on, if it is off, and wait until one can log in."""
        if self.init_pid(host) is None:
            self._power_on(host)
        self.wait(lambda: self._answers(host), f"{host.name} does not let anyone in", READY_SECONDS[self.living.kind])

    def reboot(self, host: Host) -> None:
        """Reboot a host in an orderly way and wait until one can log in again."""
        before = self.inside(host, "cat /proc/sys/kernel/random/boot_id; stat -c %Y /proc/1")
        self.inside(host, "systemctl reboot --no-block || systemctl reboot", check=False)

        def again() -> bool:
            with contextlib.suppress(LabError):
                return self.inside(host, "cat /proc/sys/kernel/random/boot_id; stat -c %Y /proc/1") != before
            return False

        limit = READY_SECONDS[self.living.kind]
        self.wait(again, f"{host.name} did not reboot", limit)
        self.wait(lambda: self._answers(host), f"{host.name} does not let anyone in after its reboot", limit)

    def wait(self, condition: Callable[[], bool], else_say: str, seconds: float = 30.0) -> None:
        """Return as soon as the condition holds. Raises LabError with `else_say` after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise LabError(f"{else_say} within {seconds:.0f} s (lab {self.name!r}){self._last_words()}")
            time.sleep(0.05)

    # How it is done

    def _up(self, hosts: int, kind: str, lower: Path, venv: Path | None) -> None:
        state = self.state
        if not state:
            self._down()
            state = self._start(kind, hosts)
            self._make_key()
            self._shared_files(venv)
        for index in range(hosts + 1, state.hosts + 1):
            self._remove(Host(index, state.net))
        (self.folder / "boot.json").write_text(
            json.dumps(
                {
                    "lower": str(lower),
                    "accel": metal.accel(lower) if kind == "metal" else "",
                    "binds": [str(path) for path in self._binds(venv)],
                    "python": str(venv / "bin/python") if venv else "/usr/bin/python3",
                }
            )
        )
        state.hosts = hosts
        self._write_state(state)
        for host in self.hosts:
            if not (self.folder / host.name).exists():
                self._new_host(host)
        self._pin_keys()
        inventory.write(self, venv)
        self._hand_over()
        for host in self.hosts:
            if self.init_pid(host) is None:
                self._power_on(host)
        for host in self.hosts:
            self.wait(lambda host=host: self._answers(host), f"{host.name} does not let anyone in", READY_SECONDS[kind])

    def _start(self, kind: str, hosts: int) -> State:
        """The namespaces, the switch, the cable to this machine and the way out."""
        self.folder.mkdir()
        machine.raise_limits()
        self.folder.chmod(0o755)
        for top in self.cgroup_tops:
            top.mkdir()
            # On cgroup2 a controller reaches a group only if every group above hands it down.
            for group in (top.parent, top) if (top.parent / "cgroup.controllers").exists() else ():
                for controller in {"cpu", "memory"} & set((group / "cgroup.controllers").read_text().split()):
                    (group / "cgroup.subtree_control").write_text(f"+{controller}")
        owner, self._owner = os.pipe()
        argv = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        argv += ["--propagation", "private", sys.executable, "-m", "testbed.holder", str(owner), str(self.folder)]
        with (self.folder / "holder.log").open("w") as log:
            outer = subprocess.Popen(
                [*argv, *(str(top) for top in self.cgroup_tops)],
                env={**os.environ, "PYTHONPATH": str(HERE.parent)},
                pass_fds=[owner],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )
        os.close(owner)
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        self.wait(
            lambda: outer.poll() is not None or children.read_text().strip() != "", "the lab's holder did not start"
        )
        if outer.poll() is not None:
            raise LabError(f"the lab's holder ended: {(self.folder / 'holder.log').read_text()[-400:]}")
        holder = int(children.read_text())
        state = State(kind=kind, net=0, hosts=0, holder=holder, started=started(holder) or 0)
        self._write_state(state)
        state.net = self._cable(holder)
        state.hosts = hosts
        self._write_state(state)
        self._switch(state)
        self._way_out(state)
        return state

    def _cable(self, holder: int) -> int:
        """A veth from this machine to the lab's switch, on the first 10.231.x.0/24 that nobody here has a route to."""
        taken = machine.routes()
        for net in range(1, 255):
            if any(route.startswith(f"10.231.{net}.") for route in taken):
                continue
            argv = [
                "ip",
                "link",
                "add",
                f"trainyard{net}",
                "type",
                "veth",
                "peer",
                "name",
                "machine",
                "netns",
                str(holder),
            ]
            made = subprocess.run(argv, capture_output=True, text=True)
            if made.returncode == 0:
                run("ip", "address", "add", f"10.231.{net}.254/24", "dev", f"trainyard{net}")
                run("ip", "link", "set", f"trainyard{net}", "up")
                return net
            if "File exists" not in made.stderr:
                raise LabError(f"no cable from this machine to the lab: {made.stderr.strip()}")
        raise LabError("no free network in 10.231.0.0/16 for the lab: take other labs down")

    def _switch(self, state: State) -> None:
        """The bridge, which is also the hosts' gateway; only package registries and name servers are let through."""
        dns = ", ".join(machine.resolvers()) or "127.0.0.1"
        web = ", ".join(str(port) for port in sorted({80, 443, *machine.proxy_ports()}))
        rules = f"""
            table inet lab {{
              chain out {{
                type filter hook forward priority filter; policy accept;
                iifname "br0" oifname "br0" accept
                ct state established,related accept
                iifname "br0" oifname "tap0" ip daddr {{ {dns} }} meta l4proto {{ tcp, udp }} th dport 53 accept
                iifname "br0" oifname "tap0" tcp dport {{ {web} }} accept
                reject with icmpx admin-prohibited
              }}
              chain nat {{
                type nat hook postrouting priority srcnat; policy accept;
                oifname "tap0" masquerade
              }}
            }}
        """
        self.in_lab(
            *("sh", "-euc"),
            f"""
            ip link set lo up
            ip link add br0 type bridge
            ip address add 10.231.{state.net}.1/24 dev br0
            ip link set machine master br0 up
            ip link set br0 up
            echo 1 > /proc/sys/net/ipv4/ip_forward
            nft -f - <<'RULES'
{rules}
RULES
            """,
        )

    def _way_out(self, state: State) -> None:
        """NAT by slirp4netns: an ordinary process of this machine opens the connections, so that neither forwarding nor a
        firewall rule of this machine is touched. It runs in the lab's PID namespace and ends with it."""
        ready, write = os.pipe()
        argv = ["nsenter", f"--pid=/proc/{state.holder}/ns/pid", "slirp4netns", "--configure", "--mtu=1500"]
        argv += ["--disable-host-loopback", f"--ready-fd={write}", "--netns-type=path"]
        argv += [f"/proc/{state.holder}/ns/net", "tap0"]
        with (self.folder / "way-out.log").open("w") as log:
            subprocess.Popen(
                argv,
                pass_fds=[write],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )
        os.close(write)
        came = os.read(ready, 1)
        os.close(ready)
        if not came:
            raise LabError(f"no way out for the lab: {(self.folder / 'way-out.log').read_text()[-400:]}")

    def _make_key(self) -> None:
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"lab {self.name}", "-f", self.key)

    def _binds(self, venv: Path | None) -> list[Path]:
        """Folders of this machine that light hosts see, read-only, at the same path."""
        if self.living.kind == "metal":
            return []
        folders = machine.pip_settings(venv / "bin/python" if venv else Path(sys.executable))[1]
        return list(dict.fromkeys([*(machine.python_binds(venv) if venv else []), *folders]))

    def _shared_files(self, venv: Path | None) -> None:
        """What every host has from this machine: name servers, certificates, pip's settings."""
        files = self.folder / "files"
        pip, _ = machine.pip_settings(venv / "bin/python" if venv else Path(sys.executable))
        _put(files / "etc/resolv.conf", "".join(f"nameserver {address}\n" for address in machine.resolvers()))
        _put(files / "etc/pip.conf", pip)
        for path in ("/etc/ssl/certs/ca-certificates.crt", "/usr/local/share/ca-certificates"):
            copy = files / path[1:]
            copy.parent.mkdir(parents=True, exist_ok=True)
            if Path(path).is_dir():
                shutil.copytree(path, copy)
            elif Path(path).exists():
                shutil.copy(path, copy)
        if self.living.kind == "light":
            # sysfs shows all of this machine's devices; a light host's own are its NICs.
            _put(
                files / "etc/systemd/system/systemd-udev-trigger.service.d/lab.conf",
                "[Service]\nExecStart=\nExecStart=udevadm trigger --type=devices --subsystem-match=net --action=add\n",
            )

    def _new_host(self, host: Host) -> None:
        """The host's disk, and what it has of its own: name, address, keys, machine-id."""
        folder = self.folder / host.name
        files = folder / "files"
        _put(files / "etc/hostname", f"{host.name}\n")
        _put(
            files / "etc/hosts",
            f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n\n::1 localhost ip6-localhost ip6-loopback\n",
        )
        _put(files / "etc/machine-id", f"{uuid.uuid4().hex}\n", mode=0o444)
        # A veth has no permanent hardware address for netplan to match; a whole machine's NIC has its name from there.
        match = (
            f'\n      match: {{macaddress: "{host.mac}"}}\n      set-name: {host.nic}'
            if self.living.kind == "metal"
            else ""
        )
        _put(
            files / "etc/netplan/50-cloud-init.yaml",
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
        key = files / "etc/ssh/ssh_host_ed25519_key"
        key.parent.mkdir(parents=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"root@{host.name}", "-f", key)
        home = files / f"home/{root.USER}"
        _put(home / ".ssh/authorized_keys", (self.folder / "id_ed25519.pub").read_text(), mode=0o600)
        (home / ".ssh").chmod(0o700)
        for path in (home, *home.rglob("*")):
            os.chown(path, 1000, 1000)
        if self.living.kind == "light":
            image = folder / "disk.img"
            with image.open("wb") as file:
                file.truncate(int(DISK[:-1]) << 30)
            # No journal: the disk never outlives this machine's uptime. No reserve: a full disk is full for root too.
            run("mke2fs", "-q", "-t", "ext4", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1", image)

    def _pin_keys(self) -> None:
        lines = []
        for host in self.hosts:
            key = (self.folder / host.name / "files/etc/ssh/ssh_host_ed25519_key.pub").read_text().split()
            lines.append(f"{host.address} {key[0]} {key[1]}\n")
        self.known_hosts.write_text("".join(lines))

    def _hand_over(self) -> None:
        """With sudo the person, not root, uses key and inventory."""
        (self.folder / "cp").mkdir(exist_ok=True)
        owner = (int(os.environ.get("SUDO_UID", 0)), int(os.environ.get("SUDO_GID", 0)))
        for path in (self.key, self.known_hosts, self.inventory, self.folder / "cp"):
            os.chown(path, *owner)

    def _power_on(self, host: Host) -> None:
        """Start the host's loop of boots in the lab's namespaces."""
        state = self.living
        for group in self.cgroups(host):
            # The scopes of the last boot.
            remove_cgroups(group)
            group.mkdir()
        boot = json.loads((self.folder / "boot.json").read_text())
        environment = {
            "PATH": os.environ["PATH"],
            "LAB": str(self.folder),
            "NAME": host.name,
            "NIC": host.nic,
            "MAC": host.mac,
            "LOWER": boot["lower"],
            "ACCEL": boot["accel"],
            "CGROUPS": " ".join(str(group) for group in self.cgroups(host)),
            "BINDS": " ".join(boot["binds"]),
        }
        script = HERE / ("host.sh" if state.kind == "light" else "metal.sh")
        with (self.folder / host.name / "console.log").open("a") as log:
            subprocess.Popen(
                ["nsenter", "--target", str(state.holder), "--mount", "--net", "--pid", "sh", str(script)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )
        self.wait(lambda: self.init_pid(host) is not None, f"{host.name} does not start")

    def power_off(self, host: Host) -> None:
        """Pull the plug."""
        pid = self.init_pid(host)
        if pid is not None:
            (machine.cgroup2() / f"trainyard-{self.name}" / host.name / "cgroup.freeze").write_text("0")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.wait(lambda: self.init_pid(host) is None, f"{host.name} does not end")
        self.in_lab("ip", "link", "del", host.name, check=False)

    def _remove(self, host: Host) -> None:
        self.power_off(host)
        holder = self.living.holder
        for mount in ("root", "disk"):
            run("nsenter", "--target", str(holder), "--mount", "umount", self.folder / host.name / mount, check=False)
        for group in self.cgroups(host):
            remove_cgroups(group)
        shutil.rmtree(self.folder / host.name)

    def _answers(self, host: Host) -> bool:
        try:
            with socket.create_connection((host.address, 22), timeout=0.5) as link:
                # An emulated machine takes seconds to start the sshd that greets.
                link.settimeout(10)
                if not link.recv(4):
                    return False
        except OSError:
            return False
        done = subprocess.run([str(arg) for arg in self.ssh(host)] + ["true"], capture_output=True, text=True)
        if "Host key verification failed" in done.stderr:
            raise LabError(f"{host.address} is not {host.name}: its host key is another than the one it was given")
        return done.returncode == 0

    def _last_words(self) -> str:
        logs = [self.folder / "holder.log", *self.folder.glob("*/console.log")]
        return "".join(f"\n{log}: {text[-400:]}" for log in logs if (text := _read(log).strip()))

    def _write_state(self, state: State) -> None:
        file = self.folder / "state.json"
        file.with_suffix(".new").write_text(json.dumps(asdict(state)))
        file.with_suffix(".new").rename(file)

    def _let_go(self) -> None:
        """From here on the lab may outlive this process."""
        if self._owner is not None:
            os.write(self._owner, b"+")
            os.close(self._owner)
            self._owner = None

    def _end(self, state: State) -> None:
        """End the holder: gently, so that it removes its cgroups, or else by force."""
        if self._owner is not None:
            # It may be too young yet to hear signals; the end of its owner it will not miss.
            os.close(self._owner)
            self._owner = None
        for number, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.holder, number)
            with contextlib.suppress(LabError):
                return self.wait(
                    lambda: started(state.holder) != state.started, "the lab's holder does not end", seconds
                )
        raise LabError(f"the holder of lab {self.name!r}, process {state.holder}, cannot be killed")

    def _down(self) -> None:
        state = self.state
        for socket_file in (self.folder / "cp").glob("*"):
            # Ansible's persistent connections, or they would wait for hosts that are gone.
            run("ssh", "-F", "none", "-O", "exit", "-o", f"ControlPath={socket_file}", "gone", check=False)
        if state:
            if state.net:
                run("ip", "link", "del", f"trainyard{state.net}", check=False)
            self._end(state)
        for top in self.cgroup_tops:
            for frozen in top.glob("*/cgroup.freeze"):
                frozen.write_text("0")
            remove_cgroups(top)
        # The kernel lets go of a disk a moment after its last user.
        self.wait(lambda: not _loops(self.folder), "the kernel does not let go of the hosts' disks")
        shutil.rmtree(self.folder, ignore_errors=True)
        machine.restore_limits()


def names() -> list[str]:
    """Every lab that is up, or of which something is left."""
    return sorted(path.name for path in LABS.iterdir() if path.is_dir()) if LABS.exists() else []


def started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it is not there or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _loops(folder: Path) -> list[str]:
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    return [text for text in map(_read, files) if text.startswith(f"{folder}/")]


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _put(file: Path, text: str, mode: int = 0o644) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)


def _quoted(script: str) -> str:
    return "'" + script.replace("'", "'\\''") + "'"
