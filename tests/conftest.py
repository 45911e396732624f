"""Settings of every test run, and the list of skipped tests for the summary of tools/run-tests."""

import contextlib
import gc
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: two test workers share two cores, and each process trains with one thread.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import ansible.module_utils
import hypothesis
import pytest

# Every Ansible process of the tests appends its output, with the deprecations, to this file.
ANSIBLE_LOG = Path(tempfile.mkdtemp(prefix="trainyard-log-"), "ansible.log")
ANSIBLE_LOG.parent.chmod(0o755)
ANSIBLE_LOG.touch()
ANSIBLE_LOG.chmod(0o666)  # tests run playbooks as other users, too
os.environ["ANSIBLE_LOG_PATH"] = str(ANSIBLE_LOG)

# The imports of torch and of the tests leave almost no garbage. The collector is enabled again when all tests are collected.
gc.disable()
with contextlib.suppress(ImportError):
    # Before any Ansible module: Ansible patches sys.intern, and torch's compiler cannot be imported after that.
    import torch._dynamo  # noqa: F401

# Modules import plugins/module_utils as ansible.module_utils, as they do on a host.
ansible.module_utils.__path__.append(str(Path(__file__).resolve().parent.parent / "plugins/module_utils"))

# SIGTERM raises KeyboardInterrupt, so that fixtures remove what they created.
signal.signal(signal.SIGTERM, signal.default_int_handler)
# Tests end playbooks by SIGHUP and SIGINT, which nohup and a shell's background jobs ignore for all processes below them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# The duration of an example depends on the machine, not on the code.
hypothesis.settings.register_profile(
    "trainyard", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("trainyard")

SKIPPED = os.environ.get("TRAINYARD_SKIPPED")  # a file that tools/run-tests prints in its summary
DEADLINE = float(os.environ.get("TRAINYARD_DEADLINE", "inf"))  # s since the epoch after which no test begins

LAB_FOLDERS = [Path(__file__).resolve().parent / name for name in ("lab", "unit/discovery")]
# Lab tests of these files check durations, machine load or traces of a lab: they run without another test at the same
# time.
SERIAL = ("test_faults.py", "test_life.py", "test_preflight.py", "test_ranks_systemd.py", "test_session.py")
# The files that take longest, which begin first, so that no worker process is left alone with one at the end.
LONGEST = (
    "test_firewall.py",  # on hosts that no other test has provisioned
    "test_cold.py",
    "test_queue.py",
    "test_python.py",
    "test_train_playbook.py",
    "test_circle.py",
    "test_ranks.py",
    "test_distill_playbook.py",
    "test_cli.py",
    "test_host_files.py",
    "test_run_session.py",
    "test_site.py",
    "test_train.py",
    "test_login.py",
    "test_isolation_hosts.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move LONGEST to the front, and mark the lab tests that run alone: SERIAL, and those that measure times in network namespaces."""
    _skip_privileged(items)
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    for item in items:
        if not item.get_closest_marker("lab"):
            continue
        if item.path.parent not in LAB_FOLDERS:
            raise pytest.UsageError(
                f"{item.nodeid}: tools/run-tests looks for lab tests in tests/lab and tests/unit/discovery"
            )
        if item.path.name in SERIAL or item.path.parent.name != "lab":
            item.add_marker(pytest.mark.serial)


def _skip_privileged(items: list[pytest.Item]) -> None:
    """Skip the tests with the mark `privileged` that this user, or this kernel, does not permit."""
    for item in items:
        mark = item.get_closest_marker("privileged")
        if mark and not mark.kwargs.get("permitted", os.geteuid() == 0):
            item.add_marker(pytest.mark.skip(reason=mark.kwargs.get("reason", "needs root, to act as another user")))


def pytest_collection_finish() -> None:
    """Enable the garbage collector, which leaves the imported objects alone."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def deprecations() -> Iterator[None]:
    """Fail a test in which Ansible reported that something is deprecated."""
    before = ANSIBLE_LOG.stat().st_size
    yield
    with ANSIBLE_LOG.open(errors="replace") as log:
        log.seek(before)
        found = [line for line in log if "[DEPRECATION WARNING]" in line]
    assert not found, "".join(found)


def pytest_unconfigure() -> None:
    """Remove the log."""
    shutil.rmtree(ANSIBLE_LOG.parent, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests for which no time is left, before their fixtures."""
    if time.time() > DEADLINE:
        pytest.skip(f"NOT RUN, no time was left: tests of {item.path.name}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Append failed tests, and the reasons of skipped ones with their counts, to the file that TRAINYARD_SKIPPED names."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    failed = [report.nodeid for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
    if SKIPPED and (failed or reasons):
        with Path(SKIPPED).open("a") as file:
            file.writelines(f"{count} x {reason}\n" for reason, count in sorted(reasons.items()))
            file.writelines(f"FAILED {name}\n" for name in failed)
