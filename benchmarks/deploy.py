"""Greedy answers of a deployed model equal to those of transformers: merged as f16 and as q8_0, and as an adapter.

    make bench NAME=deploy [ARGS='--steps 180 --adapter-steps 60']

Needs a real `ollama` on PATH. The benchmark trains a tiny model on short texts and chats of the embedded dataset, all weights, and then
an adapter of it on others. Half of the 60 prompts are chats, half are raw text; the adapter answers 40. Each model is deployed as
playbooks/deploy.yml does. The trained models are kept in .trainyard/bench/deploy; --fresh trains them again. Exits with 1 if a
count is below its limit: f16 59 of 60, q8_0 58 of 60, adapter 39 of 40.

--time measures instead how long playbooks/deploy.yml takes on three nodes of this machine, with a real server each, above a playbook
that does nothing: the first deployment of a run, that of a converted run, and one that changes nothing. Exits with 1 above 5 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from netlab import daemon

from benchmarks.deploy_time import time_deployments
from benchmarks.inputs import TOP, build_inputs
from trainer.config import make_spec, read_yaml
from trainer.data.samples import read_samples
from trainer.data.tiny import make_tiny
from trainer.greedy_answers import greedy_answers
from trainyard.connection import Host, HostConnection
from trainyard.ollama.client import OllamaClient, OllamaError
from trainyard.ollama.deploy import Deployment
from trainyard.ollama.options import make_deploy_options
from trainyard.openssh import LocalTransport

SAMPLES = 66  # of the dataset for each of the two runs; a few texts have the same beginning
LONGEST = 90  # characters of an answer
LIMITS = {"f16": (59, 60), "q8_0": (58, 60), "adapter": (39, 40)}
ADDRESS = "127.0.11.21:18437"


def datasets(folder: Path) -> list[Path]:
    """Write two datasets of short chats and texts in turn, and return their files."""
    _, embedded = build_inputs()
    rows = [json.loads(line) for line in embedded.read_text().splitlines()]
    rows = [row for row in rows if len(row["output"]) < LONGEST]
    random.Random(1).shuffle(rows)
    files = []
    for part in range(2):
        some = rows[part * SAMPLES : (part + 1) * SAMPLES]
        lines = [row if n % 2 else {"text": f"{row['instruction']} {row['output']}"} for n, row in enumerate(some)]
        files.append(folder / f"data{part}.jsonl")
        files[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    return files


def train(folder: Path, run: str, **fields: Any) -> Path:
    """Train a run in the data directory `folder` unless it has finished; return its folder."""
    run_dir = folder / "runs" / run
    if not (run_dir / "result.json").exists():
        fixed = {"run": run, "batch_size": 12, "gradient_accumulation": 1, "packing": "false", "seq_length": 128}
        fixed |= {"eval_split": 0, "precision": "32-true", "checkpoint_interval": 0, "schedule": "cosine"}
        words = [f"{name}={value}" for name, value in (fixed | fields).items()]
        command = [sys.executable, "-P", "-m", "trainer", *words, "--data-dir", str(folder)]
        environment = os.environ | {"PYTHONPATH": str(TOP), "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return run_dir


@contextlib.contextmanager
def ollama(folder: Path) -> Iterator[str]:
    """Run a real server until the block ends; yield its URL."""
    program = shutil.which("ollama")
    if not program:
        raise SystemExit("error: no `ollama` on PATH")
    command = ["env", f"OLLAMA_HOST={ADDRESS}", f"OLLAMA_MODELS={folder / 'models'}", program, "serve"]
    with daemon(None, command, folder / "log"):
        url = f"http://{ADDRESS}"
        deadline = time.monotonic() + 60
        while True:
            try:
                OllamaClient(url).version()
                break
            except OllamaError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield url


def keep_answers(run_dir: Path, count: int) -> None:
    """Replace the answers that a run keeps by those to `count` prompts."""
    (run_dir / "deploy/answers.json").unlink(missing_ok=True)
    (run_dir / "deploy").mkdir(exist_ok=True)
    result = json.loads((run_dir / "result.json").read_text())
    weights = result.get("adapter_sha256") or result["model_sha256"]
    record = greedy_answers(make_spec(read_yaml(run_dir / "spec.yml"), "spec.yml"), run_dir, weights, count)
    if len(record["prompts"]) != count:
        raise SystemExit(f"error: {run_dir} has {len(record['prompts'])} prompts, expected {count}")


def deploy(data_dir: Path, work: Path, url: str, **options: Any) -> str:
    """Deploy a run to one host, which is this machine; return the line that says how many answers are equal."""
    host = Host("node1", "127.0.0.1", str(data_dir), sys.executable)
    chosen = make_deploy_options(options)
    deployment = Deployment(
        [host], lambda host: HostConnection(host, LocalTransport()), {"node1": [url]}, chosen, work=work
    )
    return str(deployment.deploy()["lines"][-1])


def main() -> int:
    """Train, deploy and print the three counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=180, help="of the training of all weights")
    parser.add_argument("--adapter-steps", type=int, default=60)
    parser.add_argument("--fresh", action="store_true", help="train again")
    parser.add_argument("--time", action="store_true", help="measure the time of deployments to three nodes")
    parser.add_argument("--rounds", type=int, default=3, help="of --time")
    a = parser.parse_args()
    folder = TOP / ".trainyard/bench/deploy"
    if a.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    first, second = datasets(folder)
    if not (folder / "base/config.json").exists():
        make_tiny([*read_samples(first), *read_samples(second)], folder / "base", 1)
    full = train(
        folder, "full", model=folder / "base", dataset=first, lora_r=0, lr=2e-3, max_steps=a.steps, epochs=1000
    )
    adapter = train(
        folder,
        "adapter",
        model=full / "model",
        dataset=second,
        lora_r=16,
        lr=2e-3,
        max_steps=a.adapter_steps,
        epochs=1000,
    )
    for run_dir in (full, adapter):
        print(f"{run_dir.name}: loss {json.loads((run_dir / 'result.json').read_text())['loss_last']:.3f}")
    if a.time:
        with tempfile.TemporaryDirectory() as aside:
            return time_deployments([full, adapter], lambda copy: keep_answers(copy, 20), Path(aside), a.rounds)
    keep_answers(full, 60)
    keep_answers(adapter, 40)
    counts = {}
    with tempfile.TemporaryDirectory() as aside, ollama(Path(aside)) as url:
        for name, more in {
            "f16": {"run": "full", "deploy_name": "base"},
            "q8_0": {"run": "full", "deploy_name": "rounded", "deploy_quantize": "q8_0"},
            "adapter": {"run": "adapter", "deploy_name": "adapted", "deploy_base": "base", "deploy_as": "adapter"},
        }.items():
            line = deploy(folder, Path(aside) / "work", url, **more)
            counts[name] = int(line.rpartition("): ")[2].split()[0])
            least, total = LIMITS[name]
            print(f"{name}: {counts[name]} of {total} answers equal those of transformers (limit {least})", flush=True)
    return int(any(counts[name] < least for name, (least, _) in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
