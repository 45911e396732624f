"""What is written beside weights so that other programs end an answer and render a chat as the training did."""

import copy
import json
from pathlib import Path
from typing import Any

import torch

from trainer.common.files import to_json
from trainer.common.formats import printable
from trainer.config import RunSpec
from trainer.data.template_text import end_of_turn, without_generation
from trainer.data.token_ids import PADDING_OF_FILES

_TOKENIZER_CONFIG = "tokenizer_config.json"
_TOP_LEVEL = ("rope_theta", "partial_rotary_factor")  # beside rope_scaling in transformers 4
_PHI3 = ("type", "short_factor", "long_factor")  # it refuses others


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer whose chat templates every jinja renders: without ``{% generation %}``.

    Its eos_token stays, and its class and padding token are those of the base model.
    """
    saved, template = copy.copy(tokenizer), tokenizer.chat_template
    if isinstance(template, dict):
        saved.chat_template = {name: without_generation(source) for name, source in template.items()}
    elif template:
        saved.chat_template = without_generation(template)
    saved.save_pretrained(folder)
    _keep_settings(tokenizer, folder / _TOKENIZER_CONFIG)


def _keep_settings(tokenizer: Any, path: Path) -> None:
    """Give a saved tokenizer_config.json the class and the padding token of the base model, in words of transformers 4 too."""
    saved = json.loads(path.read_text(encoding="utf-8"))
    if name := _class_of(str(tokenizer.name_or_path)):
        saved["tokenizer_class"] = name
    padding = getattr(tokenizer, PADDING_OF_FILES, tokenizer.pad_token)
    if padding is None:
        saved.pop("pad_token", None)
    elif padding != tokenizer.pad_token:
        saved["pad_token"] = padding
    if isinstance(saved.get("extra_special_tokens"), list):  # a mapping in transformers 4
        saved["additional_special_tokens"] = saved.pop("extra_special_tokens")
    path.write_text(to_json(saved, indent=2) + "\n", encoding="utf-8")


def _class_of(model: str) -> str:
    """Return the class that the tokenizer_config.json of a model names; empty if it names none."""
    from transformers.utils import cached_file

    try:
        path = cached_file(
            model,
            _TOKENIZER_CONFIG,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        name = json.loads(Path(path).read_text(encoding="utf-8")).get("tokenizer_class") if path else ""
    except (OSError, ValueError, AttributeError):
        return ""
    return name if isinstance(name, str) else ""


def add_old_rope_keys(folder: Path) -> None:
    """Let transformers 4 and programs that read its keys find the rotary embedding of a saved model in its config.json.

    transformers 5 writes ``rope_parameters`` alone, which others ignore: they would use the default theta without a word.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for part in [config, *(value for value in config.values() if isinstance(value, dict))]:
        if isinstance(part.get("rope_parameters"), dict):
            part |= _old_rope_keys(part["rope_parameters"], str(part.get("model_type", "")))
    path.write_text(to_json(config, indent=2) + "\n", encoding="utf-8")


def _old_rope_keys(rope: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the keys of transformers 4 for ``rope_parameters``, which may be those of each kind of layer."""
    found: dict[str, Any] = {}
    if isinstance(local := rope.get("sliding_attention"), dict) and "rope_theta" in local:
        found["rope_local_base_freq"] = local["rope_theta"]
    rope = rope["full_attention"] if isinstance(rope.get("full_attention"), dict) else rope
    found |= {name: rope[name] for name in _TOP_LEVEL if rope.get(name) is not None}
    if rope.get("rope_type", "default") != "default":
        names = _PHI3 if kind == "phi3" else [name for name in rope if name not in _TOP_LEVEL]
        scaling = rope | {"type": rope["rope_type"]}
        found["rope_scaling"] = {name: scaling[name] for name in names if name in scaling}
    return found


def template_end(tokenizer: Any) -> str:
    """Return the special or added token after an answer in the chat template; empty if there is none."""
    template = tokenizer.chat_template
    source = template.get("default", "") if isinstance(template, dict) else template or ""
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    return end_of_turn(source, tokenizer.special_tokens_map, [*tokenizer.all_special_tokens, *added])


def other_end(tokenizer: Any) -> str:
    """Return what ends a turn of the chat template where it is not the tokenizer's eos_token; empty otherwise."""
    end = template_end(tokenizer)
    return "" if end == tokenizer.eos_token else end


def end_ids(tokenizer: Any, config: Any) -> list[int]:
    """Return the tokens that end an answer: those of the generation config (else of the tokenizer), and the template's.

    `config`: the model's generation config; it may have no end.
    """
    known = getattr(config, "eos_token_id", None)
    known = tokenizer.eos_token_id if known is None else known
    found = [int(each) for each in (known if isinstance(known, list) else [known]) if each is not None]
    end = template_end(tokenizer)
    return list(dict.fromkeys([*found, *([tokenizer.convert_tokens_to_ids(end)] if end else [])]))


def untrained_end(spec: RunSpec, model: Any, tokenizer: Any) -> str:
    """Return a warning if no training has changed the weights of what ends a turn, and adapters leave them so; else an empty text."""
    end = template_end(tokenizer) or tokenizer.eos_token
    number = tokenizer.convert_tokens_to_ids(end) if end and spec.lora_r else None
    parts = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
    plain = {
        name: part.weight for name, part in parts.items() if hasattr(part, "weight") and not hasattr(part, "lora_A")
    }
    frozen = " and ".join(
        name for name, weight in plain.items() if number is not None and _is_untrained(weight, number)
    )
    why = f"WARNING: {printable(end, 80)}, which ends a turn, was never trained in this model's {frozen}, and adapters leave it so"
    remedy = "add these layers to lora_targets, set lora_r=0, or choose a model that knows the token"
    return f"{why}: answers may not end: {remedy}" if frozen else ""


@torch.no_grad()
def _is_untrained(weight: torch.Tensor, number: int) -> bool:
    """Return whether a row of a matrix, [V, H], is about 0, the mean of the rows, or another row."""
    if weight.is_meta or weight.dim() != 2 or len(weight) <= number:
        return False
    row, mean = weight[number].float(), weight.mean(0, dtype=torch.float32)
    usual = (weight[:: max(1, len(weight) // 1000)].float() - mean).norm(dim=1).median() / 20
    near = [(part.float() - row).norm(dim=1) < usual for part in (torch.stack([mean, 0 * mean]), *weight.split(8192))]
    return int(torch.cat(near).sum()) > 1  # the row itself


def add_end_token(config: Any, tokenizer: Any) -> bool:
    """Make what ends a turn of the chat template an end token of a generation config; return whether it changed.

    The tokenizer's own eos_token stays: it ends plain text, and templates write it.
    """
    known, ends = config.eos_token_id, end_ids(tokenizer, config)
    if not ends or ends == (known if isinstance(known, list) else [known]):
        return False
    config.eos_token_id = ends if len(ends) > 1 else ends[0]
    return True


def save_ends(config: Any, folder: Path) -> None:
    """Write the special tokens of a generation config; its other settings, which may not be valid, stay with the base model."""
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    GenerationConfig(**{name: getattr(config, name, None) for name in names}).save_pretrained(folder)
