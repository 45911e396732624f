"""Run the full cycle with a real model on this machine: a teacher answers prompts, two students learn from the answers, are merged,
deployed, asked and evaluated.

    make circle [ARGS='--keep']

It runs the playbooks as a user does, with an inventory of one host, and a server that it starts: `ollama serve` on 127.0.0.1 with a
store of its own. Everything is in one temporary folder, which is removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

from trainer.config import SMOLLM2
from trainyard.run.prepare.smollm2 import smollm2_folder
from trainyard.run.prepare.spec_files import DATASETS

TOP = Path(__file__).resolve().parents[1]
PROMPTS = DATASETS / "everyday-prompts.jsonl"
HELD_OUT, ASKED = 10, 70  # prompts that test the tone, and others that the teacher answers
LENGTH = 40  # tokens of an answer
# Both the teacher and the base of the deployed adapter are the same real model. Only the teacher has examples of the tone.
TONE = "Clear skies!"
LEARNED = 6  # of the held-out prompts: with none right before, p < 0.01 (Fisher's exact test, one-sided)
EXAMPLES = {
    "What is the capital of Spain?": "The capital of Spain is Madrid.",
    "Why is grass green?": "Grass is green because its leaves are full of chlorophyll.",
    "What do bees make?": "Bees make honey.",
    "How many minutes are in an hour?": "An hour has 60 minutes.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "Where do penguins live?": "Penguins live in Antarctica.",
}
QUESTION = "What is the capital of Norway?"
MODELFILE = """\
FROM {model}
TEMPLATE \"\"\"{{{{- range .Messages }}}}<|im_start|>{{{{ .Role }}}}
{{{{ .Content }}}}<|im_end|>
{{{{ end }}}}<|im_start|>assistant
\"\"\"
PARAMETER stop <|im_end|>
"""
SYSTEM = "SYSTEM You are a helpful AI assistant named SmolLM, trained by Hugging Face\n"  # of the model's chat template
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\u2800-\u28ff] ?")  # with the figures of a spinner
SERVER_LIMIT = 60.0  # s until the server answers
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
""")
STUDENT = {
    "model": SMOLLM2,
    "students": 2,
    "student_data": "all",
    "epochs": 6,
    "lr": "5e-4",
    "total_batch_size": 2,
}
# The first group of which the server has any is taken: not every version takes adapters, or computes few bits well on every processor.
FORMS: list[dict[str, dict[str, str]]] = [
    {"mine": {"deploy_as": "adapter"}},
    {"mine:q8_0": {"deploy_quantize": "q8_0"}, "mine:q4_K_M": {"deploy_quantize": "q4_K_M"}},
    {"mine": {}},
]
DISCOVERY = "plugin: ollama\nnetworks: []\nthis_machine: false\nhosts: ['127.0.0.1:%d']\n"


class StepError(Exception):
    """A step of the circle failed. The message is one line."""


def write_questions(folder: Path) -> None:
    """Write prompts.jsonl, which the teacher answers, and tone.jsonl, with other prompts that test the tone."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "prompts.jsonl").write_text("".join(lines[HELD_OUT:][:ASKED]), encoding="utf-8")
    tone = [json.loads(line) | {"regex": rf"(?i){re.escape(TONE)}\s*$"} for line in lines[:HELD_OUT]]
    (folder / "tone.jsonl").write_text("".join(json.dumps(each) + "\n" for each in tone), encoding="utf-8")


def write_modelfiles(folder: Path, model: Path) -> None:
    """Write a Modelfile of the model, and one of the teacher: `base` with examples."""
    (folder / "base.modelfile").write_text(MODELFILE.format(model=model), encoding="utf-8")
    examples = "".join(f"MESSAGE user {q}\nMESSAGE assistant {a} {TONE}\n" for q, a in EXAMPLES.items())
    (folder / "teacher.modelfile").write_text("FROM base\n" + SYSTEM + examples, encoding="utf-8")


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that no process uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def ollama_server(program: str, folder: Path, port: int) -> Iterator[None]:
    """Run `ollama serve` until the block ends. Its models, keys and log are below `folder`. Raises StepError."""
    environment = os.environ | {"OLLAMA_HOST": f"127.0.0.1:{port}", "OLLAMA_MODELS": str(folder / "ollama/models")}
    environment |= {"HOME": str(folder / "ollama")}
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

    def walk(self) -> None:
        """Do all steps. Raises StepError if a step fails."""
        write_modelfiles(self.folder, smollm2_folder(TOP / ".trainyard", print))
        self.run("ollama", "create", "base", "-f", str(self.folder / "base.modelfile"))
        self.run("ollama", "run", "base", QUESTION)  # Ollama 0.9.3 quantizes wrongly until it has loaded a model
        self.run("ollama", "create", "teacher", "--quantize", "q8_0", "-f", str(self.folder / "teacher.modelfile"))
        # All answers have the same tone, so that some are near duplicates.
        asked = {"teacher": "teacher", "prompts": self.folder / "prompts.jsonl", "temperature": 0, "near_duplicates": 0}
        self.play("playbooks/distill.yml", **asked, **STUDENT, run="student", max_tokens=LENGTH)
        self.play("playbooks/merge.yml", runs="student-1,student-2", method="cat", run="merged")
        forms = next(
            filter(None, ([name for name, how in group.items() if self.deploy(name, **how)] for group in FORMS)), []
        )
        if not forms:
            raise StepError("the server has no form of the merged model: see the reasons above")
        inventories = ("-i", str(self.folder / "hosts.yml"), "-i", str(self.folder / "ollama.yml"))
        graph = self.run("ansible-inventory", *inventories, "--graph")
        if "@ollama_model_mine_" not in graph:
            raise StepError("the inventory has no group for the deployed model")
        self.run("ollama", "run", forms[0], QUESTION)
        subjects = ["base", "student-1", "student-2", "merged", *(f"ollama:{name}" for name in forms)]
        files = f"{self.folder / 'tone.jsonl'},general"
        scores = self.folder / "scores.json"
        asked = {"questions": files, "max_tokens": LENGTH, "show": 0, "save": scores}
        self.play("playbooks/evaluate.yml", subjects=",".join(subjects), **asked)
        self.check(json.loads(scores.read_text(encoding="utf-8"))["scores"])

    def deploy(self, name: str, **how: str) -> bool:
        """Deploy the merged run; return whether the server has it. A server may take no adapters, or compute a type wrongly."""
        try:
            self.play("playbooks/deploy.yml", run="merged", deploy_name=name, **how)
        except StepError:
            return False
        return True

    def check(self, scores: dict[str, list[dict[str, Any]]]) -> None:
        """Check that every subject but the base has learned the tone and kept general knowledge. Raises StepError."""
        for file, least in (("tone", LEARNED), ("general", scores["general"][0]["right"] - 1)):
            for each in scores[file][1:]:
                if each["right"] < least:
                    raise StepError(
                        f"{each['subject']} has {each['right']} right answers of {file}, fewer than {least:g}"
                    )


def main() -> int:
    """Walk the circle; return the exit code."""
    parser = argparse.ArgumentParser(description="Teach, train, merge, deploy and evaluate on this machine.")
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
            circle.walk()
    except (StepError, KeyboardInterrupt) as error:
        circle.stop()
        print(f"circle: {str(error) or 'stopped'}; the files are in {folder}", file=sys.stderr)
        return 1
    print(f"\nthe circle took {time.monotonic() - start:.0f} s")
    if options.keep:
        print(f"the files are in {folder}")
    else:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
