"""Memory that the planner predicts against the peak of real runs, for every strategy.

    make bench NAME=memory [ARGS='--models 58m --ranks 2 3 --rows 2 8 --seq 64 256']

Each run trains four steps under torchrun with tcmalloc, as train.yml starts it: model loading, steps, checkpoints and the final
export. The measured value is the largest resident set of any rank. The predicted value is the plan's, plus Python and its
libraries. Exits with 1 if a value differs by more than 10 %. Takes about ten minutes with the defaults.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.inputs import SIZES, TOP, build_inputs, model_of
from trainer.config import make_spec
from trainer.planner.cost import Layout
from trainer.planner.hosts import BASE
from trainer.planner.model_shape import shape_of
from trainer.planner.report import rows_of
from trainer.strategy import plan_of
from trainyard.remote.host_facts import allocator

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "deepspeed, stage 2": {"strategy": "deepspeed"},
    "deepspeed, stage 3": {"strategy": "deepspeed", "deepspeed_stage": 3},
    "diloco": {"strategy": "diloco", "local_steps": 2},
}


def peak_of(torchruns: list[subprocess.Popen[bytes]]) -> float:
    """Wait for all processes; return the largest resident set of a rank in MiB."""
    peak = 0
    while any(torchrun.poll() is None for torchrun in torchruns):
        for torchrun in torchruns:
            try:
                ranks = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
                texts = [Path(f"/proc/{rank}/status").read_text() for rank in ranks]
            except OSError:
                continue  # the process ended
            marks = [line.split()[1] for text in texts for line in text.splitlines() if line.startswith("VmHWM:")]
            peak = max([peak, *map(int, marks)])
        time.sleep(0.02)
    return peak / 1024


def measured(fields: dict[str, Any], ranks: int, folder: Path, port: int) -> float:
    """Train with one torchrun per rank; return the peak in MiB."""
    spec = folder / "spec.json"
    spec.write_text(json.dumps({"run": "r", **fields}))
    environment = os.environ | {"PYTHONPATH": str(TOP), "LD_PRELOAD": allocator(), "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    torchruns = []
    with (folder / "log").open("w") as log:
        for host in range(ranks):
            command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={ranks}", f"--node-rank={host}"]
            command += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", "-m", "trainer"]
            command += ["train", str(spec), f"--data-dir={folder}/{host}"]
            torchruns.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log))
        peak = peak_of(torchruns)
    if any(torchrun.returncode for torchrun in torchruns):
        raise SystemExit(f"error: the run failed:\n{(folder / 'log').read_text()[-2000:]}")
    return peak


def main() -> int:
    """Print one row per case; return 1 if a value differs by more than 10 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["58m"], choices=["tiny", *SIZES])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="rows per rank and step")
    parser.add_argument("--micro", type=int, default=4, help="maximum rows of a micro-batch")
    parser.add_argument(
        "--seq", type=int, nargs="+", default=[64, 256], help="sequence length for each value of --rows"
    )
    parser.add_argument("--lora", type=int, nargs="+", default=[0, 16], help="lora_r")
    parser.add_argument("--port", type=int, default=29400)
    a = parser.parse_args()
    _, dataset = build_inputs()
    print(
        "| model | ranks | rows | strategy | lora_r | MiB planned | MiB measured | measured / planned |\n"
        + "| --- " * 8
        + "|"
    )
    worst = 1.0
    cases = itertools.product(a.models, a.ranks, zip(a.rows, a.seq, strict=True), a.lora, a.strategies)
    for port, (model, ranks, (rows, seq), lora, name) in enumerate(cases, a.port):
        fields = {"model": str(model_of(model)), "dataset": str(dataset), "lora_r": lora, "seq_length": seq}
        fields |= {"batch_size": min(rows, a.micro), "total_batch_size": rows * ranks, **STRATEGIES[name]}
        fields |= {"max_steps": 4, "checkpoint_interval": 2}
        spec = make_spec(fields, "here")
        with tempfile.TemporaryDirectory() as folder:
            data = rows_of(spec, Path(folder))[0]
            need = plan_of(spec).memory(spec, shape_of(spec), Layout((1,) * ranks), data).total / 2**20 + BASE
            peak = measured(fields, ranks, Path(folder), port)
        worst = max(worst, peak / need, need / peak)
        print(f"| {model} | {ranks} | {rows} x {seq} | {name} | {lora} ", end="")
        print(f"| {need:.0f} | {peak:.0f} | {peak / need:.2f} |", flush=True)
    holds = worst <= 1.10
    print(
        f"{'holds' if holds else 'FAILS'}: the planned memory is within 10 % of the measured (largest ratio: {worst:.2f})"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
