"""Discovery beside SOLLOL 0.9.66 and nmap: one /24 in network namespaces, 8 machines with Ollama, the rest silent.

    make bench-discovery        (root, for the namespaces; nmap where it is installed)

ROUNDS calls of each, in fresh processes, the tools taking turns; a call is timed without its imports, nmap as the whole
command. The table has the median; the claims are held against each tool's best call, as that is the method's own time and
the median is also the machine's load. Exits 1 where a claim of the docs does not hold.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/discovery")]

from fake_ollama import Server, model, serve  # noqa: E402 - found by the path above
from netlab import Lab, why_no_lab  # noqa: E402

ROUNDS = 7
LIVE = [f"10.9.0.{i}" for i in range(11, 251, 30)]

OURS = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from trainyard.discovery.engine import discover
from trainyard.discovery.settings import Settings
start = time.perf_counter()
report = discover(Settings(connect_timeout=float(sys.argv[2])))
print(json.dumps([time.perf_counter() - start, len(report.machines)]))
"""

# SOLLOL waits a fifth of its timeout for a connection, and at least 0.1 s.
SOLLOL = """
import json, sys, time
from sollol.discovery import discover_ollama_nodes
start = time.perf_counter()
nodes = discover_ollama_nodes(timeout=5 * float(sys.argv[2]), discover_all_nodes=True)
print(json.dumps([time.perf_counter() - start, len([n for n in nodes if n["host"] != "localhost"])]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Discovery beside SOLLOL and nmap.")
    parser.add_argument("--sollol", metavar="PYTHON", help="a python with sollol==0.9.66")
    arguments = parser.parse_args()
    if reason := why_no_lab():
        print(f"bench-discovery {reason}")
        return 1
    with Lab() as lab:
        control = lab.controller("10.9.0.1/24")
        lab.ip(control, "route add default via 10.9.0.254")  # without one SOLLOL looks nowhere
        namespaces = [lab.node(f"n{i}", f"{address}/24") for i, address in enumerate(LIVE)]
        lab.wait_for_links()

        def python(program: str, interpreter: str, timeout: float) -> tuple[float, int]:
            command = [interpreter, "-c", program, str(ROOT), str(timeout)]
            out = subprocess.run(["ip", "netns", "exec", control, *command], capture_output=True, text=True, check=True)
            seconds, found = json.loads(out.stdout.splitlines()[-1])
            return seconds, found

        def nmap(timeout: float) -> tuple[float, int]:
            command = ["nmap", "-n", "-p", "11434", "--open", "10.9.0.0/24"]
            start = perf_counter()
            out = subprocess.run(["ip", "netns", "exec", control, *command], capture_output=True, text=True, check=True)
            return perf_counter() - start, out.stdout.count("11434/tcp open")

        tools: dict[str, Callable[[float], tuple[float, int]]] = {
            "trainyard": lambda timeout: python(OURS, sys.executable, timeout)
        }
        if arguments.sollol:
            tools["SOLLOL 0.9.66"] = lambda timeout: python(SOLLOL, arguments.sollol, timeout)
        if shutil.which("nmap"):
            tools["nmap -n"] = nmap
        else:
            print("nmap is not installed and is left out")

        print(
            f"/24, {len(LIVE)} live; median of {ROUNDS} calls in seconds (best to worst), machines found in the worst call\n"
        )
        print(f"| servers answer in | connect timeout | {' | '.join(tools)} |")
        print(f"| --- | --- |{' --- |' * len(tools)}")
        best: dict[tuple[float, float], dict[str, float]] = {}
        whole = True
        for delay, timeout in ((0, 0.1), (0, 0.3), (0.2, 0.1), (0.45, 0.1)):
            servers = [
                Server(address, namespace=namespace, delay=delay, models=[model(f"m{address}")])
                for address, namespace in zip(LIVE, namespaces, strict=True)
            ]
            results: dict[str, list[tuple[float, int]]] = {name: [] for name in tools}
            with serve(servers):
                for _ in range(ROUNDS):
                    for name, call in tools.items():
                        results[name].append(call(timeout))
            best[delay, timeout] = {n: min(s for s, _ in r) for n, r in results.items()}
            whole = whole and all(found == len(LIVE) for _, found in results["trainyard"])
            cells = [_cell(r) for r in results.values()]
            print(f"| {delay * 1000:.0f} ms | {timeout} s | {' | '.join(cells)} |", flush=True)
    return _claims(best, whole)


def _cell(calls: list[tuple[float, int]]) -> str:
    seconds = sorted(s for s, _ in calls)
    return f"{statistics.median(seconds):.3f} ({seconds[0]:.3f} to {seconds[-1]:.3f}), {min(f for _, f in calls)}"


def _claims(best: dict[tuple[float, float], dict[str, float]], whole: bool) -> int:
    held = [("every call finds all machines", whole)]
    held.append(("servers that answer in 450 ms: all in under 0.6 s", best[0.45, 0.1]["trainyard"] < 0.6))
    for timeout in (0.1, 0.3):
        held.append(
            (f"at most 1.2 x the connect timeout of {timeout} s", best[0, timeout]["trainyard"] <= 1.2 * timeout)
        )
    for key, times in best.items():
        if "SOLLOL 0.9.66" in times:
            ratio = times["SOLLOL 0.9.66"] / times["trainyard"]
            held.append(
                (f"{key[0] * 1000:.0f} ms, {key[1]} s: {ratio:.2f} x faster than SOLLOL (3 claimed)", ratio >= 3)
            )
    print()
    for claim, true in held:
        print(f"{'holds' if true else 'DOES NOT HOLD'}: {claim}")
    return 0 if all(true for _, true in held) else 1


if __name__ == "__main__":
    sys.exit(main())
