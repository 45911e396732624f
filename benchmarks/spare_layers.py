"""Start of a pipeline on the two hosts that are left of three: with the layers that they kept of their neighbours, and without.

    sudo make bench NAME=spare_layers [ARGS='--mbit 100 --rounds 3']

Only the first host has the files of the model. Prints the bytes that the second host receives until the first step of the second start, and the
time from the start of torchrun to that step, which includes the imports. Requires root (ip netns, tc). Takes about five minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.inputs import build_inputs, model_of
from benchmarks.linked_hosts import PORT, host_command, host_environment, linked_hosts, parse
from trainer.distributed import SPARE_LAYERS

LIMIT = 300.0  # s for a start
SETTLED = 5.0  # s without another tensor, after which none is expected
HOSTS = 3


class Pipeline:
    """A run whose hosts have a data folder each below `folder`; `names`: their namespaces."""

    def __init__(self, folder: Path, names: list[str], spec: dict[str, object], spare: bool) -> None:
        self.folder, self.names, self.spec = folder, names, spec
        self.environment = host_environment() | {SPARE_LAYERS: str(int(spare))}

    def start(self, hosts: int) -> list[subprocess.Popen[bytes]]:
        """Start one rank on each of the first `hosts` hosts."""
        launchers = []
        for place in range(hosts):
            data = self.folder / str(place)
            run_dir = data / "runs/r"
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / "stop").unlink(missing_ok=True)
            (data / "r.yml").write_text(json.dumps(self.spec))
            words = [f"--nnodes={hosts}", f"--node-rank={place}", "--nproc-per-node=1"]
            words += ["--master-addr=10.77.0.1", f"--master-port={PORT}", "-m", "trainer", "train", str(data / "r.yml")]
            command = [*host_command(self.names[place], place, None), "-m", "trainer.distributed.torchrun", *words]
            command += [f"--run-dir={run_dir}", f"--data-dir={data}"]
            with (data / "log").open("ab") as log:
                launchers.append(subprocess.Popen(command, cwd=data, env=self.environment, stdout=log, stderr=log))
        return launchers

    def steps(self) -> int:
        """Return the number of recorded steps."""
        file = self.folder / "0/runs/r/metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def received(self) -> int:
        """Return the bytes that the second host has received."""
        command = ["ip", "netns", "exec", self.names[1], "cat", "/sys/class/net/eth0/statistics/rx_bytes"]
        return int(subprocess.run(command, check=True, capture_output=True).stdout)

    def kept(self) -> int:
        """Return the number of tensors that the second host has kept."""
        return len(list((self.folder / "1/model.layers").glob("*.safetensors")))

    def until_step(self, hosts: int) -> tuple[float, float]:
        """Start, wait for a step and for the tensors that are received meanwhile, and stop.

        Returns:
            The seconds to the step, and the MB that the second host has received until it.
        """
        before, bytes_before, begun = self.steps(), self.received(), time.monotonic()
        launchers = self.start(hosts)
        while self.steps() == before:
            if time.monotonic() - begun > LIMIT or any(launcher.poll() for launcher in launchers):
                raise SystemExit((self.folder / "0/log").read_text()[-3000:])
            time.sleep(0.02)
        seconds, received = time.monotonic() - begun, self.received() - bytes_before
        kept = -1
        while self.kept() != kept:
            kept = self.kept()
            time.sleep(SETTLED)
        (self.folder / "0/runs/r/stop").touch()
        for launcher in launchers:
            launcher.wait(LIMIT)
        return seconds, received / 1e6


def measure(mbit: int, size: str, spare: bool, seq: int, rows: int) -> list[tuple[float, float]]:
    """Return seconds and MB of the start on three hosts and of that on two."""
    _, dataset = build_inputs()
    with tempfile.TemporaryDirectory() as work, linked_hosts(mbit, HOSTS) as names:
        for place in range(HOSTS):
            folder = Path(work, str(place), "model")
            shutil.copytree(model_of(size), folder)
            if place:
                for file in folder.glob("*.safetensors"):
                    file.unlink()
        spec: dict[str, object] = {"model": "./model", "dataset": str(dataset), "run": "r", "strategy": "pipeline"}
        spec |= {"balance": "even", "seq_length": seq, "total_batch_size": rows, "batch_size": 1, "epochs": 1000}
        spec |= {"max_steps": 1000, "eval_interval": 0, "checkpoint_interval": 1, "loggers": "none"}
        pipeline = Pipeline(Path(work), names, spec, spare)
        return [pipeline.until_step(HOSTS), pipeline.until_step(HOSTS - 1)]


def main() -> None:
    """Print one row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds; the medians are printed")
    a = parse(parser)
    size = a.models[0]
    found: dict[bool, list[list[tuple[float, float]]]] = {False: [], True: []}
    for _ in range(a.rounds):
        for spare, results in found.items():
            results.append(measure(a.mbit, size, spare, a.seq, a.rows))
    print(f"model {size}, {a.mbit} Mbit/s, median of {a.rounds}:")
    print("| layers of neighbours | start on three hosts | MB to host 2 | start on two of them | MB to host 2 |")
    print("| --- " * 5 + "|")
    for spare, results in found.items():
        columns = [statistics.median(each[start][part] for each in results) for start in (0, 1) for part in (0, 1)]
        print(
            f"| {'kept' if spare else 'not kept'} | {columns[0]:.1f} s | {columns[1]:.0f} | {columns[2]:.1f} s | {columns[3]:.0f} |"
        )


if __name__ == "__main__":
    main()
