"""Faults of a lab host: one function injects a fault, another undoes it. An undo is idempotent."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from . import machine
from .lab import Lab, LabHost
from .machine import LabError

SAVED = "/var/lib/lab-fault"  # on the host: the files that a fault replaced


@dataclass(frozen=True)
class Fault:
    """A fault: `usage` names its arguments, `description` describes its effect."""

    usage: str
    description: str
    inject: Callable[..., None]
    undo: Callable[[Lab, LabHost], None]


def cut(lab: Lab, host: LabHost) -> None:
    lab.in_lab("ip", "link", "set", host.name, "down")


def uncut(lab: Lab, host: LabHost) -> None:
    lab.in_lab("ip", "link", "set", host.name, "up", check=False)


def shape(lab: Lab, host: LabHost, rate: str) -> None:
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    if not (match := re.fullmatch(r"(\d+)(kbit|mbit|gbit)", rate)):
        raise LabError(f"shape takes a rate like 100mbit or 1gbit, not {rate!r}")
    # A burst below one full-size segment or one timer tick (4 ms) would cut the rate itself.
    burst = max(64 * 1024, int(int(match[1]) * units[match[2]] / 8 * 0.004))
    bucket = ["root", "tbf", "rate", rate, "burst", str(burst), "latency", "50ms"]
    lab.in_lab("tc", "qdisc", "replace", "dev", host.name, *bucket)
    lab.inside(host, f"tc qdisc replace dev {host.nic} {' '.join(bucket)}")


def unshape(lab: Lab, host: LabHost) -> None:
    lab.in_lab("tc", "qdisc", "del", "dev", host.name, "root", check=False)
    lab.inside(host, f"tc qdisc del dev {host.nic} root", check=False)


def pause(lab: Lab, host: LabHost) -> None:
    _freeze(lab, host, "1")


def unpause(lab: Lab, host: LabHost) -> None:
    _freeze(lab, host, "0")


def _freeze(lab: Lab, host: LabHost, value: str) -> None:
    group = machine.cgroup2() / f"trainyard-{lab.name}" / host.name
    (group / "cgroup.freeze").write_text(value)
    lab.wait(lambda: f"frozen {value}" in (group / "cgroup.events").read_text(), f"{host.name} cannot be paused")


def crash(lab: Lab, host: LabHost) -> None:
    lab.power_off(host)


def uncrash(lab: Lab, host: LabHost) -> None:
    lab.boot(host)


def fill(lab: Lab, host: LabHost, free_mib: str = "0") -> None:
    lab.inside(
        host,
        f"""mkdir -p {SAVED}
        free=$(df --output=avail --block-size=1 / | tail -n 1)
        fallocate -l $((free - {_number(free_mib)} * 1048576)) {SAVED}/full || :
        # Fill the blocks that fallocate cannot take.
        [ {_number(free_mib)} != 0 ] || cat /dev/zero >> {SAVED}/full 2>/dev/null || :""",
    )


def unfill(lab: Lab, host: LabHost) -> None:
    lab.inside(host, f"rm -f {SAVED}/full")


def cpu(lab: Lab, host: LabHost, percent: str = "50") -> None:
    top, unified = machine.cgroup_of("cpu")
    group = top / f"trainyard-{lab.name}" / host.name
    quota = _number(percent) * 1000
    if unified:
        (group / "cpu.max").write_text(f"{quota} 100000")
    else:
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text(str(quota))


def uncpu(lab: Lab, host: LabHost) -> None:
    top, unified = machine.cgroup_of("cpu")
    group = top / f"trainyard-{lab.name}" / host.name
    (group / ("cpu.max" if unified else "cpu.cfs_quota_us")).write_text("max 100000" if unified else "-1")


def memory(lab: Lab, host: LabHost, mib: str) -> None:
    top, unified = machine.cgroup_of("memory")
    group = top / f"trainyard-{lab.name}" / host.name
    (group / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(_number(mib) << 20))


def unmemory(lab: Lab, host: LabHost) -> None:
    top, unified = machine.cgroup_of("memory")
    group = top / f"trainyard-{lab.name}" / host.name
    (group / ("memory.max" if unified else "memory.limit_in_bytes")).write_text("max" if unified else "-1")


def skew(lab: Lab, host: LabHost, package: str, version: str, python: str = "") -> None:
    python = python or json.loads((lab.folder / "boot.json").read_text())["python"]
    if not re.fullmatch(r"[\w.-]+", package) or not re.fullmatch(r"[\w.+!-]+", version):
        raise LabError(f"skew takes a package and a version, not {package!r} {version!r}")
    # The environment may be read-only: changed copies of its files are mounted over them.
    lab.inside(
        host,
        f"""mkdir -p {SAVED}/skew
        {python} - {package} {version} <<'PYTHON'
import hashlib, importlib.metadata, pathlib, subprocess, sys
package, version = sys.argv[1:]
found = importlib.metadata.distribution(package)
real_version = found.version
modules = [file for file in found.files or [] if file.name in ("METADATA", "version.py", "_version.py", "__init__.py")]
for file in [file for file in modules if len(file.parts) == 2]:
    real = pathlib.Path(found.locate_file(file)).resolve()
    if real_version not in (text := real.read_text()):
        continue
    fake = pathlib.Path("{SAVED}/skew", hashlib.sha256(str(real).encode()).hexdigest())
    fake.write_text(text.replace(real_version, version))
    subprocess.run(["mount", "--bind", fake, real], check=True)
    with open("{SAVED}/skew/list", "a") as listing:
        print(real, file=listing)
PYTHON""",
    )


def unskew(lab: Lab, host: LabHost) -> None:
    lab.inside(
        host,
        f"""[ -e {SAVED}/skew/list ] || exit 0
        while read -r file; do umount "$file" 2>/dev/null || :; done < {SAVED}/skew/list
        rm -r {SAVED}/skew""",
    )


def port(lab: Lab, host: LabHost, number: str) -> None:
    taken = _number(number)
    code = (
        f"import signal, socket; s = socket.create_server(('::', {taken}), family=socket.AF_INET6, dualstack_ipv6=True);"
        " signal.pause()"
    )
    lab.inside(host, f'systemd-run --quiet --collect --unit=lab-port-{taken} /usr/bin/python3 -c "{code}"')
    lab.wait(
        lambda: lab.inside(host, f"ss --no-header --listening --tcp --numeric 'sport = {taken}'") != "",
        f"cannot listen on port {taken} of {host.name}: another process may use it",
    )


def unport(lab: Lab, host: LabHost) -> None:
    lab.inside(host, "systemctl stop 'lab-port-*'")


def hosts(lab: Lab, host: LabHost) -> None:
    unused = "\n".join(f"10.231.{host.net}.253 {peer.name}" for peer in lab.hosts if peer != host)
    lab.inside(
        host,
        f"""mkdir -p {SAVED}
        [ -e {SAVED}/hosts ] || cp -a /etc/hosts {SAVED}/hosts
        cat > /etc/hosts <<'HOSTS'
127.0.0.1 localhost
127.0.1.1 {host.name}
{unused}
HOSTS""",
    )


def unhosts(lab: Lab, host: LabHost) -> None:
    lab.inside(host, f"[ ! -e {SAVED}/hosts ] || {{ cat {SAVED}/hosts > /etc/hosts; rm {SAVED}/hosts; }}")


def nic(lab: Lab, host: LabHost) -> None:
    _require_light(lab, "nic")
    pid = lab.init_pid(host)
    lab.in_lab(
        *("sh", "-euc"),
        f"""ip link show br1 >/dev/null 2>&1 || {{ ip link add br1 type bridge; ip link set br1 up; }}
        ip link show {host.name}b >/dev/null 2>&1 ||
          ip link add {host.name}b type veth peer name {host.nic}b netns {pid}
        ip link set {host.name}b master br1 up""",
    )
    lab.inside(
        host, f"ip link set {host.nic}b up; ip address replace 10.232.{host.net}.{8 + host.index}/24 dev {host.nic}b"
    )


def unnic(lab: Lab, host: LabHost) -> None:
    lab.in_lab("ip", "link", "del", f"{host.name}b", check=False)


def clone(lab: Lab, host: LabHost, source: str) -> None:
    identity = lab.inside(lab.host(source), "cat /etc/machine-id").strip()
    lab.inside(
        host,
        f"""mkdir -p {SAVED}
        [ -e {SAVED}/machine-id ] || cp -a /etc/machine-id {SAVED}/machine-id
        chmod u+w /etc/machine-id
        echo {identity} > /etc/machine-id""",
    )


def unclone(lab: Lab, host: LabHost) -> None:
    lab.inside(host, f"[ ! -e {SAVED}/machine-id ] || mv {SAVED}/machine-id /etc/machine-id")


def block(lab: Lab, host: LabHost, ports: str) -> None:
    if not re.fullmatch(r"\d+(-\d+)?", ports):
        raise LabError(f"block takes a port or a range like 32768-60999, not {ports!r}")
    rule = f"tcp dport {ports} drop"
    # A separate table, so that ufw neither shows nor removes it.
    lab.inside(
        host,
        f"""nft -f - <<'RULES'
table inet lab_fault {{ chain blocked {{ type filter hook input priority -50; policy accept; {rule}; }}; }}
RULES""",
    )


def unblock(lab: Lab, host: LabHost) -> None:
    lab.inside(host, "nft delete table inet lab_fault", check=False)


def mtu(lab: Lab, host: LabHost, size: str) -> None:
    lab.inside(host, f"ip link set {host.nic} mtu {_number(size)}")


def unmtu(lab: Lab, host: LabHost) -> None:
    lab.inside(host, f"ip link set {host.nic} mtu 1500")


FAULTS = {
    "block": Fault("PORT[-PORT]", "drop incoming packets for these TCP ports", block, unblock),
    "clone": Fault("HOST", "copy the machine-id of HOST", clone, unclone),
    "cpu": Fault("[PERCENT]", "limit its CPU time to this percentage of one core (50)", cpu, uncpu),
    "crash": Fault("", "power failure; undo boots it with the same disk", crash, uncrash),
    "cut": Fault("", "disconnect its network cable", cut, uncut),
    "fill": Fault("[MIB]", "fill its disk except for MIB mebibytes (0)", fill, unfill),
    "hosts": Fault("", "map the names of its peers to an unused address in /etc/hosts", hosts, unhosts),
    "memory": Fault("MIB", "limit its memory; beyond the limit the kernel kills processes", memory, unmemory),
    "mtu": Fault("BYTES", "set the MTU of its NIC", mtu, unmtu),
    "nic": Fault("", "add a second NIC on a network without its peers", nic, unnic),
    "pause": Fault("", "freeze all its processes, with connections open", pause, unpause),
    "port": Fault("PORT", "listen on this TCP port", port, unport),
    "shape": Fault("RATE", "limit its link in both directions: 100mbit, 1gbit", shape, unshape),
    "skew": Fault("PACKAGE VERSION [PYTHON]", "change the version of a Python package", skew, unskew),
}


def inject(lab: Lab, host: LabHost, name: str, *arguments: str) -> None:
    """Inject a fault. Raises LabError if the name is unknown or the arguments are wrong."""
    fault = _fault(name)
    required = len([word for word in fault.usage.split() if not word.startswith("[")])
    if not required <= len(arguments) <= len(fault.usage.split()):
        raise LabError(f"usage: fault {host.name} {name} {fault.usage}: {fault.description}")
    fault.inject(lab, host, *arguments)


def undo(lab: Lab, host: LabHost, *names: str) -> None:
    """Undo the named faults, or all. Faults that prevent other undos are undone first."""
    first = ["pause", "cut", "memory", "cpu", "crash", "fill"]
    for name in names or [*first, *(name for name in FAULTS if name not in first)]:
        if name == "nic" and lab.running.kind == "metal":
            continue
        _fault(name).undo(lab, host)


def _fault(name: str) -> Fault:
    if name not in FAULTS:
        raise LabError(f"unknown fault {name!r}: use one of {', '.join(FAULTS)}")
    return FAULTS[name]


def _number(text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise LabError(f"{text!r} is not an integer")
    return int(text)


def _require_light(lab: Lab, name: str) -> None:
    if lab.running.kind != "light":
        raise LabError(f"{name} works on light hosts only, lab {lab.name!r} has {lab.running.kind} hosts")
