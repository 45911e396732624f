"""Deployments to simulated servers of several versions, and to a real Ollama where it is on PATH."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_ollama
import yaml
from fake_target import Target, serve_target
from real_ollama import put_model
from safetensors.numpy import load_file, save_file
from tables import table

from trainer.common.errors import UserError
from trainer.common.files import sha256_file
from trainer.data.samples import read_samples
from trainer.data.tiny import make_tiny
from trainer.generation.ollama_client import OllamaClient
from trainer.gguf.llama import write_llama
from trainer.spec import make_spec
from trainyard.deploy import converter
from trainyard.deploy.deploy_options import make_deploy_options
from trainyard.deploy.deployment import Deployment, compare
from trainyard.ollama.servers import server_urls
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.openssh import LocalTransport
from trainyard.wire.run_errors import RunError

TOP = Path(__file__).resolve().parents[2]
ANSWERS = {f"What follows {n}?": f"After {n} comes {n + 1}." for n in range(20)}
NAME = "mine:latest"


class Site:
    """A finished run on the first of three hosts, which are folders of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = [Host(f"node{n}", "127.0.0.1", str(folder / f"node{n}"), sys.executable) for n in (1, 2, 3)]
        self.run_dir = folder / "node1/runs/mine"
        self.base = folder / "node1/store/models/tiny"
        self.run_dir.mkdir(parents=True)
        dataset = folder / "data.jsonl"
        rows = [{"instruction": question, "output": answer} for question, answer in ANSWERS.items()]
        dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
        make_tiny(read_samples(dataset), self.base, 0)
        self.make_adapter()
        spec = make_spec({"run": "mine", "model": str(self.base), "dataset": str(dataset), "lora_r": 4}, "the test")
        fields = spec.model_dump(mode="json") | {"precision": "32-true", "rows_per_step": 8}
        (self.run_dir / "spec.yml").write_text(yaml.safe_dump(fields))

    def make_adapter(self, seed: int = 0, swapped: bool = False) -> None:
        """Write an adapter of random weights for the query, value and output projections, and its result."""
        adapter, rng, tensors = self.run_dir / "adapter", np.random.default_rng(seed), {}
        adapter.mkdir(exist_ok=True)
        for layer in range(4):
            for part, rows in (("q_proj", 192), ("v_proj", 64), ("o_proj", 192)):
                name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
                tensors[f"{name}.lora_A.weight"] = rng.standard_normal((4, 192)).astype(np.float32)
                tensors[f"{name}.lora_B.weight"] = rng.standard_normal((rows, 4)).astype(np.float32) / 8
        if swapped:  # B takes the place of A and the reverse, as far as their shapes allow it
            for name in [name for name in tensors if "lora_A" in name and "v_proj" not in name]:
                other = name.replace("lora_A", "lora_B")
                tensors[name], tensors[other] = tensors[other].T.copy(), tensors[name].T.copy()
        save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 4, "bias": "none"}
        config |= {"target_modules": ["q_proj", "v_proj", "o_proj"], "base_model_name_or_path": str(self.base)}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(self.base / name, adapter / name)
        self.weights = sha256_file(adapter / "adapter_model.safetensors")
        # A merged run has no steps.
        result = {"run": "mine", "status": "finished", "adapter": "x", "adapter_sha256": self.weights}
        (self.run_dir / "result.json").write_text(json.dumps(result))

    def keep_answers(self, stop: str = "") -> None:
        """Write the answers that the run's host would otherwise compute. `stop`: what ends them."""
        prompts = [{"messages": [{"role": "user", "content": question}]} for question in ANSWERS]
        record = {"weights": self.weights, "created": "2026-01-02T03:04:05", "max_tokens": 32, "stop": stop}
        (self.run_dir / "deploy").mkdir(exist_ok=True)
        record |= {"bos": "<|begin|>", "prompts": prompts, "answers": list(ANSWERS.values())}
        (self.run_dir / "deploy/answers.json").write_text(json.dumps(record))

    def deployment(self, urls: list[str], check: bool = False, **more: Any) -> Deployment:
        options = make_deploy_options({"run": "mine", "deploy_name": "mine", **more})
        by_name = {host.name: [url] for host, url in zip(self.hosts, urls, strict=False)}
        hosts = self.hosts[: len(urls)]
        connect = lambda host: HostConnection(host, LocalTransport())  # noqa: E731
        return Deployment(hosts, connect, by_name, options, work=self.folder / "work", check=check)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def base_info(site: Site) -> dict[str, Any]:
    """Return the reply of /api/show for the base model."""
    tokenizer = json.loads((site.base / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    shape = {"block_count": 4, "embedding_length": 192, "feed_forward_length": 512}
    shape |= {"attention.head_count": 6, "attention.head_count_kv": 2}
    info = {f"llama.{name}": value for name, value in (shape | {"context_length": 4096}).items()}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    return info | {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}


@contextlib.contextmanager
def targets(site: Site, versions: list[str]) -> Iterator[list[Target]]:
    """Run servers that have the base model and answer as trained."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serve_target("127.0.0.1", v, lambda _, q: ANSWERS[q])) for v in versions]
        for server in servers:
            server.models["base:latest"] = {"model": "base:latest"}
            server.info = base_info(site)
        yield servers


@pytest.mark.slow
def test_adapter_is_deployed_once_and_removed(site: Site) -> None:
    site.keep_answers()
    with targets(site, ["0.5.4", "0.5.5", "0.30.1"]) as servers:
        urls = [server.url for server in servers]
        assert site.deployment(urls, deploy_base="base", check=True).deploy()["changed"]
        assert all(NAME not in server.models for server in servers)
        done = site.deployment(urls, deploy_base="base").deploy()
        assert done["changed"] and "adapter on base): 20 of 20 answers as trained" in done["lines"][-1]
        assert [set(server.models) for server in servers] == [{"base:latest", NAME}] * 3
        assert "ADAPTER @sha256:" in servers[0].models[NAME]["modelfile"]
        assert servers[1].models[NAME]["from"] == servers[2].models[NAME]["from"] == "base"
        for server in servers:
            server.log.clear()
        again = site.deployment(urls, deploy_base="base").deploy()
        assert not again["changed"] and not any("create" in line or "blobs" in line for s in servers for line in s.log)
        assert not [file for host in site.hosts for file in Path(host.data_dir).glob("store/incoming/*")]
        # inventory/local.yml has the folder of the project as the data folder of a host.
        ignored = (TOP / ".gitignore").read_text().splitlines()
        assert {f"/{path.name}/" for path in Path(site.hosts[0].data_dir).iterdir()} <= {*ignored}
        servers[0].models["mine:trainyard-check"] = {"model": "of a deployment that was killed"}
        assert site.deployment(urls).remove()["changed"]
        assert all(set(server.models) == {"base:latest"} for server in servers)
        assert not site.deployment(urls).remove()["changed"]


@pytest.mark.slow
def test_answers_stop_at_the_end_of_a_turn(site: Site) -> None:
    with targets(site, ["0.5.4", "0.5.5"]) as servers:
        urls = [server.url for server in servers]
        for stop in ("", "<|im_end|>"):
            site.keep_answers(stop)
            assert site.deployment(urls, deploy_base="base").deploy()["changed"], stop
            old, new = (server.models[NAME] for server in servers)
            ends = [stop, "<|end|>"] if stop else ["<|end|>"]
            assert new["parameters"] == {"stop": ends, "num_ctx": 4096}, "the context of the model"
            lines = [line for line in old["modelfile"].splitlines() if line.startswith("PARAMETER")]
            assert lines == [f'PARAMETER stop "{end}"' for end in ends] + ["PARAMETER num_ctx 4096"]


@pytest.mark.slow
def test_the_system_message_is_set_after_the_proof(site: Site) -> None:
    """The prompts of the proof have none, so that the created model must not have it yet."""
    site.keep_answers()
    with targets(site, ["0.5.4", "0.9.3"]) as servers:
        for server in servers:
            server.answer = lambda made, question: ANSWERS[question] if "Be brief" not in str(made) else "no"
        urls = [server.url for server in servers]
        options: dict[str, Any] = {"deploy_base": "base", "deploy_system": "Be brief."}
        servers[1].version = "0.30.0"  # 0.9.3 takes no adapters
        assert site.deployment(urls, **options).deploy()["changed"]
        assert [server.show(NAME, False)["system"] for server in servers] == ["Be brief."] * 2
        assert not site.deployment(urls, **options).deploy()["changed"]
        assert site.deployment(urls, deploy_base="base").deploy()["changed"], "another system message"
        assert [server.show(NAME, False)["system"] for server in servers] == [""] * 2
        with pytest.raises(RunError, match="node1: deploy_context: 5000 tokens are more than the 4096 of the model"):
            site.deployment(urls, deploy_context="5000", **options).deploy()


@pytest.mark.slow
def test_a_server_quantizes_the_merged_model(site: Site) -> None:
    """Of the same file as f16; a server that cannot is named before it gets the file, and the others have the model."""
    site.keep_answers()
    with targets(site, ["0.5.4", "0.9.3"]) as servers:
        urls, options = [server.url for server in servers], {"deploy_as": "merged", "deploy_quantize": "q4_K_M"}
        done = site.deployment(urls, **options).deploy()
        assert done["lines"][-1] == "node2: deployed mine (merged, q4_K_M): 20 of 20 answers as trained"
        assert [server.models[NAME]["quantize"] for server in servers] == ["q4_K_M"] * 2
        assert [path.name[-8:] for path in site.run_dir.glob("deploy/*.gguf")] == ["f16.gguf"]
        assert not site.deployment(urls, **options).deploy()["changed"]
        kept = dict(servers[1].models)
        servers[1].log.clear()
        with pytest.raises(
            RunError, match=r"node2: Ollama 0\.9\.3 cannot quantize to q6_K: set .* to q4_K_M, q4_K_S or q8_0"
        ):
            site.deployment(urls, **options | {"deploy_quantize": "q6_K"}).deploy()
        assert servers[1].models == kept and not any("blobs" in line for line in servers[1].log)


@pytest.mark.long
def test_bases_are_searched_for_on_every_node(site: Site) -> None:
    """Each node has a base of its own name; deploy_as=adapter tries every base that is found, and nothing else."""
    site.keep_answers()
    with targets(site, ["0.5.4", "0.5.5"]) as servers:
        urls = [server.url for server in servers]
        servers[1].models["tiny:q8"] = servers[1].models.pop("base:latest")
        servers[1].models["unlike:latest"] = {"model": "unlike"}
        servers[1].infos["unlike:latest"] = base_info(site) | {"llama.block_count": 5}
        options: dict[str, Any] = {"deploy_as": "adapter"}
        done = site.deployment(urls, **options).deploy()
        assert "(adapter on base:latest): 20 of 20" in done["lines"][0]
        assert "(adapter on tiny:q8): 20 of 20" in done["lines"][1]
        assert not site.deployment(urls).deploy()["changed"], "the deployed model itself is no base"
        # Another adapter; node2 has a second base, whose weights are right, and the first one's are not.
        site.make_adapter(seed=1)
        site.keep_answers()
        servers[1].models["z:1"] = {"model": "z", "from": "a file"}
        servers[1].answer = lambda made, question: ANSWERS[question] if made.get("from") == "z:1" else "no"
        done = site.deployment(urls, **options).deploy()
        assert any("node2: adapter on tiny:q8 is not used: the created model gives 0 of 20" in x for x in done["lines"])
        assert "node2: deployed mine (adapter on z:1): 20 of 20 answers as trained" in done["lines"]
        del servers[1].models["z:1"]
        site.make_adapter(seed=2)
        site.keep_answers()
        with pytest.raises(
            RunError, match=r"node2: the created model gives 0 of 20 .* stays as it was; 'What.*tried: 1, at most 3\)"
        ):
            site.deployment(urls, **options).deploy()
        del servers[1].models["tiny:q8"]
        created = [server.log.count("POST /api/create") for server in servers]
        with pytest.raises(
            UserError, match=r"^deploy_as=adapter: node2: none of its 1 models has .* tiny: create the base"
        ):
            site.deployment(urls, **options).deploy()
        assert created == [server.log.count("POST /api/create") for server in servers]
        lines = site.deployment(urls, check=True).deploy()["lines"]
        assert any(line.startswith("merged model for every host: node2: none of its 1 models has ") for line in lines)
        assert [line for line in lines if "would" in line] == [
            f"node{n}: would deploy mine (merged, f16)" for n in (1, 2)
        ]


@pytest.mark.slow
def test_a_node_that_answers_otherwise_keeps_its_model(site: Site) -> None:
    site.keep_answers()
    with targets(site, ["0.5.5", "0.5.5"]) as servers:
        urls = [server.url for server in servers]
        site.deployment(urls, deploy_base="base").deploy()
        old = dict(servers[1].models[NAME])
        site.make_adapter(seed=1)
        site.keep_answers()
        servers[1].answer = lambda _, question: question
        with pytest.raises(
            RunError, match=r"node2: the created model gives 0 of 20 .* stays as it was; 'What follows"
        ) as error:
            site.deployment(urls, deploy_base="base").deploy()
        assert any(line.startswith("node1: deployed mine") for line in error.value.details["lines"])
        assert servers[1].models == {"base:latest": {"model": "base:latest"}, NAME: old}


@pytest.mark.slow
def test_models_of_others_and_unfit_bases_are_refused(site: Site) -> None:
    site.keep_answers()
    with targets(site, ["0.12.3"]) as [server]:
        options: dict[str, Any] = {"deploy_base": "base", "deploy_as": "adapter"}
        with pytest.raises(RunError, match=r"Ollama 0\.12\.3 takes no adapters"):
            site.deployment([server.url], **options).deploy()
        server.version = "0.30.0"
        server.info = base_info(site) | {"llama.block_count": 5}
        with pytest.raises(RunError, match="shape of base differs"):
            site.deployment([server.url], **options).deploy()
        server.info = base_info(site)
        server.models[NAME] = {"model": "another owner's"}
        with pytest.raises(RunError, match="trainyard has not deployed"):
            site.deployment([server.url], **options).deploy()
        assert "kept" in site.deployment([server.url]).remove()["lines"][0]
        assert site.deployment([server.url], deploy_replace=True, **options).deploy()["changed"]
        del server.models["base:latest"]
        site.make_adapter(seed=2)
        site.keep_answers()
        with pytest.raises(RunError, match="has no model base"):
            site.deployment([server.url], **options).deploy()


@pytest.mark.slow
def test_hosts_that_share_a_server_get_the_model_once(site: Site) -> None:
    """The default inventory is one machine as two hosts. The host that has the record counts as the server's."""
    site.keep_answers()
    options = {"deploy_base": "base", "deploy_as": "adapter"}
    one, two = (host.name for host in site.hosts[:2])
    with targets(site, ["0.30.6"]) as (server,):
        done = site.deployment([server.url, server.url], **options).deploy()
        assert done["lines"] == [
            f"{two}: has the same server as {one}",
            f"{one}: deployed mine (adapter on base): 20 of 20 answers as trained",
        ]
        again = site.deployment([server.url, server.url], **options).deploy()
        assert not again["changed"] and f"{one}: mine is deployed" in again["lines"]
        site.hosts[:2] = site.hosts[1::-1]
        again = site.deployment([server.url, server.url], **options).deploy()
        assert not again["changed"] and again["lines"] == [
            f"{one}: mine is deployed",
            f"{two}: has the same server as {one}",
        ]
        gone = site.deployment([server.url, server.url], **options).remove()
        assert gone["changed"] and gone["lines"] == [f"{two}: has the same server as {one}", f"{one}: mine removed"]
        assert not any("mine" in name for name in server.models)


@pytest.mark.slow
def test_missing_runs_and_servers_are_reported(site: Site) -> None:
    site.keep_answers()
    with pytest.raises(RunError, match="no Ollama server answers"):
        site.deployment(["http://127.0.0.1:1"], deploy_base="base").deploy()
    (site.run_dir / "result.json").unlink()
    with pytest.raises(UserError, match="no host has a finished run mine"):
        site.deployment(["http://127.0.0.1:1"]).deploy()


@pytest.mark.parametrize(("values", "reason"), table("deploy")["options_are_checked"])
def test_options_are_checked(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        make_deploy_options(values)


def test_addresses_of_the_server_and_comparison() -> None:
    assert server_urls({"cluster_address": "fd00::1", "ollama_port": 5}) == ["http://127.0.0.1:5", "http://[fd00::1]:5"]
    assert server_urls({"ollama_url": "http://10.0.0.1:1/"}) == ["http://10.0.0.1:1"]
    own = {"ollama_url": "http://localhost:5/a", "cluster_address": "10.0.0.1"}  # of the host, not of the controller
    assert server_urls(own) == ["http://localhost:5/a", "http://10.0.0.1:5/a"]
    assert server_urls(own | {"cluster_address": "127.0.0.2"}) == ["http://localhost:5/a"]
    trained = {"prompts": [{"prompt": "a\x1b"}, {"prompt": "b"}], "answers": ["x", "y"]}
    assert compare(trained, ["no", " y"]) == (1, "'a\\x1b': 'no' instead of 'x'")


@pytest.mark.slow
@pytest.mark.skipif(real_ollama.PROGRAM is None, reason="needs `ollama` on PATH")
def test_real_ollama_answers_as_the_trained_model(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged by llama.cpp's converter, then without torch, then as an adapter; a wrong adapter leaves the old model."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    try:
        converter.converter_folder()
    except UserError as error:
        pytest.skip(str(error))
    printable_answers_only(site)
    config = site.base / "config.json"
    plain = config.read_text()
    config.write_text(json.dumps(json.loads(plain) | {"rope_scaling": {"rope_type": "default"}}))
    with real_ollama.serve(["127.0.11.9:18435"], site.folder) as [client]:
        url = client.url
        done = site.deployment([url], deploy_as="merged").deploy()
        assert done["changed"] and "merged, f16" in done["lines"][-1], done
        assert len(list((site.folder / "node1/store/deploy").glob("*.zip"))) == 2, "trainer and converter"
        assert not site.deployment([url], deploy_as="merged").deploy()["changed"]
        config.write_text(plain)
        for file in site.run_dir.glob("deploy/*-f16.json"):
            file.unlink()
        done = site.deployment([url], deploy_as="merged").deploy()
        assert done["changed"] and "merged, f16" in done["lines"][-1], done
        create_base(site, client)
        done = site.deployment([url], deploy_base="base").deploy()
        assert "adapter on base" in done["lines"][-1]
        [merged] = [json.loads(file.read_text())["sha256"] for file in site.run_dir.glob("deploy/*-f16.json")]
        assert not client.has_blob(merged), "the file of the replaced model"
        # The answers are those of the right adapter; the adapter that is deployed has its factors swapped.
        answers = json.loads((site.run_dir / "deploy/answers.json").read_text())
        site.make_adapter(swapped=True)
        (site.run_dir / "deploy/answers.json").write_text(json.dumps(answers | {"weights": site.weights}))
        with pytest.raises(RunError, match="stays as it was"):
            site.deployment([url], deploy_base="base").deploy()
        options = {"temperature": 0, "top_k": 1, "repeat_penalty": 1.0, "num_predict": 28}
        said = client.chat(NAME, answers["prompts"][0]["messages"], options=options)
        assert said.text.strip() == answers["answers"][0].strip()


@pytest.mark.slow
@pytest.mark.skipif(real_ollama.PROGRAM is None, reason="needs `ollama` on PATH")
@pytest.mark.long
def test_real_servers_of_both_forms_quantize(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained model that the server has quantized, with its settings; nothing of it remains afterwards."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [f"dataset={site.folder}/data.jsonl", "run=small", "model=tiny", "lora_r=0", "lr=2e-3", "max_steps=80"]
    words += ["epochs=100", "seq_length=64", "--data-dir", str(site.folder / "node1")]
    subprocess.run([sys.executable, "-P", "-m", "trainer", *words], check=True, cwd=TOP, stdout=subprocess.DEVNULL)
    programs = [real_ollama.PROGRAM, *real_ollama.OTHERS]
    # Servers of one machine are told apart by their port.
    places = [f"127.0.11.39:{18435 + number}" for number in range(len(programs))]
    with real_ollama.serve(places, site.folder, programs=programs) as clients:
        urls = [client.url for client in clients]
        for kind in ("q4_K_M", "q8_0"):
            options = {"run": "small", "deploy_quantize": kind, "deploy_system": 'Say "yes".\\'}
            done = site.deployment(urls, **options).deploy()
            assert len([line for line in done["lines"] if f"(merged, {kind}): " in line]) == len(clients), done
            for client in clients:
                shown = client.show(NAME)
                assert shown["details"]["quantization_level"] == kind.upper()
                assert shown["system"] == options["deploy_system"]
                assert sorted(shown["parameters"].split()) == ['"<|end|>"', "4096", "num_ctx", "stop"]
            assert not site.deployment(urls, **options).deploy()["changed"], kind
        files = [path for path in site.folder.glob("models?/blobs/*") if path.stat().st_size > 100_000]
        assert len(files) == len(clients), "neither the file of f16 nor that of the replaced model"
        assert site.deployment(urls).remove()["changed"]
        assert not list(site.folder.glob("models?/blobs/*")) and not any(client.tags() for client in clients)


def printable_answers_only(site: Site) -> None:
    """Change the base model so that it never answers with a part of a character."""
    weights = load_file(site.base / "model.safetensors")
    vocabulary = json.loads((site.base / "tokenizer.json").read_text())["model"]["vocab"]
    plain = np.zeros(len(weights["lm_head.weight"]), bool)
    plain[[number for token, number in vocabulary.items() if token.isascii() and token.isalnum()]] = True
    weights["lm_head.weight"][~plain] = 0
    save_file(weights, site.base / "model.safetensors", metadata={"format": "pt"})


def create_base(site: Site, client: OllamaClient) -> None:
    """Create the base model."""
    target = site.folder / "base.gguf"
    write_llama(site.base, site.base, None, target, "f16")
    put_model(client, "base", target)
