"""Saved tokenizers and models work elsewhere: plain jinja renders the templates, and answers end where a turn ends."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import jinja2
import pytest
import torch
from safetensors.torch import load_file, save_file
from tables import table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trainer_runs import Here
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.data.plain_template import PLAIN_TEMPLATE
from trainer.data.template_text import end_of_turn, without_generation
from trainer.data.token_ids import set_padding, usable_tokens
from trainer.gguf.special import complete
from trainer.loop.final_export import save_in_parts
from trainer.models import greedy_answers
from trainer.models.model import add_lora, load_tokenizer
from trainer.models.tokenizer_output import add_end_token, end_ids, other_end, save_tokenizer, untrained_end
from trainer.spec import make_spec

CHATML = table("tokenizer_output")["chatml"]
CHAT = table("tokenizer_output")["chat"]
MARKED = table("tokenizer_output")["marked"] | {"plain": PLAIN_TEMPLATE}


def make_tokenizer(template: str | None = CHATML, **special: str) -> Any:
    """Return a byte-level tokenizer whose eos_token is not what ends a turn of ChatML."""
    names = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", *pre_tokenizers.ByteLevel.alphabet()]
    core = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(names[:4])
    made = PreTrainedTokenizerFast(tokenizer_object=core, **{"bos_token": "<s>", "eos_token": "</s>", **special})
    made.chat_template = template
    return made


def stock(source: str, trim: bool, messages: Any) -> str:
    environment = jinja2.Environment(trim_blocks=trim, lstrip_blocks=trim)
    return environment.from_string(source).render(messages=messages, eos_token="</s>", add_generation_prompt=False)


@pytest.mark.parametrize("name", MARKED)
def test_a_template_without_its_marks_renders_the_same(name: str) -> None:
    plain = without_generation(MARKED[name])
    expected = render_jinja_template([CHAT], chat_template=MARKED[name], eos_token="</s>")[0][0]
    assert render_jinja_template([CHAT], chat_template=plain, eos_token="</s>")[0][0] == expected
    assert stock(plain, True, CHAT) == expected
    assert stock(plain, False, CHAT) is not None, "it has no tag that jinja does not know"
    assert without_generation(plain) == plain and ("{% with" in plain) == (name == "a name")


def test_a_saved_tokenizer_has_no_marks(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    for template in (PLAIN_TEMPLATE, {"default": CHATML, "tool_use": PLAIN_TEMPLATE}):
        tokenizer.chat_template = template
        save_tokenizer(tokenizer, tmp_path)
        assert tokenizer.chat_template == template, "the trainer needs the marks"
        files = [file for file in tmp_path.rglob("*") if file.is_file() and "generation %" in file.read_text()]
        assert not files
        found = AutoTokenizer.from_pretrained(tmp_path)
        assert found("a</s>").input_ids == tokenizer("a</s>").input_ids and found.eos_token == "</s>"
        for name in template if isinstance(template, dict) else [None]:
            texts = [each.apply_chat_template(CHAT, chat_template=name, tokenize=False) for each in (tokenizer, found)]
            assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("template", "end"),
    [*table("tokenizer_output")["what_ends_a_turn"], (CHATML, "<|im_end|>"), (PLAIN_TEMPLATE, "</s>")],
)
def test_what_ends_a_turn(template: str | None, end: str) -> None:
    tokenizer = make_tokenizer(template)
    assert end_of_turn(template or "", {"eos_token": "</s>"}, ["</s>", "<|im_end|>", "<|im"]) == end
    assert other_end(tokenizer) == ("" if end == "</s>" else end)
    other = [3] if end == "<|im_end|>" else []
    assert end_ids(tokenizer, None) == [1, *other]
    for known in (7, [7, 3]):
        config = GenerationConfig(eos_token_id=known)
        changed = add_end_token(config, tokenizer)
        added = {"<|im_end|>": 3, "</s>": 1}.get(end)
        unchanged = added is None or (isinstance(known, list) and added in known)
        assert changed != unchanged
        assert config.eos_token_id == (known if unchanged else [*([known] if known == 7 else known), added])


@pytest.mark.parametrize(("row", "fields", "warns"), table("tokenizer_output")["an_end_that_was_never_trained"])
def test_an_end_of_a_turn_that_was_never_trained(row: str, fields: dict[str, Any], warns: bool) -> None:
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    weight = model.lm_head.weight.data
    weight[3] = {"zero": 0 * weight[3], "mean": weight.mean(0), "twin": weight[9], "own": weight[3]}[row]
    spec = make_spec({"lora_targets": "q_proj", **fields}, "here")
    base = add_lora(spec, model).get_base_model() if spec.lora_r else model
    line = untrained_end(spec, base, tokenizer)
    assert bool(line) == warns
    if warns:
        assert line.startswith(
            "WARNING: <|im_end|>, which ends a turn, was never trained in this model's lm_head, and adapters leave"
        )


def test_a_gguf_file_knows_what_ends_a_turn(tmp_path: Path) -> None:
    for template, eot in ((CHATML, 3), (PLAIN_TEMPLATE, None)):
        make_tokenizer(template).save_pretrained(tmp_path)  # as an earlier version saved it, with the marks
        special = gguf.SpecialVocab(tmp_path, load_merges=True)
        complete(special, tmp_path)
        assert special.special_token_ids.get("eot") == eot and special.special_token_ids["eos"] == 1
        assert special.chat_template == without_generation(template)


@pytest.fixture
def other_end_model(tmp_path: Path) -> Path:
    """A model that answers everything with <|im_end|>, which is not the tokenizer's eos_token."""
    tokenizer = make_tokenizer()
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**config, vocab_size=len(tokenizer), max_position_embeddings=128, **ids))
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_a_run_saves_the_end_of_a_turn(here: Here, other_end_model: Path) -> None:
    here.model = other_end_model
    assert here(max_steps=2, lora_r=4, merge=True, precision="32-true") == 0, here.err
    for folder in ("adapter", "merged"):
        assert GenerationConfig.from_pretrained(here.run_dir() / folder).eos_token_id == [1, 3]
        assert AutoTokenizer.from_pretrained(here.run_dir() / folder).eos_token == "</s>"
    kept = json.loads((here.run_dir() / "deploy/answers.json").read_text())
    assert kept["stop"] == "<|im_end|>" and kept["answers"]
    assert here("full", max_steps=2, lora_r=0) == 0, here.err
    assert GenerationConfig.from_pretrained(here.run_dir("full") / "model").eos_token_id == [1, 3]


def test_greedy_answers_stop_at_the_end_of_a_turn() -> None:
    class Repeats:
        """Answers `a`, what ends the turn, and `b`, whatever the prompt; stops only at the ends that it is told."""

        device, generation_config = torch.device("cpu"), GenerationConfig(eos_token_id=1)

        def eval(self) -> None:
            pass

        def generate(self, ids: torch.Tensor, attention_mask: torch.Tensor, max_time: float | None) -> torch.Tensor:
            assert self.generation_config.eos_token_id == [1, 3]
            a, b = tokenizer("ab").input_ids
            return torch.cat([ids, torch.tensor([[a, 3, b]] * len(ids))], 1)

    tokenizer = make_tokenizer()
    prompts = [{"messages": CHAT[:1]}, {"prompt": "x"}]
    assert greedy_answers.answer(Repeats(), tokenizer, prompts) == ["a", "a"]


def test_answers_of_an_earlier_version_are_computed_again(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    for record, known in (({"weights": "w"}, False), ({"weights": "w", "stop": ""}, True)):
        (tmp_path / "deploy/answers.json").write_text(json.dumps(record))
        assert (greedy_answers.known_answers(tmp_path, "w") is not None) == known


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "TokenizersBackend", "PreTrainedTokenizerFast", None])
def test_a_saved_tokenizer_keeps_class_and_padding_of_the_base(name: str | None, tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "base")
    path = tmp_path / "base/tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("tokenizer_class")
    settings["additional_special_tokens"] = ["<|im_start|>"]
    path.write_text(json.dumps(settings | ({"tokenizer_class": name} if name else {})))
    base = load_tokenizer(str(tmp_path / "base"))
    assert base.pad_token == "</s>"
    save_tokenizer(base, tmp_path / "adapter")
    save_tokenizer(AutoTokenizer.from_pretrained(tmp_path / "adapter"), tmp_path / "merged")
    for folder in ("adapter", "merged"):
        saved = json.loads((tmp_path / folder / "tokenizer_config.json").read_text())
        assert "pad_token" not in saved and "extra_special_tokens" not in saved
        assert saved["additional_special_tokens"] == ["<|im_start|>"]
        assert name is None or saved["tokenizer_class"] == name
        found = AutoTokenizer.from_pretrained(tmp_path / folder)
        assert found.pad_token is None
        assert found.all_special_tokens == AutoTokenizer.from_pretrained(tmp_path / "base").all_special_tokens
        assert found.backend_tokenizer.to_str() == base.backend_tokenizer.to_str()


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
ROPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = table("tokenizer_output")["ropes"] | {
    "yarn": ("llama", YARN | {"rope_theta": 1e6}, {"rope_theta": 1e6, "rope_scaling": YARN})
}


@pytest.mark.parametrize("name", ROPES)
def test_a_saved_model_has_the_rope_keys_of_transformers_4(name: str, tmp_path: Path) -> None:
    kind, rope, expected = ROPES[name]
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "vocab_size": 96, "head_dim": 8, "original_max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    default = AutoConfig.for_model(kind)
    known = {key: value for key, value in sizes.items() if hasattr(default, key) or key == "head_dim"}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **known, rope_parameters=rope)).eval()
    save_in_parts(model, model.state_dict().items(), tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {key: saved.get(key) for key in expected} == expected
    assert ("rope_scaling" in saved) == ("rope_scaling" in expected)
    ids = torch.arange(90)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        for _ in range(2):
            assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(input_ids=ids).logits, wanted)
            saved.pop("rope_parameters", None)  # the old keys alone mean the same
            (tmp_path / "config.json").write_text(json.dumps(saved))


# Tokens that the embedding lacks -------------------------------------------------------------------------------------


def with_rows(model: Path, folder: Path, rows: int) -> Path:
    """Return a copy of a model whose embedding has only the first rows."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    cut = {
        name: value[:rows].clone() if "embed_tokens" in name or "lm_head" in name else value
        for name, value in tensors.items()
    }
    save_file(cut, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    return folder


def test_padding_uses_an_id_of_the_embedding(model_folder: Path, tmp_path: Path) -> None:
    words = load_tokenizer(str(model_folder))
    assert (words.pad_token_id, usable_tokens(words, 10**6), usable_tokens(words, None)) == (2, len(words), len(words))
    words.add_special_tokens({"pad_token": "[PAD]"})
    outside = tmp_path / "outside"
    shutil.copytree(model_folder, outside)
    words.save_pretrained(outside)
    found = load_tokenizer(str(outside))
    assert found.pad_token_id == found.eos_token_id == 1 and usable_tokens(found, len(words) - 1) == len(found) - 1
    set_padding(found, 1)  # the end token is outside too
    assert found.pad_token_id == 0
    found.pad_token = found.eos_token = None
    set_padding(found, 1)
    assert found.pad_token_id is None


def test_a_run_with_a_smaller_embedding(here: Any, tmp_path: Path) -> None:
    rows = len(load_tokenizer(str(here.model)))
    whole, here.model = here.model, with_rows(here.model, tmp_path / "less", 40)
    assert here(max_steps=1) == 1
    assert here.err.count("error: ") == 1 and "train.jsonl:1: has the token '" in here.err
    assert "has 40 rows: " in here.err
    assert here("fake", fake_data=True, max_steps=1, eval_split=0) == 0, here.err
    assert rows > 40 and whole != here.model
