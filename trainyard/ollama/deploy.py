"""Put a trained model into the Ollama server of every host, and prove that each copy answers as the trained model.

The head of the run supplies greedy answers and, for a merged model, the GGUF file. Every node creates the model under a
temporary name and answers the same prompts. Only a node that answers as trained gets the final name.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import math
import secrets
import shlex
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.data.plain_template import PLAIN_TEMPLATE
from trainer.errors import UserError
from trainer.files import sha256_file
from trainer.formats import mib, printable, quoted
from trainer.gguf_fields import adds_bos
from trainyard.connection import FanOut, Host, HostConnection, RemoteError
from trainyard.ollama.chat_template import derive_apart
from trainyard.ollama.converter import SHA256 as CONVERTER
from trainyard.ollama.converter import converter_folder
from trainyard.ollama.hf_template import read_template
from trainyard.ollama.options import DeployOptions
from trainyard.ollama.trained_run import TrainedRun, copy_files, find_run, read_tokens
from trainyard.remote.ollama import equal_answers
from trainyard.replies import ReplyError, checked_reply
from trainyard.run.copy_files import fetch_file
from trainyard.run.errors import RunError
from trainyard.run.trainer_archive import trainer_archive

STATE_LIMIT = 60.0  # s for a host to describe its server
EXPORT_LIMIT = 3600.0  # s for the head to convert and to answer
CREATE_LIMIT = 7200.0  # s for a node to receive the model and to answer
# Share of the answers that must be equal. Rounding changes a few; a wrong model gives nearly none.
MIN_EQUAL = {"f16": 0.85, "q8_0": 0.7}
_SHOWN = 160  # characters of an answer in a message
_PORT = 11434
Report = Callable[[str], None]


@dataclass
class Artifact:
    """A GGUF file on the controller, and how a node uses it."""

    file: Path
    sha256: str
    template: str
    base: str  # the base of an adapter on the node, or empty
    key: str  # equal for equal deployments
    bos: str  # the text of the token that raw prompts need and the server does not add
    notes: list[str] = field(default_factory=list)


class Deployment:
    """Deploys one run to the Ollama servers of hosts, or removes it.

    Args:
        hosts: the nodes; one of them has the run.
        connect: makes a connection to a host; called in the main thread.
        urls: for each host the addresses at which its own server may be reached from it, the preferred one first.
        work: folder on the controller for files.
        report: receives lines while a step runs.
        check: change nothing; say what would change.
    """

    def __init__(
        self,
        hosts: list[Host],
        connect: Callable[[Host], HostConnection],
        urls: Mapping[str, list[str]],
        options: DeployOptions,
        *,
        work: Path,
        report: Report = print,
        check: bool = False,
    ) -> None:
        self.hosts, self.urls, self.options = {host.name: host for host in hosts}, urls, options
        self.connections = {host.name: connect(host) for host in hosts}
        self.work, self.report, self.check = work / "deploy", report, check
        self._connect = connect
        self._exports: dict[str, FanOut] = {}  # by type of weights; "" for the answers alone
        self._local = Path()

    def deploy(self) -> dict[str, Any]:
        """Deploy the run; return `changed` and `lines`.

        Raises:
            RunError: a node did not get the model; the others have it.
            UserError: the run cannot be deployed.
        """
        trained = find_run(self.options.run, self.hosts, self.connections, bool(self._base_name()))
        if not self._base_name():  # only the merged model fits
            self._start_export(trained, self.options.deploy_quantize)
        self._local = copy_files(trained, self.connections[trained.host.name], self.work / self.options.run)
        tokens = read_tokens(self._local)
        states, errors = self._states(len(tokens))
        identity = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
        artifacts: dict[str, Artifact] = {}
        for name, state in states.items():
            try:
                self._check_owner(state)
                artifacts[name] = self._artifact(trained, state, identity)
            except (RemoteError, UserError) as error:
                errors[name] = str(error)
        wanted = {name: art for name, art in artifacts.items() if not self._is_deployed(states[name], art)}
        lines = self._notes(artifacts.values())
        lines += [f"{name}: {self.options.deploy_name} is deployed" for name in artifacts if name not in wanted]
        if self.check:
            lines += [f"{name}: would deploy {self.options.deploy_name}" for name in wanted]
        elif wanted:
            deployed, failed = self._install(trained, wanted)
            lines += [f"{name}: {text}" for name, text in deployed.items()]
            errors |= failed
        if errors:
            name, why = next(iter(errors.items()))
            more = [f"{other}: {text}" for other, text in errors.items()]
            raise RunError(f"{name}: {why}", lines=[*lines, *more], troubles=errors)
        return {"changed": bool(wanted), "lines": lines, "hosts": {name: name in wanted for name in artifacts}}

    def remove(self) -> dict[str, Any]:
        """Remove the deployed model from every node; return `changed` and `lines`. Raises RunError."""
        replies, errors = self._ask("remove", {name: {"check": self.check} for name in self.hosts}, STATE_LIMIT)
        lines = []
        for name, reply in replies.items():
            text = "removed" if reply.get("changed") else "is not deployed"
            text = "is not from trainyard: kept" if reply.get("foreign") else text
            lines.append(
                f"{name}: {self.options.deploy_name} {'would be ' if self.check and text == 'removed' else ''}{text}"
            )
        if errors:
            name, why = next(iter(errors.items()))
            raise RunError(f"{name}: {why}", lines=lines, troubles=errors)
        return {"changed": any(reply.get("changed") for reply in replies.values()), "lines": lines}

    def _start_export(self, run: TrainedRun, quantize: str) -> None:
        """Start trainer.gguf_export on the run's host, over a connection of its own: imports there may take seconds."""
        what = "convert the model and answer" if quantize else "answer"
        self.report(f"{run.host.name}: {what} {self.options.run}")
        connection = self._connect(run.host)

        def ask(trainer: str, converter: str = "") -> dict[str, Any]:
            request = {"run_dir": run.folder, "weights": run.weights, "quantize": quantize}
            request |= {"converter": converter, "converter_id": CONVERTER}
            command = f"PYTHONPATH={shlex.quote(trainer)} exec {shlex.quote(run.host.python)} -P -m trainer.gguf_export"
            return connection.run(command, json.dumps(request).encode(), "gguf_export")

        def work() -> dict[str, Any]:
            trainer = self._put(connection, trainer_archive(self.work.parent))
            reply = ask(trainer)
            if reply["needs_converter"]:
                reply = ask(trainer, self._put(connection, self._converter_archive()))
            return reply

        self._exports[quantize] = FanOut({run.host.name: work})

    def _export(self, run: TrainedRun, quantize: str = "") -> dict[str, Any]:
        """Return the reply of trainer.gguf_export on the run's host, asked once. Raises RemoteError."""
        if quantize not in self._exports:
            self._start_export(run, quantize)
        done, name = self._exports[quantize].wait(EXPORT_LIMIT), run.host.name
        if name in done.errors:
            raise RemoteError(f"{name}: {done.errors[name]}")
        return done.answers[name]

    def _answers(self, run: TrainedRun) -> dict[str, Any]:
        answers: dict[str, Any] | None = self._export(run, next(iter(self._exports), ""))["answers"]
        if answers is None:
            raise RemoteError(f"{run.host.name} has not computed the answers")
        if not answers["prompts"] or len(answers["prompts"]) != len(answers["answers"]):
            raise RemoteError("the run's dataset has no prompt to compare answers with")
        return answers

    def _converter_archive(self) -> Path:
        """Return the converter as one zip file with equal bytes for equal contents."""
        target = self.work / f"converter-{CONVERTER[:16]}.zip"
        if not target.exists():
            folder = converter_folder()
            target.parent.mkdir(parents=True, exist_ok=True)
            with (
                tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as aside,
                zipfile.ZipFile(aside, "w") as archive,
            ):
                for path in sorted(folder.rglob("*.py")):
                    entry = zipfile.ZipInfo(str(path.relative_to(folder)), date_time=(1980, 1, 1, 0, 0, 0))
                    archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
            Path(aside.name).replace(target)
        return target

    # The nodes ----------------------------------------------------------------------------------------------------------

    def _request(self, name: str, step: str) -> dict[str, Any]:
        records = f"{self.hosts[name].data_dir}/deployed"
        return {"step": step, "urls": self.urls[name], "name": self.options.deploy_name, "records": records}

    def _ask(
        self, step: str, more: Mapping[str, dict[str, Any]], limit: float
    ) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Ask the hosts in `more` at once; return their replies and errors by name."""
        calls = {name: functools.partial(self._call, name, step, extra) for name, extra in more.items()}
        done = FanOut(calls).wait(limit)
        return done.answers, done.errors

    def _call(self, name: str, step: str, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply of a node to a step of the verb `ollama`. Raises RemoteError."""
        reply = self.connections[name].call("ollama", self._request(name, step) | dict(more))
        try:
            return checked_reply(f"ollama_{step}", reply)
        except ReplyError as error:
            raise RemoteError(str(error)) from None

    def _states(self, tokens: int) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        more = {"base": self._base_name(), "tokens": tokens}
        states, errors = self._ask("state", dict.fromkeys(self.hosts, more), STATE_LIMIT)
        return {name: states[name] for name in self.hosts if name in states}, errors

    def _base_name(self) -> str:
        return self.options.deploy_base if self.options.deploy_as != "merged" else ""

    def _check_owner(self, state: dict[str, Any]) -> None:
        """Check that a model of this name was deployed by trainyard. Raises UserError."""
        record = state["record"]
        if (
            state["digest"]
            and (record is None or record["digest"] != state["digest"])
            and not self.options.deploy_replace
        ):
            raise UserError(
                f"it has a model {self.options.deploy_name} that trainyard has not deployed: choose another deploy_name, or set "
                "deploy_replace=true"
            )

    @staticmethod
    def _is_deployed(state: dict[str, Any], artifact: Artifact) -> bool:
        record = state["record"]
        return bool(record and record["key"] == artifact.key and state["digest"] == record["digest"])

    def _misfit(self, run: TrainedRun, state: dict[str, Any], tokens: str) -> str:
        """Return why a node cannot take the adapter; empty if it can."""
        from trainyard.ollama.adapter_gguf import ARCHITECTURES  # imports numpy; a merged model does without

        base, name = state["base"], self.options.deploy_base
        names = run.base.get("architectures")
        arch = str(names[0]) if isinstance(names, list) and names else ""
        if run.kind != "adapter":
            return "the run has no adapter"
        if not state["adapters"]:
            return f"Ollama {'.'.join(map(str, state['version']))} takes no adapters"
        if base is None:
            return f"it has no model {name}"
        if arch not in ARCHITECTURES:
            return f"adapters of {quoted(arch)} cannot be written as GGUF"
        if base["tokens"] != tokens:
            return f"the vocabulary of {name} differs from that of the run"
        if base["shape"] != _shape(run.base):
            return f"the shape of {name} differs from that of the run's base model"
        return ""

    def _artifact(self, run: TrainedRun, state: dict[str, Any], tokens: str) -> Artifact:
        """Return what a node gets. Raises UserError, RemoteError."""
        why = self._misfit(run, state, tokens) if self._base_name() else "the run has no base on the hosts"
        if not why:
            from trainer.plain_adapter import AdapterError

            try:
                return self._adapter(run, state["base"])
            except AdapterError as error:
                why = str(error)
        if self.options.deploy_as == "adapter":
            raise UserError(f"deploy_as=adapter: {why}")
        return self._merged(run)

    @functools.cache  # noqa: B019
    def _adapter_file(self, run_folder: str, config: str) -> Path:
        from trainyard.ollama.adapter_gguf import write_adapter

        target = self.work / self.options.run / "adapter.gguf"
        write_adapter(self._local, json.loads(config), target)
        return target

    def _adapter(self, run: TrainedRun, base: dict[str, Any]) -> Artifact:
        file = self._adapter_file(run.folder, json.dumps(run.base))
        fields = {
            name: value == "True" if value in ("True", "False") else value for name, value in base["fields"].items()
        }
        digest = sha256_file(file)
        return self._complete(
            run, file, digest, adds_bos(fields), f"{digest} {base['digest']}", self.options.deploy_base
        )

    def _merged(self, run: TrainedRun) -> Artifact:
        """Return the merged model; its GGUF file is on the controller only if a node needs it."""
        gguf = self._export(run, self.options.deploy_quantize)["gguf"]
        if gguf is None:
            raise RemoteError(f"{run.host.name} has not converted the model")
        file = self.work / f"{gguf['sha256']}.gguf"
        return self._complete(run, file, gguf["sha256"], gguf["adds_bos"], gguf["sha256"], "")

    def _complete(self, run: TrainedRun, file: Path, digest: str, added: bool, origin: str, base: str) -> Artifact:
        answers = self._answers(run)
        source, special = read_template(self._local)
        bos = special.get("bos_token", "")
        text, notes = self.options.template_text(), []
        if not text:
            today = datetime.datetime.fromisoformat(answers["created"])
            derived = self._derive(source or PLAIN_TEMPLATE, json.dumps(special), today, bos if added else "")
            text, notes = derived.text, derived.notes
        key = hashlib.sha256(f"{origin} {base} {text}".encode()).hexdigest()
        return Artifact(file, digest, text, base, key, "" if added else bos, notes)

    @functools.cache  # noqa: B019
    def _derive(self, source: str, special: str, today: datetime.datetime, added: str) -> Any:
        return derive_apart(source, json.loads(special), today, added, self._local.parent / "template.json")

    def _notes(self, artifacts: Any) -> list[str]:
        return list(dict.fromkeys(f"note: {note}" for artifact in artifacts for note in artifact.notes))

    # Installation -------------------------------------------------------------------------------------------------------

    def _install(self, run: TrainedRun, wanted: Mapping[str, Artifact]) -> tuple[dict[str, str], dict[str, str]]:
        """Create the model on the nodes at once; return a line for each that has it, and why another has not."""
        answers = self._answers(run)
        merged = {art.sha256: art for art in wanted.values() if not art.base}
        try:
            for artifact in merged.values():
                self._fetch(run, artifact)
            calls = {
                name: functools.partial(self._create, name, artifact, answers) for name, artifact in wanted.items()
            }
            done = FanOut(calls).wait(CREATE_LIMIT)
        finally:
            for artifact in merged.values():  # the run's host and the servers have it
                artifact.file.unlink(missing_ok=True)
        deployed, errors = {}, dict(done.errors)
        count = len(answers["prompts"])
        for name, reply in done.answers.items():
            equal, difference = compare(answers, reply["answers"])
            if not reply["accepted"] or equal < self._least(wanted[name], count):
                errors[name] = (
                    f"the created model gives {equal} of {count} answers as the trained one does: it is removed, and "
                    f"{self.options.deploy_name} stays as it was; {difference}"
                )
                continue
            how = f"adapter on {wanted[name].base}" if wanted[name].base else f"merged, {self.options.deploy_quantize}"
            deployed[name] = f"deployed {self.options.deploy_name} ({how}): {equal} of {count} answers as trained"
        return deployed, errors

    def _least(self, artifact: Artifact, count: int) -> int:
        """Return how many of `count` answers must be equal."""
        return math.ceil(MIN_EQUAL["f16" if artifact.base else self.options.deploy_quantize] * count)

    def _fetch(self, run: TrainedRun, artifact: Artifact) -> None:
        """Copy the merged model from the run's host to the controller, unless it is there. Raises RemoteError, UserError."""
        if artifact.file.exists():
            return
        try:
            self._fetch_gguf(run, artifact)
        except OSError as error:
            raise UserError(f"cannot write {artifact.file}: {error.strerror}: free disk space") from None

    def _fetch_gguf(self, run: TrainedRun, artifact: Artifact) -> None:
        gguf = self._export(run, self.options.deploy_quantize)["gguf"]
        self.report(f"{run.host.name}: copying {mib(gguf['bytes'])} MiB to the controller")
        with tempfile.TemporaryDirectory(dir=self.work) as aside:
            arrived = Path(aside) / "model.gguf"
            fetch_file(self.connections[run.host.name], gguf["path"], arrived, gguf["bytes"])
            if not arrived.exists() or sha256_file(arrived) != artifact.sha256:
                raise RemoteError(f"{run.host.name}: the merged model arrived damaged: run the same command again")
            arrived.replace(artifact.file)

    def _create(self, name: str, artifact: Artifact, answers: dict[str, Any]) -> dict[str, Any]:
        """Copy the file to a node, which creates the model and answers; return its reply. Raises RemoteError."""
        connection = self.connections[name]
        incoming = f"{connection.host.data_dir}/store/incoming"
        prompts = [
            prompt if "messages" in prompt else {"prompt": artifact.bos + prompt["prompt"]}
            for prompt in answers["prompts"]
        ]
        options = {"temperature": 0, "seed": 0, "top_k": 1, "repeat_penalty": 1.0, "num_predict": answers["max_tokens"]}
        request = {
            "file": f"{incoming}/{artifact.sha256}-{secrets.token_hex(4)}",
            "sha256": artifact.sha256,
            "template": artifact.template,
            "base": artifact.base,
            "prompts": prompts,
            "options": options,
            "expected": answers["answers"],
            "least": self._least(artifact, len(prompts)),
            "key": artifact.key,
        }
        if self._call(name, "prepare", {"sha256": artifact.sha256, "incoming": incoming})["lacking"]:
            connection.put(str(artifact.file), str(request["file"]))
        reply = self._call(name, "create", request)
        if len(reply["answers"]) != len(prompts):
            raise RemoteError("sent an incomplete reply to create")
        return reply

    def _put(self, connection: HostConnection, source: Path) -> str:
        """Copy a file to the store of a host unless it is there; return its path on the host. Raises RemoteError."""
        store, digest = f"{connection.host.data_dir}/store", sha256_file(source)
        target = f"{store}/deploy/{digest}{source.suffix}"
        request = {
            "files": {target: digest},
            "arrived": {},
            "contents": {},
            "cache": f"{store}/digests-deploy.json",
            "incoming": f"{store}/incoming",
            "check": False,
        }
        if connection.call("receive", request)["lacking"]:
            arrived = f"{store}/incoming/{digest}-deploy"
            connection.put(str(source), arrived)
            if connection.call("receive", request | {"arrived": {target: arrived}})["lacking"]:
                raise RemoteError("a file that was copied is missing afterwards; run the same command again")
        return target


def server_urls(variables: Mapping[str, Any]) -> list[str]:
    """Return the addresses at which a host may reach its own Ollama server, from its variables.

    `ollama_url` names the address. Without it, these are the loopback address and then the address in the cluster, at
    `ollama_port`.
    """
    if url := variables.get("ollama_url"):
        return [str(url).rstrip("/")]
    address, port = str(variables.get("cluster_address") or "127.0.0.1"), variables.get("ollama_port") or _PORT
    return list(
        dict.fromkeys(f"http://{f'[{host}]' if ':' in host else host}:{port}" for host in ("127.0.0.1", address))
    )


def compare(trained: Mapping[str, Any], answers: list[str]) -> tuple[int, str]:
    """Return the number of equal answers, and the first difference for a person."""
    for prompt, expected, got in zip(trained["prompts"], trained["answers"], answers, strict=True):
        if expected.strip() != got.strip():
            question = prompt["messages"][-1]["content"] if "messages" in prompt else prompt["prompt"]
            difference = f"{quoted(question)}: {quoted(got, _SHOWN)} instead of {quoted(expected, _SHOWN)}"
            return equal_answers(trained["answers"], answers), printable(difference, 3 * _SHOWN)
    return len(answers), ""


def _shape(config: Mapping[str, Any]) -> list[Any]:
    """Return the shape of a model from its config.json, in the order of the verb `ollama`."""
    heads = config.get("num_attention_heads")
    names = ("num_hidden_layers", "hidden_size", "intermediate_size")
    return [*(config.get(name) for name in names), heads, config.get("num_key_value_heads") or heads]
