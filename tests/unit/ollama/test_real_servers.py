"""The client and the pool with a real `ollama` from PATH."""

import threading
from pathlib import Path

import pytest
import real_ollama

from trainer.generation.ollama_client import Cancel, OllamaError
from trainyard.ollama.answers import AnswerFile
from trainyard.ollama.collect import Questions, collect_answers
from trainyard.ollama.distill_options import DistillOptions
from trainyard.ollama.openai_node import openai_teachers
from trainyard.ollama.teacher_nodes import Prompt
from trainyard.ollama.teachers import Candidate, find_teachers

WHY = [{"role": "user", "content": "Why?"}]
URLS = [f"http://127.0.11.{n}:18435" for n in (2, 3)]


@pytest.mark.slow
@pytest.mark.skipif(real_ollama.PROGRAM is None, reason="needs `ollama` on PATH")
def test_two_real_servers_teach(tmp_path: Path) -> None:
    """Both answer, times in the queue are sane, and the answers of one seed are kept once."""
    weights = real_ollama.weights()
    if weights is None:
        pytest.skip("tiny.gguf is missing next to this ollama")
    with real_ollama.serve([url.removeprefix("http://") for url in URLS], tmp_path) as clients:
        for client in clients:
            digest = real_ollama.put_model(client, "tiny", weights)
            assert client.has_blob(digest) and not client.has_blob("0" * 64)
            client.copy("tiny", "other:1")
            assert set(client.tags()) == {"tiny:latest", "other:1"}
            assert client.delete("other:1") and not client.delete("other:1")
        with pytest.raises(OllamaError, match="not found") as failed:
            client.chat("absent", [{"role": "user", "content": "x"}])
        assert failed.value.status == 404
        # The digest of a model that a server created covers the path of its folder of models; a server takes any spelling.
        teachers = find_teachers([Candidate(f"node{n}", url, True) for n, url in enumerate(URLS)], "library/Tiny")
        assert len({teacher.digest for teacher in teachers}) == 2
        for node in (teachers[0], openai_teachers([f"{URLS[0]}/v1"], "tiny:latest", 60.0)[0]):
            long = [{"role": "user", "content": "The secret word is ZEBRA. " + "word and more text " * 700}]
            read = [node.ask(Prompt(chat, {"num_predict": 4}, room=8192), Cancel()) for chat in (long, WHY)]
            assert [answer.truncated for answer in read] == [True, False], node
        chats = [[{"role": "user", "content": f"question {n}"}] for n in range(30)]
        questions = Questions(chats, DistillOptions(teacher="tiny", prompts="-", max_tokens=16))
        with AnswerFile(tmp_path / "answers.jsonl") as answers:
            result = collect_answers(questions, teachers, answers, print)
            assert result and not result.failed and sum(result.answers.values()) == len(answers) == 30
            assert all(result.answers.values()) and sum(result.tokens.values()) > 30
            assert collect_answers(questions, teachers, answers, print) is None
        exact = {"temperature": 0.0, "num_predict": 12, "seed": 1}
        [node, other] = openai_teachers([f"{url}/v1" for url in URLS], "tiny:latest", 60.0)
        for chat in chats[:3]:
            native, openai = (each.ask(Prompt(chat, exact), Cancel()) for each in (teachers[0], node))
            assert (openai.text, openai.finished, openai.tokens) == (native.text, native.finished, native.tokens)
        with AnswerFile(tmp_path / "openai.jsonl") as answers:
            assert collect_answers(questions, [node, other], answers, print) and len(answers) == 30
            assert collect_answers(questions, [other], answers, print) is None, "one model on two servers"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("teacher")]
