"""Run the checks on one NVIDIA GPU, and write results.json and results.md. `make test-gpu` starts this program.

    python -m benchmarks.gpu [--leg 1 | --checks plan nccl | --list] [--time-limit 530] [--out DIR] [--device auto|cuda|cpu]

Every check and every run has a time limit, and a failure does not stop the others. The files are written after every run, so an
interrupted program leaves what it measured; tools/gpu-docs joins those of legs. Exits with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.gpu import report
from benchmarks.gpu.bench import TOP, Bench, Outcome
from benchmarks.gpu.cases import CASES, CPU, LARGE_MEMORY, scale_for
from benchmarks.gpu.checks import CHECKS, INPUT_SECONDS, LEG_SECONDS, LEGS, LIMITS, evaluate
from benchmarks.gpu.resume import resumed
from benchmarks.gpu.trl import trl

NONE = Outcome("skipped")


def work_of(bench: Bench) -> dict[str, tuple[bool, Callable[[], Outcome]]]:
    """Return {run: (whether it is timed, what runs it)} beyond the cases."""
    mib = str(bench.scale.collective_mib)
    return {
        "trl": (True, lambda: trl(bench)),
        "collectives": (True, lambda: bench.program("collectives", "benchmarks.gpu.collectives", mib, ranks=1)),
        "packing": (
            False,
            lambda: bench.program("packing", "benchmarks.gpu.packing", str(bench.folder / "small"), bench.device),
        ),
        "resume": (False, lambda: resumed(bench)),
    }


def needed_runs(checks: Iterable[str]) -> list[str]:
    """Return the runs that the checks need, each once."""
    return list(dict.fromkeys(run for name in checks for run in CHECKS[name][1]))


def run_all(bench: Bench, checks: list[str], jobs: int, done: Callable[[str], None]) -> None:
    """Run the runs that each check needs: first the timed ones, alone, then `jobs` of the others at a time."""
    others = work_of(bench)
    writing = threading.Lock()

    def run(name: str) -> None:
        try:
            if name in CASES:
                bench.run_case(name)
            else:
                bench.outcomes[name] = others[name][1]()
        except (OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
            bench.outcomes[name] = Outcome("failed", reason=f"{type(error).__name__}: {error}")
        with writing:
            done(name)

    for check in checks:
        bench.check_deadline = time.monotonic() + LIMITS[check]
        needed = [run for run in CHECKS[check][1] if bench.outcomes.get(run, NONE).status == "skipped"]
        timed = [name for name in needed if (CASES[name].timed if name in CASES else others[name][0])]
        timed = [] if bench.scale.cpu else timed  # a stand-in measures no speed
        for name in timed:
            run(name)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            try:
                for future in [pool.submit(run, name) for name in needed if name not in timed]:
                    future.result()
            except BaseException:
                bench.deadline = 0.0  # ends the runs that the pool would wait for
                raise


def listed() -> str:
    """Return a line for each leg and each of its checks."""
    lines = []
    for number, leg in enumerate(LEGS, 1):
        lines.append(f"leg {number}: at most {INPUT_SECONDS + sum(leg.values())} s")
        lines += [
            f"  {name:<10}{limit:4} s  {CHECKS[name][0]} ({', '.join(CHECKS[name][1])})" for name, limit in leg.items()
        ]
    return "\n".join(lines)


def jobs_for(bench: Bench) -> int:
    """Return how many untimed runs fit on the machine at a time."""
    if bench.scale.cpu:
        return 2
    return max(1, min(4, (os.cpu_count() or 1) // 3, int(bench.machine["memory_mib"] / LARGE_MEMORY)))


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        prog="make test-gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--leg", type=int, choices=range(1, len(LEGS) + 1), help="the checks of one leg, in 9 minutes")
    names = ", ".join(LIMITS)
    which.add_argument("--checks", nargs="+", default=list(LIMITS), choices=LIMITS, metavar="CHECK", help=names)
    which.add_argument("--list", action="store_true", help="print the legs with their checks")
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cuda", "cpu"), help="cpu: test the checks themselves"
    )
    parser.add_argument("--time-limit", type=float, default=LEG_SECONDS, help="seconds after which no run continues")
    parser.add_argument(
        "--out", type=Path, default=None, help="folder of the results (default: $OUT, or .trainyard/gpu)"
    )
    parser.add_argument(
        "--work", type=Path, default=None, help="folder for models and runs, kept (default: a temporary one)"
    )
    return parser.parse_args()


def device_of(asked: str) -> str:
    """Return cuda or cpu. Exits with one line if CUDA is requested but absent."""
    if asked == "cpu":
        return asked
    import torch

    if torch.cuda.is_available():
        return "cuda"
    sys.exit(
        f"error: torch {torch.__version__} finds no CUDA GPU here: run this where nvidia-smi lists one, "
        "or test the checks themselves with --device cpu"
    )


def main() -> int:
    """Run the checks; return 1 if one failed."""
    a = arguments()
    if a.list:
        print(listed())
        return 0
    began = time.monotonic()
    device = device_of(a.device)
    out = a.out or Path(os.environ.get("OUT") or TOP / ".trainyard" / "gpu")
    out, checks = (out / f"leg-{a.leg}", list(LEGS[a.leg - 1])) if a.leg else (out, a.checks)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="trainyard-gpu-") as temporary:
        folder = (a.work or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, device, began + a.time_limit, scale=CPU)
        inputs = [str(folder), device, *needed_runs(checks)]
        prepared = bench.program("prepare", "benchmarks.gpu.prepare", *inputs, seconds=240)
        if prepared.status != "ok":
            print(f"error: the inputs could not be created: {prepared.reason}", file=sys.stderr)
            return 1
        bench.machine = prepared.values["machine"] | {"liger": bool(importlib.util.find_spec("liger_kernel"))}
        bench.planned = prepared.values["planned"]
        bench.scale = scale_for(device, bench.machine["memory_mib"])
        jobs = jobs_for(bench)
        bench.threads = 1 if bench.scale.cpu else max(1, (os.cpu_count() or 1) // jobs)
        print(f"{report.about(bench.machine)}; inputs and plans: {prepared.seconds:.0f} s", flush=True)

        def done(name: str) -> None:
            outcome = bench.outcomes[name]
            print(f"{name:<14}{outcome.seconds:6.0f} s  {outcome.status}  {outcome.reason}", flush=True)
            report.write(bench, evaluate(bench, checks), out, time.monotonic() - began)

        run_all(bench, checks, jobs, done)
        results = evaluate(bench, checks)
        report.write(bench, results, out, time.monotonic() - began)
        report.copy_logs(bench, out)
    print("\n".join(report.summary(results)))
    print(f"{time.monotonic() - began:.0f} s; written to {out}: results.json, results.md, logs.txt")
    return int(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("error: interrupted: results.json and results.md have the runs that ended")
