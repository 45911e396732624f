"""Put the result of a run into a repository of the Hugging Face Hub, with a model card."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import yaml
from pydantic.fields import FieldInfo

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.config.fields import Words, declare
from trainer.config.yaml_text import YamlError, parse_yaml
from trainer.data.dataset_files import HUB_ID
from trainyard.deploy.run_export import RunExport
from trainyard.deploy.trained_run import TrainedRun, find_run
from trainyard.playbook_options import PlaybookOptions
from trainyard.run.follow.artifacts import ADAPTER_CONFIG, with_base_model
from trainyard.run.launch_options import HUB_NAME, PUSH_FORMS, LaunchOptions
from trainyard.wire.connection import Host, HostConnection, RemoteError
from trainyard.wire.copy_files import copy_artifacts
from trainyard.wire.replies import ReplyError
from trainyard.wire.run_errors import RunError

Form = Literal["result", "merged", "gguf"]


class PushOptions(PlaybookOptions):
    """What is pushed, and to which repository."""

    run: str = declare("", "name of a finished run", min_length=1)
    push: str = declare("", "repository of the hub, OWNER/NAME", pattern=HUB_NAME, expected="OWNER/NAME")
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

    Returns `changed`; `url` of the repository; `lines`, readable text. Raises UserError: an option is not valid, no
    host has the run, or there is no token; RunError: a file cannot be copied, or the hub refuses it.
    """
    token = check_push(options)
    by_name = {host.name: host for host in hosts}
    connections = {host.name: connect(host) for host in hosts}
    run = find_run(options.run, by_name, connections, with_base=False)
    if check:
        return {"changed": True, "msg": f"would push {options.run} to {options.push}"}
    try:
        with tempfile.TemporaryDirectory(prefix="trainyard-push-") as folder:
            _copy(run, options.push_as, connections[run.host.name], Path(folder), connect, home, report)
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
) -> None:
    """Copy the files of a run to `folder`, where those of its result are at the top, and its model card."""
    name = PurePosixPath(run.folder).name
    text = connection.call("read_files", {"run_dir": run.folder, "text": ["origin.json"]})["text"]
    origin = parse_yaml(text.get("origin.json") or "{}")
    base = str(origin.get("model", "") if isinstance(origin, dict) else "")
    base = base if HUB_ID.fullmatch(base) else PurePosixPath(base).name
    edits = {ADAPTER_CONFIG: lambda config: with_base_model(base, config)}
    patterns = [f"{run.kind}/*" if "result" in forms else f"{run.kind}/README.md"]
    patterns += ["merged/*"] if "merged" in forms else []
    if "gguf" in forms:
        work = home / ".trainyard/deploy"
        work.mkdir(parents=True, exist_ok=True)
        gguf = RunExport(connect, work, report).reply(run, "f16")["gguf"]
        patterns.append(f"deploy/{PurePosixPath(gguf['path']).name}")
    report(f"{run.host.name}: copying {', '.join(forms)} of {name}")
    for pattern in patterns:
        if not copy_artifacts(connection, run.folder, folder, [pattern], edits) and not pattern.endswith(".md"):
            raise RemoteError(f"{run.folder} has no {pattern.split('/')[0]}: train with merge=true, or change push_as")
    for path in (folder / run.kind).glob("*"):
        path.rename(folder / path.name)
    for path in (folder / "deploy").glob("*.gguf"):
        path.rename(folder / f"{name}.gguf")
    for empty in (run.kind, "deploy"):
        if (folder / empty).is_dir():
            (folder / empty).rmdir()
    if not (folder / "README.md").exists():  # a merged run has none
        front = {"library_name": "peft" if run.kind == "adapter" else "transformers", "tags": ["trainyard"]}
        (folder / "README.md").write_text(f"---\n{yaml.safe_dump(front)}---\n\n# {name}\n", encoding="utf-8")


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
        what = f"the hub refuses {options.push} (status {code})"
        raise RunError(f"push: {what}: check the name and the rights of the token") from None
    except Exception as error:  # of the HTTP library of huggingface_hub, or a refused name
        raise RunError(f"push: {options.push}: {printable(error, 300)}") from None
    return str(url)
