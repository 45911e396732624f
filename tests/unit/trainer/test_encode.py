"""Encoding samples: token ids, loss mask, truncation, cache."""

import copy
import dataclasses
import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tables import table
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from trainer_runs import chat, records, write_jsonl

from trainer.common.errors import UserError
from trainer.data import encode
from trainer.data.corpus import Corpus, load_corpus, save_corpus, select
from trainer.data.data_report import BEYOND, NO_ANSWER
from trainer.data.encode import DataReport, encode_all, encoded_dataset
from trainer.data.hf_template import SPECIAL_TOKENS
from trainer.data.packing import collate
from trainer.data.plain_template import PLAIN_TEMPLATE
from trainer.data.samples import Sample
from trainer.data.shapes import to_sample
from trainer.data.special_tokens import DEFAULTS
from trainer.data.text_tokenizer import TextTokenizer, token_ids
from trainer.data.tiny import TEMPLATE
from trainer.models.model import load_tokenizer
from trainer.spec import make_spec

# Like those of Qwen and Llama: no generation tags, and text after every answer.
UNMARKED = table("encode")["unmarked"]
ALTERNATING = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported\nat all') }}{% endif %}"
    + TEMPLATE
)
TALK = chat("the cat runs", "a red tree", "the moon ä", "猫 sits 🚂")


# Like those of models that call tools: JSON of the tools in front, and of the calls in an answer.
WITH_TOOLS = table("encode")["with_tools"]
CALLS = to_sample(table("encode")["calls"])


class Encoder(encode.Encoder):
    """Returns the token ids of a sample and which carry loss, before anything is truncated."""

    def __call__(self, sample: Sample) -> tuple[list[int], list[bool]]:
        encoded = self.encode(sample)
        return encoded.ids, self.mask(encoded.answered)


def encoder(tokenizer: Any, template: Any = None, seq_length: int = 512, train_on: str = "answer") -> Encoder:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template or TEMPLATE
    return Encoder(tokenizer, seq_length=seq_length, train_on=train_on)


def trained_text(tokenizer: Any, sample: Sample, **how: Any) -> tuple[str, str]:
    """Return the full text, and the text of the tokens with loss."""
    ids, mask = encoder(tokenizer, **how)(sample)
    assert len(ids) == len(mask)
    return tokenizer.decode(ids), tokenizer.decode([i for i, flag in zip(ids, mask, strict=True) if flag])


@pytest.mark.parametrize(
    "template", [TEMPLATE, TEMPLATE.replace("{% gen", "{%- gen"), TEMPLATE.replace("{% gen", "{%gen")]
)
def test_only_marked_answers_carry_loss(tokenizer: Any, template: str) -> None:
    text, trained = trained_text(tokenizer, TALK, template=template)
    first = "<|begin|><|user|>the cat runs<|assistant|>a red tree<|end|>"
    assert text == f"{first}<|user|>the moon ä<|assistant|>猫 sits 🚂<|end|>"
    assert trained == "a red tree<|end|>猫 sits 🚂<|end|>"


def test_an_end_of_a_turn_that_is_no_token_is_a_warning(tokenizer: Any) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>\n{% endfor %}"
    for end, wanted in (("<|im_end|>", "'<|im_end|>', which is no special token"), ("<|end|>", ""), ("", "")):
        notes = encoder(tokenizer, template=template.replace("<|im_end|>", end)).encode(TALK).notes
        assert [note.startswith("the chat template ends a turn with ") for note in notes] == [True] * bool(wanted)
        assert wanted in "".join(notes)


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, UNMARKED])
def test_tool_calls_are_refused_by_a_template_without_them(tokenizer: Any, template: str) -> None:
    with pytest.raises(UserError, match=r"leaves out the tool call .* of message 1: use a model that calls tools"):
        encoder(tokenizer, template=template)(Sample(messages=CALLS.messages))
    with pytest.raises(UserError, match="the chat template of the model has no tools"):
        encoder(tokenizer, template=template)(Sample(messages=TALK.messages, tools=CALLS.tools))


def test_the_plain_template(tokenizer: Any) -> None:
    system = Sample(messages=({"role": "system", "content": "be brief"}, *TALK.messages))
    text, trained = trained_text(tokenizer, system, template=PLAIN_TEMPLATE)
    assert text.startswith("be brief\n\n### Instruction:\nthe cat runs\n\n### Response:\na red tree<|end|>\n")
    assert trained == "a red tree<|end|>猫 sits 🚂<|end|>"


def test_a_tokenizer_without_template_end_or_padding(tokenizer: Any) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = bare.eos_token = bare.pad_token = bare.bos_token = None
    make = Encoder(bare, seq_length=64, train_on="answer")
    ids, mask = make(TALK)
    assert bare.decode(ids).endswith("### Response:\n猫 sits 🚂\n")
    # The template writes nothing after an answer here: the header of the next question ends it.
    trained = bare.decode([i for i, flag in zip(ids, mask, strict=True) if flag])
    assert trained == "a red tree\n### Instruction:猫 sits 🚂\n"
    ids, mask = make(Sample(pieces=(("the cat", True),)))
    assert bare.decode(ids) == "the cat" and all(mask)


def test_an_empty_answer_trains_its_end_only_and_is_noted(tokenizer: Any) -> None:
    _, trained = trained_text(tokenizer, chat("the cat", ""), template=UNMARKED)
    assert trained.strip() == "<|end|>"
    notes = encoder(tokenizer, UNMARKED).encode(chat("the cat", "")).notes
    assert notes == ("an answer is empty, and its end alone is trained",)


def test_raw_text_and_prompts(tokenizer: Any) -> None:
    text, trained = trained_text(tokenizer, Sample(pieces=(("the cat", False), (" runs", True))))
    assert (text, trained) == ("the cat runs<|end|>", " runs<|end|>")
    assert trained_text(tokenizer, Sample(pieces=(("the cat", True),)))[0] == "the cat<|end|>"


def test_a_long_text_becomes_several_rows(tokenizer: Any) -> None:
    """Each token of it is predicted once. The tokens that other samples lose beyond seq_length are counted."""
    whole = Sample(pieces=(("the cat runs to the moon " * 9, True),))
    all_ids = encoder(tokenizer)(whole)[0]
    short = Encoder(tokenizer, seq_length=8, train_on="answer")
    parts, report = short.rows(whole)
    assert [i for part in parts for i, flag in zip(part.ids, part.trained, strict=True) if flag] == all_ids[1:]
    assert all(len(part.ids) <= 8 for part in parts) and (report.samples, report.answers, report.truncated) == (1, 1, 0)
    assert report.kept_tokens == sum(len(part.ids) for part in parts) and report.lost_tokens == 0
    corpus = encode_all([whole], short)
    assert len(corpus) == len(parts) and corpus.report == report
    cut = Sample(pieces=(("the cat", False), (whole.pieces[0][0], True)))
    ids = encoder(tokenizer)(cut)[0]
    assert (short.rows(cut)[1].kept_tokens, short.rows(cut)[1].lost_tokens) == (8, len(ids) - 8)


@pytest.mark.parametrize("answer", ["", " \n"])
def test_an_empty_answer_is_noted(tokenizer: Any, answer: str) -> None:
    for sample in (Sample(pieces=(("the cat", False), (answer, True))), chat("the cat", answer)):
        short = encode.Encoder(tokenizer, seq_length=64, train_on="answer")
        assert short.encode(sample).notes[0] == "an answer is empty, and its end alone is trained"
        lines = short.rows(sample)[1].lines()
        assert any("WARNING" in line and "without the chat template" in line for line in lines) == bool(sample.pieces)


def test_a_template_error_is_one_line(tokenizer: Any) -> None:
    system = Sample(messages=({"role": "system", "content": "be brief"}, *TALK.messages))
    with pytest.raises(UserError) as caught:
        encoder(tokenizer, ALTERNATING)(system)
    assert str(caught.value) == (
        "dataset: the chat template of the model has no system role (System role not supported): remove it, or set system=prepend"
    )


def test_the_first_token_of_a_sample_never_carries_loss(tokenizer: Any) -> None:
    corpus = encode_all([Sample(pieces=(("the cat", True),))] * 2, encoder(tokenizer, train_on="all"))
    assert not corpus.trained[corpus.starts[:-1]].any()
    assert corpus.trained_counts().tolist() == (corpus.lengths - 1).tolist()


def test_the_fingerprint_covers_everything_that_encoding_depends_on(tokenizer: Any) -> None:
    other_end = copy.deepcopy(tokenizer)
    other_end.eos_token = "<|user|>"
    prints = [
        encoder(tokenizer).fingerprint(),
        encoder(tokenizer, UNMARKED).fingerprint(),
        encoder(tokenizer, seq_length=64).fingerprint(),
        encoder(tokenizer, train_on="all").fingerprint(),
        encoder(other_end).fingerprint(),
        Encoder(tokenizer, seq_length=512, train_on="answer", rows=9).fingerprint(),
    ]
    assert len(set(prints)) == 6
    assert encoder(tokenizer).fingerprint() == prints[0]


@pytest.fixture(scope="module")
def corpus(tokenizer: Any) -> Corpus:
    return encode_all([to_sample(row) for row in records(30)], encoder(tokenizer, seq_length=48))


def test_a_corpus_survives_a_round_trip_to_disk(corpus: Corpus, tmp_path: Path) -> None:
    save_corpus(corpus, tmp_path / "new" / "c.npz")
    back = load_corpus(tmp_path / "new" / "c.npz")
    assert back is not None
    assert (back.digest(), back.report) == (corpus.digest(), corpus.report)
    assert (back.tokens.dtype, back.trained.dtype, back.starts.dtype) == (np.int32, np.bool_, np.int64)


def test_the_digest_changes_with_any_element(corpus: Corpus) -> None:
    for change in ("tokens", "trained", "starts"):
        other = copy.deepcopy(corpus)
        array = getattr(other, change)
        array[7] = not array[7] if change == "trained" else array[7] + 1
        assert other.digest() != corpus.digest(), change


@given(st.lists(st.integers(0, 29), max_size=40))
def test_select_returns_the_samples_in_order(corpus: Corpus, chosen: list[int]) -> None:
    part = select(corpus, chosen)
    assert len(part) == len(chosen) and part.starts.dtype == np.int64
    for place, sample in enumerate(chosen):
        mine, theirs = slice(*part.starts[place : place + 2]), slice(*corpus.starts[sample : sample + 2])
        assert part.tokens[mine].tolist() == corpus.tokens[theirs].tolist()
        assert part.trained[mine].tolist() == corpus.trained[theirs].tolist()


@given(st.lists(st.lists(st.integers(0, 29), min_size=1, max_size=4), max_size=4), st.booleans())
def test_collate_lays_samples_out(corpus: Corpus, rows: list[list[int]], fixed: bool) -> None:
    ids, positions, labels = collate(corpus, rows, pad=2, length=192 if fixed else None)
    widths = [sum(int(corpus.lengths[i]) for i in row) for row in rows]
    assert ids.shape == positions.shape == labels.shape == (max(1, len(rows)), 192 if fixed else max(widths, default=8))
    for place, row in enumerate(rows):
        end = 0
        for sample in row:
            first, last = corpus.starts[sample : sample + 2]
            here = slice(end, end + last - first)
            assert ids[place, here].tolist() == corpus.tokens[first:last].tolist()
            assert positions[place, here].tolist() == list(range(last - first))
            wanted = np.where(corpus.trained[first:last], corpus.tokens[first:last], -100)
            assert labels[place, here].tolist() == wanted.tolist()
            end += last - first
        assert (ids[place, end:] == 2).all() and (labels[place, end:] == -100).all()
        # Positions restart once per sample: the padding is not a separate sample.
        assert ((positions[place] == 0) | (positions[place] == ~0)).sum() == max(1, len(row))
    if not rows:
        assert (labels == -100).all()


@pytest.mark.parametrize("damage", ["missing", "half", "flipped", "other"])
def test_a_damaged_cache_is_ignored(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    corpus = Corpus(np.arange(64, dtype=np.int32), np.ones(64, dtype=np.bool_), np.array([0, 64]))
    save_corpus(corpus, path)
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "half":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        place = data.index(bytes(range(4))) if bytes(range(4)) in data else 200
        data[place : place + 40] = b"\xff" * 40
        path.write_bytes(data)
    else:
        path.write_bytes(b"not a corpus")
    assert load_corpus(path) is None


def test_several_datasets_are_one_corpus(tokenizer: Any, tmp_path: Path) -> None:
    first, second = (write_jsonl(tmp_path / f"{seed}.jsonl", records(20 + seed, seed)) for seed in (1, 2))
    store = tmp_path / "store"

    def corpus(dataset: Any, **fields: Any) -> Corpus:
        spec = make_spec({"dataset": dataset, "seq_length": 64} | fields, "")
        return encoded_dataset(spec, copy.deepcopy(tokenizer), store)

    both, alone = corpus([str(first), {"path": str(second), "weight": 0.5}]), corpus(str(first))
    assert alone.sources is None and len(both) == 43
    assert both.sources is not None and both.sources.tolist() == [0] * 21 + [1] * 22
    assert both.tokens[: len(alone.tokens)].tolist() == alone.tokens.tolist()
    assert both.starts[:22].tolist() == alone.starts.tolist() and both.starts[-1] == len(both.tokens)
    assert len([*(store / "cache").iterdir()]) == 2, "each file has one entry"
    assert corpus([str(first), str(second)]).digest() == both.digest() != alone.digest()
    held = select(both, [0, 30])
    assert held.sources is not None and held.sources.tolist() == [0, 1]


def test_the_cache_distinguishes_columns_and_the_files_of_a_folder(tokenizer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = write_jsonl(folder / "train.jsonl", [{"text": "the cat", "other": "a dog runs"}])

    def text(dataset: Path, **fields: Any) -> str:
        spec = make_spec({"dataset": str(dataset)} | fields, "")
        return tokenizer.decode(encoded_dataset(spec, copy.deepcopy(tokenizer), tmp_path / "store").tokens)

    assert text(file) == text(folder) == "the cat<|end|>"
    assert text(file, columns={"text": "other"}) == text(folder, columns="text=other") == "a dog runs<|end|>"
    write_jsonl(folder / "train.jsonl", [{"text": "a tree"}])
    assert text(folder) == text(file) == "a tree<|end|>"
    write_jsonl(folder / "test.jsonl", [{"text": "a moon"}])
    assert text(folder, dataset_split="test") == "a moon<|end|>"


@pytest.mark.parametrize(
    "text", ["the cat", "<|begin|>the cat", "the cat<|end|>", "<|begin|>the cat<|end|>", "<|begin|>the cat<|end|>\n"]
)
def test_begin_and_end_stand_once_whoever_writes_them(tokenizer: Any, text: str) -> None:
    """A text gets BOS only from a tokenizer that adds it, as in TRL: many have one for other purposes (SmolLM2, GPT-2)."""
    adds = copy.deepcopy(tokenizer)
    template = ("<|begin|> $A", "<|begin|> $A $B", [("<|begin|>", tokenizer.bos_token_id)])
    adds.backend_tokenizer.post_processor = processors.TemplateProcessing(*template)
    for pieces in (((text, True),), ((text[:-4], False), (text[-4:], True))):
        assert tokenizer.decode(encoder(adds)(Sample(pieces=pieces))[0]).rstrip() == "<|begin|>the cat<|end|>"
        shown = tokenizer.decode(encoder(tokenizer)(Sample(pieces=pieces))[0])
        assert shown.rstrip() == text.strip().removesuffix("<|end|>") + "<|end|>"


def test_prompt_and_completion_are_one_text(tokenizer: Any) -> None:
    """A tokenizer joins characters across their border: both apart would be other tokens than the model sees later."""
    for prompt, completion in (("the c", "at"), ("the ", "cat"), ("the cat", ""), ("the", " cat")):
        ids, mask = encoder(tokenizer)(Sample(pieces=((prompt, False), (completion, True))))
        assert ids[:-1] == tokenizer("the cat", add_special_tokens=False)["input_ids"]
        shown = tokenizer.decode([i for i, flag in zip(ids, mask, strict=True) if flag])
        assert shown.endswith(f"{completion.strip()}<|end|>")


def test_the_system_message_can_join_the_first_question(tokenizer: Any) -> None:
    chosen = copy.deepcopy(tokenizer)
    chosen.chat_template = ALTERNATING
    system = Sample(messages=({"role": "system", "content": "be brief"}, *TALK.messages), silent=frozenset({2}))
    prepends = Encoder(chosen, seq_length=512, train_on="answer", system="prepend")
    assert prepends(TALK) == encoder(tokenizer, ALTERNATING)(TALK)
    ids, mask = prepends(system)
    assert tokenizer.decode(ids).startswith("<|begin|><|user|>be brief\n\nthe cat runs<|assistant|>")
    assert tokenizer.decode([i for i, flag in zip(ids, mask, strict=True) if flag]) == "猫 sits 🚂<|end|>"


def test_the_controller_encodes_as_the_hosts_do(tokenizer: Any, tmp_path: Path) -> None:
    for template in (TEMPLATE, UNMARKED, PLAIN_TEMPLATE):
        saved = copy.deepcopy(tokenizer)
        saved.chat_template = template
        saved.save_pretrained(tmp_path)
        read = TextTokenizer.read(tmp_path)
        assert read is not None
        there, here = (Encoder(each, seq_length=512, train_on="answer") for each in (saved, read))
        for sample in (TALK, Sample(pieces=(("the 猫 cat", False), (" runs 🚂", True)))):
            assert here.encode(sample) == there.encode(sample)


def test_a_panic_of_the_tokenizer_names_its_file(
    tokenizer: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    splits = copy.deepcopy(tokenizer)
    splits.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated")
    splits.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    for call in (TextTokenizer.of(loaded).tokenize, TextTokenizer.read(tmp_path).tokenize, partial(token_ids, loaded)):  # type: ignore[union-attr]
        with pytest.raises(UserError, match=rf"^model: the tokenizer {tmp_path}.* fails: .*retry-limit"):
            call("a" * 3000 + "b")


@pytest.mark.parametrize("change", table("encode")["the_controller_has_the_special_tokens_of_the_hosts"])
def test_the_controller_has_the_tokens_of_the_hosts(change: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    adds = copy.deepcopy(tokenizer)
    if "Qwen2" not in str(change):
        template = ("<|begin|> <|end|> $A", "$A $B", [("<|begin|>", 0), ("<|end|>", 1)])
        adds.backend_tokenizer.post_processor = processors.TemplateProcessing(*template)
    adds.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    kept = {} if "GPT2" in str(change) else json.loads(file.read_text())  # GPT-2's own file names no special token
    file.write_text(json.dumps(kept | change))
    there, here = TextTokenizer.of(transformers.AutoTokenizer.from_pretrained(tmp_path)), TextTokenizer.read(tmp_path)
    assert here is not None
    assert (here.begin, here.eos, here.added, here.tokens) == (there.begin, there.eos, there.added, there.tokens)
    assert here.begin == (() if "Neo" in str(change) or "Qwen2" in str(change) else (0, 1))
    for text in ("the cat <|extra|> runs<|end|>", "<|endoftext|> <|call|>"):
        assert here.tokenize(text) == there.tokenize(text)


@pytest.mark.parametrize(("name", "model_type", "more"), table("encode")["the_controller_splits_a_text_as_the_class"])
def test_the_controller_splits_a_text_as_the_class_of_the_hosts_does(
    name: str, model_type: str | None, more: dict[str, Any], tmp_path: Path
) -> None:
    """Some classes of transformers take from tokenizer.json only the vocabulary."""
    vocabulary = ["<unk>", "<s>", "</s>", "<pad>", "<mask>", "▁", "a", "b", "▁a", "ab", "<0x63>"]
    places = {token: index for index, token in enumerate(vocabulary)}
    model = models.BPE(places, [("▁", "a"), ("a", "b")], unk_token="<unk>")
    core = Tokenizer(model)
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.add_special_tokens(vocabulary[:5])
    core.save(str(tmp_path / "tokenizer.json"))
    special = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special | more))
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    there, here = TextTokenizer.of(transformers.AutoTokenizer.from_pretrained(tmp_path)), TextTokenizer.read(tmp_path)
    assert here is not None
    for text in ("ab a<s>ab ca", " a  b</s> a", "xy"):
        assert here.tokenize(text) == there.tokenize(text)


def test_tokens_that_only_transformers_knows(tokenizer: Any, tmp_path: Path) -> None:
    """The controller then leaves the check to the hosts."""
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text('{"tokenizer_class": "CohereTokenizer", "bos_token": null}')
    assert TextTokenizer.read(tmp_path) is None
    file.write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt_bigcode"}')
    assert TextTokenizer.read(tmp_path) is None, "transformers does not use the class for this model"
    file.write_text('{"tokenizer_class": "CohereTokenizer", "bos_token": null, "eos_token": "<|end|>"}')
    assert TextTokenizer.read(tmp_path) is not None


@pytest.mark.parametrize("name", DEFAULTS)
def test_default_tokens_are_those_of_transformers(name: str) -> None:
    parameters = inspect.signature(getattr(transformers, name).__init__).parameters
    found = {key: parameters[key].default for key in SPECIAL_TOKENS if key in parameters}
    assert DEFAULTS[name] == {key: text for key, text in found.items() if text}


def test_a_tokenizer_that_does_not_know_places(tokenizer: Any) -> None:
    whole = TextTokenizer.of(tokenizer)
    blind = dataclasses.replace(whole, tokenize=lambda text: (whole.tokenize(text)[0], None))
    for sample in (TALK, Sample(pieces=(("the cat", False), (" runs", True)))):
        assert Encoder(blind, seq_length=64, train_on="answer")(sample) == encoder(tokenizer, TEMPLATE)(sample)
    with pytest.raises(UserError, match="does not tell where an answer begins"):
        Encoder(blind, seq_length=64, train_on="answer")(Sample(pieces=(("the c", False), ("at", True))))


def test_the_report_says_what_became_of_the_samples(tokenizer: Any) -> None:
    long = chat("the cat", " ".join(["runs"] * 100))
    unseen = chat(" ".join(["runs"] * 100), "a tree")
    asked = Sample(messages=TALK.messages[:1])
    corpus = encode_all([TALK, long, unseen, asked], encoder(tokenizer, seq_length=48))
    kept, whole = int(corpus.lengths.sum()), encoder(tokenizer, seq_length=512)
    lost = sum(len(whole(each)[0]) for each in (TALK, long, unseen, asked)) - kept
    became = DataReport(
        4, 3, int(corpus.trained.sum()), 2, {BEYOND: 1, NO_ANSWER: 1}, kept_tokens=kept, lost_tokens=lost
    )
    assert corpus.report == became
    assert len(corpus) == 2 and corpus.lengths.max() == 48 and all(corpus.trained_counts() > 0)
    with pytest.raises(UserError, match="none of 1 samples has a token with loss within seq_length 48: increase"):
        encode_all([unseen], encoder(tokenizer, seq_length=48))


def test_a_token_outside_the_embedding_is_refused_at_its_sample(tokenizer: Any) -> None:
    samples = [Sample(pieces=((text, True),), where=f"d.jsonl:{line}") for line, text in ((1, "a"), (2, "the"))]
    low, high = sorted(samples, key=lambda sample: max(encoder(tokenizer)(sample)[0]))
    limited = Encoder(tokenizer, seq_length=64, train_on="answer", rows=max(encoder(tokenizer)(low)[0]) + 1)
    assert limited(low)
    with pytest.raises(UserError, match=rf"{high.where}: has the token .*, and the embedding .* has \d+ rows: "):
        limited(high)


def test_an_answer_that_has_its_end_gets_no_second_one(tokenizer: Any) -> None:
    for template in (TEMPLATE, UNMARKED, PLAIN_TEMPLATE):
        plain = encoder(tokenizer, template)(TALK)
        for end in ("<|end|>", "<|end|>\n", " <|end|>"):
            ended = [{**m, "content": m["content"] + end} if m["role"] == "assistant" else m for m in TALK.messages]
            assert encoder(tokenizer, template)(Sample(messages=tuple(ended))) == plain


def test_chats_with_tools_take_the_template_for_tools(tokenizer: Any, tmp_path: Path) -> None:
    named = copy.deepcopy(tokenizer)
    named.chat_template = {"default": TEMPLATE, "tool_use": WITH_TOOLS}
    named.save_pretrained(tmp_path)
    read = TextTokenizer.read(tmp_path)
    assert read is not None
    for each in (named, read):
        chosen = Encoder(each, seq_length=512, train_on="answer")
        assert chosen(CALLS) == encoder(tokenizer, WITH_TOOLS)(CALLS)
        assert chosen(TALK) == encoder(tokenizer, TEMPLATE)(TALK)
    named.chat_template = {"tool_use": WITH_TOOLS}
    nameless = Encoder(named, seq_length=512, train_on="answer")
    assert nameless(CALLS)
    with pytest.raises(UserError, match="none of them is 'default'"):
        nameless(TALK)


def test_a_marker_that_takes_the_first_space_of_an_answer_carries_no_loss(tokenizer: Any) -> None:
    greedy = copy.deepcopy(tokenizer)
    greedy.add_special_tokens({"additional_special_tokens": [AddedToken("<|assistant|>", rstrip=True, special=True)]})
    greedy.chat_template = UNMARKED
    ids, mask = Encoder(greedy, seq_length=64, train_on="answer")(chat("the cat", " a tree"))
    assert "<|assistant|>" not in greedy.decode([i for i, flag in zip(ids, mask, strict=True) if flag])


def test_weights_and_train_on_all_contradict_each_other(tokenizer: Any) -> None:
    record = {"messages": [dict(message) for message in TALK.messages]}
    record["messages"][1]["weight"] = 0
    with pytest.raises(UserError, match="train_on=all trains every token: set train_on=answer"):
        encoder(tokenizer, train_on="all")(to_sample(record))
    history = {"prompt": record["messages"][2:3], "completion": record["messages"][3:]}
    assert all(encoder(tokenizer, train_on="all")(to_sample(history))[1])
