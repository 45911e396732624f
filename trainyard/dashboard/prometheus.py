"""The state of the cluster in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import CollectorRegistry

from trainyard.dashboard.state import ClusterView

CONTENT_TYPE = CONTENT_TYPE_LATEST
HOST_VALUES = {
    "cpu_percent": ("trainyard_host_cpu_percent", "CPU use of all cores"),
    "memory_total": ("trainyard_host_memory_bytes", "memory"),
    "memory_available": ("trainyard_host_memory_available_bytes", "memory that is available"),
    "disk_free": ("trainyard_host_disk_free_bytes", "free disk space below the data folder"),
    "received": ("trainyard_host_received_bytes_per_second", "traffic to the cluster interface"),
    "sent": ("trainyard_host_sent_bytes_per_second", "traffic from the cluster interface"),
}
GPU_VALUES = {
    "utilisation_percent": ("trainyard_gpu_utilisation_percent", "GPU use"),
    "memory_used_mib": ("trainyard_gpu_memory_used_mebibytes", "GPU memory in use"),
    "memory_total_mib": ("trainyard_gpu_memory_mebibytes", "GPU memory"),
    "temperature_c": ("trainyard_gpu_temperature_celsius", "GPU temperature"),
    "power_w": ("trainyard_gpu_power_watts", "GPU power"),
}
RUN_VALUES = {
    "step": ("trainyard_run_step", "steps that the run has finished"),
    "steps": ("trainyard_run_steps", "steps of the run"),
    "loss": ("trainyard_run_loss", "training loss"),
    "tokens_per_second": ("trainyard_run_tokens_per_second", "speed of all ranks"),
}


class _Collector:
    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each kind of value."""
        hosts = self._cluster.hosts.items()
        up = [([name], float(host.connected)) for name, host in hosts]
        yield _family("trainyard_host_up", "whether the host answers", ["host"], up)
        for key, (metric, text) in HOST_VALUES.items():
            here = [([name], host.sample[key]) for name, host in hosts if host.connected and key in host.sample]
            yield _family(metric, text, ["host"], here)
        samples = [(name, host.sample.get("gpus", [])) for name, host in hosts if host.connected]
        gpus = [([name, gpu["uuid"]], gpu) for name, found in samples for gpu in found]
        for key, (metric, text) in GPU_VALUES.items():
            values = [(labels, gpu[key]) for labels, gpu in gpus if gpu[key] is not None]
            yield _family(metric, text, ["host", "gpu"], values)
        alive = [run for run in self._cluster.runs.values() if run.alive]
        for key, (metric, text) in RUN_VALUES.items():
            beats = [(run.name, run.first.get(key)) for run in alive]
            found = [([name], float(value)) for name, value in beats if isinstance(value, int | float)]
            yield _family(metric, text, ["run"], found)
        shares = [([run.name], run.comm_share) for run in alive if run.comm_share is not None]
        yield _family("trainyard_run_communication_share", "share of the time in communication", ["run"], shares)
        counts: dict[str, int] = {}
        for run in self._cluster.runs.values():
            counts[run.status] = counts.get(run.status, 0) + 1
        yield _family("trainyard_runs", "runs by status", ["status"], [([one], counts[one]) for one in sorted(counts)])


def _family(name: str, text: str, labels: list[str], values: Iterable[tuple[list[str], float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def exposition(cluster: ClusterView) -> bytes:
    """Return all metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(cluster))  # type: ignore[arg-type]
    return generate_latest(registry)
