"""The results of the checks as JSON, as Markdown, and as benchmarks/gpu/results.md. Standard library only.

python -m benchmarks.gpu.report results.json...     join results, and put the tables into benchmarks/gpu/results.md (tools/gpu-docs)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import TOP, Bench
from benchmarks.gpu.checks import CHECKS, Result

BEGIN, END = "<!-- results of make test-gpu: begin -->", "<!-- results of make test-gpu: end -->"
PAGE = TOP / "benchmarks" / "gpu" / "results.md"
_LOG_TAIL = 6000  # characters of each log in logs.txt


def about(machine: dict[str, Any]) -> str:
    """Return one line about the machine and the versions."""
    cuda = f", CUDA {machine['cuda']}" if machine.get("cuda") else ""
    return (
        f"{machine['device']}, {machine['memory_mib'] / 1024:.0f} GiB, torch {machine['torch']}{cuda}, "
        f"Python {machine['python']}"
    )


def write(bench: Bench, results: Sequence[Result], out: Path, seconds: float) -> None:
    """Write results.json and results.md into `out`."""
    found = {
        "machine": bench.machine,
        "scale": bench.scale.name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(seconds),
        "checks": [result.as_json() for result in results],
        "planned": bench.planned,
        "runs": {name: vars(outcome) for name, outcome in bench.outcomes.copy().items()},
    }
    for name, text in (
        ("results.json", json.dumps(found, indent=1)),
        ("results.md", "\n".join(markdown(found)) + "\n"),
    ):
        aside = out / f".{name}.tmp"
        aside.write_text(text)
        aside.replace(out / name)


def markdown(found: dict[str, Any]) -> list[str]:
    """Return the tables: one row per check, then one row per figure."""
    lines = [f"{about(found['machine'])}; {found['date']}; {found['seconds']} s.", ""]
    if found["scale"] == "cpu":
        lines += ["Stand-in without CUDA: figures of speed and memory have no meaning.", ""]
    lines += ["| check | result | notes |", "| --- | --- | --- |"]
    for check in found["checks"]:
        notes = "; ".join(filter(None, [check["reason"], *check["notes"]]))
        lines.append(f"| {check['title']} | {check['status']} | {_cell(notes)} |")
    lines += ["", "| figure | value | bound |", "| --- | --- | --- |"]
    for check in found["checks"]:
        for figure in check["figures"]:
            shown = "not a number" if figure["value"] is None else f"{figure['value']:.4g} {figure['unit']}".rstrip()
            mark = "" if figure["holds"] else " (outside)" if figure["binding"] else " (no meaning without CUDA)"
            lines.append(f"| {_cell(figure['name'])} | {shown}{mark} | {figure['bound'] or '-'} |")
    return lines


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:400]


def summary(results: Sequence[Result]) -> list[str]:
    """Return one line per check for a terminal, with the figures that are outside of their bounds."""
    lines = []
    for result in results:
        lines.append(f"{result.status:<8}{result.title}{': ' if result.reason else ''}{result.reason}")
        lines += [f"        {note}" for note in result.notes]
        for figure in result.figures:
            if figure.binding and not figure.holds:
                lines.append(f"        {figure.name}: {figure.value:.4g} {figure.unit}, bound {figure.bound}")
    return lines


def copy_logs(bench: Bench, out: Path) -> None:
    """Write the ends of all logs into one file."""
    parts = []
    for log in sorted((bench.folder / "logs").glob("*.log")):
        parts += [f"==== {log.stem}", log.read_text(errors="replace")[-_LOG_TAIL:]]
    (out / "logs.txt").write_text("\n".join(parts))


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of several legs as one: for each check the last result that was not skipped. Raises ValueError.

    Args:
        parts: contents of results.json, of one kind of GPU and one version of torch.
    """
    kinds = {(part["scale"], part["machine"]["device"], part["machine"]["torch"]) for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"results of different machines cannot be joined: {'; '.join(sorted(map(str, kinds)))}")
    checks: dict[str, Any] = {}
    for check in (check for part in parts for check in part["checks"]):
        if check["name"] not in checks or check["status"] != "skipped":
            checks[check["name"]] = check
    dates = {"date": max(part["date"] for part in parts), "seconds": sum(part["seconds"] for part in parts)}
    return parts[-1] | dates | {"checks": [checks[name] for name in CHECKS if name in checks]}


def fill(page: str, found: dict[str, Any]) -> str:
    """Return the page with the tables between its two marks. Raises ValueError if the results are of no GPU."""
    if found["scale"] == "cpu":
        raise ValueError("the results are those of a stand-in without CUDA: run make test-gpu on a machine with a GPU")
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"{PAGE.name} has no place for results: the lines '{BEGIN}' and '{END}'")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, "", *markdown(found), "", END]) + after


def main(files: Sequence[Path]) -> int:
    """Fill the page from the results of one run or of several legs; return 1 with one line if that is impossible."""
    try:
        PAGE.write_text(fill(PAGE.read_text(), joined([json.loads(file.read_text()) for file in files])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {' '.join(map(str, files))}: {error}", file=sys.stderr)
        return 1
    print(f"{PAGE.relative_to(TOP)} has the results of {', '.join(map(str, files))}")
    return 0


if __name__ == "__main__":
    sys.exit(main([Path(file) for file in sys.argv[1:]]))
