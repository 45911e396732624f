"""A real `ollama` from PATH gives the same replies as the fake servers."""

import asyncio
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from netlab import daemon

from trainyard.discovery.engine import discover
from trainyard.discovery.http import BadReply
from trainyard.discovery.networks import Target
from trainyard.discovery.scan import ask
from trainyard.discovery.settings import Settings

OLLAMA = shutil.which("ollama")
TARGET = Target("127.0.11.1", 18434)


@pytest.mark.slow
@pytest.mark.skipif(OLLAMA is None, reason="needs `ollama` on PATH")
def test_a_real_ollama_is_found_with_its_models(tmp_path, monkeypatch):
    monkeypatch.setenv("OLLAMA_HOST", f"{TARGET.address}:{TARGET.port}")
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "models"))
    with daemon(None, [str(OLLAMA), "serve"], tmp_path / "log"):
        wait_until_it_answers()
        settings = Settings(networks=("127.0.11.0/29",), ports=(TARGET.port,), this_machine=False)
        [empty] = discover(settings).machines
        assert empty.local and empty.endpoints[0].servers[0].models == ()

        weights = Path(os.path.realpath(str(OLLAMA))).parents[1] / "tiny.gguf"
        if not weights.exists():
            pytest.skip(f"found, without a model: {weights.name} is missing next to this ollama")
        (tmp_path / "Modelfile").write_text(f"FROM {weights}\n")
        run("create", "tiny", "-f", str(tmp_path / "Modelfile"))
        run("run", "tiny", "hi")
        [machine] = discover(settings).machines
    server = machine.endpoints[0].servers[0]
    assert [(m.name, m.family, m.parameters) for m in server.models] == [("tiny:latest", "llama", "116K")]
    assert len(server.models[0].digest) == 64 and server.models[0].size > 400_000
    assert [m.name for m in server.loaded] == ["tiny:latest"]


def wait_until_it_answers(seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            asyncio.run(ask(TARGET, 2.0))
            return
        except BadReply:
            if time.monotonic() > deadline:
                raise


def run(*arguments: str) -> None:
    subprocess.run([str(OLLAMA), *arguments], check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
