"""Put the result of a run into a repository of the Hugging Face Hub, with a model card."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import yaml
from pydantic.fields import FieldInfo

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.config import RunSpec
from trainer.config.fields import Words, declare
from trainer.config.yaml_text import YamlError, parse_yaml
from trainyard.deploy.run_export import RunExport
from trainyard.deploy.trained_run import TrainedRun, find_run
from trainyard.playbook_options import PlaybookOptions
from trainyard.run.follow.artifacts import ADAPTER_CONFIG, with_base_model
from trainyard.run.launch_options import HUB_ID, PUSH_FORMS, LaunchOptions
from trainyard.wire.connection import Host, HostConnection, RemoteError
from trainyard.wire.copy_files import copy_artifacts
from trainyard.wire.replies import ReplyError
from trainyard.wire.run_errors import RunError

Form = Literal["result", "merged", "gguf"]
_RESULTS = {
    "step": "steps",
    "tokens": "tokens",
    "world_size": "ranks",
    "loss_first": "loss of the first step",
    "loss_last": "loss of the last step",
    "eval_loss": "held-out loss",
}


class PushOptions(PlaybookOptions):
    """What is pushed, and to which repository."""

    run: str = declare("", "name of a finished run", min_length=1)
    push: str = declare("", "repository of the hub, OWNER/NAME", pattern=f"^({HUB_ID})?$", expected="OWNER/NAME")
    push_as: Words = declare(("result",), PUSH_FORMS, min_length=1)
    push_public: bool = declare(False, "make a new repository public")


OPTIONS: dict[str, FieldInfo] = dict(PushOptions.model_fields)


def check_push(options: PushOptions) -> str:
    """Check what can be known before a run starts; return the token. Raises UserError."""
    from huggingface_hub import get_token

    if unknown := [form for form in options.push_as if form not in get_args(Form)]:
        raise UserError(f"push_as: expected some of {', '.join(get_args(Form))}, got {printable(unknown[0])}")
    if not options.push:
        raise UserError("push: name a repository, OWNER/NAME")
    if not (token := get_token()):
        raise UserError("push: there is no token of the hub: set HF_TOKEN to one that may write, or run hf auth login")
    return token


@dataclass(frozen=True)
class FinalPush:
    """Pushes a run that has finished: the launch option `push`."""

    hosts: Sequence[Host]
    connect: Callable[[Host], HostConnection]
    launch: LaunchOptions
    home: Path
    report: Callable[[str], None]

    def options(self, run: str) -> PushOptions:
        """Return what is pushed."""
        return PushOptions(run=run, push=self.launch.push, push_as=self.launch.push_as)

    def __call__(self, run: str) -> list[str]:
        """Push a run; return readable lines. Raises RunError."""
        try:
            done = push_run(self.options(run), self.hosts, self.connect, home=self.home, report=self.report)
        except (RunError, UserError) as error:
            raise RunError(f"run {run} is finished, but not pushed: {error}") from None
        lines: list[str] = done["lines"]
        return lines


def push_run(
    options: PushOptions,
    hosts: Sequence[Host],
    connect: Callable[[Host], HostConnection],
    *,
    home: Path,
    report: Callable[[str], None] = print,
    check: bool = False,
) -> dict[str, Any]:
    """Copy the result of a run from its host, write a model card, and upload both.

    Returns:
        `changed`; `url` of the repository; `lines`, readable text.

    Raises:
        UserError: an option is not valid, no host has the run, or there is no token.
        RunError: a file cannot be copied, or the hub refuses it.
    """
    token = check_push(options)
    by_name = {host.name: host for host in hosts}
    connections = {host.name: connect(host) for host in hosts}
    run = find_run(options.run, by_name, connections, with_base=False)
    if check:
        return {"changed": True, "msg": f"would push {options.run} to {options.push}"}
    try:
        with tempfile.TemporaryDirectory(prefix="trainyard-push-") as folder:
            card = _copy(run, options.push_as, connections[run.host.name], Path(folder), connect, home, report)
            (Path(folder) / "README.md").write_text(card, encoding="utf-8")
            url = _upload(Path(folder), options, token)
    except (RemoteError, ReplyError, YamlError) as error:
        raise RunError(f"push: {run.host.name}: {error}") from None
    except OSError as error:
        raise RunError(f"push: {error.strerror or error}") from None
    return {"changed": True, "url": url, "lines": [f"pushed {options.run} ({', '.join(options.push_as)}) to {url}"]}


def _copy(
    run: TrainedRun,
    forms: Sequence[str],
    connection: HostConnection,
    folder: Path,
    connect: Callable[[Host], HostConnection],
    home: Path,
    report: Callable[[str], None],
) -> str:
    """Copy the files of a run to `folder`, where those of its result are at the top; return the model card."""
    name = PurePosixPath(run.folder).name
    text = connection.call("read_files", {"run_dir": run.folder, "text": ["result.json", "spec.yml", "origin.json"]})[
        "text"
    ]
    result, origin, spec = (parse_yaml(text.get(file) or "{}") for file in ("result.json", "origin.json", "spec.yml"))
    if not all(isinstance(each, dict) for each in (result, origin, spec)):
        raise RemoteError(f"{run.folder} has not the files of a run")
    base = _word(origin.get("model"))
    edits = {ADAPTER_CONFIG: lambda config: with_base_model(base, config)}
    patterns = [pattern for form, pattern in (("result", f"{run.kind}/*"), ("merged", "merged/*")) if form in forms]
    if "gguf" in forms:
        work = home / ".trainyard/deploy"
        work.mkdir(parents=True, exist_ok=True)
        gguf = RunExport(connect, work, report).reply(run, "f16")["gguf"]
        patterns.append(f"deploy/{PurePosixPath(gguf['path']).name}")
    report(f"{run.host.name}: copying {', '.join(forms)} of {name}")
    for pattern in patterns:
        if not copy_artifacts(connection, run.folder, folder, [pattern], edits):
            raise RemoteError(f"{run.folder} has no {pattern.split('/')[0]}: train with merge=true, or change push_as")
    for path in (folder / run.kind).glob("*"):
        path.rename(folder / path.name)
    for path in (folder / "deploy").glob("*.gguf"):
        path.rename(folder / f"{name}.gguf")
    for empty in (run.kind, "deploy"):
        if (folder / empty).is_dir():
            (folder / empty).rmdir()
    return model_card(name, run.kind, base, origin, spec, result)


def model_card(
    name: str, kind: str, base: str, origin: Mapping[str, Any], spec: Mapping[str, Any], result: Mapping[str, Any]
) -> str:
    """Return the text of README.md. What a host wrote is data in it: it makes no heading, link or line of metadata."""
    data = _word(origin.get("dataset"))
    about: dict[str, Any] = {"library_name": "peft" if kind == "adapter" else "transformers", "tags": ["trainyard"]}
    about |= {"base_model": base} if re.fullmatch(HUB_ID, base) else {}
    about |= {"datasets": [data]} if re.fullmatch(HUB_ID, data) else {}
    # Paths of a host say nothing elsewhere, and may say too much.
    shown = {key: spec[key] for key in RunSpec.model_fields if key in spec and key not in ("run", "model", "dataset")}
    shown = {key: value for key, value in shown.items() if "/" not in str(value)}
    rows = [
        f"| {what} | {result[key]:.4g} |" for key, what in _RESULTS.items() if isinstance(result.get(key), int | float)
    ]
    return "\n".join(
        [
            *("---", yaml.safe_dump(about, sort_keys=False).strip(), "---", "", f"# {_word(name)}", ""),
            f"{'An adapter of' if kind == 'adapter' else 'A model that began as'} `{PurePosixPath(base).name}`, trained with "
            f"[trainyard](https://github.com/trainyard/trainyard) on `{data if 'datasets' in about else PurePosixPath(data).name}`.",
            *("", "| result | |", "| --- | --- |", *rows, "", "Run spec:", ""),
            *(f"    {printable(line, 300)}" for line in yaml.safe_dump(shown).splitlines()),
            "",
        ]
    )


def _word(text: object) -> str:
    """Return a name or path of a host without characters that have a meaning in Markdown or YAML."""
    return re.sub(r"[^\w./:@+-]", "_", printable(text or "unknown", 200))


def _upload(folder: Path, options: PushOptions, token: str) -> str:
    """Create the repository if it is missing, and upload the folder in one commit; return its URL. Raises RunError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    hub = HfApi(os.environ.get("HF_ENDPOINT") or None, token)
    try:
        url = hub.create_repo(options.push, private=not options.push_public, exist_ok=True)
        hub.upload_folder(repo_id=options.push, folder_path=folder, commit_message=f"trainyard: {options.run}")
    except OfflineModeIsEnabled:
        raise RunError("push: HF_HUB_OFFLINE is set: unset it") from None
    except HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else "none"
        raise RunError(
            f"push: the hub refuses {options.push} (status {code}): check the name and the rights of the token"
        ) from None
    except ValueError as error:
        raise RunError(f"push: {options.push}: {printable(str(error), 300)}") from None
    return str(url)
