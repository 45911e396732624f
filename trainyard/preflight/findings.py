"""Findings of preflight, and the forms in which they are reported: lines, table, JSON, exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.common.formats import counted, table
from trainyard.preflight.hardware_table import hardware_table
from trainyard.preflight.host_state import HostState

LEVELS = ("failure", "warning", "note")  # a run fails; a run may be slower; information
COLUMNS = ["host", "address", "device", "free memory", "to the head", "verdict"]


@dataclass(frozen=True)
class Finding:
    """One problem. `host` is empty for a problem of the cluster; `check` is its name in docs/troubleshooting.md."""

    check: str
    host: str
    level: str
    text: str
    remedy: str

    @property
    def message(self) -> str:
        """The problem and its remedy, without the host."""
        return f"{self.text}: {self.remedy}"

    @property
    def headline(self) -> str:
        """The problem and its remedy, after the host's name."""
        return f"{self.host}: {self.message}" if self.host else self.message

    @property
    def line(self) -> str:
        """The line that preflight prints."""
        return f"{self.level}: {self.headline} [{self.check}]"


@dataclass(frozen=True)
class PreflightReport:
    """The result of preflight: findings by severity, the lines to print, and the measurements."""

    findings: list[Finding]
    lines: list[str]
    states: Sequence[HostState] = ()

    @property
    def exit_code(self) -> int:
        """0 without findings (notes do not count), 1 with warnings only, 2 with failures."""
        levels = {finding.level for finding in self.findings}
        return 2 if "failure" in levels else 1 if "warning" in levels else 0

    @property
    def error(self) -> str:
        """One line for the first failure; empty if there is none."""
        failures = [finding for finding in self.findings if finding.level == "failure"]
        if not failures:
            return ""
        more = f" (and {counted(len(failures) - 1, 'more failure')}, listed below)" if len(failures) > 1 else ""
        return f"{failures[0].headline} [{failures[0].check}]{more}"

    @property
    def other_lines(self) -> list[str]:
        """The lines without that of the failure in `error`, which is printed above them."""
        lines = list(self.lines)
        failure = next((finding.line for finding in self.findings if finding.level == "failure"), "")
        if failure in lines:
            lines.remove(failure)
        return lines

    def output(self, json_to: str) -> list[str]:
        """Return the lines to print.

        `json_to`: empty for the table; "true" for the report as one line of JSON; else a file to which the report is
        written as JSON, beside the table. Raises OSError: the file cannot be written.
        """
        if json_to.lower() in ("true", "yes"):
            return [json.dumps(self.as_dict())]
        if json_to:
            Path(json_to).write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
        return self.other_lines

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON report."""
        return {
            "exit": self.exit_code,
            "findings": [{"id": finding.check} | asdict(finding) for finding in self.findings],
            "hosts": {state.name: state.as_dict() for state in self.states},
        }


def by_severity(findings: list[Finding], names: Sequence[str]) -> list[Finding]:
    """Return the findings with the most severe first, and within a level in the order of the inventory."""
    places = {name: place for place, name in enumerate(names)}
    return sorted(findings, key=lambda f: (LEVELS.index(f.level), places.get(f.host, -1), f.check))


def host_table(states: Sequence[HostState], findings: Sequence[Finding]) -> list[str]:
    """Return a table of the hosts' hardware, one of their network and verdict, and the findings."""
    rows = [COLUMNS]
    for state in states:
        checks = [f.check for f in findings if f.host == state.name and f.level != "note"]
        verdict = ", ".join(dict.fromkeys(checks)) or "ok"
        if state.error:
            rows.append([state.name, state.address, *["-"] * 3, verdict])
            continue
        facts, memory, link = state.facts, state.health["memory"], state.link_to_head
        free = f"{memory['available_mib'] / 1024:.1f} of {memory['total_mib'] / 1024:.1f} GiB"
        speed = f"{link['mbit']:.0f} Mbit/s, {link['latency_ms']:.2f} ms" if link else "-"
        rows.append([state.name, state.address, facts["interface"] or "-", free, speed, verdict])
    hardware = {state.name: state.health.get("hardware") for state in states if not state.error}
    found = hardware_table([state.name for state in states], {name: one for name, one in hardware.items() if one})
    return [*table(rows), "", *found, "", *(finding.line for finding in findings)]
