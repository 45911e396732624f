"""What rollout servers are asked, and what they may answer: vLLM's API, and an Ollama that cannot write completions of a run."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_teacher import Teacher, serve
from run_hosts import free_port
from threaded_server import QuietHandler

from trainer.generation.ollama_client import Answer, Cancel, OllamaClient, OllamaError
from trainer.generation.rollout_servers import Adapter, Base, OllamaServer, RolloutRequest, Sampling, VLLMServer

SAMPLING = Sampling("run-v", 0.7, 5, 64, 30.0)


class FakeVLLM:
    """The part of vLLM's server that a rollout needs. `reply` changes the answer of /completions."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.loaded: list[str] = []
        self.reply: dict[str, Any] = {
            "choices": [{"text": " 4", "finish_reason": "stop", "token_ids": [7, 2]}],
            "usage": {"completion_tokens": 2},
        }
        fake = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                body = self.asked()
                fake.asked.append((self.path, body))
                self.reply(*fake.answer(self.path, body))

            def do_GET(self) -> None:
                self.reply(200, json.dumps({"data": []}))

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        name = body.get("lora_name") or body.get("model")
        if path == "/v1/load_lora_adapter":
            if not Path(body["lora_path"], "adapter_config.json").exists():
                return 400, json.dumps({"error": {"message": f"No adapter found for {body['lora_path']}", "code": 400}})
            if name in self.loaded:
                return 400, json.dumps({"error": f"The lora adapter '{name}' has already been loaded."})
            self.loaded.append(str(name))
            return 200, f"Success: LoRA adapter '{name}' added successfully."
        if name not in self.loaded:
            return 404, json.dumps({"error": f"The model `{name}` does not exist."})
        if path == "/v1/unload_lora_adapter":
            self.loaded.remove(str(name))
            return 200, "Success"
        return 200, json.dumps(self.reply)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def vllm() -> Iterator[FakeVLLM]:
    fake = FakeVLLM()
    yield fake
    fake.close()


def adapter(folder: Path, version: int) -> Adapter:
    (folder / f"run-v{version}").mkdir()
    (folder / f"run-v{version}" / "adapter_config.json").write_text("{}")
    return Adapter(version, folder / f"run-v{version}", folder, "")


def test_a_vllm_server_loads_each_adapter_from_the_shared_folder(vllm: FakeVLLM, tmp_path: Path) -> None:
    newest = [adapter(tmp_path, 0)]
    server = VLLMServer("s", vllm.url, SAMPLING, lambda: newest[0], str(tmp_path))
    prompt = RolloutRequest(3, 1, [5, 6], "a b", 9)
    server.prepare(Base("", []), prompt)
    assert vllm.asked[1] == ("/v1/load_lora_adapter", {"lora_name": "run-v0", "lora_path": f"{tmp_path}/run-v0"})
    newest[0] = adapter(tmp_path, 1)
    answer = server.ask(prompt, Cancel())
    assert (answer.text, answer.finished, prompt.ids, prompt.version) == (" 4", "stop", [7, 2], 1)
    path, body = vllm.asked[-1]
    assert path == "/v1/completions" and body["model"] == "run-v1" and body["prompt"] == [5, 6]
    assert (body["temperature"], body["top_p"], body["top_k"], body["max_tokens"], body["seed"]) == (0.7, 1.0, -1, 5, 9)
    penalties = [body[f"{name}_penalty"] for name in ("repetition", "presence", "frequency")]
    assert penalties == [1.0, 0.0, 0.0] and body["min_p"] == 0.0  # else those of the model's generation_config.json
    newest[0] = adapter(tmp_path, 2)
    server.ask(prompt, Cancel())
    assert vllm.loaded == ["run-v1", "run-v2"]
    server.probe()
    server.close()
    assert vllm.loaded == []


@pytest.mark.parametrize(
    "reply",
    [{}, {"choices": []}, {"choices": [None]}, {"choices": [{"text": 5}]}, {"choices": {"a": 1}}, {"choices": [{"text": None}]}],
)  # fmt: skip
def test_a_reply_without_a_completion_is_an_error(vllm: FakeVLLM, tmp_path: Path, reply: dict[str, Any]) -> None:
    vllm.reply = reply
    server = VLLMServer("s", vllm.url, SAMPLING, lambda: first, str(tmp_path))
    first = adapter(tmp_path, 0)
    with pytest.raises(OllamaError, match="the reply of /completions has no text"):
        server.ask(RolloutRequest(0, 0, [5], "a", 1), Cancel())


def test_a_run_that_was_killed_replaces_its_adapters(vllm: FakeVLLM, tmp_path: Path) -> None:
    first = adapter(tmp_path, 0)
    for _ in range(2):
        server = VLLMServer("s", vllm.url, SAMPLING, lambda: first, str(tmp_path))
        server.prepare(Base("", []), RolloutRequest(0, 0, [5], "a", 1))
    loads = [path for path, _ in vllm.asked if path == "/v1/load_lora_adapter"]
    assert len(loads) == 2 and vllm.loaded == ["run-v0"]


def test_a_server_that_has_started_anew_gets_the_adapter_again(vllm: FakeVLLM, tmp_path: Path) -> None:
    """An error 404 would leave it out for the rest of the run."""
    newest, prompt = [adapter(tmp_path, 0)], RolloutRequest(0, 0, [5], "a", 1)
    server = VLLMServer("s", vllm.url, SAMPLING, lambda: newest[0], str(tmp_path))
    server.ask(prompt, Cancel())
    vllm.loaded.clear()
    with pytest.raises(OllamaError, match="does not exist") as found:
        server.ask(prompt, Cancel())
    assert found.value.status == 500
    assert server.ask(prompt, Cancel()).text == " 4" and vllm.loaded == ["run-v0"]
    for version in (1, 2):  # the third one replaces the first one, which the server no longer has
        vllm.loaded.clear()
        newest[0] = adapter(tmp_path, version)
        assert server.ask(prompt, Cancel()).text == " 4"


def test_a_folder_that_the_server_does_not_see_is_named(vllm: FakeVLLM, tmp_path: Path) -> None:
    server = VLLMServer("s", vllm.url, SAMPLING, lambda: adapter(tmp_path, 0), "/elsewhere")
    with pytest.raises(OllamaError, match="No adapter found for /elsewhere/run-v0"):
        server.prepare(Base("", []), RolloutRequest(0, 0, [5], "a", 1))


def test_vllm_without_a_port_is_at_that_of_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at that of Ollama."""
    asked = []
    monkeypatch.setattr(
        OllamaClient, "get", lambda client, path, **more: asked.append((client.port, client._path + path))
    )
    for url in ("http://10.0.0.6/v1", "http://[::1]/v1/", "http://10.0.0.6:8000/v1"):
        VLLMServer("s", url, SAMPLING, lambda: adapter(tmp_path, 0), str(tmp_path)).probe()
    assert asked == [(80, "/v1/models"), (80, "/v1/models"), (8000, "/v1/models")]


def test_an_ollama_that_cannot_write_completions_says_why(tmp_path: Path) -> None:
    old, without = (Teacher("127.0.0.1", free_port(), version=version) for version in ("0.9.3", "0.5.4"))
    with serve(old, without):
        for teacher, message in (
            (old, r"Ollama 0\.9\.3 runs no adapters: update it to 0\.30 or later"),
            (without, "it has no model absent: run ollama pull there, or omit rollout_model"),
        ):
            server = OllamaServer("s", teacher.url, SAMPLING, lambda: pytest.fail("no adapter"))
            with pytest.raises(OllamaError, match=message):
                server.prepare(Base("absent", ["a"]), RolloutRequest(0, 0, [5], "a", 1))


@pytest.mark.parametrize("name", ["Teacher", "library/TEACHER:latest", "registry.ollama.ai/library/teacher"])
def test_each_spelling_of_a_base_is_found(name: str) -> None:
    with serve(teacher := Teacher("127.0.0.1", free_port(), version="0.31.0")):
        server = OllamaServer("s", teacher.url, SAMPLING, lambda: pytest.fail("no adapter"))
        with pytest.raises(OllamaError, match="the vocabulary of"):  # what is checked once the base is found
            server.prepare(Base(name, ["a"]), RolloutRequest(0, 0, [5], "a", 1))


@pytest.mark.parametrize("space", ["a", "\n"])
def test_an_answer_that_ollama_ends_as_it_repeats_a_token_goes_on(monkeypatch: pytest.MonkeyPatch, space: str) -> None:
    """No version of Ollama gives more than 31 times the same token, and the next one is drawn but not told."""
    asked: list[tuple[str, int, int]] = []
    model = "x" * 3 + space * 70 + "y" * 10  # one token a character

    def generate(client: Any, name: str, prompt: str, *, options: Any, hear: Any, keep: int, **more: Any) -> Answer:
        assert keep < 1 << 18, "an endless answer must not keep the pool busy"
        asked.append((prompt, options["num_predict"], options["seed"]))
        rest, repeated, last = model[len(prompt) - len("prompt") :][: options["num_predict"]], 0, ""
        for piece in rest:
            repeated, last = (repeated + 1 if piece.strip() == last else 0), piece.strip()
            if repeated > 30:
                raise OllamaError("the answer is incomplete")
            hear(piece)
        return Answer(rest, "", "stop" if rest == model[-len(rest) :] else "length", len(rest), 0.0, 0.0)

    monkeypatch.setattr(OllamaClient, "generate", generate)
    monkeypatch.setattr(OllamaServer, "current", lambda server: (4, "run-v4"))
    for limit, text, finished in ((200, model, "stop"), (60, model[:60], "length"), (35, model[:35], "length")):
        server = OllamaServer("s", "http://127.0.0.1:1", replace(SAMPLING, limit=limit), lambda: pytest.fail("none"))
        answer = server.ask(RolloutRequest(0, 0, [1], "prompt", 5), Cancel())
        assert (answer.text, answer.finished) == (text, finished)
    assert all(left == 200 - len(prompt) + 6 for prompt, left, _ in asked[:3]) and len({seed for *_, seed in asked}) > 2
