"""The plan of a run: ranks, devices, ports, threads and the command of every host."""

from __future__ import annotations

import ipaddress
import zlib
from pathlib import Path
from typing import Any

from trainer.common.formats import table
from trainer.config import RunSpec
from trainer.distributed import SHARED_GPUS
from trainer.strategy import plan_named, plan_of
from trainyard.preflight.gpu_choice import devices, numbers
from trainyard.preflight.host_state import HostState
from trainyard.remote.commit import start_of
from trainyard.run.plan.isolation import NO_ISOLATION, Isolation
from trainyard.run.types import PlanEntry
from trainyard.wire.connection import Host
from trainyard.wire.run_errors import PlanError

# Below 32768, because the kernel assigns higher ports to outgoing connections.
PORTS = range(29500, 29600)
LOOPBACK = "127.0.0.1"
GPUS = "CUDA_VISIBLE_DEVICES"
_MAX_ADDRESSES = 64  # of one host: a host states them itself
_JOIN_TIMEOUT = 120  # s for all hosts of an elastic run to reach the rendezvous


def choose_port(requested: int | None, free: list[int], head: str, run_dir: str, lease: str = "") -> int:
    """Return the rendezvous port on the head: the requested one, or a free one that the path of the run folder selects.

    Runs that start on one machine at the same time see the same free ports, so the first one would be used twice. The
    jobs of the queue have consecutive numbers: with a `lease`, its job selects the port. Raises PlanError: it is in
    use, or none is free.
    """
    if requested is not None:
        if requested not in free:
            raise PlanError(f"port {requested} is in use on the head {head}: free it, or omit master_port")
        return requested
    if not free:
        raise PlanError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free on the head {head}: set master_port")
    job = Path(lease).name
    return free[(int(job) if job.isdecimal() else zlib.crc32(run_dir.encode())) % len(free)]


def head_first(hosts: list[HostState], head: str) -> list[HostState]:
    """Return the hosts in rank order: the inventory's order, with the named head first.

    Raises PlanError: the run has no host of that name.
    """
    if not head:
        return hosts
    names = [host.name for host in hosts]
    if head not in names:
        raise PlanError(f"head: {head} is not a host of this run; its hosts are {', '.join(names)}")
    return sorted(hosts, key=lambda host: host.name != head)


def rank_counts(hosts: list[HostState]) -> list[int]:
    """Return the number of ranks on each host."""
    return [host.host.processes or len(host.gpus) or 1 for host in hosts]


def hosts_share_gpus(hosts: list[HostState]) -> bool:
    """Return whether hosts that are one machine use the same GPU."""
    used = [device for host in hosts for device in devices(host.gpus)]
    return len(used) > len(set(used))


def check_own_gpus(hosts: list[HostState], spec: RunSpec) -> None:
    """Check that no ranks share a GPU if the strategy does not allow that. Raises PlanError."""
    counts = rank_counts(hosts)
    if sum(counts) < 2 or not plan_of(spec).needs_own_gpus(spec):
        return
    refused = f"strategy={spec.strategy} cannot run with ranks that share a GPU"
    for host, count in zip(hosts, counts, strict=True):
        if host.gpus and count > len(host.gpus):
            raise PlanError(
                f"{host.name}: {refused} ({count} ranks, {len(host.gpus)} GPU): set cluster_processes={len(host.gpus)}, or "
                "strategy=ddp or pipeline"
            )
    if hosts_share_gpus(hosts):
        names = ", ".join(host.name for host in hosts if host.gpus)
        raise PlanError(
            f"{names}: {refused}, and hosts of these are one machine: leave one of them out, or set strategy=ddp or pipeline"
        )


def plan_nodes(
    hosts: list[HostState],
    *,
    run: str,
    port: int,
    attempt: int = 1,
    elastic: int = 0,
    restarts: int = 0,
    identity: str = "",
    isolation: Isolation = NO_ISOLATION,
) -> list[PlanEntry]:
    """Plan a run over `hosts`, in order: the rank is the place in the list. Raises PlanError: a host cannot take part.

    Args:
        port: rendezvous port on the first host, the head.
        attempt: number of this start of the run.
        elastic: 0 for the static rendezvous; else the minimum number of hosts with which torchrun continues, restarting
            its ranks up to `restarts` times.
        identity: id of this start at the rendezvous.
        isolation: which connections the units of the ranks permit.
    """
    _check_routes(hosts)
    counts = rank_counts(hosts)
    threads = threads_per_rank(hosts, counts)
    addresses = meeting_addresses(hosts)
    peers = peer_addresses(hosts) if isolation.limited else []
    shared_gpus = hosts_share_gpus(hosts)  # all ranks need the same backend
    nodes: list[PlanEntry] = []
    for place, (host, count) in enumerate(zip(hosts, counts, strict=True)):
        first = sum(counts[:place])
        meeting = _rendezvous(addresses, place, port, elastic, restarts)
        meeting.append(f"--rdzv-id={identity or f'{run}-{attempt}'}")
        run_dir = f"{host.host.data_dir}/runs/{run}"
        nodes.append(
            PlanEntry(
                **_of_host(host, addresses[place]),
                node_rank=place,
                ranks=list(range(first, first + count)),
                threads=threads[place],
                run_dir=run_dir,
                command=_command(host.host, run_dir, meeting, count),
                attempt=attempt,
                elastic=bool(elastic),
                peers=peers,
                isolated=isolation.limited,
                shared_gpus=shared_gpus,
            )
        )
    return nodes


def _of_host(state: HostState, address: str) -> dict[str, Any]:
    """Return the fields of a node that its host alone determines. `address`: where it meets the others."""
    host, facts = state.host, state.facts
    return {
        "host": host.name,
        "address": address,
        "interface": "lo" if address == LOOPBACK else facts["interface"],
        "data_dir": host.data_dir,
        "backend": host.backend,
        # A unit keeps to the cores that the queue granted.
        "properties": [f"CPUAffinity={' '.join(map(str, host.cpus))}"] if host.cpus else [],
        # CPU tensors use malloc, and glibc's keeps up to twice the memory that they need.
        "allocator": "" if state.gpus else facts.get("allocator", ""),
        "stale": facts.get("running", False),
        "devices": devices(state.gpus),
        "gpu_numbers": numbers(state),
        "hide_gpus": bool(facts["gpus"]) and not state.gpus,
        "lease": host.lease,
        "versions": facts["versions"],
        "gpus": [gpu["name"] for gpu in state.gpus],
        "memory_mib": min((gpu["memory_mib"] for gpu in state.gpus), default=facts["memory_mib"]),
        "link_mbit": facts["link_mbit"],
        "previous": start_of(facts["part"]),
        "stop_wanted": facts["stop_wanted"],
    }


def threads_per_rank(hosts: list[HostState], counts: list[int]) -> list[int]:
    """Return the CPU threads of each rank of a host. Ranks of all hosts that are one machine share its processors.

    A rank leaves the share of the other GPUs of its machine to other runs: with more threads than cores, each of them takes many
    times as long.
    """
    on_machine: dict[str, int] = {}
    for host, count in zip(hosts, counts, strict=True):
        boot = host.facts["boot_id"]
        on_machine[boot] = on_machine.get(boot, 0) + count
    found = []
    for host in hosts:
        sharing = on_machine[host.facts["boot_id"]]
        if host.gpus and not host.host.cpus:  # else the queue has granted cores
            sharing = max(sharing, len(host.facts["gpus"]))
        found.append(max(1, host.facts["cpus"] // sharing))
    return found


def _command(host: Host, run_dir: str, meeting: list[str], ranks: int) -> list[str]:
    """Return the command of the launcher, which is in trainer.zip, to which PYTHONPATH points."""
    launcher = [host.python, "-m", "trainer.launch.torchrun", *meeting, f"--nproc-per-node={ranks}"]
    trainer = ["-m", "trainer", "train", f"{run_dir}/spec.yml", f"--run-dir={run_dir}", f"--data-dir={host.data_dir}"]
    return [*launcher, *trainer]


def meeting_addresses(hosts: list[HostState]) -> list[str]:
    """Return the address at which each host meets the others: loopback if all of them are one machine."""
    addresses = [host.address for host in hosts]
    return [LOOPBACK] * len(hosts) if len(set(addresses)) == 1 else addresses


def peer_addresses(hosts: list[HostState]) -> list[str]:
    """Return every address from which a host of the run may connect; only loopback if all hosts are one machine.

    A host with several addresses connects from the one that its routing table selects for a peer's address.
    """
    if LOOPBACK in meeting_addresses(hosts):
        return [LOOPBACK]
    found = [host.address for host in hosts]
    for host in hosts:
        facts = host.facts
        more = [facts.get(name) for name in ("addresses", "addresses_v6")]
        listed = [facts["source"], *(address for some in more if isinstance(some, list) for address in some)]
        found += [address for address in listed if _is_address(address)][:_MAX_ADDRESSES]
    return list(dict.fromkeys(found))


def _is_address(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(ipaddress.ip_address(value))
    except ValueError:
        return False


def _check_routes(hosts: list[HostState]) -> None:
    if not hosts:
        raise PlanError("there is no host to run on: add hosts to the group 'cluster' of the inventory")
    for host in hosts:
        facts = host.facts
        if facts["route_error"] or not facts["interface"]:
            why = facts["route_error"] or f"no network device there has the address {facts['source']}"
            raise PlanError(f"{host.name}: {why}; check cluster_address of {host.name} and of the head")


def _rendezvous(addresses: list[str], place: int, port: int, minimum: int, restarts: int) -> list[str]:
    """Return torchrun's flags of the rendezvous: static, or elastic with at least `minimum` hosts."""
    if not minimum:
        words = [f"--nnodes={len(addresses)}", f"--node-rank={place}", f"--master-addr={addresses[0]}"]
        return [*words, f"--master-port={port}", "--max-restarts=0"]
    # Without is_host and --local-addr, no host would serve the store where /etc/hosts maps the host name to 127.0.1.1.
    conf = f"is_host={int(place == 0)},join_timeout={_JOIN_TIMEOUT},last_call_timeout=3"
    conf += ",keep_alive_interval=1,keep_alive_max_attempt=5"
    words = [f"--nnodes={minimum}:{len(addresses)}", "--rdzv-backend=c10d", f"--rdzv-conf={conf}"]
    words += [f"--rdzv-endpoint={addresses[0]}:{port}", f"--local-addr={addresses[place]}"]
    return [*words, f"--max-restarts={restarts}"]


def environment(node: PlanEntry, extra: dict[str, str]) -> str:
    """Return the contents of the node's `env` file: KEY=VALUE lines. The file has mode 0600, because it may hold
    secrets.

    Raises PlanError: a name or value that such a file cannot hold.
    """
    values = {
        "PYTHONPATH": f"{node.run_dir}/trainer.zip",
        "PYTHONUNBUFFERED": "1",
        **({"GLOO_SOCKET_IFNAME": node.interface, "NCCL_SOCKET_IFNAME": node.interface} if node.interface else {}),
        **({"OMP_NUM_THREADS": str(node.threads)} if node.threads else {}),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **({"LD_PRELOAD": node.allocator} if node.allocator else {}),
        **gpu_environment(node),
        # Otherwise restarted ranks read their peers' previous addresses from torchrun's store, and wait for those.
        **({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if node.elastic else {}),
        # A library that still contacts the hub would wait for a timeout.
        **({"HF_HUB_OFFLINE": "1"} if node.isolated else {}),
    } | {name: str(value) for name, value in extra.items()}
    if GPUS in extra and (node.devices or node.hide_gpus):
        raise PlanError(f"{node.host}: {GPUS} in run_env or cluster_env is set by the plan: set cluster_gpus instead")
    for name, value in values.items():
        if "\n" in value or "\n" in name or "=" in name:
            raise PlanError(f"run_env: {name!r} contains a line break or '=': give it as a file instead")
    return "".join(f"{name}={value}\n" for name, value in values.items())


def gpu_environment(node: PlanEntry) -> dict[str, str]:
    """Return the variables that limit the ranks to the node's GPUs. Rank N of the host uses the N-th of them."""
    if node.hide_gpus:
        return {GPUS: ""}
    shared = {SHARED_GPUS: "1"} if node.shared_gpus else {}
    # UUIDs, because CUDA numbers GPUs by their speed and nvidia-smi by their slot.
    limits = {GPUS: ",".join(node.devices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if node.devices else {}
    return limits | shared


def shared_rows(nodes: list[PlanEntry], spec: RunSpec, before: list[int]) -> list[int]:
    """Return each host's rows of a step: as `before` (rows by rank, of an earlier start), else equal for all ranks."""
    ranks, rows = sum(len(node.ranks) for node in nodes), spec.rows_per_step
    if len(before) != ranks or sum(before) != rows:
        before = [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]
    return [sum(before[rank] for rank in node.ranks) for node in nodes]


def plan_lines(nodes: list[PlanEntry], spec: RunSpec, port: int, before: list[int]) -> list[str]:
    """Return the plan of the ranks as a table and a summary. `before`: rows by rank, of an earlier start."""
    world = sum(len(node.ranks) for node in nodes)
    head = ["host", "node", "ranks", "address", "device", "threads"]
    rows = []
    for node in nodes:
        ranks = ",".join(map(str, node.ranks))
        rows.append([node.host, str(node.node_rank), ranks, node.address, node.interface, str(node.threads)])
    meeting = f"rendezvous {nodes[0].address}:{port}"
    if any(node.gpu_numbers or node.hide_gpus for node in nodes):
        head.append("GPUs")
        rows = [[*row, ",".join(map(str, n.gpu_numbers)) or "-"] for row, n in zip(rows, nodes, strict=True)]
    by_speed = ""
    if plan_named(spec.strategy).shares_rows_by_speed and not spec.script:
        head.append("rows")
        rows = [[*row, str(count)] for row, count in zip(rows, shared_rows(nodes, spec, before), strict=True)]
        by_speed = ", balanced by measured speed" if spec.balance == "auto" and world > 1 else ""
    if spec.script:
        return [*table([head, *rows]), f"world size {world}, {meeting}, script {Path(spec.script).name}"]
    batches = f"{spec.rows_per_step} rows per step in micro-batches of {spec.batch_size}{by_speed}"
    return [*table([head, *rows]), f"world size {world}, {meeting}, strategy {spec.strategy}, {batches}"]
