"""The plan of a run: ranks, devices, port, threads and the exact command of every host. Pure Python, no Ansible."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.strategy import plan_named

# Below 32768: the kernel hands ports above it to any outgoing connection.
PORTS = range(29500, 29600)


class PlanError(Exception):
    """These hosts cannot run this together; the message is one plain line."""


class HostUnreachableError(PlanError):
    """A host does not answer: it may be there in a moment."""


@dataclass(frozen=True)
class Node:
    """One host of a run. `ranks` count over all hosts, in inventory order; `threads` are CPU threads a rank."""

    host: str
    node_rank: int
    ranks: list[int]
    address: str
    interface: str
    threads: int
    run_dir: str
    data_dir: str
    command: list[str]
    backend: str = "auto"
    properties: list[str] = field(default_factory=list)
    attempt: int = 1
    replica: int | None = None  # the replica that this host belongs to, if each has a torchrun of its own
    restarts: int = 0  # starts in a row of such a torchrun alone, by its host's supervisor
    lighthouse: str = ""  # where the head keeps the lighthouse of such a run
    allocator: str = ""  # a library to be loaded ahead of the C library's malloc
    elastic: bool = False  # torchrun starts its ranks again by itself
    stale: bool = False  # a part of an earlier start still runs there, and is stopped before this one begins

    def as_dict(self) -> dict[str, Any]:
        """Return the plan's form as Ansible passes it on."""
        return asdict(self)


def choose_port(wanted: int | None, free: list[int], head: str) -> int:
    """Return the rendezvous port on the head: the wanted one, or the first that is free.

    Raises:
        PlanError: it is in use.
    """
    if wanted is not None:
        if wanted not in free:
            raise PlanError(
                f"port {wanted} is in use on the head {head}: end what uses it, or leave master_port out and a free one is taken"
            )
        return wanted
    if not free:
        raise PlanError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free on the head {head}: set master_port")
    return free[0]


def head_first(hosts: list[dict[str, Any]], head: str) -> list[dict[str, Any]]:
    """Return the hosts in the order of their ranks: as in the inventory, but a head that is named comes first.

    Raises:
        PlanError: the head is none of them.
    """
    if not head:
        return hosts
    names = [host["host"] for host in hosts]
    if head not in names:
        raise PlanError(f"head: {head} is none of the run's hosts: {', '.join(names)}")
    return sorted(hosts, key=lambda host: host["host"] != head)


def replica_ports(hosts: list[dict[str, Any]], port: int, size: int) -> list[int]:
    """Return free ports: of the lighthouse on the head, and for each replica of `size` hosts that of its rendezvous.

    All are unlike: two hosts may be one machine. `port`: of the first replica, on the head; 0 for a run that is there.

    Raises:
        PlanError: a host has none left.
    """
    if not port:
        return [0] * (1 + len(hosts))
    ports = [port]
    for host in [hosts[0], *hosts[size::size]]:
        left = [free for free in host["facts"]["free_ports"] if free not in ports]
        if not left:
            raise PlanError(
                f"no port from {PORTS.start} to {PORTS.stop - 1} is free on {host['host']}: end what uses them"
            )
        ports.append(left[0])
    return [ports[1], ports[0], *ports[2:]]


def plan(
    hosts: list[dict[str, Any]],
    *,
    run: str,
    port: int,
    attempt: int = 1,
    elastic: int = 0,
    restarts: int = 0,
    replica_hosts: int = 0,
) -> list[Node]:
    """Plan a run over `hosts`, in order: rank = place in the list.

    Args:
        hosts: for each host its name (`host`), `address`, `data_dir`, `python`, `backend`, `processes` (0: one a GPU,
            or one where there is none) and what `probe.look` found there (`facts`).
        port: rendezvous port on the first host, which is the head.
        attempt: number of this start of the run.
        elastic: 0 for the static rendezvous; else torchrun itself goes on with so many hosts at least, and starts its
            ranks again up to `restarts` times.
        replica_hosts: 0 for one torchrun; else every so many neighbouring hosts have one of their own, started again
            alone up to `restarts` times in a row.

    Raises:
        PlanError: a host cannot take part; says which and why.
    """
    if not hosts:
        raise PlanError("there is no host to run on: is the group 'cluster' empty?")
    processes = [host["processes"] or len(host["facts"]["gpus"]) or 1 for host in hosts]
    on_machine: dict[str, int] = {}
    for host, count in zip(hosts, processes, strict=True):
        boot = host["facts"]["boot_id"]
        on_machine[boot] = on_machine.get(boot, 0) + count
    nodes: list[Node] = []
    first = 0
    ports = replica_ports(hosts, port, replica_hosts) if replica_hosts else []
    firsts = [sum(processes[:place]) for place in range(0, len(hosts), replica_hosts or len(hosts))]
    for place, (host, count) in enumerate(zip(hosts, processes, strict=True)):
        facts = host["facts"]
        if facts["trouble"] or not facts["interface"]:
            why = facts["trouble"] or f"no network device there has the address {facts['source']}"
            raise PlanError(f"{host['host']}: {why}; check cluster_address of {host['host']} and of the head")
        run_dir = f"{host['data_dir']}/runs/{run}"
        meeting = [f"--nnodes={len(hosts)}", f"--node-rank={place}"]
        meeting += [f"--master-addr={hosts[0]['address']}", f"--master-port={port}", "--max-restarts=0"]
        if elastic:
            # Without is_host and --local-addr, Debian's `127.0.1.1 hostname` leaves the store to nobody.
            conf = f"is_host={int(place == 0)},join_timeout=120,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"
            meeting = [f"--nnodes={elastic}:{len(hosts)}", "--rdzv-backend=c10d", f"--rdzv-conf={conf}"]
            meeting += [f"--rdzv-endpoint={hosts[0]['address']}:{port}", f"--rdzv-id={run}-{attempt}"]
            meeting += [f"--local-addr={host['address']}", f"--max-restarts={restarts}"]
        number, among = divmod(place, replica_hosts) if replica_hosts else (None, 0)
        lighthouse, flags = "", []
        if number is not None:
            crew = hosts[place - among : place - among + replica_hosts]
            meeting = [f"--nnodes={len(crew)}", f"--node-rank={among}", f"--master-addr={crew[0]['address']}"]
            meeting += [f"--master-port={ports[1 + number]}", "--max-restarts=0"]
            lighthouse = f"{hosts[0]['address']}:{ports[0]}"
            flags = [
                f"--replica={number}/{len(firsts)}",
                f"--first-rank={firsts[number]}",
                f"--lighthouse={lighthouse}",
            ]
        command = [
            host["python"], "-m", "torch.distributed.run", *meeting, f"--nproc-per-node={count}",
            "-m", "trainer", "train", f"{run_dir}/spec.yml", f"--run-dir={run_dir}", f"--data-dir={host['data_dir']}",
            *flags,
        ]  # fmt: skip
        nodes.append(
            Node(
                host=host["host"],
                node_rank=place,
                ranks=list(range(first, first + count)),
                address=host["address"],
                interface=facts["interface"],
                threads=max(1, facts["cpus"] // on_machine[facts["boot_id"]]),
                run_dir=run_dir,
                data_dir=host["data_dir"],
                command=command,
                backend=host["backend"],
                attempt=attempt,
                replica=number,
                restarts=restarts if replica_hosts else 0,
                lighthouse=lighthouse if place == 0 else "",
                # Tensors of a CPU come and go by malloc, and glibc's keeps up to as much again as they need.
                allocator="" if facts["gpus"] else facts.get("allocator", ""),
                elastic=bool(elastic),
                stale=facts.get("running", False),
            )
        )
        first += count
    return nodes


def environment(node: Node, extra: dict[str, str]) -> str:
    """Return the contents of the node's `env` file (KEY=VALUE lines, mode 0600: it may hold secrets)."""
    values = {
        "PYTHONPATH": f"{node.run_dir}/trainer.zip",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": node.interface,
        "NCCL_SOCKET_IFNAME": node.interface,
        "OMP_NUM_THREADS": str(node.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **({"LD_PRELOAD": node.allocator} if node.allocator else {}),
        # Else ranks that were started again find in torchrun's store where their peers were before, and wait for those.
        **({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if node.elastic else {}),
    } | {name: str(value) for name, value in extra.items()}
    for name, value in values.items():
        if "\n" in value or "\n" in name or "=" in name:
            raise PlanError(f"run_env: {name!r} holds a line break or '=': give it as a file instead")
    return "".join(f"{name}={value}\n" for name, value in values.items())


def shared_rows(nodes: list[Node], spec: dict[str, Any], before: list[int]) -> list[int]:
    """Return the rows of a step that every host takes: as the run shared them last, else equal for every rank."""
    ranks, rows = sum(len(node.ranks) for node in nodes), spec["rows_per_step"]
    if len(before) != ranks or sum(before) != rows:
        before = [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]
    return [sum(before[rank] for rank in node.ranks) for node in nodes]


def table(nodes: list[Node], spec: dict[str, Any], port: int, before: list[int]) -> list[str]:
    """Return the plan as lines that a person reads before anything starts; `before`: rows by rank, of an earlier start."""
    world = sum(len(node.ranks) for node in nodes)
    head = ["host", "node", "ranks", "address", "device", "threads"]
    rows = [
        [n.host, str(n.node_rank), ",".join(map(str, n.ranks)), n.address, n.interface, str(n.threads)] for n in nodes
    ]
    if nodes[0].lighthouse:
        head.append("replica")
        rows = [[*row, str(n.replica)] for row, n in zip(rows, nodes, strict=True)]
    by_speed = ""
    if plan_named(spec["strategy"]).shares_rows_by_speed:
        head.append("rows")
        rows = [[*row, str(count)] for row, count in zip(rows, shared_rows(nodes, spec, before), strict=True)]
        by_speed = ", shared by speed as it is measured" if spec["balance"] == "auto" and world > 1 else ""
    widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    ]
    return [
        *lines,
        f"world size {world}, {'lighthouse ' + nodes[0].lighthouse if nodes[0].lighthouse else f'rendezvous {nodes[0].address}:{port}'}, strategy {spec['strategy']}, "
        f"{spec['rows_per_step']} rows a step in micro-batches of {spec['batch_size']}{by_speed}",
    ]
