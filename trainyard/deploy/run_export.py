"""What the host of a run computes for a deployment: the greedy answers of the run, and its merged model as GGUF."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.common.files import sha256_file
from trainyard.deploy.converter import SHA256 as CONVERTER
from trainyard.deploy.converter import converter_archive
from trainyard.deploy.trained_run import TrainedRun
from trainyard.wire.connection import FanOut, Host, HostConnection, RemoteError
from trainyard.wire.trainer_archive import trainer_archive

EXPORT_LIMIT = 3600.0  # s for the host to convert and to answer


class RunExport:
    """Asks the host of a run for its answers and for its model, each once.

    `connect`: makes a connection to a host; called in the main thread. `work`: folder on the controller for files.
    `report`: receives a line when a step starts.
    """

    def __init__(self, connect: Callable[[Host], HostConnection], work: Path, report: Callable[[str], None]) -> None:
        self._connect, self._work, self._report = connect, work, report
        self._started: dict[str, FanOut] = {}  # by type of weights; "" for the answers alone

    def start(self, run: TrainedRun, quantize: str) -> None:
        """Start trainer.launch.gguf_export on the run's host, over a separate connection: its imports may take seconds.

        Args:
            quantize: type of the weights of the merged model; empty for the answers alone.
        """
        what = "convert the model and answer" if quantize else "answer"
        self._report(f"{run.host.name}: {what} {Path(run.folder).name}")
        connection, archive = self._connect(run.host), trainer_archive(self._work.parent)

        def ask(trainer: str, converter: str = "") -> dict[str, Any]:
            values = {"run_dir": run.folder, "weights": run.weights, "quantize": quantize}
            values |= {"converter": converter, "converter_id": CONVERTER}
            request = {
                "trainer": trainer,
                "digest": sha256_file(archive),
                "run_dir": run.folder,
                "reads": [],
                "backend": run.host.backend,
                "limit": EXPORT_LIMIT,
                "input": values,
            }
            return connection.call("gguf_export", request)

        def work() -> dict[str, Any]:
            trainer = _put(connection, archive)
            reply = ask(trainer)
            if reply["needs_converter"]:
                reply = ask(trainer, _put(connection, converter_archive(self._work)))
            return reply

        self._started[quantize] = FanOut({run.host.name: work})

    def reply(self, run: TrainedRun, quantize: str = "") -> dict[str, Any]:
        """Return the reply of trainer.launch.gguf_export on the run's host. Raises RemoteError."""
        if quantize not in self._started:
            self.start(run, quantize)
        done, name = self._started[quantize].wait(EXPORT_LIMIT), run.host.name
        if name in done.errors:
            raise RemoteError(f"{name}: {done.errors[name]}")
        return done.answers[name]

    def answers(self, run: TrainedRun) -> dict[str, Any]:
        """Return the prompts of the run and its answers. Raises RemoteError."""
        answers: dict[str, Any] | None = self.reply(run, next(iter(self._started), ""))["answers"]
        if answers is None:
            raise RemoteError(f"{run.host.name} has not computed the answers")
        if not answers["prompts"] or len(answers["prompts"]) != len(answers["answers"]):
            raise RemoteError("the run's dataset has no prompt to compare answers with")
        return answers


def _put(connection: HostConnection, source: Path) -> str:
    """Copy a file to the store of a host unless the store has it; return its path on the host. Raises RemoteError."""
    store, digest = f"{connection.host.data_dir}/store", sha256_file(source)
    target = f"{store}/deploy/{digest}{source.suffix}"
    request = {
        "files": {target: digest},
        "arrived": {},
        "cache": f"{store}/digests-deploy.json",
        "incoming": f"{store}/incoming",
        "check": False,
    }
    if connection.call("receive", request)["lacking"]:
        arrived = f"{store}/incoming/{digest}-{secrets.token_hex(8)}"
        connection.put(str(source), arrived)
        if connection.call("receive", request | {"arrived": {target: arrived}})["lacking"]:
            raise RemoteError("a file that was copied is missing afterwards; run the same command again")
    return target
