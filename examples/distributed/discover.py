"""Find machines with Ollama, say which addresses are one machine, and whether it is worth it to train on several.

python examples/distributed/discover.py [--network 192.168.1.0/24]... [--host ADDRESS:PORT]... [--verbose]
"""

import argparse

from trainyard import Cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", action="append", default=[])
    parser.add_argument("--host", action="append", default=[])
    parser.add_argument(
        "--verbose", action="store_true", help="also the inventory names of every machine, and warnings"
    )
    given = parser.parse_args()
    networks = given.network or ([] if given.host else ["auto"])
    cluster = Cluster.discover(networks, scan={"hosts": given.host})

    for model in cluster.models():
        print(f"{model.name}: {', '.join(model.hosts)}")
    machines = cluster.machines()
    for machine in machines:
        joins = "may join" if machine.trusted else "its SSH host key is not accepted"
        print(f"{machine.name} ({', '.join(machine.addresses)}): {joins}")
        if given.verbose:
            print(f"  in the inventory: {', '.join(machine.entries)}")
    print(machines.verdict)
    if given.verbose:
        print("\n".join(machines.warnings) or "no warnings")


if __name__ == "__main__":
    main()
