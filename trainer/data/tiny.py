"""model=tiny: a Llama with a few million random weights and a tokenizer trained on the dataset. No network, no torch."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.common.files import sha256_file
from trainer.common.inputs import path_kind
from trainer.config import TINY, RunSpec
from trainer.data.samples import samples_of
from trainer.data.shapes import Sample

RECIPE = "72a2dd"  # part of the model's name: another one for any change of what this module makes, and only then
VOCABULARY = 4096
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
SPECIAL = ["<|begin|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = (
    "{{ '<|begin|>' }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% generation %}{{ m['content'] }}{{ '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def _texts(samples: Iterable[Sample]) -> Iterable[str]:
    for sample in samples:
        for message in sample.messages:
            yield message["content"]
        for text, _ in sample.pieces:
            yield text
        if sample.rejected:
            yield from _texts([sample.rejected])


def make_tokenizer(samples: Iterable[Sample]) -> Tokenizer:
    """Train a byte-level BPE tokenizer with at most `VOCABULARY` tokens on the text of the samples."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(samples), trainer)
    return tokenizer


def make_weights(seed: int) -> dict[str, np.ndarray]:
    """Return random float32 weights by the parameter names of LlamaForCausalLM: norms are 1, matrices are normal."""
    rng = np.random.default_rng(seed)
    hidden, ff, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    assert isinstance(hidden, int) and isinstance(ff, int) and isinstance(head, int)
    query, value = 6 * head, 2 * head

    def matrix(rows: int, columns: int, std: float = 0.02) -> np.ndarray:
        return (rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)).astype(np.float32)

    # LoRA does not train the embedding and the head: they are large enough for adapters to have an effect.
    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, hidden, 1.0),
        "lm_head.weight": matrix(VOCABULARY, hidden, 0.1),
    }
    for layer in range(4):
        name = f"model.layers.{layer}"
        for part, shape in (
            ("self_attn.q_proj", (query, hidden)),
            ("self_attn.k_proj", (value, hidden)),
            ("self_attn.v_proj", (value, hidden)),
            ("self_attn.o_proj", (hidden, query)),
            ("mlp.gate_proj", (ff, hidden)),
            ("mlp.up_proj", (ff, hidden)),
            ("mlp.down_proj", (hidden, ff)),
        ):
            weights[f"{name}.{part}.weight"] = matrix(*shape)
        for part in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{part}.weight"] = np.ones(hidden, np.float32)
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    return weights


def make_tiny(samples: Iterable[Sample], folder: Path, seed: int) -> None:
    """Write config, tokenizer and weights into `folder`, as transformers reads them. The files depend only on samples and seed."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(samples).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=False)),
        "chat_template": TEMPLATE,
        "model_max_length": CONFIG["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": VOCABULARY}, indent=1), encoding="utf-8")
    save_file(make_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})


def ensure_tiny_model(store: Path, dataset: Path | None, seed: int, samples: Callable[[], Sequence[Sample]]) -> Path:
    """Return the folder of the tiny model below `store`/models; create it if it does not exist.

    The folder's name contains the digest of the dataset, the seed and RECIPE, so a model from another dataset or recipe
    is never reused. `dataset`: the file that `samples` reads; None if the samples have no file (their text is hashed
    instead). `samples`: reads the samples that the tokenizer is trained on; called only if they are needed. Raises
    UserError: `samples` raises it.
    """
    known: Sequence[Sample] | None = None
    if dataset:
        source = sha256_file(dataset)[:12]
    else:
        known = samples()
        source = hashlib.sha256("\0".join(_texts(known)).encode()).hexdigest()[:12] if known else "fake"
    folder = store / "models" / f"tiny-{source}-{seed}-{RECIPE}"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".tmp-{folder.name}-"))
    try:
        # In a folder of its own mode, the umask applies: mkdtemp's folder is for its owner alone.
        make_tiny(samples() if known is None else known, aside / folder.name, seed)
        (aside / folder.name).rename(folder)
    except OSError:
        if not (folder / "config.json").exists():
            raise
        # Another process created the same files first.
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def with_tiny_model(spec: RunSpec, store: Path) -> RunSpec:
    """Return the spec with the folder of the tiny model in place of `model: tiny`; any other spec unchanged.

    Raises UserError: the dataset is unavailable or invalid.
    """
    if spec.model != TINY:
        return spec
    return spec.model_copy(update={"model": str(tiny_folder(spec, store))})


def tiny_folder(spec: RunSpec, store: Path, report: Callable[[str], None] = lambda line: None) -> Path:
    """Return the folder of the tiny model for the datasets and the seed of a spec; create it if it does not exist.

    `report`: receives a line before the model is created. Raises UserError: a dataset is unavailable or invalid.
    """
    first, *others = spec.sources
    # A file is known by its digest. Other samples depend on several settings: their text is.
    is_file = path_kind(Path(first.path)) == "file" and not others and not first.columns
    dataset = Path(first.path) if is_file and not spec.fake_data else None

    def samples() -> list[Sample]:
        if spec.fake_data:
            return []
        report("creating the model tiny: random weights and a tokenizer trained on the dataset (once)")
        return list(samples_of(spec))

    return ensure_tiny_model(store, dataset, spec.common_seed, samples)
