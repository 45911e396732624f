"""A run on lab hosts under faults, and checks of its result. tests/lab/test_session.py uses it."""

import base64
import json
import re
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from lab_hosts import Host, Lab
from run_hosts import kill_playbook, start_playbook
from testbed import faults

from trainer.config import RunSpec
from trainer.data.corpus import load_corpus, select
from trainer.data.order import Order, held_out, training_samples
from trainer.records.run_state import RunHistory

DATA = "/home/tester/trainyard"


@dataclass
class Trial:
    """One run of train.yml in the background."""

    lab: Lab
    inventory: Path
    variables: dict[str, Any]
    process: subprocess.Popen[str] | None = None
    lines: list[tuple[float, str]] = field(default_factory=list)

    def start(self) -> None:
        words = [word for name, value in self.variables.items() for word in ("-e", f"{name}={value}")]
        self.process = start_playbook(self.inventory, "train.yml", *words, stdout=subprocess.PIPE)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip()))

    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def wait_line(self, pattern: str, since: float, limit: float = 300.0) -> tuple[float, str]:
        """Return the time and the text of the first line after `since` that matches. Raises AssertionError after `limit` seconds, or if the playbook ends."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            for at, line in list(self.lines):
                if at > since and re.match(pattern, line):
                    return at, line
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no line {pattern!r}\n{self.output()[-6000:]}")

    @property
    def run_dir(self) -> str:
        return f"{DATA}/runs/{self.variables['run']}"

    def read(self, host: Host, name: str) -> bytes:
        """Return a file of the run folder on a host; empty if it does not exist."""
        return base64.b64decode(self.lab.inside(host, f"base64 -w0 {self.run_dir}/{name} 2>/dev/null || true"))

    def run_hosts(self) -> list[Host]:
        """Return the hosts of the newest start, by node rank."""
        nodes = {}
        for host in self.lab.hosts:
            if self.lab.init_pid(host) is not None and (text := self.read(host, "state/node.json")):
                nodes[host.name] = json.loads(text)
        newest = max(nodes.values(), key=lambda node: node["attempt"])
        return [self.lab.host(name) for name in newest["hosts"]]

    def leftovers(self) -> str:
        """Return the processes of the run and the listeners on its ports, on all hosts."""
        found = []
        for host in self.lab.hosts:
            environs = f"grep -lsaz TRAINYARD_RUN_DIR={self.run_dir} /proc/[0-9]*/environ"
            programs = self.lab.inside(
                host, f"for file in $({environs}); do tr '\\0' ' ' <${{file%/environ}}/cmdline; echo; done"
            )
            ports = self.lab.inside(host, "ss -Hltn 'sport >= 29500 and sport < 29600' || true")
            found += [f"{host.name}: {line[:300]}" for line in (programs + ports).splitlines()]
        return "\n".join(found)

    def inject(self, kind: str, host: Host) -> str:
        """Kill a rank of the host (`kill`) or inject a fault of faults.py, wait until the run trains again, and undo the fault. Return the reason of the failure."""
        start = time.time()
        if kind == "kill":
            rank = json.loads(self.read(host, "state/node.json"))["ranks"][0]
            pid = json.loads(self.read(host, f"state/rank{rank}.json"))["pid"]
            start = time.time()
            self.lab.inside(host, f"kill -9 {pid}")
        else:
            faults.inject(self.lab, host, kind)
        at, message = self.wait_line("failed: ", start)
        self.wait_line(r"step \d+/", self.wait_line("following ", at)[0])
        if kind != "kill":
            faults.undo(self.lab, host, kind)
            self.lab.wait(
                lambda: "ok" in self.lab.inside(host, "echo ok", check=False), f"{host.name} does not answer", 60
            )
        return message

    def end(self, limit: float = 900.0) -> int:
        return self.process.wait(limit)

    def clean(self) -> None:
        kill_playbook(self.process)
        for host in self.lab.hosts:
            faults.undo(self.lab, host)

    def result(self) -> dict[str, Any]:
        return json.loads(self.read(self.run_hosts()[0], "result.json"))

    def wrong_samples(self) -> list[str]:
        """Compare the rows that the ranks processed in every step with the sample order; return the steps that differ."""
        head = self.run_hosts()[0]
        newest = self.lab.inside(head, f"ls -d {self.run_dir}/checkpoints/step-* | tail -1").strip().rpartition("/")[2]
        state = json.loads(self.read(head, f"checkpoints/{newest}/state.json"))
        history = RunHistory([*state["starts"], {"start": "", "step": state["step"], "head": ""}])
        recorded: dict[int, list[tuple[int, list[int]]]] = {}
        for host in self.lab.hosts:
            names = self.lab.inside(host, f"ls {self.run_dir}/samples 2>/dev/null || true").split()
            for name in names:
                for line in self.read(host, f"samples/{name}").decode().splitlines():
                    record = json.loads(line)
                    if history.is_valid(record):
                        rank = int(re.findall(r"\d+", name)[0])
                        recorded.setdefault(record["step"], []).extend((rank, row) for row in record["rows"])
        spec = RunSpec.model_validate(yaml.safe_load(self.read(head, "spec.yml")))
        cache = self.lab.inside(head, f"ls {self.run_dir}/cache/*.npz").split()
        wrong = []
        corpus = None
        for name in cache:
            with tempfile.NamedTemporaryFile(suffix=".npz") as file:
                file.write(base64.b64decode(self.lab.inside(head, f"base64 -w0 {name}")))
                file.flush()
                one = load_corpus(Path(file.name))
                corpus = one if one is not None and one.digest() == state["data"] else corpus
        assert corpus is not None, "the corpus of the run is not in the cache"
        train_set = select(corpus, training_samples(spec, len(corpus), held_out(spec, len(corpus))))
        order = Order(
            train_set.lengths, seed=spec.seed, capacity=spec.seq_length, packing=spec.packing, epochs=spec.epochs,
            rows=spec.rows_per_step,
        )  # fmt: skip
        for step in range(1, state["step"] + 1):
            rows = [row for _, row in sorted(recorded.get(step, []), key=lambda item: item[0])]
            if rows != order.step(step - 1):
                wrong.append(f"step {step}: processed {rows}, expected {order.step(step - 1)}")
        return wrong

    def metrics_steps(self) -> list[int]:
        return [json.loads(line)["step"] for line in self.read(self.run_hosts()[0], "metrics.jsonl").splitlines()]


def run_variables(run: str, dataset: Path, steps: int) -> dict[str, Any]:
    """Return the variables of train.yml for a run that restarts after every fault.

    At the default lr of model=tiny (3e-3) the model memorizes samples, and the losses of two undisturbed runs with another
    summation order differ by 0.1 after 275 steps: the final losses would not be comparable.
    """
    return {
        "run": run, "dataset": dataset, "seq_length": 64, "total_batch_size": 6, "max_steps": steps, "epochs": 1000,
        "lr": 2e-4, "checkpoint_interval": 5, "eval_interval": 0, "loggers": "none", "retries": 1000, "nodes_min": 2,
    }  # fmt: skip
