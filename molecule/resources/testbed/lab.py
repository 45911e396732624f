"""A lab by its name: start it, stop it, boot its hosts, and run commands in them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path

from . import host_files, inventory, machine, metal, network, root
from .machine import LABS, LabError, locked, loop_files, read_if_present, remove_cgroups, run, start_time

HERE = Path(__file__).parent
BOOT_TIMEOUT = {"light": 60, "metal": 400}  # seconds until a host accepts a login


@dataclass(frozen=True)
class LabHost:
    """One host of a lab. `index` counts from 1; `net` is the third octet of the lab's addresses."""

    index: int
    net: int

    @property
    def name(self) -> str:
        """The inventory name."""
        return f"node{self.index}"

    @property
    def address(self) -> str:
        """The IPv4 address in the network of the lab."""
        # Starts at .9: as strings .10 sorts before .9, which reveals code that depends on the order of strings.
        return f"10.231.{self.net}.{8 + self.index}"

    @property
    def nic(self) -> str:
        """The name of its network device."""
        # The name differs between hosts, as on real machines.
        return f"enp{self.index}s0"

    @property
    def mac(self) -> str:
        """The MAC address of its network device."""
        return f"02:79:00:00:{self.net:02x}:{8 + self.index:02x}"


@dataclass
class LabState:
    """The recorded state of a running lab, with which `down` finds it after any failure."""

    kind: str
    net: int
    hosts: int
    holder: int  # its PID on this machine
    started: int  # start time of the holder in clock ticks since boot: a PID may be reused
    releases: list[str] = field(default_factory=list)  # code names; the hosts take turns


class Lab:
    """A lab by its name. Several labs can run at the same time; `up` and `down` are idempotent."""

    def __init__(self, name: str = "lab") -> None:
        if not name.replace("-", "").isalnum() or len(name) > 40:
            raise LabError(f"the name of a lab consists of letters, digits and dashes, not {name!r}")
        self.name = name
        self.folder = LABS / name
        self._owner: int | None = None

    @property
    def state(self) -> LabState | None:
        """The state of the lab if it is running, else None."""
        file = self.folder / "state.json"
        if not file.exists():
            return None
        # Another version of this program may have written other fields.
        known = {field.name for field in fields(LabState)}
        state = LabState(**{name: value for name, value in json.loads(file.read_text()).items() if name in known})
        return state if start_time(state.holder) == state.started else None

    @property
    def running(self) -> LabState:
        """The state of the lab. Raises LabError if it is not running."""
        if state := self.state:
            return state
        raise LabError(f"no lab named {self.name!r} is running: start one with make lab")

    @property
    def hosts(self) -> list[LabHost]:
        """The hosts in inventory order. Raises LabError if the lab is not running."""
        state = self.running
        return [LabHost(index, state.net) for index in range(1, state.hosts + 1)]

    def host(self, name: str) -> LabHost:
        """Return the host with this name. Raises LabError if there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise LabError(f"no host {name!r} in lab {self.name!r}: it has {', '.join(host.name for host in self.hosts)}")

    @property
    def inventory(self) -> Path:
        """The inventory file of the lab."""
        return self.folder / "inventory.yml"

    @property
    def key(self) -> Path:
        """The private key that the user of the hosts accepts."""
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The known_hosts file with the keys of the hosts."""
        return self.folder / "known_hosts"

    @cached_property
    def cgroup_tops(self) -> list[Path]:
        """The folder of this lab in every cgroup hierarchy that it uses."""
        tops = {machine.cgroup2()}
        for controller in ("cpu", "memory"):
            with contextlib.suppress(LabError):
                tops.add(machine.cgroup_of(controller)[0])
        return [top / f"trainyard-{self.name}" for top in sorted(tops)]

    def cgroups(self, host: LabHost) -> list[Path]:
        """Return the folder of a host in every cgroup hierarchy that the lab uses."""
        return [top / host.name for top in self.cgroup_tops]

    def init_pid(self, host: LabHost) -> int | None:
        """Return the PID on this machine of the host's PID 1, or of its qemu; None if the host is off."""
        group = machine.cgroup2() / f"trainyard-{self.name}" / host.name
        for file in (group / "init.scope/cgroup.procs", group / "cgroup.procs"):
            for pid in file.read_text().split() if file.exists() else []:
                with contextlib.suppress(OSError):
                    status = Path(f"/proc/{pid}/status").read_text()
                    if self.running.kind == "metal" or status.split("NSpid:")[1].split("\n")[0].split()[-1] == "1":
                        return int(pid)
        return None

    def in_lab(self, *argv: str | Path, check: bool = True) -> str:
        """Run a command in the network namespace of the switch, from an address outside of the cluster."""
        return run("nsenter", f"--net=/proc/{self.running.holder}/ns/net", *argv, check=check)

    def inside(self, host: LabHost, script: str, check: bool = True) -> str:
        """Run a shell script as root inside a host and return its output. Raises LabError if it fails or the host is off."""
        if self.running.kind == "metal":
            return run(*self.ssh(host), "sudo", "sh", "-euc", shlex.quote(script), check=check)
        pid = self.init_pid(host)
        if pid is None:
            raise LabError(f"{host.name} is off: boot it with make lab-undo HOST={host.name} FAULT=crash")
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        enter = ["nsenter", "--target", str(pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--wd=/"]
        return run(*enter, "env", "-i", path, "sh", "-euc", script, check=check)

    def ssh(self, host: LabHost) -> list[str | Path]:
        """Return the ssh command that logs in to a host as its user."""
        options = ["-o", f"UserKnownHostsFile={self.known_hosts}", "-o", "StrictHostKeyChecking=yes"]
        options += ["-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"]
        options += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4"]
        return ["ssh", "-F", "none", "-i", self.key, *options, f"{root.USER}@{host.address}"]

    def up(
        self,
        hosts: int = 3,
        kind: str = "light",
        venv: Path | None = None,
        persistent: bool = True,
        releases: Sequence[str] = (),
    ) -> None:
        """Start the lab with this number of hosts, or change a running lab to it; hosts that are off are booted.

        `releases` are code names that the hosts use in rotation; by default the release of this machine. The hosts mount `venv` read-only
        at its own path, those under qemu a copy of it, if all of them have the Python of this machine. A `persistent` lab outlives this process once it is up; until
        then, and otherwise, it ends with it. Raises LabError, and removes what it created, if the lab cannot start.
        """
        machine.require(kind)
        if not 1 <= hosts <= 200:
            raise LabError(f"a lab has 1 to 200 hosts, not {hosts}")
        own = machine.os_release()["VERSION_CODENAME"]
        names = list(releases) or [own]
        self._check_running(kind, names)
        LABS.mkdir(parents=True, exist_ok=True)
        roots = [root.build(kind, name) for name in names]
        if kind == "metal":
            for lower in roots:
                metal.image(lower)
        if venv and set(names) != {own} and machine.python_binds(venv) == [venv]:
            venv = None
        with locked(LABS / f"{self.name}.lock"):
            self._check_running(kind, names)
            state = self.state
            try:
                self._up(hosts, kind, dict(zip(names, roots, strict=True)), venv)
                if persistent:
                    self._detach()
            except BaseException:
                if not state:
                    self._down()
                raise

    def down(self) -> None:
        """Stop the lab and remove its files and processes. Does nothing if there is no such lab."""
        if LABS.exists():
            with locked(LABS / f"{self.name}.lock"):
                self._down()

    def boot(self, host: LabHost) -> None:
        """Switch a host on if it is off, and wait until it accepts a login."""
        if self.init_pid(host) is None:
            self._power_on(host)
        self._wait_for_login(host, self.running.kind)

    def reboot(self, host: LabHost) -> None:
        """Reboot a host through systemd, and wait until it accepts a login again."""
        before = self.inside(host, "cat /proc/sys/kernel/random/boot_id; stat -c %Y /proc/1")
        self.inside(host, "systemctl reboot --no-block || systemctl reboot", check=False)

        def rebooted() -> bool:
            with contextlib.suppress(LabError):
                return self.inside(host, "cat /proc/sys/kernel/random/boot_id; stat -c %Y /proc/1") != before
            return False

        limit = BOOT_TIMEOUT[self.running.kind]
        self.wait(rebooted, f"{host.name} did not reboot", limit)
        self.wait(lambda: self._accepts_login(host), f"{host.name} does not accept a login after its reboot", limit)

    def wait(self, condition: Callable[[], bool], message: str, seconds: float = 30.0) -> None:
        """Wait until the condition holds. Raises LabError with `message` after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise LabError(f"{message} within {seconds:.0f} s (lab {self.name!r}){self._log_tails()}")
            time.sleep(0.05)

    def _check_running(self, kind: str, releases: list[str]) -> None:
        if (state := self.state) and (state.kind, state.releases) != (kind, releases):
            running = f"{state.kind} hosts of {', '.join(state.releases)}"
            raise LabError(
                f"lab {self.name!r} is running with {running}: stop it first with make lab-down, or start another lab with LAB_NAME=NAME"
            )

    def _up(self, hosts: int, kind: str, roots: dict[str, Path], venv: Path | None) -> None:
        state = self.state
        if not state:
            self._down()
            state = self._start(kind, hosts, list(roots))
            host_files.create_key(self.key, f"lab {self.name}")
            host_files.write_shared(self, kind, venv)
        for index in range(hosts + 1, state.hosts + 1):
            self._remove(LabHost(index, state.net))
        (self.folder / "boot.json").write_text(
            json.dumps(
                {
                    "lowers": [str(lower) for lower in roots.values()],
                    "accels": [metal.accel(lower) if kind == "metal" else "" for lower in roots.values()],
                    "binds": [str(path) for path in host_files.binds(kind, venv)],
                    "python": str(venv / "bin/python") if venv else "/usr/bin/python3",
                }
            )
        )
        state.hosts = hosts
        self._write_state(state)
        for host in self.hosts:
            if not (self.folder / host.name).exists():
                host_files.write_host(self, kind, host)
        host_files.write_known_hosts(self)
        inventory.write(self, venv)
        self._chown_to_user()
        for host in self.hosts:
            if self.init_pid(host) is None:
                self._power_on(host)
        for host in self.hosts:
            self._wait_for_login(host, kind)

    def _start(self, kind: str, hosts: int, releases: list[str]) -> LabState:
        """Create the cgroups, the namespaces, the switch, the cable to this machine and NAT."""
        self.folder.mkdir()
        machine.raise_limits()
        self.folder.chmod(0o755)
        for top in self.cgroup_tops:
            top.mkdir()
            # On cgroup2 a group has a controller only if every group above it delegates it.
            for group in (top.parent, top) if (top.parent / "cgroup.controllers").exists() else ():
                for controller in {"cpu", "memory"} & set((group / "cgroup.controllers").read_text().split()):
                    (group / "cgroup.subtree_control").write_text(f"+{controller}")
            if kind == "metal":
                machine.prefer(top)
        owner, self._owner = os.pipe()
        try:
            holder = network.start_holder(self, owner)
        finally:
            os.close(owner)
        state = LabState(kind=kind, net=0, hosts=0, holder=holder, started=start_time(holder) or 0, releases=releases)
        self._write_state(state)
        state.net = network.connect_machine(holder)
        state.hosts = hosts
        self._write_state(state)
        network.start_switch(self, state.net)
        network.start_nat(self, holder)
        return state

    def _chown_to_user(self) -> None:
        """Under sudo, give the key and the inventory to the calling user."""
        (self.folder / "cp").mkdir(exist_ok=True)
        owner = (int(os.environ.get("SUDO_UID", 0)), int(os.environ.get("SUDO_GID", 0)))
        for path in (self.key, self.known_hosts, self.inventory, self.folder / "cp"):
            os.chown(path, *owner)

    def _power_on(self, host: LabHost) -> None:
        """Start a host in the namespaces of the lab; its script boots it again whenever it reboots."""
        state = self.running
        for group in self.cgroups(host):
            # Groups of the last boot.
            remove_cgroups(group)
            group.mkdir()
        boot = json.loads((self.folder / "boot.json").read_text())
        environment = {
            "PATH": os.environ["PATH"],
            "LAB": str(self.folder),
            "NAME": host.name,
            "NIC": host.nic,
            "MAC": host.mac,
            "LOWER": boot["lowers"][(host.index - 1) % len(boot["lowers"])],
            "ACCEL": boot["accels"][(host.index - 1) % len(boot["accels"])],
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

    def power_off(self, host: LabHost) -> None:
        """Switch a host off without a shutdown, as a power failure does."""
        pid = self.init_pid(host)
        if pid is not None:
            (machine.cgroup2() / f"trainyard-{self.name}" / host.name / "cgroup.freeze").write_text("0")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.wait(lambda: self.init_pid(host) is None, f"{host.name} does not stop")
        self.in_lab("ip", "link", "del", host.name, check=False)

    def _remove(self, host: LabHost) -> None:
        self.power_off(host)
        holder = self.running.holder
        for mount in ("root", "disk"):
            run("nsenter", "--target", str(holder), "--mount", "umount", self.folder / host.name / mount, check=False)
        for group in self.cgroups(host):
            remove_cgroups(group)
        shutil.rmtree(self.folder / host.name)

    def _wait_for_login(self, host: LabHost, kind: str) -> None:
        self.wait(lambda: self._accepts_login(host), f"{host.name} does not accept a login", BOOT_TIMEOUT[kind])

    def _accepts_login(self, host: LabHost) -> bool:
        try:
            with socket.create_connection((host.address, 22), timeout=0.5) as connection:
                # An emulated host takes seconds to start the sshd that sends the banner.
                connection.settimeout(10)
                if not connection.recv(4):
                    return False
        except OSError:
            return False
        done = subprocess.run([str(arg) for arg in self.ssh(host)] + ["true"], capture_output=True, text=True)
        if "Host key verification failed" in done.stderr:
            raise LabError(f"{host.address} presents another host key than {host.name} was given")
        return done.returncode == 0

    def _log_tails(self) -> str:
        logs = [self.folder / "holder.log", *self.folder.glob("*/console.log")]
        return "".join(f"\n{log}: {text[-400:]}" for log in logs if (text := read_if_present(log).strip()))

    def _write_state(self, state: LabState) -> None:
        file = self.folder / "state.json"
        file.with_suffix(".new").write_text(json.dumps(asdict(state)))
        file.with_suffix(".new").rename(file)

    def _detach(self) -> None:
        """Let the lab outlive this process."""
        if self._owner is not None:
            os.write(self._owner, b"+")
            os.close(self._owner)
            self._owner = None

    def _end_holder(self, state: LabState) -> None:
        """End the holder: by SIGTERM, after which it removes the cgroups, or else by SIGKILL."""
        if self._owner is not None:
            # A new holder may not handle signals yet; it always notices that its owner closed the pipe.
            os.close(self._owner)
            self._owner = None
        for number, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.holder, number)
            with contextlib.suppress(LabError):
                return self.wait(
                    lambda: start_time(state.holder) != state.started, "the holder of the lab does not end", seconds
                )
        raise LabError(f"the holder of lab {self.name!r}, process {state.holder}, cannot be killed")

    def _down(self) -> None:
        state = self.state
        for socket_file in (self.folder / "cp").glob("*"):
            # Ansible's persistent connections would otherwise wait for hosts that no longer exist.
            run("ssh", "-F", "none", "-O", "exit", "-o", f"ControlPath={socket_file}", "gone", check=False)
        if state:
            if state.net:
                network.disconnect_machine(state.net)
            self._end_holder(state)
        for top in self.cgroup_tops:
            for frozen in top.glob("*/cgroup.freeze"):
                frozen.write_text("0")
            remove_cgroups(top)
        # The kernel detaches a loop device shortly after its last use.
        self.wait(lambda: not loop_files(self.folder), "the kernel does not detach the disks of the hosts")
        shutil.rmtree(self.folder, ignore_errors=True)
        machine.restore_limits()


def lab_names() -> list[str]:
    """Return the names of all labs that are running or left files behind."""
    return sorted(path.name for path in LABS.iterdir() if path.is_dir()) if LABS.exists() else []
