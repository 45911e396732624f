"""Put a trained model into the Ollama server of every host, and prove that each copy answers as the trained model.

The head of the run supplies greedy answers and, for a merged model, the GGUF file. Every node creates the model under a
temporary name and answers the same prompts. Only a node that answers as trained gets the final name.
"""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.common.errors import UserError
from trainer.common.files import sha256_file
from trainer.common.formats import mib
from trainer.generation.ollama_models import DEFAULTS, GREEDY
from trainer.gguf.metadata import adds_bos
from trainyard.deploy.adapter_base import base_misfit, run_misfit, wanted_base
from trainyard.deploy.deploy_options import DeployOptions
from trainyard.deploy.model_settings import ModelSettings, SettingsReader
from trainyard.deploy.proof import WRITTEN, compare, least, unsupported
from trainyard.deploy.run_export import RunExport
from trainyard.deploy.trained_run import TrainedRun, copy_files, find_run, read_tokens
from trainyard.ollama.servers import shared_servers
from trainyard.remote.ollama import BASES_LIMIT
from trainyard.run.types import Report
from trainyard.wire.connection import FanOut, Host, HostConnection, RemoteError
from trainyard.wire.copy_files import fetch_file, lent_files, split_run
from trainyard.wire.replies import ReplyError, checked_reply
from trainyard.wire.run_errors import RunError, first_of

STATE_LIMIT = 60.0  # s for a host to describe its server
CREATE_LIMIT = 7200.0  # s for a node to receive the model and to answer


@dataclass
class Artifact:
    """A GGUF file on the controller, and how a node uses it."""

    file: Path
    sha256: str
    base: str  # the base of an adapter on the node, or empty
    kind: str  # type of the weights; of an adapter f16
    settings: ModelSettings
    key: str  # equal for equal deployments

    @property
    def quantize(self) -> str:
        """The type that the server makes of the file; empty if it takes the file as it is."""
        return "" if self.kind in WRITTEN else self.kind

    @property
    def how(self) -> str:
        """What it is, for a message."""
        return f"adapter on {self.base}" if self.base else f"merged, {self.kind}"


@dataclass
class Choice:
    """The artifacts for a node, which gets the first one that answers as trained."""

    artifacts: list[Artifact]
    refused: list[str] = field(default_factory=list)  # keys of adapters that were tried
    searched: bool = False  # the node has found the bases of the artifacts


class Deployment:
    """Deploys one run to the Ollama servers of hosts, or removes it.

    Args:
        hosts: the nodes; one of them has the run.
        connect: makes a connection to a host; called in the main thread.
        urls: for each host the addresses at which its own server may be reached from it, the preferred one first.
        work: folder on the controller for files.
        report: receives lines while a step runs.
        check: change nothing; report what would change.
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
        self._export = RunExport(connect, self.work, report)
        self._written = options.deploy_quantize if options.deploy_quantize in WRITTEN else "f16"  # type in the file
        self._local: Path  # set by deploy
        self._settings: SettingsReader
        self._has_adapter = False  # whether this call has written the adapter as GGUF
        self._reasons: dict[str, list[str]] = {}  # why nodes get the merged model, with their names
        self._shared: dict[str, str] = {}  # host: the host whose server it has too
        self._searches = options.deploy_as != "merged" and not options.deploy_base

    def deploy(self) -> dict[str, Any]:
        """Deploy the run; return `changed` and `lines`.

        Raises RunError: a node did not get the model; the others have it; UserError: the run cannot be deployed.
        """
        trained = find_run(self.options.run, self.hosts, self.connections, self.options.deploy_as != "merged")
        misfit = self._run_misfit(trained)
        if misfit or self.options.deploy_as == "merged":  # only the merged model fits
            self._searches = False
            self._export.start(trained, self._written)
        self._local = copy_files(trained, self.connections[trained.host.name], self.work / self.options.run)
        self._settings = SettingsReader(trained, self._local, self.options)
        tokens = read_tokens(self._local)
        states, errors = self._states(trained, tokens)
        misfits = self._misfits(trained, states, tokens, misfit)
        choices: dict[str, Choice] = {}
        for name, why in misfits.items():
            try:
                choices[name] = self._choice(name, trained, states[name], why)
            except (RemoteError, UserError) as error:
                errors[name] = str(error)
        wanted = {name: c for name, c in choices.items() if not self._is_deployed(states[name], c.artifacts)}
        lines = self._notes(choices)
        lines += [f"{name}: {self.options.deploy_name} is deployed" for name in choices if name not in wanted]
        lines += [f"{name}: has the same server as {keeper}" for name, keeper in self._shared.items()]
        if self.check:
            lines += [
                f"{name}: would deploy {self.options.deploy_name} ({choice.artifacts[0].how})"
                for name, choice in wanted.items()
            ]
        elif wanted:
            deployed, failed = self._install(trained, wanted)
            lines += deployed
            errors |= failed
        _raise_first(errors, lines)
        return {"changed": bool(wanted), "lines": lines, "hosts": {name: name in wanted for name in choices}}

    def remove(self) -> dict[str, Any]:
        """Remove the deployed model from every node; return `changed` and `lines`. Raises RunError."""
        states, errors = self._ask(
            "state", {name: {"base": "", "like": None, "tokens": 0} for name in self.hosts}, STATE_LIMIT
        )
        shared = shared_servers(states, self.urls)
        asked = {name: {"check": self.check} for name in self.hosts if name in states and name not in shared}
        replies, failed = self._ask("remove", asked, STATE_LIMIT)
        errors |= failed
        lines = [f"{name}: has the same server as {keeper}" for name, keeper in shared.items()]
        for name, reply in replies.items():
            text = "removed" if reply.get("changed") else "is not deployed"
            text = "is not from trainyard: kept" if reply.get("foreign") else text
            lines.append(
                f"{name}: {self.options.deploy_name} {'would be ' if self.check and text == 'removed' else ''}{text}"
            )
        _raise_first(errors, lines)
        return {"changed": any(reply.get("changed") for reply in replies.values()), "lines": lines}

    # The nodes ----------------------------------------------------------------------------------------------------------

    def _request(self, name: str, step: str) -> dict[str, Any]:
        records = f"{self.hosts[name].data_dir}/deployed"
        return {"step": step, "urls": self.urls[name], "name": self.options.deploy_name, "records": records}

    def _ask(
        self, step: str, more: Mapping[str, dict[str, Any]], limit: float
    ) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Ask the hosts in `more` at once; return their replies, in this order, and errors by name."""
        calls = {name: functools.partial(self._call, name, step, extra) for name, extra in more.items()}
        done = FanOut(calls).wait(limit)
        return {name: done.answers[name] for name in more if name in done.answers}, done.errors

    def _call(self, name: str, step: str, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply of a node to a step of the verb `ollama`. Raises RemoteError."""
        reply = self.connections[name].call("ollama", self._request(name, step) | dict(more))
        try:
            return checked_reply(f"ollama_{step}", reply)
        except ReplyError as error:
            raise RemoteError(str(error)) from None

    def _states(self, run: TrainedRun, tokens: list[str]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Return the states of the servers, and why a node has none or must not be changed, by name."""
        base = self.options.deploy_base if self.options.deploy_as != "merged" else ""
        like = wanted_base(run, tokens) if self._searches else None
        request = {"base": base, "like": like, "tokens": len(tokens)}
        states, errors = self._ask("state", {name: request for name in self.hosts}, STATE_LIMIT)  # noqa: C420
        self._shared = shared_servers(states, self.urls)
        states = {name: state for name, state in states.items() if name not in self._shared}
        for name, state in states.items():
            if why := self._foreign(state):
                errors[name] = why
        return {name: states[name] for name in self.hosts if name in states and name not in errors}, errors

    def _foreign(self, state: dict[str, Any]) -> str:
        """Return why a model of this name is not replaced: trainyard has not deployed it. Empty if it may be."""
        record = state["record"]
        if self.options.deploy_replace or not state["digest"] or (record and record["digest"] == state["digest"]):
            return ""
        return (
            f"it has a model {self.options.deploy_name} that trainyard has not deployed: choose another deploy_name, or set "
            "deploy_replace=true"
        )

    @staticmethod
    def _is_deployed(state: dict[str, Any], artifacts: list[Artifact]) -> bool:
        record = state["record"]
        same = record and state["digest"] and state["digest"] == record["digest"]
        return bool(same and record["key"] in [artifact.key for artifact in artifacts])

    def _run_misfit(self, run: TrainedRun) -> str:
        """Return why the adapter of the run is not deployed, whatever the nodes have. Raises UserError."""
        if self.options.deploy_as == "merged":
            return ""
        why = run_misfit(run)
        if why and self.options.deploy_as == "adapter":
            raise UserError(f"deploy_as=adapter: {why}; set deploy_as=merged")
        return why

    def _misfits(
        self, run: TrainedRun, states: Mapping[str, dict[str, Any]], tokens: list[str], misfit: str
    ) -> dict[str, str]:
        """Return for each node why it gets the merged model; empty where it gets the adapter.

        A base that is searched for must be on every node. Raises UserError.
        """
        if self.options.deploy_as == "merged":
            return dict.fromkeys(states, "deploy_as=merged")
        if misfit:
            return dict.fromkeys(states, misfit)
        found = {name: base_misfit(run, state, tokens, self.options.deploy_base) for name, state in states.items()}
        if not self._searches or not any(found.values()):
            return found
        lacking = "; ".join(f"{name}: {why}" for name, why in found.items() if why)
        if self.options.deploy_as == "adapter":
            raise UserError(f"deploy_as=adapter: {lacking}: create the base model there, or set deploy_as=merged")
        return dict.fromkeys(states, lacking)

    def _choice(self, name: str, run: TrainedRun, state: dict[str, Any], misfit: str) -> Choice:
        """Return what a node may get. Raises UserError, RemoteError."""
        if not misfit:
            from trainer.gguf.plain_adapter import AdapterError

            try:
                return self._adapters(name, run, state)
            except AdapterError as error:
                misfit = str(error)
        if self.options.deploy_as == "adapter":
            raise UserError(f"deploy_as=adapter: {misfit}")
        if self.options.deploy_as == "auto" and run.kind == "adapter":
            self._reasons.setdefault(misfit, []).append(name)
        if why := unsupported(self.options.deploy_quantize, state["version"]):
            raise UserError(why)
        return Choice([self._merged(run)])

    def _adapters(self, name: str, run: TrainedRun, state: dict[str, Any]) -> Choice:
        """Return the adapter on each base of a node, without those that an earlier deployment has tried."""
        artifacts = [self._adapter(run, base) for base in state["bases"]]
        if not self._searches or self.options.deploy_as == "adapter":
            return Choice(artifacts, searched=self._searches)
        earlier = state["record"]["refused"] if state["record"] else []
        refused = [artifact.key for artifact in artifacts if artifact.key in earlier]
        left = [artifact for artifact in artifacts if artifact.key not in refused]
        if not left:
            why = "an earlier deployment tried the adapter on every base that was found, and its answers were not as trained"
            self._reasons.setdefault(why, []).append(name)
        return Choice(left or [self._merged(run)], refused, searched=True)

    def _adapter(self, run: TrainedRun, base: dict[str, Any]) -> Artifact:
        """Return the adapter of the run on a base. Raises AdapterError."""
        from trainer.gguf.gguf_adapter import write_adapter

        file = self.work / self.options.run / "adapter.gguf"
        if not self._has_adapter:
            write_adapter(self._local, run.base, file)
            self._has_adapter = True
        fields = {
            name: value == "True" if value in ("True", "False") else value for name, value in base["fields"].items()
        }
        digest = sha256_file(file)
        settings = self._settings.read(self._export.answers(run), adds_bos(fields), base["context"])
        reset = tuple(name for name in base["parameters"] if name in DEFAULTS)
        return self._complete(file, digest, replace(settings, reset=reset), base)

    def _merged(self, run: TrainedRun) -> Artifact:
        """Return the merged model; its GGUF file is on the controller only if a node needs it."""
        gguf = self._export.reply(run, self._written)["gguf"]
        if gguf is None:
            raise RemoteError(f"{run.host.name} has not converted the model")
        file = self.work / f"{gguf['sha256']}.gguf"
        settings = self._settings.read(self._export.answers(run), gguf["adds_bos"], gguf["context"])
        return self._complete(file, gguf["sha256"], settings)

    def _complete(
        self, file: Path, digest: str, settings: ModelSettings, base: Mapping[str, Any] | None = None
    ) -> Artifact:
        name, base_digest = (base["name"], base["digest"]) if base else ("", "")
        kind = "f16" if base else self.options.deploy_quantize
        # The key of a deployment without parameters to reset is that of former versions.
        named = {key: value for key, value in asdict(settings).items() if key != "reset" or value}
        about = [digest, name, base_digest, kind, named | {"notes": []}]
        return Artifact(file, digest, name, kind, settings, hashlib.sha256(json.dumps(about).encode()).hexdigest())

    def _notes(self, choices: Mapping[str, Choice]) -> list[str]:
        artifacts = [artifact for choice in choices.values() for artifact in choice.artifacts]
        notes = [f"note: {note}" for artifact in artifacts for note in artifact.settings.notes]
        for why, names in self._reasons.items():
            notes.append(f"merged model for {'every host' if len(names) == len(choices) else ', '.join(names)}: {why}")
        return list(dict.fromkeys(notes))

    # Installation -------------------------------------------------------------------------------------------------------

    def _install(self, run: TrainedRun, wanted: Mapping[str, Choice]) -> tuple[list[str], dict[str, str]]:
        """Create the model on the nodes at once; return lines for them, and the reason why a node has no model.

        A node whose model does not answer as trained gets its next artifact, if it has searched for bases.
        """
        answers, left = self._export.answers(run), dict(wanted)
        merged: dict[str, Artifact] = {}
        lines: list[str] = []
        errors: dict[str, str] = {}
        try:
            while left:
                for name, artifact in [(name, choice.artifacts[0]) for name, choice in left.items()]:
                    if not artifact.base:
                        merged[artifact.sha256] = artifact
                        try:
                            self._fetch(run, artifact)
                        except (RemoteError, UserError) as error:
                            errors[name] = str(error)
                            del left[name]
                calls = {name: functools.partial(self._create, name, choice, answers) for name, choice in left.items()}
                done = FanOut(calls).wait(CREATE_LIMIT + self.options.deploy_answer_limit)
                errors |= done.errors
                answered = {name: choice for name, choice in left.items() if name in done.answers}
                left = self._judge(run, answered, done.answers, lines, errors)
        finally:
            for artifact in merged.values():  # the run's host and the servers have it
                artifact.file.unlink(missing_ok=True)
        return lines, errors

    def _judge(
        self,
        run: TrainedRun,
        choices: Mapping[str, Choice],
        replies: Mapping[str, dict[str, Any]],
        lines: list[str],
        errors: dict[str, str],
    ) -> dict[str, Choice]:
        """Add the results of first artifacts to `lines` and `errors`; return the next ones of nodes that refused theirs."""
        following, answers = {}, self._export.answers(run)
        for name, choice in choices.items():
            how, text = choice.artifacts[0].how, self._refusal(choice.artifacts[0], replies[name], answers)
            if not text:
                equal, count = compare(answers, replies[name]["answers"])[0], len(answers["prompts"])
                limit = f", at least {least(choice.artifacts[0].kind, count)} needed" if equal < count else ""
                what = f"{equal} of {count} answers as trained{limit}"
                lines.append(f"{name}: deployed {self.options.deploy_name} ({how}): {what}")
                continue
            try:
                after = self._next_choice(run, choice)
            except (RemoteError, UserError) as error:
                errors[name] = f"{how} is not used, and the merged model is missing: {error}"
                continue
            if after:
                lines.append(f"{name}: {how} is not used: {text}")
                following[name] = after
            else:
                searched = choice.searched and choice.artifacts[0].base
                tried = f" (bases tried: {len(choice.refused) + 1}, at most {BASES_LIMIT})" if searched else ""
                errors[name] = text + tried
        return following

    def _refusal(self, artifact: Artifact, reply: Mapping[str, Any], answers: Mapping[str, Any]) -> str:
        """Return why a node did not accept the model that it created; empty if it did."""
        if "error" in reply:
            return f"Ollama: {reply['error']}"
        count, (equal, difference) = len(answers["prompts"]), compare(answers, reply["answers"])
        limit = least(artifact.kind, count)
        if reply["accepted"] and equal >= limit:
            return ""
        return (
            f"the created model gives {equal} of {count} answers as the trained one does, and at least {limit} are needed "
            f"({artifact.how}): it is removed, and "
            f"{self.options.deploy_name} stays as it was; {difference}"
        )

    def _next_choice(self, run: TrainedRun, choice: Choice) -> Choice | None:
        """Return the next artifact for a node after the first one has failed: the next base that it has found, then the
        merged model.

        Raises UserError, RemoteError.
        """
        failed, rest = choice.artifacts[0], choice.artifacts[1:]
        if not choice.searched or not failed.base:
            return None
        if not rest and self.options.deploy_as == "auto":
            rest = [self._merged(run)]
        return Choice(rest, [*choice.refused, failed.key], searched=True) if rest else None

    def _fetch(self, run: TrainedRun, artifact: Artifact) -> None:
        """Copy the merged model from the run's host, unless the controller has it. Raises RemoteError, UserError."""
        if artifact.file.exists():
            return
        gguf = self._export.reply(run, self._written)["gguf"]
        self.report(f"{run.host.name}: copying {mib(gguf['bytes'])} MiB to the controller")
        root, name = split_run(run.folder)
        exported = f"{name}/deploy/{PurePosixPath(gguf['path']).name}"  # see trainer.launch.gguf_export
        connection = self.connections[run.host.name]
        try:
            with tempfile.TemporaryDirectory(dir=self.work) as aside, lent_files(connection, root, [exported]) as lent:
                arrived = Path(aside) / "model.gguf"
                fetch_file(connection, lent[exported], arrived, gguf["bytes"])
                if sha256_file(arrived) != artifact.sha256:
                    raise RemoteError(f"{run.host.name}: the merged model arrived damaged: run the same command again")
                arrived.replace(artifact.file)
        except OSError as error:
            raise UserError(f"cannot write {artifact.file}: {error.strerror}: free disk space") from None

    def _create(self, name: str, choice: Choice, answers: dict[str, Any]) -> dict[str, Any]:
        """Copy the file to a node, which creates the model and answers; return its reply. Raises RemoteError."""
        connection, artifact = self.connections[name], choice.artifacts[0]
        settings = artifact.settings
        incoming = f"{connection.host.data_dir}/store/incoming"
        prompts = [
            prompt if "messages" in prompt else {"prompt": settings.bos + prompt["prompt"]}
            for prompt in answers["prompts"]
        ]
        context = {"num_ctx": settings.context} if settings.context else {}
        options = GREEDY | {"stop": list(settings.stop), "num_predict": answers["max_tokens"]} | context
        request = {
            "file": f"{incoming}/{artifact.sha256}-{secrets.token_hex(4)}",
            "sha256": artifact.sha256,
            "base": artifact.base,
            "quantize": artifact.quantize,
            "template": settings.template,
            "parameters": settings.parameters,
            "system": settings.system,
            "prompts": prompts,
            "options": options,
            "answer_limit": self.options.deploy_answer_limit,
            "expected": answers["answers"],
            "least": least(artifact.kind, len(prompts)),
            "key": artifact.key,
            "refused": choice.refused,
        }
        if self._call(name, "prepare", {"sha256": artifact.sha256, "incoming": incoming})["lacking"]:
            connection.put(str(artifact.file), str(request["file"]))
        reply = self._call(name, "create", request)
        if "error" not in reply and len(reply["answers"]) != len(prompts):
            raise RemoteError("sent an incomplete reply to create")
        return reply


def _raise_first(errors: Mapping[str, str], lines: list[str]) -> None:
    """Raise RunError if hosts have errors, with the lines for the user."""
    if errors:
        message, others = first_of(errors)
        raise RunError(message, lines=[*others, *lines], troubles=errors)
