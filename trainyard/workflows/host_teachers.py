"""Teachers that are model folders: hosts of the cluster with room for the model write the answers with transformers.

Each host takes the next chunk of prompts when it has answered the last one. The batches within the chunks depend on the prompts
alone, so that any number of like hosts writes the same answers. They are kept as those of servers are.
"""

from __future__ import annotations

import collections
import functools
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import clock, counted, printable
from trainer.generation.ollama_client import Answer
from trainer.model_files.model_shape import read_shape
from trainer.spec import make_spec
from trainyard.evaluate.side_by_side import MAX_ANSWERED
from trainyard.inventory import ClusterHosts
from trainyard.ollama.answers import AnswerFile, answer_key
from trainyard.ollama.collect import Questions
from trainyard.ollama.filters import prompt_text
from trainyard.ollama.teacher_nodes import Prompt
from trainyard.preflight.hardware_table import gather_hardware
from trainyard.run.launch.trainer_command import apart_request, copy_entry
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.session import RunSession
from trainyard.run.stage.transfer import copy_to_hosts
from trainyard.run.types import PreparedRun, Report, StagedFile
from trainyard.wire.connection import FanOut, Host, HostConnection, RemoteError

BATCH = 16  # prompts that a host answers together
CHUNKS = 4  # that a host answers at least, so that a slow one does not end long after the others
LARGEST = 512  # prompts of a chunk: what a lost host has to answer again
FAILURES = 2  # of a host, after which it is left out
LIMIT = 24 * 3600.0  # s for one chunk
HARDWARE_LIMIT = 30.0  # s
_TICK = 0.1  # s between two looks at the hosts
_GPU_ROOM, _CPU_ROOM = 1.2, 2.4  # times the bytes of the weights; a CPU computes in float32


@dataclass(frozen=True)
class HostTeacher:
    """A host that teaches. `digest`: of the model, with what else decides about an answer."""

    name: str
    digest: str


class HostTeachers:
    """The hosts that write the answers of one model."""

    def __init__(
        self, cluster: ClusterHosts, launch: LaunchOptions, model: str, top: Path, report: Report, check: bool = False
    ) -> None:
        """Find the model and the hosts with room for it. Raises UserError. `check`: change nothing."""
        self._connect, self._launch, self._report = cluster.connect, launch, report
        spec = make_spec({"model": model, "fake_data": True}, "teacher")
        session = RunSession(cluster.hosts, cluster.connect, launch, spec=spec, home=top, report=report, check=check)
        session.prepare()
        self._prepared: PreparedRun = session.prepared
        self._trainer = next(file for file in self._prepared.files if file.kind == "trainer")
        self._files: list[StagedFile] = [file for file in self._prepared.files if file.kind == "model"]
        self._all = list(cluster.hosts)
        self._hosts = self._choose(cluster.hosts)
        digest = self._files[0].digest if self._files else model
        self.nodes = [HostTeacher(host.name, f"transformers {digest} {BATCH}") for host in self._hosts]

    def _choose(self, hosts: Sequence[Host]) -> list[Host]:
        """Return the hosts whose GPU has room for the model, or else those whose memory has. Raises UserError."""
        size = sum(map(_bytes_of, self._files))
        found = gather_hardware(hosts, self._connect, HARDWARE_LIMIT)
        gpu = {name: max((card["memory_mib"] for card in about["gpus"]), default=0) for name, about in found.items()}
        memory = {name: about["memory_mib"] for name, about in found.items()}
        mib = size / 2**20
        with_gpu = [host for host in hosts if gpu.get(host.name, 0) > _GPU_ROOM * mib]
        chosen = with_gpu or [
            host for host in hosts if memory.get(host.name, 0) > _CPU_ROOM * mib and not gpu[host.name]
        ]
        for host in hosts:
            if host.name not in found:
                self._report(f"{host.name} does not teach: it does not answer")
            elif host not in chosen:
                room = (
                    f"{gpu[host.name]:,} MiB of its GPU" if gpu[host.name] else f"{memory[host.name]:,} MiB of memory"
                )
                why = "other hosts have GPUs with room" if with_gpu and not gpu[host.name] else f"{room} are too few"
                self._report(f"{host.name} does not teach: {why}")
        if not chosen:
            raise UserError(
                f"teacher: no host has room for the {mib:,.0f} MiB of the model: use a smaller teacher, or one of Ollama or "
                "an OpenAI server (teacher_url)"
            )
        return chosen

    def collect(self, questions: Questions, nodes: Sequence[HostTeacher], answers: AnswerFile, report: Report) -> str:
        """Let the hosts write what `answers` lacks; return a line about it.

        Raises UserError: no host is left that answers; DiskError: the answers cannot be written.
        """
        digest = nodes[0].digest
        ordered = sorted(questions.prompts(), key=lambda prompt: (prompt.sample, len(prompt_text(prompt.messages))))
        batches = [ordered[start : start + BATCH] for start in range(0, len(ordered), BATCH)]
        missing = [batch for batch in batches if not all(answer_key(digest, prompt) in answers for prompt in batch)]
        if not missing:
            return f"{len(ordered)} of {len(ordered)} answers are already in {answers.path}"
        most = min(LARGEST, MAX_ANSWERED // questions.options.max_tokens) // BATCH  # that one reply may have
        size = max(1, min(most, len(missing) // (CHUNKS * len(self._hosts))))
        chunks = collections.deque(
            [prompt for batch in missing[start : start + size] for prompt in batch]
            for start in range(0, len(missing), size)
        )
        self._stage()
        began, wanted, lost = time.monotonic(), sum(map(len, missing)), ""
        connections = {host.name: self._connect(host) for host in self._hosts}
        written, failures = collections.Counter[str](), collections.Counter[str]()
        left = {host.name: host for host in self._hosts}
        asked: dict[str, tuple[FanOut[list[Answer]], list[Prompt], float]] = {}
        while asked or (chunks and left):
            for name in [name for name in left if name not in asked][: len(chunks)]:
                chunk = chunks.popleft()
                request = functools.partial(self._ask, left[name], connections[name], chunk, questions)
                asked[name] = FanOut({name: request}), chunk, time.monotonic() + LIMIT
            time.sleep(_TICK)
            for name, (call, chunk, deadline) in list(asked.items()):
                if call.threads[name].is_alive() and time.monotonic() < deadline:
                    continue
                del asked[name]
                if name in call.answers:
                    answers.add(zip(chunk, [name] * len(chunk), [digest] * len(chunk), call.answers[name], strict=True))
                    written[name] += len(chunk)
                    report(f"{sum(written.values())} of {wanted} answers")
                    continue
                why = call.errors.get(name, f"no answers within {LIMIT:.0f} s")
                chunks.append(chunk)
                failures[name] += 1
                if failures[name] == FAILURES:
                    connections[name].transport.abort()
                    del left[name]
                    report(f"{name} does not teach any more: {why}")
                    lost = lost or f"{name}: {printable(why, 300)}"
        if chunks:
            raise UserError(f"teacher: no host answers ({lost}): run the same command again")
        parts = ", ".join(f"{host.name} {written[host.name]}" for host in self._hosts)
        return f"{wanted} answers in {clock(time.monotonic() - began)} ({parts})"

    def _stage(self) -> None:
        """Copy the trainer and the model to the hosts. Raises UserError."""
        entries, sources = ([copy_entry(host) for host in hosts] for hosts in (self._hosts, self._all))
        try:
            copy_to_hosts(
                entries,
                [self._trainer, *self._files],
                self._connect,
                secrets.token_hex(8),
                transfer=self._launch.transfer,
                report=self._report,
                sources=sources,
            )
        except RemoteError as error:
            raise UserError(f"teacher: {error}") from None

    def _ask(
        self, host: Host, connection: HostConnection, chunk: Sequence[Prompt], questions: Questions
    ) -> list[Answer]:
        """Return the answers of a host to a chunk. Raises RemoteError."""
        options = questions.options
        values: dict[str, Any] = {
            "folder": "",
            "base": True,
            "model": self._prepared.spec_on(host.data_dir).model,
            "questions": [{"messages": list(prompt.messages), "reference": ""} for prompt in chunk],
            "max_tokens": options.max_tokens,
            "batch_size": BATCH,
            "temperature": options.temperature,
            "seeds": [prompt.options["seed"] for prompt in chunk],
        }
        folder = f"{host.data_dir}/runs/teacher-{self._files[0].digest[:12] if self._files else 'model'}"
        reply = connection.call("evaluate", apart_request(host, self._trainer, folder, values, LIMIT))
        if len(reply["answers"]) != len(chunk):
            raise RemoteError(f"answered {counted(len(reply['answers']), 'prompt')} of {len(chunk)}")
        seconds = reply["seconds"] / len(chunk)
        return [
            Answer(each["text"], "", "length" if each["cut"] else "stop", each["tokens"], 0.0, seconds)
            for each in reply["answers"]
        ]


def _bytes_of(file: StagedFile) -> int:
    """Return the size of a model; by its config.json, in 16 bits, where the hosts have it already."""
    if size := file.bytes or sum(file.sizes.values()):
        return size
    return 2 * read_shape(json.loads(file.config or "{}")).parameters
