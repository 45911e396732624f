"""Real Ollama servers write completions of a run: with the adapter of the step, while one is killed, and the same ones after a restart."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_ollama
from ascii_model import write_ascii_model
from run_hosts import free_port, until
from safetensors.numpy import load_file, save_file
from trainer_runs import Cluster, lines, write_jsonl
from transformers import AutoTokenizer

from trainer.common.files import sha256_file
from trainer.generation.ollama_client import Cancel, OllamaClient, OllamaError
from trainer.generation.rollout_servers import Adapter, Base, OllamaServer, RolloutRequest, Sampling
from trainer.gguf.gguf_adapter import write_adapter
from trainer.gguf.llama import write_llama

pytestmark = [pytest.mark.slow, pytest.mark.skipif(real_ollama.PROGRAM is None, reason="needs `ollama` on PATH")]
WORDS = ["cat", "dog", "tree", "house", "sun", "moon", "water", "fire", "stone", "bird"]
STEPS = 6


def fields_of(folder: Path, urls: list[str]) -> dict[str, Any]:
    return {
        "model": folder / "model", "run": "r", "dataset": folder / "p.jsonl", "method": "grpo", "reward": folder / "mine.py", "seq_length": 64,
        "grpo_max_tokens": 16, "total_batch_size": 32, "batch_size": 8, "max_steps": STEPS, "lr": 1e-2, "eval_split": 0,
        "checkpoint_interval": 1, "checkpoint_keep": -1, "rollout_servers": ",".join(urls),
    }  # fmt: skip


def begin(folder: Path, urls: list[str], **fields: Any) -> subprocess.Popen[str]:
    """Start a run of a tiny model on the CPU."""
    words = [f"--{name}={value}" for name, value in (fields_of(folder, urls) | fields).items()]
    command = [sys.executable, "-m", "trainer", *words, "--data-dir", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs/r/metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_ascii_model(tmp_path / "model")
    write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"the {a} and the {b}"} for a in WORDS for b in WORDS])
    (tmp_path / "mine.py").write_text(
        "def reward_e(completions, **_): return [text.count('e') for text in completions]"
    )
    return tmp_path


@pytest.mark.long
def test_real_servers_write_what_a_resumed_run_trains_on(folder: Path) -> None:
    places = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with real_ollama.serve(places, folder) as clients:
        urls = [client.url for client in clients]
        done = begin(folder, urls)
        output, _ = done.communicate(timeout=300)
        assert done.returncode == 0, output
        for place in places:
            assert f"rollouts: {place} writes completions" in output
        found = metrics(folder)
        assert len(found) == STEPS
        by_server = {
            place: sum(step["metrics"][f"completions_per_second/{place}"] > 0 for step in found) for place in places
        }
        assert all(by_server.values()) and 0 < max(step["metrics"]["staleness"] for step in found) <= 1
        for client in clients:
            assert client.tags() == {}, "the run leaves nothing on a server"
        for step in found:  # servers write whole completions, with the adapter of the run
            assert step["metrics"]["completion_length"] > 10
            for place in places:
                assert abs(step["metrics"].get(f"drift/{place}", 0.0)) < 0.3, step
        run_dir = folder / "runs/r"
        adapter = run_dir / "adapter/adapter_model.safetensors"
        assert not [*(run_dir / "rollouts").glob("*.gguf")], "only servers need them"
        digest, losses = sha256_file(adapter), [step["loss"] for step in found]

        # As if the process had been killed in step 4: what had arrived is trained on again.
        for path in [*run_dir.glob("checkpoints/step-*[456]"), run_dir / "adapter"]:
            shutil.rmtree(path)
        (run_dir / "result.json").unlink()
        again = begin(folder, urls)
        output, _ = again.communicate(timeout=300)
        assert again.returncode == 0 and "resuming from step 3 of 6" in output, output
        assert f"rollouts: {3 * 32} completions of the stopped run are used" in output
        assert sha256_file(adapter) == digest and [step["loss"] for step in metrics(folder)] == losses


@pytest.mark.long
def test_two_ranks_resume_with_the_same_completions(folder: Path) -> None:
    """Also if completions are two steps old, and each is trained on twice, in micro-batches of 4."""
    fields = {"grpo_iterations": 2, "max_staleness": 2, "batch_size": 4, "lora_dropout": 0.1}
    fields |= {"eval_split": 0.1, "eval_interval": 2}
    with real_ollama.serve([f"127.0.0.1:{free_port()}"], folder) as [client]:
        spec = fields_of(folder, [client.url]) | {"loggers": "none", "balance": "even"} | fields
        cluster = Cluster(folder, spec, cold=True)
        run_dir, found = cluster.run_dir(), list[list[Any]]()
        try:
            for _ in range(2):
                assert cluster.wait(cluster.start(1, 2)) == [0], cluster.logs()
                found.append([step for step in lines(run_dir / "metrics.jsonl") if "grad_norm" in step])
                for path in [*run_dir.glob("checkpoints/step-*[3456]"), run_dir / "adapter"]:
                    shutil.rmtree(path)
                (run_dir / "result.json").unlink()
        finally:
            cluster.end()
    same, again = ([(step["loss"], step["grad_norm"]) for step in steps] for steps in found)
    assert same == again and len(same) == STEPS
    metrics_of = [step["metrics"] for step in found[0]]
    assert max(each["staleness"] for each in metrics_of) > 1 and all(
        each["completion_length"] > 10 for each in metrics_of
    )
    assert all(abs(each.get(f"drift/127.0.0.1:{client.port}", 0)) < 0.3 for each in metrics_of)


@pytest.mark.long
def test_a_killed_server_loses_only_what_it_was_writing(folder: Path) -> None:
    """Servers alone write. One is killed; the run ends with the other."""
    places = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with real_ollama.serve(places[:1], folder) as [first]:
        second = subprocess.Popen(
            [str(real_ollama.PROGRAM), "serve"],
            env=os.environ | {"OLLAMA_HOST": places[1], "OLLAMA_MODELS": str(folder / "b"), "HOME": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            other = OllamaClient(f"http://{places[1]}")
            until(lambda: answers(other))
            run = begin(folder, [first.url, other.url], rollout_ranks=False)
            journal = folder / "runs/r/rollouts/completions.jsonl"
            until(lambda: journal.exists() and journal.read_text().count(places[1]) > 20, 120)
        finally:
            os.killpg(second.pid, signal.SIGKILL)
            second.wait()
        output, _ = run.communicate(timeout=300)
        assert run.returncode == 0, output
        found = metrics(folder)
        assert len(found) == STEPS and found[-1]["metrics"][f"completions_per_second/{places[0]}"] > 0
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        assert len({(each["step"], each["place"]) for each in lines}) == len(lines), "no place is written twice"


def answers(client: OllamaClient) -> bool:
    try:
        return bool(client.version())
    except OllamaError:
        return False


@pytest.mark.long
def test_an_adapter_is_live_on_three_servers_within_seconds(folder: Path, tmp_path: Path) -> None:
    """An adapter of 10 MB: from the file to an answer. The server has loaded the base with another adapter before."""
    for urls in (["http://127.0.0.1:1"], []):
        done = begin(folder, urls, max_steps=1)
        output, _ = done.communicate(timeout=300)
        assert done.returncode == len(urls), output
        assert (
            not urls
            or "no server can write completions (127.0.0.1:1: connection refused at 127.0.0.1 port 1): fix one, or omit"
            in output
        )
    base = folder / "model"
    adapter, weights = folder / "runs/r/adapter", tmp_path / "base.gguf"
    write_llama(base, base, None, weights, "f16")
    adapters = [wide_adapter(adapter, base, tmp_path / f"{version}", version) for version in (1, 2)]
    newest = adapters[:1]
    sampling = Sampling("t-v", 1.0, 4, 64, 60.0)
    with real_ollama.serve([f"127.0.0.1:{free_port()}" for _ in range(3)], folder) as clients:
        servers = [OllamaServer(client.url, client.url, sampling, lambda: newest[0]) for client in clients]
        tokenizer = AutoTokenizer.from_pretrained(base)
        ids = tokenizer("the cat and the dog")["input_ids"]
        prompt = RolloutRequest(0, 0, ids, tokenizer.decode(ids), 1)
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        for server in servers:
            server.prepare(Base("", tokens, str(tokenizer.bos_token or ""), weights, sha256_file(weights)), prompt)
        newest[0] = adapters[1]
        start = time.monotonic()
        with ThreadPoolExecutor(3) as executor:
            list(executor.map(lambda server: server.ask(replace(prompt), Cancel()), servers))
        seconds = time.monotonic() - start
        print(
            f"an adapter of {adapters[1].gguf.stat().st_size / 1e6:.1f} MB was live on 3 servers after {seconds:.2f} s"
        )
        assert seconds < 5
        assert all("t-v2:latest" in client.tags() for client in clients)


def wide_adapter(adapter: Path, base: Path, folder: Path, version: int) -> Adapter:
    """Return an adapter of 10 MB for the model, with random weights."""
    rank, draw = 64, np.random.default_rng(version)
    shutil.copytree(adapter, folder)
    factors = load_file(folder / "adapter_model.safetensors")
    size = sum(max(value.shape) for value in factors.values())
    rank = int(10e6 / 4 / size) + 1
    wide = {
        name: draw.normal(0, 0.01, (rank, value.shape[1]) if "lora_A" in name else (value.shape[0], rank))
        for name, value in factors.items()
    }
    save_file({name: value.astype(np.float32) for name, value in wide.items()}, folder / "adapter_model.safetensors")
    settings = json.loads((folder / "adapter_config.json").read_text()) | {"r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    gguf = folder / "adapter.gguf"
    write_adapter(folder, json.loads((base / "config.json").read_text()), gguf)
    assert gguf.stat().st_size > 10e6
    return Adapter(version, folder, gguf, sha256_file(gguf))
