"""The client and the pool with a real `ollama` from PATH."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from netlab import daemon

from trainyard.ollama.answers import AnswerFile
from trainyard.ollama.client import OllamaClient, OllamaError
from trainyard.ollama.distill import DistillOptions, Questions, collect_answers
from trainyard.ollama.teachers import Candidate, find_teachers

OLLAMA = shutil.which("ollama")
URLS = [f"http://127.0.11.{n}:18435" for n in (2, 3)]


@pytest.mark.slow
@pytest.mark.skipif(OLLAMA is None, reason="needs `ollama` on PATH")
def test_two_real_servers_teach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both answer, times in the queue are sane, and the answers of one seed are kept once."""
    weights = Path(os.path.realpath(str(OLLAMA))).parents[1] / "tiny.gguf"
    if not weights.exists():
        pytest.skip(f"{weights.name} is missing next to this ollama")
    with contextlib.ExitStack() as stack:
        for number, url in enumerate(URLS):
            monkeypatch.setenv("OLLAMA_HOST", url.removeprefix("http://"))
            monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / f"models{number}"))
            stack.enter_context(daemon(None, [str(OLLAMA), "serve"], tmp_path / f"log{number}"))
        for url in URLS:
            client = OllamaClient(url)
            wait_for(client)
            digest = client.put_blob(weights)
            assert client.has_blob(digest) and not client.has_blob("0" * 64)
            client.create({"model": "tiny", "modelfile": f"FROM @sha256:{digest}"})
            client.copy("tiny", "other:1")
            assert set(client.tags()) == {"tiny:latest", "other:1"}
            assert client.delete("other:1") and not client.delete("other:1")
        with pytest.raises(OllamaError, match="not found") as failed:
            client.chat("absent", [{"role": "user", "content": "x"}])
        assert failed.value.status == 404
        # The digest of a model that a server created covers the path of its folder of models.
        teachers = find_teachers([Candidate(f"node{n}", url, True) for n, url in enumerate(URLS)], "tiny", mixed=True)
        assert len(teachers) == 2
        chats = [[{"role": "user", "content": f"question {n}"}] for n in range(30)]
        questions = Questions(chats, DistillOptions(teacher="tiny", prompts="-", max_tokens=16))
        with AnswerFile(tmp_path / "answers.jsonl") as answers:
            result = collect_answers(questions, teachers, answers, print)
            assert result and not result.failed and sum(result.answers.values()) == len(answers) == 30
            assert all(result.answers.values()) and sum(result.tokens.values()) > 30
            assert collect_answers(questions, teachers, answers, print) is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("teacher")]


def wait_for(client: OllamaClient, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            client.version()
            return
        except OllamaError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
