"""Fixtures: small models and datasets, and runs of them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")  # before torch

import pytest
from trainer_runs import Cluster, Here, records, write_jsonl


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with about 20,000 weights and the tokenizer of the tiny model: a step takes milliseconds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from trainer.data.shapes import to_sample
    from trainer.data.tiny import make_tiny

    folder = tmp_path_factory.mktemp("model")
    make_tiny([to_sample(row) for row in records(100)], folder, 1)
    (folder / "model.safetensors").unlink()
    vocabulary = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": vocabulary}
    config = LlamaConfig(**sizes, initializer_range=0.2, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Any:
    from trainer.models.model import load_tokenizer

    return load_tokenizer(str(model_folder))


@pytest.fixture(scope="module")
def corpus(tokenizer: Any) -> Any:
    """24 encoded samples, with token ids below 256 for models with a vocabulary of 256."""
    import numpy as np

    from trainer.data.encode import Encoder, encode_all
    from trainer.data.shapes import to_sample

    samples = [to_sample(row) for row in records(24)]
    made = encode_all(samples, Encoder(tokenizer, seq_length=64, train_on="answer"))
    np.mod(made.tokens, 256, out=made.tokens)
    return made


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "train.jsonl", records(120))


@pytest.fixture
def here(tmp_path: Path, model_folder: Path, dataset: Path, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(tmp_path, model_folder, dataset, capsys)


@pytest.fixture
def cluster(tmp_path: Path, model_folder: Path, dataset: Path) -> Iterator[Cluster]:
    """Simulated hosts for runs of the small model: a step takes milliseconds."""
    spec = {"model": model_folder, "dataset": dataset, "seq_length": 64, "total_batch_size": 6, "batch_size": 2}
    made = Cluster(tmp_path, spec | {"lr": 1e-2, "loggers": "none", "eval_split": 0.05})
    yield made
    made.end()
