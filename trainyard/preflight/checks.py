"""What is wrong with these hosts, by what they answered: named, with its remedy. Pure Python, no Ansible.

A host is a dict as run_plan.describe makes it (`host`, `address`, `data_dir`, `python`, ...) with `facts` (probe.look);
preflight adds `health` (health.gather), `mesh` (mesh.measure), `asked` (the controller's clock around its answer)
and `trouble` instead of all these when it did not answer. Every function returns findings; none is nothing wrong.
"""

from __future__ import annotations

import ipaddress
import statistics
from dataclasses import asdict, dataclass
from typing import Any

LEVELS = ("failure", "warning", "note")  # a run would fail; it may suffer; worth knowing

CLOCK = 2.0  # s that a host's clock may be off the others'
DISK_LOW = 10 << 30  # bytes
MEMORY_LOW = 2048  # MiB
SLOW_LINE = 300.0  # Mbit/s: a 100 Mbit port or Wi-Fi, not a gigabit line under load
SLOW_ANSWER = 5.0  # ms there and back
SLOW_NAMES = 3.0  # s
SHARE = 0.75  # of a core


@dataclass(frozen=True)
class Finding:
    """One trouble: `host` is empty for one of the whole cluster; `check` is the name that docs/troubleshooting.md uses."""

    check: str
    host: str
    level: str
    text: str
    remedy: str

    @property
    def plain(self) -> str:
        """What is wrong and what to do, without the host."""
        return f"{self.text}: {self.remedy}"

    @property
    def line(self) -> str:
        """The same as preflight shows it."""
        where = f"{self.host}: " if self.host else ""
        return f"{self.level}: {where}{self.plain} [{self.check}]"

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


Host = dict[str, Any]


# What train.yml asks before every run, too ------------------------------------------------------------------------------


def environment(host: Host) -> list[Finding]:
    """A Python with torch, and a place to write to."""
    name, facts = host["host"], host["facts"]
    found = []
    if not facts["python_exists"]:
        text = f"there is no Python at {host['python']}"
        found.append(Finding("python", name, "failure", text, "set it up with site.yml, or mend cluster_python"))
    elif "torch" not in facts["versions"]:
        text = f"{host['python']} has no torch"
        found.append(Finding("torch", name, "failure", text, "set the host up with site.yml, or mend cluster_python"))
    if not facts["may_write"]:
        text = f"cannot write to {host['data_dir']}"
        found.append(Finding("disk", name, "failure", text, "mend its rights, or set cluster_data_dir"))
    if facts.get("busy_with"):
        text = f"busy: run {facts['busy_with']} is running there"
        found.append(Finding("busy", name, "failure", text, "stop it, or take others with -e hosts="))
    return found


def room(host: Host, needed: int) -> list[Finding]:
    """Enough space for what a run brings, in bytes."""
    free = host["facts"]["free_bytes"]
    if free >= needed:
        return []
    text = f"{free / 1e6:.0f} MB free in {host['data_dir']}, the run needs about {needed / 1e6:.0f} MB"
    return [Finding("disk", host["host"], "failure", text, "make room, or set cluster_data_dir")]


def twins(hosts: list[Host]) -> list[Finding]:
    """One machine under two names, and loopback addresses between several machines."""
    found = []
    seen: dict[tuple[str, ...], str] = {}
    for host in hosts:
        facts = host["facts"]
        # Containers share a boot_id, cloned images a machine-id; one machine has both in common with itself.
        mark = (facts["boot_id"], facts["machine_id"], *machine_marks(facts), host["data_dir"])
        twin = seen.setdefault(mark, host["host"])
        if twin != host["host"]:
            text = f"{twin} and {host['host']} are one machine (same boot_id and machine-id)"
            found.append(Finding("twice", host["host"], "failure", text, "drop one from the inventory"))
    loopback = [host["host"] for host in hosts if ipaddress.ip_address(host["address"]).is_loopback]
    if loopback and len({host["facts"]["boot_id"] for host in hosts}) > 1:
        text = "cluster_address is a loopback address, which the other machines cannot reach"
        found.append(Finding("address", loopback[0], "failure", text, "give the one that they reach it at"))
    return found


def machine_marks(facts: dict[str, Any]) -> tuple[str, ...]:
    """What tells containers and clones of one image apart: their addresses."""
    return tuple(sorted(facts.get("addresses") or ()))


def unlike(hosts: list[Host]) -> list[Finding]:
    """Environments that are not the same as the first host's."""
    found = []
    first = next((host for host in hosts if host["facts"]["versions"]), None)
    for host in hosts:
        if first is None or host is first or not host["facts"]["versions"]:
            continue
        mine, other = first["facts"]["versions"], host["facts"]["versions"]
        differ = [name for name in sorted({*mine, *other}) if mine.get(name) != other.get(name)]
        if differ:
            shown = ", ".join(f"{name} {mine.get(name, 'none')} / {other.get(name, 'none')}" for name in differ)
            text = f"{first['host']} and {host['host']} have different environments: {shown}"
            found.append(Finding("versions", host["host"], "failure", text, "make them equal with site.yml"))
    return found


# What only preflight asks -----------------------------------------------------------------------------------------------


def reachable(host: Host) -> list[Finding]:
    """SSH. The words are those of OpenSSH's client."""
    word = host["trouble"]
    remedies = {
        "Permission denied": "put your key on it (ssh-copy-id), or mend ansible_user",
        "Host key verification failed": "look at that machine: if it was set up anew, take its old key out of known_hosts",
        "No route to host": "is it on, and its cable in? else mend ansible_host",
        "Connection refused": "start sshd there, or mend ansible_port",
        "Could not resolve": "write its IP address into ansible_host",
        "no answer within": "it takes connections and says nothing: it hangs, look at its screen, or switch it off and on",
        "timed out": "is it on, its cable in, and port 22 open there? else mend ansible_host",
        "not found": "install python3 there",
    }
    remedy = next((remedy for said, remedy in remedies.items() if said.lower() in word.lower()), "ssh to it by hand")
    return [Finding("ssh", host["host"], "failure", f"does not answer: {word}", remedy)]


def machine(host: Host) -> list[Finding]:
    """Memory, CPUs, disk, GPUs, sudo, and who else is at work there."""
    name, seen, facts = host["host"], host["health"], host["facts"]
    found = []

    def say(check: str, level: str, text: str, remedy: str) -> None:
        found.append(Finding(check, name, level, text, remedy))

    if not seen["sudo"]:
        say(
            "sudo",
            "warning",
            "its user may not use sudo without a password",
            "site.yml needs that, or -K; train.yml does not",
        )
    if 0 < facts["free_bytes"] < DISK_LOW:
        say(
            "disk",
            "warning",
            f"{facts['free_bytes'] / 1e9:.1f} GB free in {host['data_dir']}",
            "make room for checkpoints",
        )
    if seen["inodes_free"] == 0 and facts["free_bytes"] > 0:
        say("disk", "failure", f"no inode is free in {host['data_dir']}", "delete small files")
    memory = seen["memory"]
    if not seen["memory_had"]:
        text = f"a process cannot have {host['memory_mib']} MiB of memory ({memory['available_mib']} of {memory['total_mib']} MiB look free)"
        say("memory", "failure", text, "end what uses it, or lift the limit that the host is under")
    elif memory["available_mib"] < MEMORY_LOW:
        text = f"{memory['available_mib']} of {memory['total_mib']} MiB of memory are free"
        say("memory", "warning", text, "end what uses it, or take a small model")
    spin = seen["spin"]
    # Half of what a process of ours gets there: on a crowded machine that is less than half a core.
    others = [row for row in seen["busy"] if row["cores"] > min(1.0, spin["share"]) / 2]
    if seen["quota"] is not None and seen["quota"] < facts["cpus"]:
        say(
            "cpu",
            "warning",
            f"a quota allows it {seen['quota']:g} of {facts['cpus']} CPUs",
            "lift it: every rank waits for the slowest",
        )
    elif spin["share"] < SHARE and spin["pauses"] >= 3 and seen["load"] < 1.5 * facts["cpus"]:
        text = f"a busy loop gets {spin['share']:.0%} of a core and is stopped for {spin['gap'] * 1e3:.0f} ms at a time: a CPU quota"
        say("cpu", "warning", text, "lift it: every rank waits for the slowest")
    elif spin["share"] < SHARE and not others:
        text = f"a busy loop gets {spin['share']:.0%} of a core (load {seen['load']:.1f} on {facts['cpus']} CPUs)"
        say("load", "warning", text, "end what else runs, there or beside it on the same machine")
    for row in others:
        text = f"{row['name']} (pid {row['pid']}, user {row['uid']}) uses {row['cores']} cores"
        say("load", "warning", text, "end it, or wait for it: every rank waits for the slowest")
    for row in seen["torchruns"]:
        text = f"somebody else's run is going on there (pid {row['pid']}: {row['command']})"
        say("busy", "failure", text, "wait for it, or train on other hosts with -e hosts=")
    gpu = seen["gpu"]
    if gpu["cards"] > len(gpu["gpus"]):
        text = f"{gpu['cards']} NVIDIA cards on the bus, the driver shows {len(gpu['gpus'])}"
        say("gpu", "warning", text, "site.yml -e nvidia_install=true, or reboot after a driver's update")
    for line in gpu["users"]:
        say("gpu", "warning", f"somebody computes on its GPU ({line})", "end that, or wait for it")
    for path in seen["files"]["spoilt"]:
        say(
            "checksum",
            "failure",
            f"{path} is damaged: its content is not what its name says",
            "delete it: train.yml brings it again",
        )
    return found


def network(host: Host, hosts: list[Host]) -> list[Finding]:
    """Its devices, routes and names."""
    name, seen, facts = host["host"], host["health"], host["facts"]
    found = []

    def say(check: str, level: str, text: str, remedy: str) -> None:
        found.append(Finding(check, name, level, text, remedy))

    if facts["trouble"] or not facts["interface"]:
        say(
            "nic", "failure", facts["trouble"] or f"no device has the address {facts['source']}", "mend cluster_address"
        )
    elif facts["source"] != host["address"] and len(hosts) > 1:
        text = (
            f"speaks to the head from {facts['source']} ({facts['interface']}), its peers reach it at {host['address']}"
        )
        say("nic", "failure", text, "set cluster_address to an address of the network that the cluster shares")
    mine = device_of(host)
    if mine and mine["wireless"]:
        say("nic", "warning", f"{mine['name']} is wireless", "use a cable: every step waits for the slowest line")
    if mine and 0 < mine["mbit"] < 1000:
        say("link", "warning", f"{mine['name']} runs at {mine['mbit']} Mbit/s", "look at cable and switch port")
    # One machine as several hosts: its other networks are no concern of theirs.
    for device in seen["devices"] if facts["interface"] != "lo" else []:
        if device["virtual"] or device is mine or device["address"].startswith("127."):
            continue
        network = ipaddress.ip_network(f"{device['address']}/{device['mask']}", strict=False)
        if not any(ipaddress.ip_address(other["address"]) in network for other in hosts if other is not host):
            text = f"has a second NIC, {device['name']} ({device['address']}), on a network where none of its peers is"
            remedy = f"runs of train.yml take {facts['interface']}; for other programs set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            say("nic", "warning", text, remedy)
    names = seen["names"]
    for peer in hosts:
        answers = names["addresses"].get(peer["host"], [])
        if peer is not host and answers and peer["address"] not in answers:
            text = f"takes the name {peer['host']} for {', '.join(answers)}, it is at {peer['address']}"
            say("names", "failure", text, "mend /etc/hosts there, or the DNS: site.yml writes the cluster's names")
    own = names["addresses"].get(seen["hostname"], [])
    if own and all(ipaddress.ip_address(address).is_loopback for address in own) and facts["interface"] != "lo":
        text = f"takes its own name {seen['hostname']} for {own[0]}"
        say("names", "note", text, "runs of train.yml do not mind; another gloo program needs GLOO_SOCKET_IFNAME")
    if names["seconds"] > SLOW_NAMES:
        text = f"looking up names takes {names['seconds']:.0f} s"
        say("names", "warning", text, "its DNS server is dead: mend /etc/resolv.conf, torchrun looks names up as well")
    return found


def device_of(host: Host) -> dict[str, Any] | None:
    """Return the device that the host speaks to the head over."""
    return next((row for row in host["health"]["devices"] if row["name"] == host["facts"]["interface"]), None)


def clones(hosts: list[Host]) -> list[Finding]:
    """Different machines with the machine-id of one: cloned images."""
    found = []
    seen: dict[str, Host] = {}
    for host in hosts:
        mark = host["facts"]["machine_id"]
        first = seen.setdefault(mark, host) if mark else host
        if first is not host and machine_marks(first["facts"]) != machine_marks(host["facts"]):
            text = f"has the machine-id of {first['host']}: one image was cloned"
            remedy = "rm /etc/machine-id && systemd-machine-id-setup there: DHCP may give both the same address"
            found.append(Finding("twice", host["host"], "warning", text, remedy))
    return found


def clocks(hosts: list[Host]) -> list[Finding]:
    """Clocks against the median of all; what the question itself took is no error of theirs."""
    if len(hosts) < 2:
        return []
    offsets = {}
    for host in hosts:
        sent, came = host["asked"]
        begun, ended = host["health"]["clock"]
        # The true offset lies between these two.
        offsets[host["host"]] = (begun - came + (ended - begun), begun - sent)
    middle = statistics.median((low + high) / 2 for low, high in offsets.values())
    found = []
    for name, (low, high) in offsets.items():
        off = max(low - middle, middle - high, 0.0)
        if off > CLOCK:
            text = f"its clock is {off:.0f} s off the others'"
            found.append(Finding("clock", name, "warning", text, "run chrony there (site.yml), or set the clock"))
    return found


def alike(hosts: list[Host]) -> list[Finding]:
    """Mixed MTUs, GPUs here and none there, datasets and trainers that differ."""
    found = []
    sizes = {host["host"]: device["mtu"] for host in hosts if (device := device_of(host))}
    if sizes:
        usual = statistics.mode(sizes.values())
        for name, size in sizes.items():
            if size != usual:
                text = f"its NIC has an MTU of {size}, the others' have {usual}"
                found.append(Finding("mtu", name, "failure", text, "set one MTU on all hosts (netplan) and the switch"))
    without = [host["host"] for host in hosts if not host["facts"]["gpus"]]
    if without and len(without) < len(hosts):
        text = f"no GPU, where {next(h['host'] for h in hosts if h['facts']['gpus'])} has one"
        found += [
            Finding("gpu", name, "warning", text, "leave it out with -e hosts=, or see what nvidia-smi says there")
            for name in without
        ]
    digests: dict[str, dict[str, str]] = {}
    for host in hosts:
        for path, digest in host["health"]["files"]["equal"].items():
            digests.setdefault(path, {})[host["host"]] = digest
    for path, by_host in digests.items():
        usual = statistics.mode(by_host.values())
        odd = [host["host"] for host in hosts if by_host.get(host["host"]) not in (usual, None)]
        odd += [host["host"] for host in hosts if host["host"] not in by_host]
        for name in odd:
            what = "differs from the others'" if name in by_host else "is not there"
            text = f"{path} {what}"
            remedy = (
                "run train.yml again: it brings what differs" if path.startswith("runs/") else "site.yml --tags nfs"
            )
            found.append(Finding("checksum", name, "failure", text, remedy))
    return found


def lines(hosts: list[Host], ports: list[int], head_port: int) -> list[Finding]:
    """Every pair of hosts on the rendezvous port and on random high ones, large packets, and speed."""
    found: list[Finding] = []
    by_name = {host["host"]: host for host in hosts}
    high = [str(port) for port in ports if port != head_port]
    for host in hosts:
        if head_port in host["mesh"]["taken"]:
            text = f"port {head_port} is in use there"
            remedy = "train.yml takes the next free one; see who it is: ss -ltnp"
            found.append(Finding("port", host["host"], "warning", text, remedy))
    for target in hosts:
        taken = {str(port) for port in target["mesh"]["taken"]}
        wrong: dict[str, dict[str, str]] = {}  # source: {port: what}
        for source in hosts:
            reached = source["mesh"]["reached"].get(target["host"], {})
            bad = {port: what for port, what in reached.items() if what and port not in taken}
            if bad:
                wrong[source["host"]] = bad
        if not wrong:
            continue
        sources = ", ".join(wrong)
        bad_ports = set().union(*wrong.values())
        what = next(iter(next(iter(wrong.values())).values()))
        all_high = bool(high) and bad_ports >= set(high) - taken
        which = {
            (True, True): "any TCP port",
            (True, False): "high TCP ports (32768-60999), which gloo and NCCL listen on",
        }.get((all_high, str(head_port) in bad_ports), f"TCP port {', '.join(sorted(bad_ports))}")
        text = f"{sources} cannot reach {which} of it ({what})"
        remedy = "its firewall is closed: site.yml opens all TCP between the cluster's addresses"
        found.append(Finding("firewall", target["host"], "failure", text, remedy))
    found += large_packets(hosts)
    found += speed(hosts, by_name)
    return found


def large_packets(hosts: list[Host]) -> list[Finding]:
    """Paths that carry small packets and lose large ones."""
    found = []
    mtus = {host["host"]: host["mesh"]["mtu"] for host in hosts}
    for host in hosts:
        for peer, line in host["mesh"]["lines"].items():
            # Unequal MTUs are named by themselves.
            lost = (
                line.get("ping_small") and line.get("ping_large") is False and mtus[host["host"]] <= mtus.get(peer, 0)
            )
            if lost or "stalled" in line:
                size = f"packets of {mtus[host['host']]} bytes" if lost else f"{128} KiB in one go"
                text = f"{size} do not get through to {peer}"
                remedy = "the path between has a smaller MTU (a tunnel, a switch): set that on both hosts"
                found.append(Finding("mtu", host["host"], "failure", text, remedy))
    return found


def line_to_head(host: dict[str, Any]) -> dict[str, Any]:
    """Return what was measured between a host and the head (mbit, latency_ms), or nothing."""
    lines: dict[str, dict[str, Any]] = (host.get("mesh") or {"lines": {}})["lines"]
    return next((line for line in lines.values() if "mbit" in line), {})


def speed(hosts: list[Host], by_name: dict[str, Host]) -> list[Finding]:
    """Lines to the head: the head's own is the slow one when all are."""
    rates = {
        host["host"]: line["mbit"]
        for host in hosts
        for line in host["mesh"]["lines"].values()
        if line.get("mbit") is not None
    }
    found = []
    slow = {name: rate for name, rate in rates.items() if rate < SLOW_LINE}
    remedy = "look at cable, switch port and NIC (ethtool); over Wi-Fi every step waits for it"
    if len(slow) > 1 and len(slow) == len(rates):
        head = next(name for name in by_name if name not in rates)
        text = f"every line to it is slow ({min(slow.values()):.0f} to {max(slow.values()):.0f} Mbit/s)"
        return [Finding("link", head, "warning", text, remedy)]
    for name, rate in slow.items():
        found.append(Finding("link", name, "warning", f"its line to the head carries {rate:.0f} Mbit/s", remedy))
    for host in hosts:
        for peer, line in host["mesh"]["lines"].items():
            if line.get("latency_ms", 0.0) > SLOW_ANSWER and peer == next(iter(by_name)):
                text = f"{peer} answers it after {line['latency_ms']:.1f} ms"
                found.append(
                    Finding("link", host["host"], "warning", text, "every all-reduce waits for that: use a cable")
                )
    return found


def all_reduce(troubles: dict[str, str]) -> list[Finding]:
    """Why the real all-reduce over all hosts failed, by host."""
    remedy = "read it: it is torch's own word"
    return [
        Finding("all-reduce", name, "failure", f"the all-reduce failed: {word}", remedy)
        for name, word in troubles.items()
    ]


# The report -------------------------------------------------------------------------------------------------------------


def judge(hosts: list[Host], ports: list[int], head_port: int, needed: int) -> list[Finding]:
    """Return all findings, the worst first, each host's together."""
    answering = [host for host in hosts if not host.get("trouble")]
    found = [finding for host in hosts if host.get("trouble") for finding in reachable(host)]
    for host in answering:
        found += [*environment(host), *room(host, needed), *machine(host), *network(host, hosts)]
    for check in (twins, clones, unlike, clocks, alike):
        found += check(answering)
    paired = [host for host in answering if host.get("mesh")]
    found += lines(paired, ports, head_port)
    places = {host["host"]: place for place, host in enumerate(hosts)}
    return sorted(found, key=lambda f: (LEVELS.index(f.level), places.get(f.host, -1), f.check))


def table(hosts: list[Host], found: list[Finding]) -> list[str]:
    """Return a table host by host, and below it the findings."""
    rows = [["host", "address", "device", "CPUs", "memory", "GPUs", "disk free", "to the head", "verdict"]]
    for host in hosts:
        mine = [f for f in found if f.host == host["host"] and f.level != "note"]
        verdict = ", ".join(dict.fromkeys(f.check for f in mine)) or "ok"
        if host.get("trouble"):
            rows.append([host["host"], host["address"], *["-"] * 6, verdict])
            continue
        facts, seen = host["facts"], host["health"]
        line = line_to_head(host)
        rows.append(
            [
                host["host"],
                host["address"],
                facts["interface"] or "-",
                str(facts["cpus"]),
                f"{seen['memory']['available_mib'] / 1024:.1f} of {seen['memory']['total_mib'] / 1024:.1f} GiB",
                str(len(facts["gpus"])),
                f"{facts['free_bytes'] / 1e9:.0f} GB",
                f"{line['mbit']:.0f} Mbit/s, {line['latency_ms']:.2f} ms" if line else "-",
                verdict,
            ]
        )
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*shown, *(finding.line for finding in found)]
