"""Discovery compared with SOLLOL 0.9.66 and nmap: time to find 8 Ollama hosts in a silent /24.

    sudo make bench NAME=discovery

The network consists of network namespaces. Each tool runs ROUNDS times in new processes, alternating with the other
tools. The time of a call excludes its
imports; for nmap it is the time of the command. The table shows medians. The claims compare the best calls, because the median also
depends on the load of the machine. Exits with 1 if a claim fails. nmap is omitted if it is not installed. Takes about two minutes.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter

from fake_ollama import Server, model, serve
from netlab import Lab, why_no_lab

ROUNDS = 7
LIVE = [f"10.9.0.{i}" for i in range(11, 251, 30)]

TRAINYARD = """
import json, sys, time
from trainyard.discovery.engine import discover
from trainyard.discovery.settings import Settings
start = time.perf_counter()
report = discover(Settings(connect_timeout=float(sys.argv[1])))
print(json.dumps([time.perf_counter() - start, len(report.machines)]))
"""

# SOLLOL waits a fifth of its timeout for a connection, but at least 0.1 s.
SOLLOL = """
import json, sys, time
from sollol.discovery import discover_ollama_nodes
start = time.perf_counter()
nodes = discover_ollama_nodes(timeout=5 * float(sys.argv[1]), discover_all_nodes=True)
print(json.dumps([time.perf_counter() - start, len([n for n in nodes if n["host"] != "localhost"])]))
"""


def main() -> int:
    """Print the table and the claims; return 1 if a claim fails."""
    parser = argparse.ArgumentParser(description="Discovery compared with SOLLOL and nmap.")
    parser.add_argument("--sollol", metavar="PYTHON", help="a python with sollol==0.9.66")
    arguments = parser.parse_args()
    if reason := why_no_lab():
        print(f"error: {reason}", file=sys.stderr)
        return 1
    with Lab() as lab:
        control = lab.controller("10.9.0.1/24")
        lab.ip(control, "route add default via 10.9.0.254")  # SOLLOL scans nothing without a default route
        namespaces = [lab.node(f"n{i}", f"{address}/24") for i, address in enumerate(LIVE)]
        lab.wait_for_links()

        def python(program: str, interpreter: str, timeout: float) -> tuple[float, int]:
            command = [interpreter, "-c", program, str(timeout)]
            out = subprocess.run(["ip", "netns", "exec", control, *command], capture_output=True, text=True, check=True)
            seconds, found = json.loads(out.stdout.splitlines()[-1])
            return seconds, found

        def nmap(timeout: float) -> tuple[float, int]:
            command = ["nmap", "-n", "-p", "11434", "--open", "10.9.0.0/24"]
            start = perf_counter()
            out = subprocess.run(["ip", "netns", "exec", control, *command], capture_output=True, text=True, check=True)
            return perf_counter() - start, out.stdout.count("11434/tcp open")

        tools: dict[str, Callable[[float], tuple[float, int]]] = {
            "trainyard": lambda timeout: python(TRAINYARD, sys.executable, timeout)
        }
        if arguments.sollol:
            tools["SOLLOL 0.9.66"] = lambda timeout: python(SOLLOL, arguments.sollol, timeout)
        if shutil.which("nmap"):
            tools["nmap -n"] = nmap
        else:
            print("nmap is not installed: omitted")

        print(
            f"/24, {len(LIVE)} live; median of {ROUNDS} calls in seconds (best to worst), hosts found in the worst call\n"
        )
        print(f"| servers answer in | connect timeout | {' | '.join(tools)} |")
        print(f"| --- | --- |{' --- |' * len(tools)}")
        best: dict[tuple[float, float], dict[str, float]] = {}
        complete = True
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
            complete = complete and all(found == len(LIVE) for _, found in results["trainyard"])
            cells = [_cell(r) for r in results.values()]
            print(f"| {delay * 1000:.0f} ms | {timeout} s | {' | '.join(cells)} |", flush=True)
    return _claims(best, complete)


def _cell(calls: list[tuple[float, int]]) -> str:
    seconds = sorted(s for s, _ in calls)
    return f"{statistics.median(seconds):.3f} ({seconds[0]:.3f} to {seconds[-1]:.3f}), {min(f for _, f in calls)}"


def _claims(best: dict[tuple[float, float], dict[str, float]], complete: bool) -> int:
    claims = [("every call finds all hosts", complete)]
    claims.append(("servers that answer in 450 ms: all in under 0.6 s", best[0.45, 0.1]["trainyard"] < 0.6))
    for timeout in (0.1, 0.3):
        claims.append(
            (f"at most 1.2 x the connect timeout of {timeout} s", best[0, timeout]["trainyard"] <= 1.2 * timeout)
        )
    for key, times in best.items():
        if "SOLLOL 0.9.66" in times:
            ratio = times["SOLLOL 0.9.66"] / times["trainyard"]
            claims.append(
                (f"{key[0] * 1000:.0f} ms, {key[1]} s: {ratio:.2f} x faster than SOLLOL (3 claimed)", ratio >= 3)
            )
    print()
    for claim, holds in claims:
        print(f"{'holds' if holds else 'FAILS'}: {claim}")
    return 0 if all(holds for _, holds in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
