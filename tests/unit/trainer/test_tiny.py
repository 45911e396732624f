"""model=tiny: the same samples and seed give the same files, on every host."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from trainer_runs import TOP, records, write_jsonl

from trainer.data.samples import to_sample
from trainer.data.tiny import VOCABULARY, make_tiny, make_tokenizer, make_weights
from trainer.files import sha256_tree

CODE = (
    "import sys; from pathlib import Path; from trainer.data.samples import read_samples; from trainer.data.tiny import make_tiny;"
    "make_tiny(read_samples(Path(sys.argv[1])), Path(sys.argv[2]), 1)"
)


def test_another_process_makes_the_same_files(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", records(300))
    for place in ("a", "b"):
        # Other hash seeds, other numbers of threads.
        environment = os.environ | {"PYTHONPATH": str(TOP), "PYTHONHASHSEED": str(ord(place))}
        environment |= {"RAYON_NUM_THREADS": "1" if place == "a" else "4", "TOKENIZERS_PARALLELISM": "true"}
        subprocess.run([sys.executable, "-c", CODE, str(data), str(tmp_path / place)], env=environment, check=True)
    assert sha256_tree(tmp_path / "a") == sha256_tree(tmp_path / "b")
    make_tiny([to_sample(row) for row in records(300)], tmp_path / "c", 2)
    assert sha256_tree(tmp_path / "a") != sha256_tree(tmp_path / "c")


def test_it_is_a_model_that_transformers_reads_whole(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_tiny([to_sample(row) for row in records(50)], tmp_path, 1)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 1e7
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert tokenizer.decode(tokenizer("Grüße, 猫 🚂!\n\t\x00")["input_ids"]) == "Grüße, 猫 🚂!\n\t\x00"


def test_no_text_at_all_still_gives_a_tokenizer() -> None:
    tokenizer = make_tokenizer([])
    assert 256 < tokenizer.get_vocab_size() < VOCABULARY
    assert tokenizer.decode(tokenizer.encode("any text ä").ids) == "any text ä"


def test_weights_depend_on_the_seed_alone() -> None:
    one, again, other = make_weights(1), make_weights(1), make_weights(2)
    assert all(np.array_equal(one[name], again[name]) for name in one)
    assert not np.array_equal(one["lm_head.weight"], other["lm_head.weight"])
