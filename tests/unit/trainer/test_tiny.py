"""model=tiny: the same samples and seed give the same files on every host; the cache never returns a stale model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tables import table
from trainer_runs import TOP, records, write_jsonl

from trainer.common.files import sha256_file, sha256_tree
from trainer.data import tiny
from trainer.data.samples import Sample
from trainer.data.shapes import to_sample
from trainer.data.tiny import VOCABULARY, ensure_tiny_model, make_tiny, make_tokenizer

MADE = table("tiny")["made"]  # the first 16 digits of the SHA-256
CODE = (
    "import sys; from pathlib import Path; from trainer.data.samples import read_samples; from trainer.data.tiny import make_tiny;"
    "make_tiny(read_samples(Path(sys.argv[1])), Path(sys.argv[2]), 1)"
)


def test_another_process_makes_the_same_files(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", records(300))
    for place in ("a", "b"):
        # Different hash seeds and numbers of threads.
        environment = os.environ | {"PYTHONPATH": str(TOP), "PYTHONHASHSEED": str(ord(place))}
        environment |= {"RAYON_NUM_THREADS": "1" if place == "a" else "4", "TOKENIZERS_PARALLELISM": "true"}
        subprocess.run([sys.executable, "-c", CODE, str(data), str(tmp_path / place)], env=environment, check=True)
    assert sha256_tree(tmp_path / "a") == sha256_tree(tmp_path / "b")
    make_tiny([to_sample(row) for row in records(300)], tmp_path / "c", 2)
    assert sha256_tree(tmp_path / "a") != sha256_tree(tmp_path / "c")


def test_transformers_loads_the_model_without_missing_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_tiny([to_sample(row) for row in records(50)], tmp_path, 1)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 1e7
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert tokenizer.decode(tokenizer("Grüße, 猫 🚂!\n\t\x00")["input_ids"]) == "Grüße, 猫 🚂!\n\t\x00"


def test_an_empty_dataset_gives_a_tokenizer() -> None:
    tokenizer = make_tokenizer([])
    assert 256 < tokenizer.get_vocab_size() < VOCABULARY
    assert tokenizer.decode(tokenizer.encode("any text ä").ids) == "any text ä"


def test_the_cache_depends_on_dataset_seed_and_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", records(20))
    reads: list[Path] = []

    def samples() -> list[Sample]:
        reads.append(data)
        return [to_sample(row) for row in records(20)]

    first = ensure_tiny_model(tmp_path, data, 1, samples)
    assert first.parent == tmp_path / "models" and (first / "model.safetensors").exists()
    assert ensure_tiny_model(tmp_path, data, 1, samples) == first and len(reads) == 1, "made once"
    other_seed = ensure_tiny_model(tmp_path, data, 2, samples)
    write_jsonl(data, records(20, seed=2))
    other_data = ensure_tiny_model(tmp_path, data, 1, samples)
    monkeypatch.setattr(tiny, "RECIPE", "other")
    other_recipe = ensure_tiny_model(tmp_path, data, 1, samples)
    made = {first, other_seed, other_data, other_recipe}
    assert len(made) == 4 and len(reads) == 4
    assert set((tmp_path / "models").iterdir()) == made, "nothing half written is left"


def test_the_cache_without_a_dataset_file_depends_on_the_text(tmp_path: Path) -> None:
    fake = ensure_tiny_model(tmp_path, None, 1, list)
    hub = ensure_tiny_model(tmp_path, None, 1, lambda: [to_sample(row) for row in records(20)])
    other = ensure_tiny_model(tmp_path, None, 1, lambda: [to_sample(row) for row in records(20, seed=2)])
    assert len({fake, hub, other}) == 3 and "tiny-fake-1-" in fake.name

    def failing() -> list[Sample]:
        raise ValueError("no samples")

    with pytest.raises(ValueError, match="no samples"):
        ensure_tiny_model(tmp_path, write_jsonl(tmp_path / "d.jsonl", records(1)), 1, failing)
    assert len(list((tmp_path / "models").iterdir())) == 3, "a failure leaves no files"


def test_another_model_has_another_recipe(tmp_path: Path) -> None:
    """A run of an earlier version resumes with the model that it began with: its name and its files stay."""
    make_tiny([to_sample(row) for row in records(20)], tmp_path, 1)
    made = {name: sha256_file(tmp_path / name)[:16] for name in MADE}
    assert (tiny.RECIPE, made) == ("72a2dd", MADE)
