"""The energy that runs have used: the power of their GPUs, integrated over the samples of their hosts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

GAP = 10.0  # s between two samples, above which the time between them does not count
POWER_LIMIT = 5000.0  # W of one GPU; a higher value is rejected
JOULES = 3600.0  # in a Wh


@dataclass
class Energy:
    """What one run has used.

    Attributes:
        watt_hours: energy of all its GPUs.
        gpu_seconds: time for which their power is known, summed over the GPUs.
        gpus: number of GPUs whose power was measured at the same time, at most.
    """

    watt_hours: float = 0.0
    gpu_seconds: float = 0.0
    gpus: int = 0

    @property
    def seconds(self) -> float:
        """Time for which the power is known."""
        return self.gpu_seconds / self.gpus if self.gpus else 0.0


class EnergyMeter:
    """Adds the samples of hosts to the runs that use their GPUs.

    Attributes:
        used: {run: its energy}.
    """

    def __init__(self) -> None:
        self.used: dict[str, Energy] = {}
        self._last: dict[tuple[str, str], tuple[float, float]] = {}  # {(host, GPU): (time, power)}
        self._measured: dict[str, set[tuple[str, str]]] = {}  # {run: GPUs that were measured}

    def take(self, host: str, at: float, gpus: Iterable[Mapping[str, Any]], users: Mapping[str, list[str]]) -> set[str]:
        """Add a sample of a host; return the runs whose energy grew.

        Args:
            at: time of the sample on the host's clock, in seconds.
            gpus: with `uuid` and `power_w`, see `reply_types.GpuSample`.
            users: for each UUID the runs that use the GPU now; they share its energy equally.
        """
        grown = set()
        for gpu in gpus:
            key, power = (host, str(gpu["uuid"])), gpu["power_w"]
            before = self._last.pop(key, None)
            if power is None or not 0 <= power <= POWER_LIMIT:
                continue
            self._last[key] = (at, power)
            runs = users.get(key[1], [])
            if before is None or not 0 < at - before[0] <= GAP:
                continue
            seconds = at - before[0]
            for run in runs:
                energy, measured = self.used.setdefault(run, Energy()), self._measured.setdefault(run, set())
                measured.add(key)
                energy.watt_hours += (before[1] + power) / 2 * seconds / JOULES / len(runs)
                energy.gpu_seconds += seconds
                energy.gpus = max(energy.gpus, len(measured))
                grown.add(run)
        return grown

    def forget(self, run: str) -> None:
        """Drop a run that no longer exists."""
        self.used.pop(run, None)
        self._measured.pop(run, None)
