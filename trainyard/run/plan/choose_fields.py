"""Decide `strategy=auto` and the automatic fields on the controller, from the facts of the hosts and the measured links."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainer.common.errors import UserError
from trainer.config import TINY, RunSpec, parse_mapping
from trainer.config.automatic import DECIDED
from trainer.planner.decisions import as_before, decide
from trainer.spec import make_spec
from trainer.strategy import AUTO
from trainyard.preflight.host_state import HostState
from trainyard.run.plan.nodes import rank_counts, threads_per_rank
from trainyard.run.types import MODELS, Files
from trainyard.wire.run_errors import PlanError

MEASURABLE = 2000.0  # Mbit/s: above, a single measured stream understates the link


def choose_fields(hosts: list[HostState], spec: RunSpec, files: Files) -> tuple[RunSpec, list[str]]:
    """Return the spec with a strategy and automatic fields for these hosts, and a line for each decision. A run that started before keeps its own.

    `files`: the files of the prepared run, among them the model. Raises PlanError: no strategy fits in memory.
    """
    for host in hosts:
        if host.facts["spec"]:
            return as_before(spec, staged_spec(host))
    links = link_speeds(hosts)
    known = []
    counts = rank_counts(hosts)
    for host, count, threads, link in zip(hosts, counts, threads_per_rank(hosts, counts), links, strict=True):
        facts = host.facts
        known.append(
            {
                "processes": count,
                "threads": threads,
                # A GPU without memory of its own shares that of the host.
                "gpu_mib": min((gpu["memory_mib"] or facts["memory_mib"] for gpu in host.gpus), default=0),
                "capability": min((gpu.get("capability", 0.0) for gpu in host.gpus), default=0.0),
                "four_bits": "bitsandbytes" in facts["versions"],
                "bfloat16": facts.get("bfloat16", False),
                "compiler": facts["compiler"],
                "memory_mib": facts["memory_mib"],
                "link_mbit": link,
            }
        )
    try:
        with spec_here(spec, files) as here:
            found, lines = decide(here, known)
    except UserError as error:
        raise PlanError(str(error)) from None
    slowest = min((link for link in links if link), default=0.0)
    if spec.strategy == AUTO and slowest in [host.link_to_head.get("mbit") for host in hosts]:
        lines[0] += " (link measured)"
    # `here` has the folders of the models on the controller.
    return spec.model_copy(update={name: getattr(found, name) for name in DECIDED}), lines


@contextlib.contextmanager
def spec_here(spec: RunSpec, files: Files) -> Iterator[RunSpec]:
    """Yield the spec with models that the controller can read: their folders here, or the config.json of a host.

    Args:
        files: the files of the prepared run, among them the model and the teacher.
    """
    folders: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="trainyard-") as work:
        for file in files:
            if file.kind not in MODELS or getattr(spec, file.kind) == TINY:
                continue
            folders[file.kind] = file.src
            if not file.src:
                folder = Path(work) / file.kind
                folder.mkdir()
                (folder / "config.json").write_text(file.config, encoding="utf-8")
                folders[file.kind] = str(folder)
        yield spec.model_copy(update=folders)


def staged_spec(host: HostState) -> RunSpec:
    """Return the spec in the run folder of a host, which started the run before. Raises PlanError if it is damaged."""
    source = f"{host.name}: spec.yml of the run"
    try:
        return make_spec(parse_mapping(host.facts["spec"], source), source)
    except UserError as error:
        raise PlanError(f"{error}: choose another run name, or remove its folder on the host") from None


def link_speeds(hosts: list[HostState]) -> list[float]:
    """Return the speed of every host's link to the head in Mbit/s: measured, else as its driver states; 0 if unknown."""
    measured = [host.link_to_head.get("mbit", 0.0) for host in hosts]
    speeds = []
    for place, (host, mbit) in enumerate(zip(hosts, measured, strict=True)):
        stated = float(host.facts["link_mbit"])
        if any(measured) and place == 0:
            stated = 0.0  # every measurement includes the head's own link
        speeds.append(mbit if 0 < mbit < MEASURABLE else max(mbit, stated))
    return speeds
