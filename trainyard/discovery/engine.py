"""A complete scan, from its settings to its report."""

import asyncio
import time
from collections.abc import Mapping

from trainyard.discovery import networks
from trainyard.discovery.scan import scan
from trainyard.discovery.scan_result import ScanReport, machines
from trainyard.discovery.settings import Settings


def discover(settings: Settings, ssh_ports: Mapping[str, int] | None = None) -> ScanReport:
    """Find the machines that run Ollama. Raises SettingsError: the settings are invalid; the message is one line.

    `ssh_ports`: address -> SSH port of machines that do not use `settings.ssh_port`.
    """
    start = time.perf_counter()
    here = networks.attached()
    names = [networks.host_and_port(text)[0] for text in settings.hosts]
    resolved = networks.resolve(names)
    plan = networks.plan(settings, here, resolved)
    ports = dict(ssh_ports or {})
    found = asyncio.run(scan(plan.targets, settings, ports))
    own = {str(a.address).partition("%")[0] for a in here}
    # The addresses of this machine that others on the scanned networks can reach.
    mine = {str(a.address) for a in here if not a.address.is_loopback and str(a.network) in plan.networks}
    return ScanReport(
        networks=plan.networks,
        skipped=plan.skipped,
        unresolved=tuple(name for name in names if not resolved[name]),
        ports=settings.ports,
        addresses=len({t.address for t in plan.targets}),
        passes=settings.passes,
        seconds=round(time.perf_counter() - start, 3),
        scanned_at=time.time(),
        silent=len(found.silent),
        refused=sum(t.address not in own and not t.address.startswith("127.") for t in found.refused),
        rejected=tuple((f"{target.address} port {target.port}", reason) for target, reason in found.rejected),
        left_out=sum(a.left_out for a in found.answers),
        own_addresses=tuple(sorted(mine, key=networks.address_order)),
        machines=tuple(machines(found.answers, own, ports, settings.ssh_port)),
    )
