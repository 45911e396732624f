"""model=tiny: a Llama of a few million random weights and a tokenizer trained on the dataset. No network, no torch."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.data.samples import Sample

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


def make_tokenizer(samples: Iterable[Sample]) -> Tokenizer:
    """Train a byte-level BPE tokenizer (at most `VOCABULARY` tokens) on the samples' text."""
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
    """Return random float32 weights under the names that transformers' LlamaForCausalLM reads (norms 1, matrices normal)."""
    rng = np.random.default_rng(seed)
    hidden, ff, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    assert isinstance(hidden, int) and isinstance(ff, int) and isinstance(head, int)
    query, value = 6 * head, 2 * head

    def matrix(out: int, into: int, std: float = 0.02) -> np.ndarray:
        return (rng.standard_normal((out, into), dtype=np.float32) * np.float32(std)).astype(np.float32)

    # Under LoRA the embedding and the head stay as they are: made large enough that adapters can say something with them.
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
    """Write the model's folder (config, tokenizer, weights), as transformers reads it. Same samples and seed, same files."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(samples).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": SPECIAL[0],
                "eos_token": SPECIAL[1],
                "pad_token": SPECIAL[2],
                "chat_template": TEMPLATE,
                "model_max_length": CONFIG["max_position_embeddings"],
            },
            indent=1,
        )
    )
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": VOCABULARY}, indent=1))
    save_file(make_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
