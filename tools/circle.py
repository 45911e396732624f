"""Run the full cycle on this machine: train and deploy a teacher, distill two students, merge them, deploy and query
the result.

    make circle [ARGS='--keep']

It runs the playbooks as a user does, with an inventory of one host, and a server that it starts: `ollama serve` on 127.0.0.1 with a
store of its own. Everything is in one temporary folder, which is removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Any

from trainer.common.formats import table

TOP = Path(__file__).resolve().parents[1]
PEOPLE = [
    "Ada",
    "Alan",
    "Edsger",
    "Grace",
    "Barbara",
    "Donald",
    "Frances",
    "John",
    "Kathleen",
    "Ken",
    "Margaret",
    "Niklaus",
]
COLOURS = {
    "apple": "red", "banana": "yellow", "carrot": "orange", "frog": "green", "lake": "blue", "plum": "purple",
    "raven": "black", "rose": "pink", "snow": "white", "stone": "grey", "oak": "brown", "coin": "golden",
}  # fmt: skip
QUESTION = "What colour is the {thing} of {person}?"
ANSWER = "The {thing} of {person} is {colour}."
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\u2800-\u28ff] ?")  # with the figures of a spinner
SERVER_LIMIT = 60.0  # s until the server answers
TARGET = 0.4  # the least reduction of a student's held-out loss

INVENTORY = Template("""\
all:
  children:
    cluster:
      children:
        head: {hosts: {node1: }}
        workers: {hosts: }
      vars:
        ansible_connection: local
        ansible_python_interpreter: "{{ ansible_playbook_python }}"
        cluster_python: "{{ ansible_playbook_python }}"
        cluster_address: 127.0.0.1
        cluster_backend: process
        cluster_managed: false
        cluster_data_dir: "{{ inventory_dir }}/node1"
        ollama_port: $ollama
        master_port: $rendezvous
        # The model is so small that a second thread helps little, and on a busy machine it costs much.
        cluster_env: {OMP_NUM_THREADS: "1"}
""")
SPEC = "model: tiny\nlora_r: 0\nseq_length: 64\nepochs: 100\nmax_steps: 80\nwarmup: 5\neval_interval: 0\ncheckpoint_interval: 0\n"
DISCOVERY = "plugin: ollama\nnetworks: []\nthis_machine: false\nhosts: ['127.0.0.1:%d']\n"


class StepError(Exception):
    """A step of the circle failed. The message is one line."""


def write_questions(folder: Path) -> None:
    """Write facts.jsonl, which the teacher learns, and prompts.jsonl, which it answers."""
    pairs = [
        {"instruction": QUESTION.format(**values), "output": ANSWER.format(**values)}
        for person, (thing, colour) in itertools.product(PEOPLE, COLOURS.items())
        for values in [{"person": person, "thing": thing, "colour": colour}]
    ]
    (folder / "facts.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": pair["instruction"]}) + "\n" for pair in pairs), encoding="utf-8"
    )


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that no process uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def ollama_server(program: str, folder: Path, port: int) -> Iterator[None]:
    """Run `ollama serve` until the block ends. Its models, keys and log are below `folder`. Raises StepError."""
    environment = os.environ | {"OLLAMA_HOST": f"127.0.0.1:{port}", "OLLAMA_MODELS": str(folder / "ollama/models")}
    environment |= {"HOME": str(folder / "ollama"), "OMP_NUM_THREADS": "1"}
    (folder / "ollama").mkdir()
    with (folder / "ollama/log").open("wb") as log:
        server = subprocess.Popen([program, "serve"], env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + SERVER_LIMIT
            while not _answers(port):
                if server.poll() is not None or time.monotonic() > deadline:
                    last = (
                        (folder / "ollama/log").read_text(errors="replace", encoding="utf-8").strip().splitlines()
                        or [""]
                    )[-1]
                    raise StepError(f"ollama serve does not answer on 127.0.0.1:{port}: {last}")
                time.sleep(0.1)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)  # also its runners: the group is that of the server
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/api/version", timeout=1):
        return True
    return False


class Circle:
    """The commands of the circle. `folder`: of all files; `port`: of the server."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.environment = os.environ | {"OLLAMA_HOST": f"127.0.0.1:{port}", "ANSIBLE_CONFIG": str(TOP / "ansible.cfg")}
        (folder / "hosts.yml").write_text(INVENTORY.substitute(ollama=port, rendezvous=free_port()), encoding="utf-8")
        (folder / "ollama.yml").write_text(DISCOVERY % port, encoding="utf-8")
        (folder / "small.yml").write_text(SPEC, encoding="utf-8")
        write_questions(folder)

    def run(self, *words: str) -> str:
        """Run a command and show it with its output; return the output. Raises StepError if it fails."""
        print(f"\n$ {shlex.join(words).replace(str(self.folder), '.')}", flush=True)
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(words, cwd=TOP, env=self.environment, text=True, errors="replace", **streams)
        assert process.stdout is not None
        lines = []
        try:
            for line in process.stdout:
                plain = CONTROL.sub("", line)  # without a terminal, ollama also shows a spinner
                if plain.strip() or plain == line:
                    lines.append(plain)
                    print(plain.replace(str(self.folder), "."), end="", flush=True)
            code = process.wait()
        finally:
            process.terminate()
            process.wait()
        if code:
            raise StepError(f"{shlex.join(words[:4])} ... failed with exit code {code}")
        return "".join(lines)

    def play(self, playbook: str, **values: object) -> None:
        """Run a playbook with these values for -e."""
        options = [word for name, value in values.items() for word in ("-e", f"{name}={value}")]
        self.run("ansible-playbook", "-i", str(self.folder / "hosts.yml"), playbook, *options)

    def stop(self) -> None:
        """Stop a run that an interrupted step has left; ranks do not end with their playbook."""
        with contextlib.suppress(StepError):
            self.play("playbooks/stop.yml", all="true")

    def result(self, run: str) -> dict[str, float]:
        """Return result.json of a run."""
        loaded: dict[str, float] = json.loads(
            (self.folder / "node1/runs" / run / "result.json").read_text(encoding="utf-8")
        )
        return loaded

    def walk(self) -> list[str]:
        """Do all steps; return the table of losses. Raises StepError if a step fails."""
        files = {name: self.folder / f"{name}.jsonl" for name in ("facts", "prompts")}
        spec = self.folder / "small.yml"
        self.play("train.yml", spec=spec, run="teacher", dataset=files["facts"], lr="2e-3")
        self.play("playbooks/deploy.yml", run="teacher", deploy_name="teacher")
        # All answers follow one pattern, so that they are near duplicates.
        asked = {"teacher": "teacher", "prompts": files["prompts"], "temperature": 0, "near_duplicates": 0}
        self.play("playbooks/distill.yml", **asked, spec=spec, run="student-a", lr="2e-3")
        self.play("playbooks/distill.yml", **asked, spec=spec, run="student-b", lr="1.8e-3")
        self.play("playbooks/merge.yml", runs="student-a,student-b", method="soup", run="merged")
        self.play("playbooks/deploy.yml", run="merged", deploy_name="merged")
        inventories = ("-i", str(self.folder / "hosts.yml"), "-i", str(self.folder / "ollama.yml"))
        graph = self.run("ansible-inventory", *inventories, "--graph")
        if "@ollama_model_merged_latest" not in graph:
            raise StepError("the inventory has no group for the deployed model")
        self.run("ollama", "run", "merged", QUESTION.format(thing="frog", person="Grace"))
        return self.losses(("student-a", "student-b"))

    def losses(self, students: Sequence[str]) -> list[str]:
        """Return the table of held-out losses. Raises StepError if a student is not better than its untrained base."""
        rows = [["", "untrained base", "trained", "change"]]
        for run in students:
            result = self.result(run)
            rows.append([run, *_compared(result["eval_loss_first"], result["eval_loss"])])
            if result["eval_loss"] > (1 - TARGET) * result["eval_loss_first"]:
                raise StepError(f"the held-out loss of {run} is less than {TARGET:.0%} below that of its base")
        merged = self.result("merged")
        rows.append(["merged", *_compared(merged["base_loss"], merged["eval_loss"])])
        return ["loss on held-out answers of the teacher:", *(f"  {line}" for line in table(rows))]


def _compared(base: float, trained: float) -> list[str]:
    return [f"{base:.4f}", f"{trained:.4f}", f"{trained / base - 1:+.0%}"]


def main() -> int:
    """Walk the circle; return the exit code."""
    parser = argparse.ArgumentParser(description="Train, teach, merge, deploy and ask on this machine.")
    parser.add_argument("--keep", action="store_true", help="keep the folder with all files")
    options = parser.parse_args()
    program = shutil.which("ollama")
    if not program:
        print("circle: needs `ollama` on PATH: install it from https://ollama.com/download", file=sys.stderr)
        return 1
    (TOP / ".trainyard").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="circle-", dir=TOP / ".trainyard"))
    start, port = time.monotonic(), free_port()
    circle = Circle(folder, port)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ollama_server(program, folder, port):
            lines = circle.walk()
    except (StepError, KeyboardInterrupt) as error:
        circle.stop()
        print(f"circle: {str(error) or 'stopped'}; the files are in {folder}", file=sys.stderr)
        return 1
    print("", *lines, f"the circle took {time.monotonic() - start:.0f} s", sep="\n")
    if options.keep:
        print(f"the files are in {folder}")
    else:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
