"""Helpers for tests of the trainer: datasets, runs in this process, and hosts on this machine with real torchrun."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from run_hosts import TOP, free_port, until
from warm_torchrun import WarmTorchrun

from trainer.data.samples import Sample

# The training of a script that has an accelerator, a model and rows.
ACCELERATED_LOOP = """\
model, optimizer, rows = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rows)
losses = []
for _ in range(4):
    for batch in rows:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
"""
WORDS = ["the", "a", "cat", "dog", "runs", "sits", "red", "blue", "tree", "house", "over", "under", "with", "from", "time", "day", "night", "sun", "moon", "star", "ä", "猫", "🚂"]  # fmt: skip


def words(draw: random.Random, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))


def records(count: int, seed: int = 1) -> list[dict[str, str]]:
    """Return Alpaca records of different lengths."""
    draw = random.Random(seed)
    return [{"instruction": words(draw, 8), "output": words(draw, 20)} for _ in range(count)]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def names(folder: Path) -> list[str]:
    """Return the names of all files and folders in a folder, including hidden ones."""
    return sorted(item.name for item in folder.iterdir())


def chat(*contents: str) -> Sample:
    """Return a chat in which user and assistant alternate."""
    roles = ("user", "assistant")
    return Sample(messages=tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(contents)))


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSONL file that may be growing; an incomplete last line is ignored."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses(run_dir: Path) -> list[float]:
    """Return the loss of every step after checking that each step occurs once, in order."""
    metrics = lines(run_dir / "metrics.jsonl")
    assert [record["step"] for record in metrics] == list(range(1, len(metrics) + 1))
    return [record["loss"] for record in metrics]


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """Return what the method measured in every step."""
    return [record["metrics"] for record in lines(run_dir / "metrics.jsonl")]


def undo_end(*run_dirs: Path) -> None:
    """Remove the result and the newest checkpoint of finished runs: the next start resumes from the one before."""
    for run_dir in run_dirs:
        (run_dir / "result.json").unlink()
        shutil.rmtree(max((run_dir / "checkpoints").glob("step-*")))


# Runs in this process ---------------------------------------------------------------------------------------------------


class Here:
    """Runs of one rank in this process: the code of ``python -m trainer`` without the time for imports."""

    def __init__(self, folder: Path, model: Path, dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.model, self.dataset, self._capsys = folder, model, dataset, capsys
        self.out = self.err = ""

    def __call__(self, run: str = "r", **fields: Any) -> int:
        """Run to the end and return the exit status; its output is in `out` and `err`."""
        import torch.distributed as dist
        from torch.nn import functional

        from trainer.__main__ import main

        linear = functional.linear  # ZeRO 3 replaces it permanently, by a function that keeps more in memory
        spec = {"run": run, "model": self.model, "dataset": self.dataset, "seq_length": 64, "total_batch_size": 4}
        spec |= {"batch_size": 2, "lr": 1e-2, "loggers": "none"} | fields
        flags = [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in spec.items()]
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return main([f"--data-dir={self.folder}", *flags])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            functional.linear = linear
            if dist.is_initialized():
                dist.destroy_process_group()
            output = self._capsys.readouterr()
            self.out, self.err = output.out, output.err

    @property
    def error(self) -> str:
        """The one-line error of a failed start."""
        errors = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and "Traceback" not in self.err, self.err
        return errors[0].removeprefix("error: ")

    def run_dir(self, run: str = "r") -> Path:
        return self.folder / "runs" / run

    def result(self, run: str = "r") -> dict[str, Any]:
        return json.loads((self.run_dir(run) / "result.json").read_text())

    def losses(self, run: str = "r") -> list[float]:
        return losses(self.run_dir(run))


# Runs under torchrun ----------------------------------------------------------------------------------------------------


def llama(folder: Path, tokenizer: Path, **sizes: int) -> Path:
    """Write a Llama with these dimensions and the tokenizer of the model in folder `tokenizer`; return its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=4096)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    return folder


# A million weights: large enough that message headers are negligible.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}


TORCHRUN = (sys.executable, "-m", "trainer.launch.torchrun")
Launcher: TypeAlias = subprocess.Popen[str] | WarmTorchrun


class Cluster:
    """Simulated hosts, each with its own data directory and torchrun, as the playbook starts them.

    Unless it is `cold`, the torchruns are forked from a process that has imported what they need.
    """

    def __init__(self, folder: Path, spec: dict[str, Any], *, cold: bool = False) -> None:
        self.folder, self.spec, self.cold = folder, spec, cold
        self.started: list[Launcher] = []

    def run_dir(self, host: int = 0, run: str = "r") -> Path:
        return self.folder / f"host{host}" / "runs" / run

    def start(self, hosts: int = 1, ranks: int = 1, run: str = "r", **fields: Any) -> list[Launcher]:
        """Start `ranks` ranks on each of `hosts` hosts; return their launchers."""
        port = free_port()
        place = [[f"--nnodes={hosts}", f"--node-rank={host}"] for host in range(hosts)]
        return [
            self._launch(host, run, self._command(host, place[host], ranks, run, port, fields)) for host in range(hosts)
        ]

    def _command(
        self, host: int, place: list[str], ranks: int, run: str, port: int, fields: dict[str, Any]
    ) -> list[str]:
        spec = self.spec | {"run": run} | fields
        run_dir = self.run_dir(host, run)
        run_dir.mkdir(parents=True, exist_ok=True)
        torchrun = [*TORCHRUN, *place, f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        # As a file: torchrun interprets --run as an abbreviation of its --run-path.
        file = run_dir.parents[1] / f"{run}.yml"
        file.write_text(json.dumps({name: str(value) for name, value in spec.items()}))
        where = [f"--run-dir={run_dir}", f"--data-dir={run_dir.parents[1]}"]
        return [*torchrun, "-m", "trainer", "train", str(file), *where]

    def _launch(self, host: int, run: str, command: list[str]) -> Launcher:
        run_dir = self.run_dir(host, run)
        environment = os.environ | {"PYTHONPATH": str(TOP), "GLOO_SOCKET_IFNAME": "lo"}
        folder, log = run_dir.parents[1], run_dir / "torchrun.log"
        launcher: Launcher
        if self.cold:
            with log.open("a") as sink:
                launcher = subprocess.Popen(command, env=environment, cwd=folder, stdout=sink, stderr=sink, text=True)
        else:
            launcher = WarmTorchrun(command[len(TORCHRUN) :], folder, log, environment)
        self.started.append(launcher)
        return launcher

    def wait(self, launchers: list[Launcher], limit: float = 300.0) -> list[int]:
        """Return the exit statuses of the launchers."""
        deadline = time.monotonic() + limit
        return [launcher.wait(max(0.1, deadline - time.monotonic())) for launcher in launchers]

    def run(self, hosts: int = 1, ranks: int = 1, run: str = "r", **fields: Any) -> list[float]:
        """Run to the end; return the losses of all steps."""
        assert self.wait(self.start(hosts, ranks, run, **fields)) == [0] * hosts, self.logs(run)
        return losses(self.run_dir(0, run))

    def logs(self, run: str = "r") -> str:
        """Return the ends of all logs, for the message of a failing test."""
        files = sorted(self.folder.glob(f"host*/runs/{run}/logs/*.log")) or sorted(self.folder.glob("**/torchrun.log"))
        return "\n".join(f"--- {file.relative_to(self.folder)}\n{file.read_text()[-3000:]}" for file in files)

    def state(self, rank: int, host: int = 0, run: str = "r") -> dict[str, Any]:
        """Return the heartbeat of a rank, or an empty dict if it has none yet."""
        file = self.run_dir(host, run) / "state" / f"rank{rank}.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def at_step(self, step: int, run: str = "r", host: int = 0) -> None:
        """Wait until `step` is recorded."""

        def there() -> bool:
            metrics = lines(self.run_dir(host, run) / "metrics.jsonl")
            return bool(metrics) and metrics[-1]["step"] >= step

        until(there, what=f"step {step}")

    def stop_between(self, launchers: list[Launcher], limit: float = 300.0) -> int:
        """Stop a run of 40 steps at a synchronization (every 5 steps), copy it to run `lost`, and return the step."""
        self.at_step(10)
        (self.run_dir(1) / "stop").touch()
        assert self.wait(launchers, limit) == [0, 0], self.logs()
        step = len(losses(self.run_dir()))
        assert step % 5 == 0 and 10 <= step < 40
        for host in (0, 1):
            shutil.copytree(self.run_dir(host), self.run_dir(host, "lost"))
            kept = self.run_dir(host, "lost") / "spec.yml"
            kept.write_text(kept.read_text().replace("run: r\n", "run: lost\n"))
        return step

    def end(self) -> None:
        for launcher in self.started:
            if launcher.poll() is None:
                # The ranks end with their launcher: trainer.distributed.worker_process requests that from the kernel.
                launcher.kill()
                launcher.wait()
