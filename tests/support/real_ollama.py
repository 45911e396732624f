"""Real servers of the `ollama` on PATH and of other versions below .trainyard, each with a store of its own."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from netlab import daemon

from trainer.common.files import sha256_file
from trainer.generation.ollama_client import OllamaClient, OllamaError
from trainer.generation.ollama_models import create_body

START_LIMIT = 60.0  # s
PROGRAM = shutil.which("ollama")
TOP = Path(__file__).resolve().parents[2]
OTHERS = [str(path) for path in sorted(TOP.glob(".trainyard/ollama-*/bin/ollama"))]  # see .ci/run


def weights() -> Path | None:
    """Return the small model beside the program, or None without a program or a model."""
    path = Path(os.path.realpath(str(PROGRAM))).parents[1] / "tiny.gguf"
    return path if PROGRAM and path.exists() else None


def put_model(client: OllamaClient, name: str, path: Path) -> str:
    """Create a model of a GGUF file; return the SHA-256 of the file."""
    digest = sha256_file(path)
    client.put_blob(path, digest)
    client.create(create_body(client.version(), name, f"@sha256:{digest}"))
    return digest


def create(client: OllamaClient, name: str) -> str:
    """Create a model of the small weights; return its digest."""
    path = weights()
    assert path
    put_model(client, name, path)
    return client.digest(name)


@contextlib.contextmanager
def serve(
    places: Sequence[str],
    folder: Path,
    prefix: Callable[[int, list[str]], list[str]] = lambda number, words: words,
    programs: Sequence[str | None] = (PROGRAM,),
) -> Iterator[list[OllamaClient]]:
    """Run servers at these places (ADDRESS:PORT) until the block ends; their stores are folder/models0 and so on.

    Args:
        prefix: makes the command of a server from its number and its words.
        programs: of the servers, in turn.
    """
    with contextlib.ExitStack() as stack:
        clients = []
        for number, place in enumerate(places):
            settings = {"OLLAMA_HOST": place, "OLLAMA_MODELS": str(folder / f"models{number}"), "HOME": str(folder)}
            words = ["env", *(f"{key}={value}" for key, value in settings.items())]
            words += [str(programs[number % len(programs)]), "serve"]
            stack.enter_context(daemon(None, prefix(number, words), folder / f"log{number}"))
            clients.append(OllamaClient(f"http://{place}"))
        for client in clients:
            _wait_for(client)
        yield clients


def _wait_for(client: OllamaClient) -> None:
    deadline = time.monotonic() + START_LIMIT
    while True:
        try:
            client.version()
            return
        except OllamaError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
