"""At the end of every test run: what was left out, and why."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import ansible.module_utils
import hypothesis

with contextlib.suppress(ImportError):
    # Before any module of Ansible's: those patch sys.intern, and torch's compiler cannot be imported after that.
    import torch._dynamo  # noqa: F401

# A module finds ours beside Ansible's, as it does where Ansible runs it.
ansible.module_utils.__path__.append(str(Path(__file__).resolve().parent.parent / "plugins/module_utils"))

# So that fixtures take down what they put up when the run is told to end.
signal.signal(signal.SIGTERM, signal.default_int_handler)

# How long an example takes says something about the machine, not about the code.
hypothesis.settings.register_profile("ours", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("ours")

LEFT_OUT = os.environ.get("TRAINYARD_LEFT_OUT")  # a file that tools/run-all reads when all is over


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    if LEFT_OUT and reasons:
        with Path(LEFT_OUT).open("a") as file:
            file.writelines(f"{count} x {reason}\n" for reason, count in sorted(reasons.items()))
