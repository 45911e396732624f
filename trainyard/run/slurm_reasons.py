"""The reason why the job of a run with `launcher=slurm` waits, as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainer.supervise.slurm_state import RUNNING, WAITING

_DATE = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\d")
_WAITS = {
    "Priority": "waits for jobs of a higher priority",
    "Resources": "waits for free nodes",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "waits for a job that has failed",
    "BeginTime": "waits for its begin, as after a requeue",
    "JobHeldUser": "is held: scontrol release starts it",
    "JobHeldAdmin": "is held by an administrator",
    "PartitionDown": "waits for its partition, which is down",
    "PartitionInactive": "waits for its partition, which is inactive",
    "PartitionTimeLimit": "waits indefinitely: slurm_time is longer than the partition permits",
    "PartitionNodeLimit": "waits indefinitely: slurm_nodes is more than the partition permits",
    "ReqNodeNotAvail": "waits for nodes that are down or reserved",
    "AssocGrpGRES": "waits until its account uses fewer GPUs",
    "QOSMaxJobsPerUserLimit": "waits until fewer jobs of its user run",
    "None": "waits for Slurm to evaluate it",
}


def waits(answer: Mapping[str, Any]) -> bool:
    """Return whether a run is a job that waits in Slurm. `answer`: a run_status."""
    return (answer.get("job") or {}).get("state") in WAITING


def waiting_line(answer: Mapping[str, Any]) -> str:
    """Return the reason why the job of a run waits; empty if it runs or does not exist.

    Args:
        answer: a run_status.
    """
    job, node = answer.get("job") or {}, answer.get("node") or {}
    state, reason = job.get("state", ""), job.get("reason", "")
    if not state:
        return ""
    if state in RUNNING:
        nodes = node.get("nodes") or []
        return "" if answer.get("ranks") or not nodes else f"job {node.get('job')} runs on {', '.join(nodes[:16])}"
    why = _WAITS.get(reason.partition(",")[0]) or (
        reason if " " in reason else f"waits ({reason})" if reason else "waits"
    )
    start = _DATE.fullmatch(job.get("start", ""))
    return f"job {node.get('job')} {why}{f', until about {start[1]} {start[2]} by its clock' if start else ''}"
